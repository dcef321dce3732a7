//! `oxtile quantize`.

use std::path::PathBuf;

use clap::Args;

use super::Device;
use crate::quantize::Recipe;

/// `oxtile quantize`.
#[derive(Args, Debug, PartialEq)]
#[command(after_help = MORE)]
pub struct Quantize {
    /// The checkpoint to read; F32, F16 and BF16 tensors are quantized
    #[arg(short, long, value_name = "FILE")]
    pub input: PathBuf,
    /// The checkpoint to write; it appears only when it is complete
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
    /// What the tensors are quantized to, and how.
    #[command(flatten)]
    pub recipe: Recipe,
    /// auto: a GPU if there is one, else the emulator; cuda: the first GPU; emulated
    #[arg(long, value_enum, default_value_t, hide_possible_values = true)]
    pub device: Device,
    /// Print one JSON document instead of tables
    #[arg(long)]
    pub json: bool,
}

const MORE: &str = "\
A tensor NAME of two or more dimensions, M the product of all but the last, K the last, becomes by rows
  mxfp8      NAME         F8_E4M3  its shape       NAME_scale  F8_E8M0  [M, K/32]
  nvfp4      NAME_packed  U8       [M, K/2]        NAME_scale  F8_E4M3  [M, K/16]  NAME_global_scale  F32  [1]
  fp8        NAME         F8_E4M3  its shape       NAME_scale  F32      [1]
  fp8-block  NAME         F8_E4M3  its shape       NAME_scale  F32      [M, K/128]
and by columns, of the transpose but for mxfp8
  mxfp8      NAME_columnwise         F8_E4M3  its shape  NAME_columnwise_scale  F8_E8M0  [M/32, K]
  nvfp4      NAME_columnwise_packed  U8       [K, M/2]   NAME_columnwise_scale  F8_E4M3  [K, M/16]
             NAME_columnwise_global_scale  F32  [1]
  fp8        NAME_columnwise         F8_E4M3  [K, M]     NAME_columnwise_scale  F32      [1]
  fp8-block  NAME_columnwise         F8_E4M3  [K, M]     NAME_columnwise_scale  F32      [K, M/128]
each with the largest magnitude that it was cast with, F32 [1], as NAME_amax or NAME_columnwise_amax; nvfp4-squares has the
tensors of nvfp4. F32 scales are what codes are multiplied by; pairs of nvfp4 codes have the even element in the low nibble; a
block at the end of a row of fp8-block may be shorter. Interleaved scales are [outer, blocks], padded to multiples of 128 and 4.
K, or M where columns are quantized, must be a multiple of 32 (mxfp8), 16 (nvfp4) or 8 (fp8-block); by columns nvfp4 and
fp8-block ask it of both, as nvfp4-squares always does. With --hadamard or --stochastic F32 and F16 tensors are not quantized:
the transform and stochastic rounding are defined for BF16, and rounding to BF16 first would change the result. Every other
tensor is copied as it is and listed with the reason. The metadata holds format, options, and type and shape of every tensor
as it was.

Examples:
  oxtile quantize -i model.safetensors -o mxfp8.safetensors
  oxtile quantize -i model.safetensors -o nvfp4.safetensors --format nvfp4 --direction both --hadamard --stochastic 7";
