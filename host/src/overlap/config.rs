//! What is computed, and how.

use std::any::TypeId;

use oxtile_tile::num::bf16;

use super::format::GatheredFormat;
use super::sizes::{Global, Local, Split};
use crate::comm::WorldSize;
use crate::gemm::{Activation, GemmConfig};
use crate::runtime::Result;
use crate::symmetric::PutOrder;

/// How a gathered product overlaps. One set of defaults for all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OverlapConfig {
    /// The method; none: [the fastest by the model](super::AllGatherConfig::choose).
    pub method: Option<Method>,
    /// How shards are cut; none: as the model finds best.
    pub cut: Option<Cut>,
    /// The order of the copies to the others; none: [that for the shard's bytes](PutOrder::of).
    pub order: Option<PutOrder>,
    /// Multiprocessors that a fused product leaves to other kernels, such as NCCL's.
    pub margin: u32,
}

impl OverlapConfig {
    /// Why it cannot be, on devices of so many multiprocessors.
    pub(super) fn check(&self, multiprocessors: u32) -> Result<(), String> {
        if self.margin >= multiprocessors {
            return Err(format!("a margin of {} leaves none of {multiprocessors} multiprocessors", self.margin));
        }
        let counts = self.cut.map(|cut| [("panels", cut.panels), ("slabs", cut.slabs)]);
        match counts.iter().flatten().find(|(_, count)| !(1..=Cut::MOST).contains(count)) {
            Some((of, count)) => Err(format!("{count} {of}: take 1 to {}", Cut::MOST)),
            None => Ok(()),
        }
    }
}

/// How a gather and a product are done together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// One kernel, which waits for each chunk just before it first reads it.
    Fused,
    /// A product for each rank's shard, once it is there.
    Chunked,
    /// The product after the whole gather.
    Sequential,
}

/// The chunks of a shard, each with a flag of its own. Tiles of one panel are computed while the next is on its way, and a tile begins with the first slab while
/// the next is on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Parts of a shard along the dimension that is gathered, one after another; fewer where they do not divide the shard.
    pub panels: u32,
    /// Parts of a panel along the dimension that is summed. Where the sum is gathered there is one.
    pub slabs: u32,
    /// Whether each slab is half as wide as the one before it, and not all are of one width: what is left to multiply after the last one has come is
    /// short with few copies.
    pub halving: bool,
    /// Whether only the panel that comes last of all has slabs: fewer copies where they take longer than the product.
    pub last_only: bool,
}

impl Cut {
    /// A shard in one piece.
    pub const WHOLE: Self = Self { panels: 1, slabs: 1, halving: false, last_only: false };
    /// The most panels, and the most slabs.
    pub const MOST: u32 = 4;
    /// The most chunks of a shard.
    pub(super) const CHUNKS: u32 = Self::MOST * Self::MOST;
}

/// Which operand the ranks gather, and along which dimension.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Gathers {
    /// Rows of `A`: each rank has `m / ranks` rows, all `k` of each, and `n / ranks` columns of `B`. `m` may be any: the last shards are then shorter.
    #[default]
    Rows,
    /// `A` along the sum: each rank has `k / ranks` of it for all `m` rows, and `n / ranks` columns of `B`. For the gradient of a weight `[m, n]`
    /// whose input is sharded by rows: with `transpose_a`, a shard is rows of the input as it is stored.
    SumOfA,
    /// `B` along the sum: each rank has `k / ranks` of it for all `n` columns, and `m / ranks` rows of `A`. For the gradient of a weight that is stored
    /// as its transpose.
    SumOfB,
}

/// A product of which one operand is gathered from all ranks of a team. Begin with [`new`](Self::new).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AllGatherConfig {
    /// Over all ranks.
    pub sizes: Global,
    /// What is gathered.
    pub gathers: Gathers,
    /// Whether `A` is stored as its transpose, `[k, m]`.
    pub transpose_a: bool,
    /// Whether `B` is stored as its transpose, `[n, k]`.
    pub transpose_b: bool,
    /// Factor of the product.
    pub alpha: f32,
    /// Factor of `D` as it was; 0 leaves it unread.
    pub beta: f32,
    /// What comes last.
    pub activation: Activation,
    /// The format in which the operand travels, to be dequantized where it arrives ([`QuantizedAllGatherGemm`](super::QuantizedAllGatherGemm)); none: its elements do. For rows of `A`.
    pub format: Option<GatheredFormat>,
    /// How it overlaps.
    pub overlap: OverlapConfig,
}

impl AllGatherConfig {
    /// The product of row-major operands, rows of `A` gathered, and nothing after it.
    pub fn new(sizes: Global) -> Self {
        let GemmConfig { transpose_a, transpose_b, alpha, beta, activation, .. } = GemmConfig::default();
        let (gathers, overlap) = (Gathers::default(), OverlapConfig::default());
        Self { sizes, gathers, transpose_a, transpose_b, alpha, beta, activation, format: None, overlap }
    }

    /// The same of an operand that travels in a format.
    pub fn travelling(self, format: GatheredFormat) -> Self {
        Self { format: Some(format), ..self }
    }

    /// What one rank multiplies, once its operand is gathered.
    ///
    /// # Errors
    /// As [`Global::local`].
    pub fn local(&self, ranks: WorldSize) -> Result<Local> {
        let split = match self.gathers {
            Gathers::Rows | Gathers::SumOfA => Split::Columns,
            Gathers::SumOfB => Split::Rows,
        };
        self.sizes.local(ranks, split)
    }

    /// Why the operand cannot travel in its format, if it has one.
    pub(super) fn check_format<T: 'static>(&self) -> Result<(), String> {
        let Some(format) = self.format else { return Ok(()) };
        if TypeId::of::<T>() != TypeId::of::<bf16>() {
            Err(format!("{format} is dequantized to bf16: take bf16 elements"))
        } else if self.gathers != Gathers::Rows || self.transpose_a {
            Err(format!(
                "{format} is gathered by rows of A that are stored as [m, k]: leave gathers and transpose_a as they are, or gather bf16"
            ))
        } else {
            self.activation.check_alone()
        }
    }

    /// The product of one rank on the gathered operand.
    ///
    /// # Errors
    /// As [`local`](Self::local).
    pub fn product(&self, ranks: WorldSize) -> Result<GemmConfig> {
        let local = self.local(ranks)?;
        let Self { transpose_a, transpose_b, alpha, beta, activation, .. } = *self;
        Ok(GemmConfig { m: local.m(), n: local.n(), k: local.k(), transpose_a, transpose_b, alpha, beta, activation })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Another default is another program: it is a line of the changelog.
    #[test]
    fn defaults_are_pinned() {
        let OverlapConfig { method, cut, order, margin } = OverlapConfig::default();
        assert_eq!((method, cut, order, margin), (None, None, None, 0));
        let sizes = Global { m: 1, n: 2, k: 3 };
        let AllGatherConfig { gathers, transpose_a, transpose_b, alpha, beta, activation, format, overlap, .. } =
            AllGatherConfig::new(sizes);
        assert_eq!((gathers, transpose_a, transpose_b, format), (Gathers::Rows, false, false, None));
        assert_eq!((alpha, beta, activation, overlap), (1.0, 0.0, Activation::Identity, OverlapConfig::default()));
    }
}
