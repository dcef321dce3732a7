//! `oxtile dequantize`.

use std::path::PathBuf;

use clap::Args;

use super::{Device, values};
use crate::{
    quantize::{Direction, direction_name},
    safetensors::Dtype,
};

/// `oxtile dequantize`.
#[derive(Args, Debug, PartialEq)]
#[command(after_help = MORE)]
pub struct Dequantize {
    /// What oxtile quantize wrote; its metadata says how
    #[arg(short, long, value_name = "FILE")]
    pub input: PathBuf,
    /// The checkpoint to write; it appears only when it is complete
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
    /// The type of the restored tensors (default: the one that each had)
    #[arg(long, value_parser = values::choice(values::WIDE))]
    pub dtype: Option<Dtype>,
    /// Which codes are taken (default: those by rows, where there are any)
    #[arg(long)]
    #[arg(value_parser = values::choice([Direction::Rows, Direction::Columns].map(|direction| (direction_name(direction), direction))))]
    pub direction: Option<Direction>,
    /// auto: a GPU if there is one, else the emulator; cuda: the first GPU; emulated
    #[arg(long, value_enum, default_value_t, hide_possible_values = true)]
    pub device: Device,
    /// Print one JSON document instead of tables
    #[arg(long)]
    pub json: bool,
}

const MORE: &str = "\
Codes and scales of a tensor NAME become NAME again, in the shape that it had, each element its code times its scale,
rounded to the type; columns that were transformed are transformed back, in f32. Every other tensor is copied.

Examples:
  oxtile dequantize -i mxfp8.safetensors -o restored.safetensors
  oxtile dequantize -i nvfp4.safetensors -o restored.safetensors --direction column --dtype f32";
