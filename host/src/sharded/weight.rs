//! What a weight is, before there is memory for it.

use super::format::WeightFormat;
use super::split::EqualShards;
use crate::comm::WorldSize;
use crate::runtime::{Error, Result};

/// A weight of a [`ShardSet`](super::ShardSet) or of a [`GradientScatter`](super::GradientScatter): its number, in the order in which the weights were named, and a mark of its name and
/// shape. So a set and the gradients of the same weights take each other's, and what has another weight at that number refuses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WeightId {
    number: usize,
    mark: u64,
}

impl WeightId {
    pub(super) fn new(number: usize, weight: &Weight) -> Self {
        Self { number, mark: weight.mark() }
    }

    /// The number.
    pub fn index(self) -> usize {
        self.number
    }

    /// The weight among `all`, or why it is none of them.
    pub(super) fn find<T>(self, all: &[T], weight: impl Fn(&T) -> &Weight) -> std::result::Result<&T, String> {
        let Some(found) = all.get(self.number) else {
            return Err(format!("there is no weight {} among {}: it is of another list of weights", self.number, all.len()));
        };
        if weight(found).mark() == self.mark {
            return Ok(found);
        }
        let Weight { name, rows, columns, .. } = weight(found);
        Err(format!(
            "weight {} is `{name}` of {rows} times {columns} here, and another one was asked for: it is of another list of weights",
            self.number
        ))
    }
}

/// Which passes use a weight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Uses {
    /// The product of the forward pass takes it by rows, the data gradient of the backward pass by columns.
    #[default]
    Both,
    /// The forward pass alone, as an embedding: it is cast in one direction, and the backward pass does not name it.
    ForwardOnly,
}

/// A weight: `experts` matrices of `rows` by `columns`, one after another. Each matrix is divided by rows among the ranks, and cast with an amax of its own where
/// the format has one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Weight {
    /// The name in errors.
    pub name: String,
    /// How many matrices; 1 for a weight that is no group of experts.
    pub experts: u64,
    /// Rows of a matrix: the outputs of its product. There may be none, as of an expert that is not there.
    pub rows: u64,
    /// Columns of a matrix: the inputs of its product.
    pub columns: u64,
    /// Which passes use it.
    pub uses: Uses,
}

impl Weight {
    /// A matrix that both passes use.
    pub fn new(name: impl Into<String>, [rows, columns]: [u64; 2]) -> Self {
        Self { name: name.into(), experts: 1, rows, columns, uses: Uses::Both }
    }

    /// The same as so many experts.
    #[must_use]
    pub fn experts(self, experts: u64) -> Self {
        Self { experts, ..self }
    }

    /// The same, for the forward pass alone.
    #[must_use]
    pub fn forward_only(self) -> Self {
        Self { uses: Uses::ForwardOnly, ..self }
    }

    /// A number that follows from name and shape (FNV-1a of 64 bits, <http://www.isthe.com/chongo/tech/comp/fnv/>).
    fn mark(&self) -> u64 {
        let shape = [self.experts, self.rows, self.columns].into_iter().flat_map(u64::to_le_bytes);
        let step = |mark: u64, byte: u8| (mark ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        self.name.bytes().chain(shape).fold(0xcbf2_9ce4_8422_2325, step)
    }

    /// How the rows of each matrix are divided.
    pub fn shards<F: WeightFormat>(&self, world: WorldSize) -> EqualShards<F> {
        EqualShards::new(self.rows, world)
    }

    /// Fails unless the format can hold it.
    pub(super) fn check<F: WeightFormat>(&self) -> Result<()> {
        let why = if self.experts == 0 || self.columns == 0 {
            "has no elements: leave it out".to_owned()
        } else if !self.columns.is_multiple_of(F::COLUMNS) {
            format!("has {} columns, and {} takes multiples of {}: pad them, or keep it in bf16", self.columns, F::NAME, F::COLUMNS)
        } else if self
            .experts
            .checked_mul(self.rows.max(1))
            .and_then(|rows| rows.checked_mul(self.columns))
            .is_none_or(|elements| elements > 1 << 48)
        {
            format!("has {} times {} times {} elements: that is no weight of this world", self.experts, self.rows, self.columns)
        } else {
            return Ok(());
        };
        Err(Error::Invalid { what: "ShardSet", why: format!("`{}` {why}", self.name) })
    }
}
