//! `oxtile join`.

use std::path::PathBuf;

use clap::Args;

/// `oxtile join`.
#[derive(Args, Debug, PartialEq)]
#[command(after_help = MORE)]
pub struct Join {
    /// The files of all ranks, in any order
    #[arg(short, long, visible_alias = "input", value_name = "FILE", num_args = 1.., required = true)]
    pub inputs: Vec<PathBuf>,
    /// The checkpoint to write; it appears only when it is complete
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
    /// Print one JSON document instead of lines
    #[arg(long)]
    pub json: bool,
}

const MORE: &str = "\
Of format keep the file is the checkpoint of before, byte for byte (files of version 1: its tensors and strings); of a quantized
one it is that of oxtile quantize with the same format and direction. Files of which one is missing, twice there, of another
model or damaged are refused, with the file at fault: data is held against the SHA-256 that its file states; strings of the
metadata have none. A file of an older version states none, and its data is not checked then, which is said.

Examples:
  oxtile join --inputs parts/model-*.safetensors --output joined.safetensors";
