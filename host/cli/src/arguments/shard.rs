//! `oxtile shard`.

use std::path::PathBuf;

use clap::{ArgGroup, Args};
use oxtile::comm::WorldSize;

use super::{Device, values};
use crate::{
    quantize::Directions,
    shard::{Embedding, ShardFormat},
};

/// `oxtile shard`.
#[derive(Args, Debug, PartialEq)]
#[command(after_help = MORE, group = ArgGroup::new("target").args(["output_prefix", "plan"]).required(true))]
pub struct Shard {
    /// The checkpoint to read; with --plan also the index of one of several files
    #[arg(short, long, value_name = "FILE")]
    pub input: PathBuf,
    /// How many ranks, from 1 to 4096
    #[arg(long = "ranks", value_name = "RANKS", allow_negative_numbers = true, value_parser = values::ranks)]
    pub world: WorldSize,
    /// The files to write: PREFIX-00001-of-0000N.safetensors is rank 0's, and so on; they appear only
    /// when all are complete
    #[arg(long, value_name = "PREFIX", verbatim_doc_comment)]
    pub output_prefix: Option<PathBuf>,
    /// keep: tensors as they are;
    /// bf16: tensors of two or more dimensions, F32 or F16, are rounded to BF16;
    /// fp8, mxfp8, nvfp4, nvfp4-squares: matrices are quantized as by oxtile quantize
    #[arg(long, default_value = "keep", hide_possible_values = true, ignore_case = true, verbatim_doc_comment)]
    #[arg(value_parser = values::choice(ShardFormat::CHOICES))]
    pub format: ShardFormat,
    /// As of oxtile quantize (default: row)
    #[arg(long = "direction", value_name = "DIRECTION", conflicts_with = "plan", ignore_case = true)]
    #[arg(value_parser = values::choice(Directions::ALL.map(|directions| (directions.name(), directions))))]
    pub directions: Option<Directions>,
    /// Write nothing: say what weights that ranks gather when they use them take of memory and traffic
    #[arg(long)]
    pub plan: bool,
    /// With --plan: what the embedding of tokens is: lookup (of forward passes alone) or tied (the head
    /// too, which both passes take); default: tied where the file has no head
    #[arg(long, hide_possible_values = true, verbatim_doc_comment)]
    #[arg(value_parser = values::choice(Embedding::CHOICES))]
    pub embedding: Option<Embedding>,
    /// With --plan: how many gathers run ahead, from 0 to 64 (default: 1, 2 and 3, one after another)
    #[arg(long, value_name = "D", allow_negative_numbers = true)]
    #[arg(value_parser = values::number("a number from 0 to 64", |distance: &u32| *distance <= 64))]
    pub distance: Option<u32>,
    /// auto: a GPU if there is one, else the emulator; cuda: the first GPU; emulated
    #[arg(long, value_enum, default_value_t, hide_possible_values = true)]
    pub device: Device,
    /// Print one JSON document instead of tables
    #[arg(long)]
    pub json: bool,
}

const MORE: &str = "\
Each tensor is divided by rows, its first dimension: all ranks have the same number of them, but for the last ones, which may
have fewer or none. A quantized tensor is divided as the matrix that it is quantized as, in multiples of 32 rows (mxfp8) or 16
(nvfp4, nvfp4-squares), so that the parts are those of the whole's codes and scales; codes by columns that are those of the
transpose are divided by its columns. What has no rows (scalars, amaxes, scales of a whole tensor) is in every file. The whole is
never in memory. A file's metadata has its rank, the format, a fingerprint of the model, SHA-256 of its data, and each tensor's
shape and first row. A file that is there is replaced if it is a shard of the same tensors, else refused. Formats are those of
weights in oxtile::sharded, which has none of fp8-block.

Examples:
  oxtile shard -i model.safetensors --ranks 4 --output-prefix parts/model --format mxfp8
  oxtile shard -i model.safetensors --ranks 4 --format mxfp8 --plan --distance 1
  oxtile shard -i model.safetensors.index.json --ranks 8 --format nvfp4 --plan";

impl Shard {
    /// The directions that matrices are quantized in.
    pub fn directions(&self) -> Directions {
        self.directions.unwrap_or_default()
    }

    /// The numbers of gathers that run ahead, of a plan.
    pub fn distances(&self) -> Vec<u32> {
        self.distance.map_or_else(|| vec![1, 2, 3], |distance| vec![distance])
    }

    pub(super) fn check(&self) -> Result<(), String> {
        let of_plans = [("--distance", self.distance.is_some()), ("--embedding", self.embedding.is_some())];
        if let Some((option, _)) = of_plans.into_iter().find(|(_, is_given)| *is_given && !self.plan) {
            return Err(format!("{option} goes with --plan"));
        }
        let quantizes = matches!(self.format, ShardFormat::Quantized(_));
        let of_formats = [("--direction", self.directions.is_some()), ("--device", self.device != Device::Auto)];
        if let Some((option, _)) = of_formats.into_iter().find(|(_, is_given)| *is_given && !quantizes) {
            return Err(format!("{option} goes with a format that quantizes, not with --format {}", self.format.name()));
        }
        if self.plan && self.device != Device::Auto {
            return Err("--device goes with --output-prefix: a plan runs nothing".to_owned());
        }
        if self.output_prefix.as_ref().is_some_and(|prefix| prefix.as_os_str().as_encoded_bytes().ends_with(b"/")) {
            return Err("--output-prefix names a folder: add how the files' names begin".to_owned());
        }
        Ok(())
    }
}
