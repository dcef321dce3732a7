//! Rows of a tensor, which a warp moves.

use oxtile_tile::prelude::*;

/// Threads of a block.
pub(super) const THREADS: u32 = 256;
/// Rows of a block, one a warp.
pub(super) const WARPS: u32 = THREADS / warp::LANES;
/// Vectors that a lane has in flight.
const VECTORS: usize = 4;
/// Words of a vector.
const WORDS: u32 = 4;

/// How many rows a tensor has, and how long they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Parameter)]
pub struct Extent {
    /// Rows.
    pub rows: u32,
    /// Words of 32 bits of a row, a multiple of 4.
    pub words: u32,
}

impl Extent {
    /// Where a row begins.
    #[inline(always)]
    pub(super) fn start(self, row: u32) -> u64 {
        u64::from(row) * u64::from(self.words)
    }

    /// Checks a tensor of `count` times these rows.
    pub(super) fn check(self, name: &'static str, count: u64, length: u64, address: u64) -> Result<(), LaunchError> {
        LaunchError::check_multiple("extent.words", WORDS.into(), self.words.into())?;
        LaunchError::check_length(name, count * u64::from(self.rows) * u64::from(self.words), length)?;
        LaunchError::check_alignment(name, 16, address)
    }

    /// A warp for each row.
    pub(super) fn grid(self) -> Result<Grid, LaunchError> {
        LaunchError::check_limit("extent.rows", self.rows.into(), super::MOST_ROWS.into())?;
        Grid::cover("extent.rows", if self.words == 0 { 0 } else { self.rows.into() }, WARPS)
    }
}

/// The row of this warp.
#[inline(always)]
#[track_caller]
pub(super) fn this_row() -> u32 {
    block::index()[0] * WARPS + thread::warp()
}

/// The warp copies so many words from one place to another, which are multiples of 4.
#[inline(always)]
#[track_caller]
pub(super) fn copy_row(source: &Global<u32>, from: u64, target: &GlobalMut<u32>, to: u64, words: u32) {
    let mut word = WORDS * thread::lane();
    while word < words {
        // All loads first.
        let at: [u32; VECTORS] = core::array::from_fn(|i| word + i as u32 * WORDS * warp::LANES);
        let vectors = at.map(|at| if at < words { source.load_vector(from + u64::from(at)) } else { Vector::from_words([0; 4]) });
        for i in 0..VECTORS {
            if at[i] < words {
                target.store_vector(to + u64::from(at[i]), vectors[i]);
            }
        }
        word += VECTORS as u32 * WORDS * warp::LANES;
    }
}
