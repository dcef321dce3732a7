//! What shards are made in, and how the rows of a matrix are divided then.

use std::ops::Range;

use oxtile::{
    comm::WorldSize,
    sharded::{Bf16, EqualShards, Fp8, Mxfp8, Nvfp4, Nvfp4Squares, WeightFormat},
};

use crate::quantize::{Directions, Format, Recipe};

/// What becomes of the tensors before they are divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShardFormat {
    /// They stay as they are.
    Keep,
    /// Matrices are rounded to BF16.
    Bf16,
    /// Matrices are quantized as `oxtile quantize` does.
    Quantized(Format),
}

impl ShardFormat {
    /// Every format, by its name on the command line and in a shard's metadata.
    pub const CHOICES: [(&'static str, Self); 6] = [
        (Self::Keep.name(), Self::Keep),
        (Self::Bf16.name(), Self::Bf16),
        (Format::Fp8.name(), Self::Quantized(Format::Fp8)),
        (Format::Mxfp8.name(), Self::Quantized(Format::Mxfp8)),
        (Format::Nvfp4.name(), Self::Quantized(Format::Nvfp4)),
        (Format::Nvfp4Squares.name(), Self::Quantized(Format::Nvfp4Squares)),
    ];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Keep => "keep",
            Self::Bf16 => "bf16",
            Self::Quantized(format) => format.name(),
        }
    }

    /// The recipe of `oxtile quantize`; none where nothing is quantized.
    pub fn recipe(self, directions: Directions) -> Option<Recipe> {
        match self {
            Self::Quantized(format) => Some(Recipe { directions, ..Recipe::of(format) }),
            Self::Keep | Self::Bf16 => None,
        }
    }

    /// The rows of each rank.
    pub fn ranges(self, rows: u64, world: WorldSize) -> Vec<Range<u64>> {
        match self {
            Self::Keep | Self::Bf16 | Self::Quantized(Format::Fp8Block) => ranges::<Bf16>(rows, world),
            Self::Quantized(Format::Fp8) => ranges::<Fp8>(rows, world),
            Self::Quantized(Format::Mxfp8) => ranges::<Mxfp8>(rows, world),
            Self::Quantized(Format::Nvfp4) => ranges::<Nvfp4>(rows, world),
            Self::Quantized(Format::Nvfp4Squares) => ranges::<Nvfp4Squares>(rows, world),
        }
    }
}

fn ranges<F: WeightFormat>(rows: u64, world: WorldSize) -> Vec<Range<u64>> {
    let shards = EqualShards::<F>::new(rows, world);
    world.ranks().map(|rank| shards.range(rank)).collect()
}
