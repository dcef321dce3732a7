//! `oxtile demo-checkpoint`.

use std::path::PathBuf;

use clap::Args;

use super::values;
use crate::safetensors::Dtype;

/// `oxtile demo-checkpoint`.
#[derive(Args, Debug, PartialEq)]
#[command(after_help = MORE)]
pub struct DemoCheckpoint {
    /// The checkpoint to write; it appears only when it is complete
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
    /// What the values are made from, a number from 0 to 2^64 - 1; the same seed makes the same file
    #[arg(long, default_value = "0", allow_negative_numbers = true, value_parser = values::number::<u64>(values::SEED, |_| true))]
    pub seed: u64,
    /// The type of its weights
    #[arg(long, default_value = "f32", value_parser = values::choice(values::WIDE))]
    pub dtype: Dtype,
}

const MORE: &str = "\
The tensors are those of a 22.7 M-parameter BERT encoder: 6 layers, width 384, vocabulary 30522.

Examples:
  oxtile demo-checkpoint --output model.safetensors
  oxtile demo-checkpoint --output model.safetensors --seed 7 --dtype bf16";
