//! The multipliers of all scales that a tensor's blocks can have.
//!
//! There are 127 scales, so a block's multiplier is looked up instead of divided for. The table is made by each CUDA block
//! while its loads are under way, and read after a block barrier.

use oxtile_tile::num::e4m3;
use oxtile_tile::prelude::*;

use super::rounding::Rounding;
use super::*;

/// Codes of a scale that is neither negative nor NaN, and one more.
pub(super) const SCALES: usize = 128;

/// What follows from a tensor's amax.
#[derive(SharedStorage, Clone, Copy)]
pub(super) struct Multipliers {
    /// The multiplier of each scale.
    multipliers: SharedArray<f32, SCALES>,
    /// The multipliers times [`Rounding::SCALE`]; `MAX` where that is not exact.
    scaled: SharedArray<f32, SCALES>,
    /// What a block's amax is multiplied by.
    scale_factor: SharedArray<f32, 1>,
}

/// A block's scale and what its elements are multiplied by.
#[derive(Clone, Copy)]
pub(super) struct BlockScale {
    pub code: e4m3,
    /// The multiplier times [`Rounding::SCALE`].
    pub scaled: f32,
    /// Whether `scaled` is exactly that, or all elements are 0 or NaN: else the block takes the slow path.
    pub is_exact: bool,
}

impl Multipliers {
    /// Written by the first [`SCALES`] threads, one scale each. The others may call it too.
    #[inline(always)]
    pub fn fill<R: Rounding>(&self, encode_scale: f32) {
        let index = thread::index();
        if index < SCALES as u32 {
            let multiplier = multiplier(e4m3::from_bits(index as u8), encode_scale);
            self.multipliers.store(index, multiplier);
            let scaled = multiplier * R::SCALE;
            self.scaled.store(index, if scaled * (1.0 / R::SCALE) == multiplier { scaled } else { f32::MAX });
            if index == 0 {
                self.scale_factor.store(0, scale_factor(encode_scale));
            }
        }
    }

    /// The scale of a block whose largest magnitude is `amax`, NaN dropped.
    #[inline(always)]
    pub fn of_block(&self, amax: f32) -> BlockScale {
        self.of_scale(block_scale(amax, self.scale_factor.load(0)), amax)
    }

    /// A scale that was found before, for a block whose largest magnitude is `amax`.
    #[inline(always)]
    pub fn of_scale(&self, code: e4m3, amax: f32) -> BlockScale {
        let scaled = self.scaled.load(u32::from(code.to_bits()));
        BlockScale { code, scaled, is_exact: scaled < f32::MAX || amax == 0.0 }
    }

    /// The factor of the elements of a block of this scale.
    #[inline(always)]
    pub fn exact(&self, scale: e4m3) -> f32 {
        self.multipliers.load(u32::from(scale.to_bits()))
    }
}
