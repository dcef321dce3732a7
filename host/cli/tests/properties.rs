//! Inputs of any bytes: no panic, and what is read is what the reference implementation of the format reads.

mod common;

use std::collections::BTreeMap;

use common::file;
use oxtile::timeline::Recording;
use oxtile_cli::{
    quantize::metadata,
    safetensors::{Checkpoint, Dtype, Tensor, TensorSpec, Writer},
    shard::metadata::Stated,
};
use proptest::prelude::*;
use safetensors::SafeTensors;

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

/// A tensor of a header: name, type, dimensions, by how much its offsets are wrong, and another member.
type Entry = (String, usize, Vec<u64>, i8, Option<String>);

fn entry() -> impl Strategy<Value = Entry> {
    let wrong = prop_oneof![8 => Just(0i8), 1 => -9i8..9];
    let other = prop_oneof![8 => Just(None), 1 => "[a-z_\u{1b}]{0,9}".prop_map(Some)];
    ("[a-c_\u{e9}\u{202e}\"\\\\]{0,3}", 0..Dtype::ALL.len(), prop::collection::vec(0u64..5, 0..4), wrong, other)
}

/// A file of tensors that follow one another, but for what is wrong with them.
fn bytes_of(entries: &[Entry], strings: &BTreeMap<String, String>, flips: &[(usize, u8)]) -> Vec<u8> {
    let mut at = 0i64;
    let mut members = Vec::new();
    if !strings.is_empty() {
        members.push(format!("\"__metadata__\":{}", serde_json::json!(strings)));
    }
    for (name, dtype, shape, wrong, other) in entries {
        let dtype = Dtype::ALL[*dtype];
        let bytes = (shape.iter().product::<u64>() * dtype.bits() / 8) as i64;
        let other = other.as_ref().map_or(String::new(), |other| format!(",{}:[{{}}]", serde_json::json!(other)));
        let (name, end) = (serde_json::json!(name), at + bytes + i64::from(*wrong));
        members.push(format!("{name}:{{\"dtype\":\"{dtype}\",\"shape\":{shape:?},\"data_offsets\":[{at},{end}]{other}}}"));
        at += bytes;
    }
    let data: Vec<u8> = (0..at).map(|i| i as u8).collect();
    let mut bytes = file(&format!("{{{}}}", members.join(",")), &data);
    let length = bytes.len();
    flips.iter().for_each(|(place, bit)| bytes[place % length] ^= bit);
    bytes
}

/// Shapes and data of a file's tensors.
type Tensors = BTreeMap<String, (Vec<u64>, Vec<u8>)>;

fn read(bytes: &[u8]) -> Result<Tensors, String> {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(file.path(), bytes).expect("writable");
    let checkpoint = Checkpoint::open(file.path()).map_err(|error| error.to_string())?;
    let data = |tensor: &Tensor| checkpoint.whole(tensor).expect("its bytes");
    Ok(checkpoint.tensors().iter().map(|tensor| (tensor.name.clone(), (tensor.shape.clone(), data(tensor)))).collect())
}

fn reference(bytes: &[u8]) -> Result<Tensors, String> {
    let tensors = SafeTensors::deserialize(bytes).map_err(|error| error.to_string())?;
    let shape = |shape: &[usize]| shape.iter().map(|&size| size as u64).collect();
    Ok(tensors.iter().map(|(name, view)| (name.to_owned(), (shape(view.shape()), view.data().to_vec()))).collect())
}

proptest! {
    #![proptest_config(config(400))]

    /// What this reader takes, the reference takes, with the same content; and a valid file is taken by both. Errors are one line without escapes.
    #[test]
    fn headers_are_read_as_the_reference_reads_them(
        entries in prop::collection::vec(entry(), 0..4),
        strings in prop::collection::btree_map("[a-c\u{0}]{0,2}", ".{0,4}", 0..3),
        flips in prop_oneof![3 => Just(vec![]), 1 => prop::collection::vec((any::<usize>(), (0..8).prop_map(|bit| 1u8 << bit)), 1..3)],
    ) {
        let bytes = bytes_of(&entries, &strings, &flips);
        match (read(&bytes), reference(&bytes)) {
            (Ok(found), reference) => prop_assert_eq!(Ok(found), reference),
            (Err(error), reference) => {
                prop_assert!(!error.contains(char::is_control), "{:?}", error);
                // This reader alone refuses what both must refuse by the format's letter: a key that stands there twice, for example.
                let is_odd = !flips.is_empty() || error.contains("twice");
                prop_assert!(reference.is_err() || is_odd, "{} refused what the reference takes", error);
            }
        }
    }

    /// What is written, the reference reads, aligned and with the same content.
    #[test]
    fn the_reference_reads_what_is_written(
        shapes in prop::collection::btree_map("[a-c\u{e9}\u{1b}\"\\\\]{0,3}", (0..Dtype::ALL.len(), prop::collection::vec(0u64..5, 0..4)), 0..5),
    ) {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let bytes = |dtype: Dtype, shape: &[u64]| shape.iter().product::<u64>() * dtype.bits();
        let specs: Vec<_> = shapes
            .into_iter()
            .map(|(name, (dtype, shape))| TensorSpec { name, dtype: Dtype::ALL[dtype], shape })
            .filter(|spec| bytes(spec.dtype, &spec.shape).is_multiple_of(8))
            .collect();
        let path = folder.path().join("out");
        let mut writer = Writer::create(&path, &[], &specs, &[("k".into(), "\u{7}".into())].into()).expect("a new file");
        let mut expected = Tensors::new();
        for (number, spec) in specs.iter().enumerate() {
            let data = vec![number as u8; (bytes(spec.dtype, &spec.shape) / 8) as usize];
            writer.append(&spec.name, &data).expect("room");
            expected.insert(spec.name.clone(), (spec.shape.clone(), data));
        }
        writer.complete().and_then(|completed| completed.publish()).expect("it is complete");
        let written = std::fs::read(&path).expect("the file");
        prop_assert_eq!(reference(&written), Ok(expected.clone()));
        prop_assert_eq!(read(&written), Ok(expected));
    }

    /// Metadata that this program did not write is an error without escapes, whatever it says.
    #[test]
    fn metadata_of_any_words(key in 0usize..7, words in prop_oneof!["\\PC{0,20}", ".{0,20}", "[\\[\\]{}:,\"0-9a-z\u{1b}]{0,30}"]) {
        let keys = ["oxtile.format", "oxtile.direction", "oxtile.layout", "oxtile.tensors", "oxtile.shard.rank", "oxtile.format_version", "oxtile.hadamard"];
        let mut strings: BTreeMap<String, String> = [
            ("oxtile.format", "mxfp8"), ("oxtile.format_version", "2"), ("oxtile.direction", "row"), ("oxtile.layout", "compact"),
            ("oxtile.hadamard", "false"), ("oxtile.tensors", "{}"),
        ].map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        strings.insert(keys[key].to_owned(), words);
        if let Err(error) = metadata::read(&strings) {
            prop_assert!(!error.to_string().contains(char::is_control), "{:?}", error.to_string());
        }
        if let Err(error) = Stated::read(&strings) {
            prop_assert!(!error.to_string().contains(char::is_control), "{:?}", error.to_string());
        }
    }

    /// A recording of any bytes is an error or one that is written and read again as it is.
    #[test]
    fn recordings_of_any_numbers(ts in -1e6f64..1e18, dur in prop_oneof![0.0f64..1e6, -1.0f64..1e-9, Just(f64::MAX)], pid in any::<u32>(), cat in "[a-z]{0,3}|kernel|wait|copy") {
        let event = serde_json::json!({ "ph": "X", "pid": pid, "tid": 0, "cat": cat, "name": "k", "ts": ts, "dur": dur, "args": { "device": 0 } });
        let text = serde_json::json!({ "traceEvents": [event], "otherData": { "clock": "steps", "start_ns": 0, "dropped": 0 } }).to_string();
        if let Ok(recording) = Recording::from_json(&text) {
            prop_assert!(Recording::from_json(&recording.to_json()).is_ok());
        }
    }
}
