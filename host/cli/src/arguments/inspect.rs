//! `oxtile inspect`.

use std::path::PathBuf;

use clap::Args;

/// `oxtile inspect`.
#[derive(Args, Debug, PartialEq)]
#[command(after_help = MORE)]
pub struct Inspect {
    /// The file
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Draw how often which magnitudes occur in one tensor, and its scales
    #[arg(long, value_name = "OUT.svg")]
    pub histogram: Option<PathBuf>,
    /// Which tensor is drawn (default: the largest that has a histogram)
    #[arg(long, value_name = "NAME")]
    pub tensor: Option<String>,
    /// Draw the values of this file in the background: oxtile quantize or dequantize made FILE of it
    /// (default: those of FILE alone)
    #[arg(long, value_name = "ORIGINAL", verbatim_doc_comment)]
    pub against: Option<PathBuf>,
    /// Print one JSON document instead of tables
    #[arg(long)]
    pub json: bool,
}

const MORE: &str = "\
Of a file of oxtile quantize NAME is the tensor's name before: its codes are drawn as the values that they stand for.

Examples:
  oxtile inspect model.safetensors
  oxtile inspect mxfp8.safetensors --histogram picture.svg --tensor layers.0.weight --against model.safetensors";

impl Inspect {
    pub(super) fn check(&self) -> Result<(), String> {
        if self.histogram.is_none() && (self.tensor.is_some() || self.against.is_some()) {
            return Err("--tensor and --against go with --histogram OUT.svg".to_owned());
        }
        Ok(())
    }
}
