//! Where the shards of weights lie in the memory of every rank.

use std::collections::HashSet;

use oxtile_tile::num::bf16;

use super::format::WeightFormat;
use super::plane::Plane;
use super::split::EqualShards;
use super::weight::{Uses, Weight};
use crate::comm::{Rank, Team};
use crate::quantize::Direction;
use crate::runtime::{Buffer, Error, Result};

/// Slots, and arrays of a plane, begin at multiples of so many bytes.
pub(super) const ALIGNMENT: u64 = 256;

/// A weight of a set.
pub(super) struct Entry<F: WeightFormat> {
    pub weight: Weight,
    pub shards: EqualShards<F>,
    /// The first byte of this weight's codes and scales in the planes of a rank, by rows and by columns.
    pub starts: [Option<[u64; 2]>; 2],
    /// The number of its first matrix among those of all weights.
    pub first_matrix: u64,
    /// The casts' targets, for each matrix.
    pub casts: Vec<F::Shard>,
    /// This rank's values of each matrix, padding included.
    pub masters: Vec<Buffer<bf16>>,
}

impl<F: WeightFormat> Entry<F> {
    /// The arrays of one matrix, of some rows of it.
    pub fn plane(&self, rows: u64, direction: Direction) -> Plane {
        F::RULE.plane([rows, self.weight.columns], direction)
    }

    /// Where the codes and scales of a plane begin.
    pub fn starts(&self, direction: Direction) -> Option<[u64; 2]> {
        self.starts[direction as usize]
    }

    /// The bytes of the whole weight in one direction, each array aligned.
    pub fn whole_bytes(&self, direction: Direction) -> u64 {
        whole_bytes(&self.weight, self.shards, direction)
    }

    /// The bytes of a plane that other ranks have.
    pub fn travelling_bytes(&self, rank: Rank, direction: Direction) -> u64 {
        travelling_bytes(&self.weight, self.shards, rank, direction)
    }
}

/// The bytes of a whole weight in one plane, each array aligned.
pub(super) fn whole_bytes<F: WeightFormat>(weight: &Weight, shards: EqualShards<F>, plane: Direction) -> u64 {
    let whole = F::RULE.plane([shards.padded_rows(), weight.columns], plane);
    whole.arrays().map(|array| aligned(weight.experts * array.bytes())).iter().sum()
}

/// The bytes of a plane that other ranks have.
pub(super) fn travelling_bytes<F: WeightFormat>(weight: &Weight, shards: EqualShards<F>, rank: Rank, plane: Direction) -> u64 {
    let own = shards.padded_range(rank);
    let bytes = |rows| F::RULE.plane([rows, weight.columns], plane).arrays().iter().map(|array| array.bytes()).sum::<u64>();
    weight.experts * (bytes(shards.padded_rows()) - bytes(own.end - own.start))
}

/// Rounds up to where an array may begin.
pub(super) fn aligned(bytes: u64) -> u64 {
    bytes.next_multiple_of(ALIGNMENT)
}

/// Where the planes of weights lie in the memory of every rank.
pub(super) struct Layout<F> {
    pub shards: Vec<EqualShards<F>>,
    pub starts: Vec<[Option<[u64; 2]>; 2]>,
    pub bytes: u64,
    /// The amaxes of all matrices of all ranks.
    pub amaxes: u64,
}

impl<F: WeightFormat> Layout<F> {
    pub fn new(weights: &[Weight], team: &Team) -> Result<Self> {
        if weights.is_empty() {
            return Err(Error::Invalid { what: "ShardSet", why: "it has no weights".to_owned() });
        }
        let (mut bytes, mut starts, mut all, mut names) = (0_u64, Vec::new(), Vec::new(), HashSet::new());
        for weight in weights {
            weight.check::<F>()?;
            if !names.insert(weight.name.as_str()) {
                return Err(Error::Invalid { what: "ShardSet", why: format!("two weights are named `{}`", weight.name) });
            }
            let shards = EqualShards::<F>::new(weight.rows, team.size());
            let is_used = [true, F::RULE.has_directions() && (weight.uses == Uses::Both || F::RULE.always_both)];
            starts.push([Direction::Rows, Direction::Columns].map(|direction| {
                is_used[direction as usize].then(|| {
                    // Of the longest shard: then the places are the same on all ranks.
                    F::RULE.plane([shards.shard_rows(), weight.columns], direction).arrays().map(|array| {
                        let start = bytes;
                        bytes += aligned(weight.experts * array.bytes());
                        start
                    })
                })
            }));
            all.push(shards);
        }
        let matrices: u64 = weights.iter().map(|weight| weight.experts).sum();
        let amaxes = if F::RULE.has_amax { matrices * u64::from(team.size().get()) } else { 0 };
        Ok(Self { shards: all, starts, bytes, amaxes })
    }

    /// The bytes that a rank takes of the arena.
    pub fn arena_bytes(&self) -> u64 {
        self.bytes + aligned(4 * self.amaxes)
    }

    /// The bytes of the values in bf16 from which a rank's shards are cast; none of a format whose shards are these values.
    pub fn master_bytes(&self, weights: &[Weight], rank: Rank) -> u64 {
        let own = |(weight, shards): (&Weight, &EqualShards<F>)| {
            let rows = shards.padded_range(rank);
            weight.experts * aligned((rows.end - rows.start) * weight.columns * 2)
        };
        if F::RULE.has_directions() { weights.iter().zip(&self.shards).map(own).sum() } else { 0 }
    }
}

/// The set in words, the same on all ranks.
pub(super) fn text<F: WeightFormat>(weights: &[Weight], team: &Team) -> String {
    use std::fmt::Write;
    let mut text = format!("shards in {} of {team:?}:", F::NAME);
    for Weight { name, experts, rows, columns, uses } in weights {
        let _ = write!(text, " `{name}` {experts} x {rows} x {columns} {uses:?};");
    }
    text
}
