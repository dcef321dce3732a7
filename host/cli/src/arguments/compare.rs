//! `oxtile compare`.

use std::path::PathBuf;

use clap::Args;

use super::values;

/// `oxtile compare`.
#[derive(Args, Debug, PartialEq)]
#[command(after_help = MORE)]
pub struct Compare {
    /// The file that counts as right
    #[arg(value_name = "REFERENCE")]
    pub reference: PathBuf,
    /// The file that is measured against it
    #[arg(value_name = "OTHER")]
    pub other: PathBuf,
    /// End with status 1 unless every tensor of either file is in both, comparable, without other special
    /// values, and its relative error at most X, from 0 on; 0 asks for equal numbers (default: no bound)
    #[arg(long, value_name = "X", verbatim_doc_comment, allow_negative_numbers = true)]
    #[arg(value_parser = values::number("a number from 0 on", |bound: &f64| *bound >= 0.0))]
    pub max_relative: Option<f64>,
    /// Print one JSON document instead of tables
    #[arg(long)]
    pub json: bool,
}

const MORE: &str = "\
The status is 0 if the files could be compared, whatever differs, but for --max-relative.

Tensors are matched by name. Of two with one shape and numbers of any type that has values:
  max error  the largest magnitude of the difference
  relative   the norm of the difference over the norm of the reference (Frobenius)
  SNR dB     10 log10 of the reference's energy over that of the difference
  cosine     of the angle between the two as vectors
An element that is NaN or infinite in either enters none of them; it is counted where the two differ.

Examples:
  oxtile compare model.safetensors restored.safetensors
  oxtile compare model.safetensors restored.safetensors --max-relative 0.05 --json";
