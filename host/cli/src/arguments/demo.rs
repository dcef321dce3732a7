//! `oxtile demo-checkpoint`.

use std::path::PathBuf;

use super::{
    Request, UsageError, WIDE,
    help::DEMO_HELP,
    words::{Word, Words},
};
use crate::safetensors::Dtype;

/// `oxtile demo-checkpoint`.
#[derive(Debug, PartialEq)]
pub struct DemoCheckpoint {
    /// What the values are made from.
    pub seed: u64,
    /// The file to be made.
    pub output: PathBuf,
    /// Type of its weights.
    pub dtype: Dtype,
}

pub(super) fn parse(words: &mut Words<'_>) -> Result<Request, UsageError> {
    let (mut seed, mut output, mut dtype) = (0, None, Dtype::F32);
    while let Some(word) = words.next()? {
        match &word {
            Word::Help => return Ok(Request::Help(DEMO_HELP)),
            Word::Value(_) => return Err(words.unexpected(&word)),
            Word::Flag(flag) => match flag.as_str() {
                "seed" => seed = words.seed("--seed")?,
                "output" => output = Some(words.path("--output")?),
                "dtype" => dtype = words.choice("--dtype", &WIDE)?,
                _ => return Err(words.unexpected(&word)),
            },
        }
    }
    Ok(Request::DemoCheckpoint(DemoCheckpoint { seed, output: words.required(output, "--output FILE")?, dtype }))
}
