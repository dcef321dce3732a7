//! What is computed, and by which methods.

use super::kernels::ScatterOperands;
use super::shards::Shards;
use crate::comm::WorldSize;
use crate::gemm::{Activation, GemmConfig};
use crate::overlap::config::Cut;
use crate::overlap::sizes::{Global, Split};
use crate::runtime::{Error, Result};

/// How a product and a reduce-scatter are done together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScatterMethod {
    /// One kernel, which stores tiles of other members' rows at their owner as soon as they are there, and adds to own tiles what the others have stored here. Takes ranks whose shards are equal and whole tiles of 256 rows, in memory
    /// that lies [in one range of addresses](crate::symmetric::Capabilities::contiguous).
    ///
    /// Kernels of several ranks wait for each other: all their blocks must be resident. Beside kernels of another stream that wait for other ranks, such as NCCL's collectives or products on another memory, leave a
    /// [margin](ReduceScatterConfig::margin) for those, or take another method, which waits for copies alone; else each may hold the multiprocessors that the other one needs, until the deadline.
    Direct,
    /// One kernel of all rows. Copy engines put panels of the other members' rows as soon as their tiles are there, and own tiles wait for what the others put. Takes ranks as [`Direct`](Self::Direct) does, in any memory, and a margin beside
    /// other kernels that wait for ranks as that.
    Whole,
    /// Products of panels, which copy engines put to their owner, and a kernel of own rows, which waits for each panel before it adds it.
    Fused,
    /// The same, and the stream waits for all panels before the kernel of own rows.
    Sequential,
}

/// A product whose sum the ranks share, and of which each gets some rows: `D = activation(alpha * (A B) + beta * D + bias)`. Begin with [`new`](Self::new).
///
/// Each rank has `k / ranks` columns of `A`, for all `m` rows, and the same rows of `B`. `m` may be any: the last ranks then get fewer rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReduceScatterConfig {
    /// Over all ranks.
    pub sizes: Global,
    /// Whether `B` is stored as its transpose, `[n, k]`.
    pub transpose_b: bool,
    /// Factor of the whole sum.
    pub alpha: f32,
    /// Factor of `D` as it was: 0, which leaves it unread, or `alpha`. What it was is then a part of the sum as those of other ranks are, added last in `f32`: it is copied beside them first.
    pub beta: f32,
    /// What comes last, after the bias: of whole sums.
    pub activation: Activation,
    /// The method; none: [the fastest by the model](Self::choose), beyond two ranks of `Fused` and `Sequential`, as four showed.
    pub method: Option<ScatterMethod>,
    /// Parts of a rank's rows, each of which has a flag, at most [`MOST_PANELS`](Self::MOST_PANELS); none: as the model finds best. Each has a multiple of 256 rows, so that
    /// there may be fewer.
    pub panels: Option<u32>,
    /// Multiprocessors that a fused product leaves to other kernels, such as NCCL's.
    pub margin: u32,
}

impl ReduceScatterConfig {
    /// The most panels.
    pub const MOST_PANELS: u32 = Cut::CHUNKS;

    /// The product of row-major operands, and nothing after it.
    pub fn new(sizes: Global) -> Self {
        Self { sizes, transpose_b: false, alpha: 1.0, beta: 0.0, activation: Activation::Identity, method: None, panels: None, margin: 0 }
    }

    /// What one rank multiplies: all rows, its part of the sum.
    ///
    /// # Errors
    /// As [`Global::local`].
    pub fn product(&self, ranks: WorldSize) -> Result<GemmConfig> {
        let local = self.sizes.local(ranks, Split::Sum)?;
        Ok(GemmConfig { m: local.m(), n: local.n(), k: local.k(), transpose_b: self.transpose_b, ..GemmConfig::default() })
    }

    /// Rows that each rank gets; the last ones may get fewer, or none.
    pub fn rows(&self, ranks: WorldSize) -> u64 {
        self.sizes.m.div_ceil(ranks.get().into())
    }

    /// The bytes that the other ranks' parts take of an [`OverlapMemory`](crate::overlap::OverlapMemory).
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn bytes<T: ScatterOperands<O>, O: 'static>(&self, ranks: WorldSize) -> Result<u64> {
        let (rows, parts) = (self.rows(ranks), u64::from(ranks.get() - 1 + self.old_parts()));
        let bytes = rows.checked_mul(self.sizes.n).and_then(|len| len.checked_mul(parts)).and_then(|len| len.checked_mul(T::RESULT_BYTES));
        bytes.ok_or(Error::TooLarge {
            what: "ReduceScatterConfig",
            count: rows.saturating_mul(self.sizes.n),
            element_bytes: T::RESULT_BYTES,
        })
    }

    /// Parts of a sum that are no other rank's: what the result was, if it is added.
    pub(super) fn old_parts(&self) -> u32 {
        u32::from(self.beta != 0.0)
    }

    pub(in crate::overlap) fn shards(&self, ranks: WorldSize, panels: u32) -> Shards {
        Shards::new(ranks.get(), self.sizes.m, panels)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Another default is another program: it is a line of the changelog.
    #[test]
    fn defaults_are_pinned() {
        let sizes = Global { m: 1, n: 2, k: 3 };
        let expected = ReduceScatterConfig {
            sizes,
            transpose_b: false,
            alpha: 1.0,
            beta: 0.0,
            activation: Activation::Identity,
            method: None,
            panels: None,
            margin: 0,
        };
        assert_eq!(ReduceScatterConfig::new(sizes), expected);
    }
}
