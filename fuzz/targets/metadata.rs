//! Metadata of quantized files and of shards: an error is without escapes, whatever the words are.
#![no_main]

use std::collections::BTreeMap;

use libfuzzer_sys::fuzz_target;
use oxtile_cli::{quantize::metadata, shard::metadata::Stated};

// A JSON object of texts, or lines `key=value`.
fuzz_target!(|input: &str| {
    let lines = || input.lines().filter_map(|line| line.split_once('=')).map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
    let strings: BTreeMap<String, String> = serde_json::from_str(input).unwrap_or_else(|_| lines());
    if let Err(error) = metadata::read(&strings) {
        assert!(!error.to_string().contains(char::is_control), "{error}");
    }
    if let Err(error) = Stated::read(&strings) {
        assert!(!error.to_string().contains(char::is_control), "{error}");
    }
});
