//! `oxtile overlap`.

use clap::{Args, ValueEnum};
use oxtile::comm::WorldSize;
use oxtile::overlap::GatheredFormat;

use super::values;

/// `oxtile overlap`.
#[derive(Args, Debug, PartialEq)]
#[command(after_help = MORE)]
pub struct Overlap {
    /// Rows and columns of the result over all ranks, and the length of its sums; bf16
    #[arg(long, value_name = "M,N,K", allow_hyphen_values = true, value_parser = sizes)]
    pub plan: [u64; 3],
    /// How many ranks: each has rows of A and columns of B
    #[arg(long, allow_negative_numbers = true, value_parser = values::ranks)]
    pub ranks: WorldSize,
    /// How the gathered operand travels
    #[arg(long, value_enum, default_value_t)]
    pub format: Travels,
    /// What the ranks do with an operand, or with the sum
    #[arg(long, value_enum, default_value_t)]
    pub operation: Operation,
    /// Print one JSON document instead of lines
    #[arg(long)]
    pub json: bool,
}

impl Overlap {
    /// Whether a format is asked for that the operation does not have.
    pub fn leaves_out_its_format(&self) -> bool {
        self.operation != Operation::AllGather && self.format != Travels::Bf16
    }
}

/// What travels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Operation {
    /// Rows of A are gathered from all ranks before the product
    #[default]
    AllGather,
    /// Each rank has a part of the sum, and gets some rows
    ReduceScatter,
    /// Each rank has a part of the sum, and gets all of it
    AllReduce,
    /// Both gradients of the product whose rows of A are gathered: of B, and of A
    Gradients,
}

impl Operation {
    /// The name.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllReduce => "all_reduce",
            Self::Gradients => "gradients",
        }
    }
}

/// How a gathered operand travels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Travels {
    /// As its elements
    #[default]
    Bf16,
    /// As codes and scales, dequantized to bf16 where they arrive
    Mxfp8,
    /// As codes and scales, dequantized to bf16 where they arrive
    Nvfp4,
}

impl Travels {
    /// The format of codes and scales, if there are any.
    pub fn format(self) -> Option<GatheredFormat> {
        match self {
            Self::Bf16 => None,
            Self::Mxfp8 => Some(GatheredFormat::Mxfp8),
            Self::Nvfp4 => Some(GatheredFormat::Nvfp4),
        }
    }

    /// The name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Mxfp8 => "mxfp8",
            Self::Nvfp4 => "nvfp4",
        }
    }
}

const MORE: &str = "\
fused       one kernel, which waits for each chunk just before it first reads it
chunked     a product for each rank's shard, once it is there
sequential  the product after the whole gather

one_shot    of an all-reduce: one launch after the product

bulk        of gradients: what they gather and scatter travels beside them
apart       of gradients: one after the other, each by its own method

The times are a model's, of H200s of one host. The library's `choose` of each
operation chooses the same (`oxtile::overlap`).

Examples:
  oxtile overlap --plan 8192,8192,8192 --ranks 4
  oxtile overlap --plan 16384,4096,8192 --ranks 2 --format mxfp8
  oxtile overlap --plan 16,8192,8192 --ranks 2 --operation all-reduce
  oxtile overlap --plan 8192,28672,8192 --ranks 4 --operation gradients";

/// No dimension of a product is larger.
const LARGEST: u64 = i32::MAX as u64;

/// `M,N,K`.
fn sizes(text: &str) -> Result<[u64; 3], String> {
    let size = |word: &str| word.parse().ok().filter(|size| (1..=LARGEST).contains(size));
    let sizes = text.split(',').map(size).collect::<Option<Vec<_>>>().and_then(|sizes| sizes.try_into().ok());
    sizes.ok_or_else(|| format!("it is not M,N,K: three numbers from 1 to {LARGEST}"))
}

#[cfg(test)]
mod tests {
    use super::sizes;

    #[test]
    fn three_sizes() {
        assert_eq!(sizes("8192,4096,64"), Ok([8192, 4096, 64]));
        let wrong = ["1,2", "1,2,3,4", "0,1,1", "1,x,1", "", "1,1,2147483648", "-1,1,1"];
        assert!(wrong.map(sizes).iter().all(Result::is_err));
    }
}
