//! Results of attention on parts of the keys, on their way from [`attention_forward_split`](fn@super::attention_forward_split) to
//! [`attention_combine`](fn@super::attention_combine).

use oxtile_tile::prelude::*;

use super::shape::Checked;

/// Parts of the keys at most: one a lane.
pub const MOST_PARTS: u32 = warp::LANES;

/// The parts as they are read.
#[derive(Clone, Copy, Parameter)]
pub struct Parts {
    /// The results, normalised: `[parts, rows, size]`, where rows are those of all heads of all batches.
    pub sums: Global<f32>,
    /// The logarithms to base 2 of the sums of exponentials: `[parts, rows]`.
    pub logs: Global<f32>,
    /// How many parts there are.
    pub count: u32,
    /// Elements of a row: a multiple of 2.
    pub size: u32,
}

/// The parts as they are written.
#[derive(Clone, Copy, Parameter)]
pub struct PartsMut {
    /// The results, normalised: `[parts, rows, size]`, where rows are those of all heads of all batches.
    pub sums: GlobalMut<f32>,
    /// The logarithms to base 2 of the sums of exponentials: `[parts, rows]`.
    pub logs: GlobalMut<f32>,
    /// How many parts there are.
    pub count: u32,
    /// Elements of a row: a multiple of 2.
    pub size: u32,
}

impl PartsArgument<'_> {
    /// Of so many rows.
    pub(super) fn check(&self, rows: u64) -> Checked {
        check(rows, [self.count, self.size], [self.sums.len(), self.logs.len()], self.sums.address())
    }
}

impl PartsMutArgument<'_> {
    /// Of so many rows.
    pub(super) fn check(&self, rows: u64) -> Checked {
        check(rows, [self.count, self.size], [self.sums.len(), self.logs.len()], self.sums.address())
    }
}

fn check(rows: u64, [count, size]: [u32; 2], [sums, logs]: [u64; 2], address: u64) -> Checked {
    LaunchError::check_limit("parts.count", count.into(), MOST_PARTS.into())?;
    LaunchError::check_multiple("parts.size", 2, size.into())?;
    let rows = rows.saturating_mul(count.into());
    LaunchError::check_length("parts.logs", rows, logs)?;
    LaunchError::check_length("parts.sums", rows.saturating_mul(size.into()), sums)?;
    LaunchError::check_alignment("parts.sums", 8, address)
}
