//! How many of everything there are: the sizes that kernels take as one parameter, and the checks of their launches.

use oxtile_tile::prelude::*;

/// Rows of a tensor of queries or of keys: sums of two of them are below 2^31.
const MOST_ROWS: u64 = (1 << 30) - 1;
/// Blocks of a grid, tiles of a launch.
pub(super) const MOST_BLOCKS: u64 = (1 << 31) - 1;

pub(super) type Checked = Result<(), LaunchError>;

/// Sizes of dense tensors: every batch has as many queries, keys and heads.
#[derive(Clone, Copy, Parameter)]
pub struct Shape {
    /// Batches.
    pub batches: u32,
    /// Query heads of a batch.
    pub heads: u32,
    /// Query heads that share a key head; a divisor of `heads`.
    pub group: u32,
    /// Queries of a batch.
    pub queries: u32,
    /// Keys of a batch.
    pub keys: u32,
}

/// Heads of tensors that hold sequences.
#[derive(Clone, Copy, Parameter)]
pub struct Heads {
    /// Sequences.
    pub batches: u32,
    /// Query heads of a sequence.
    pub heads: u32,
    /// Query heads that share a key head; a divisor of `heads`.
    pub group: u32,
    /// The query heads from one sequence to the next if sequences share rows (sbhd); 0 if they share heads (bshd, thd).
    pub step: u32,
}

impl Shape {
    /// Query heads of all batches.
    #[inline(always)]
    pub fn all_heads(&self) -> u32 {
        self.heads * self.batches
    }

    /// The same where it may be many.
    pub(super) fn many_heads(&self) -> u64 {
        u64::from(self.batches) * u64::from(self.heads)
    }

    pub(super) fn check(&self) -> Checked {
        check_heads("shape.heads", "shape.group", self.heads, self.group)?;
        check_rows([("shape.queries", self.queries), ("shape.keys", self.keys)])
    }
}

impl Heads {
    /// The tensors' query head that is head `head` of sequence `batch`.
    #[inline(always)]
    pub fn of(&self, batch: u32, head: u32) -> u32 {
        head + batch * self.step
    }

    /// The query heads of a row of the tensors.
    #[inline(always)]
    pub(super) fn in_row(&self) -> u32 {
        if self.step == 0 { self.heads } else { self.step * self.batches }
    }

    /// Query heads of all sequences, which may be many.
    pub(super) fn many(&self) -> u64 {
        u64::from(self.batches) * u64::from(self.heads)
    }

    pub(super) fn check(&self) -> Checked {
        check_heads("heads.heads", "heads.group", self.heads, self.group)
    }

    /// Tiles of `tile_rows` queries, at most, of tensors of `rows` rows: each sequence may end in one of its own.
    pub(super) fn most_tiles(&self, rows: u64, tile_rows: u32) -> u64 {
        u64::from(self.heads).saturating_mul(u64::from(self.batches).saturating_mul(rows.div_ceil(tile_rows.into()) + 1))
    }

    /// As [`in_row`](Self::in_row); refuses heads that the rows do not have.
    pub(super) fn of_row(&self) -> Result<u64, LaunchError> {
        if self.step == 0 {
            return Ok(self.heads.into());
        }
        LaunchError::check_limit("heads.step", self.step.into(), self.heads.into())?;
        LaunchError::check_multiple("heads.step", self.heads.into(), self.step.into())?;
        Ok(self.many())
    }
}

fn check_heads(heads_name: &'static str, group_name: &'static str, heads: u32, group: u32) -> Checked {
    LaunchError::check_limit(group_name, group.into(), heads.into())?;
    LaunchError::check_multiple(heads_name, group.into(), heads.into())
}

/// Refuses no tensor, and more than one, where a result goes to one of them.
pub(super) fn check_one(name: &'static str, given: [bool; 2]) -> Checked {
    LaunchError::check_length(name, 1, given.into_iter().map(u64::from).sum())
}

/// Refuses more rows than kernels count.
pub(super) fn check_rows(sides: [(&'static str, u32); 2]) -> Checked {
    sides.into_iter().try_for_each(|(name, rows)| LaunchError::check_limit(name, rows.into(), MOST_ROWS))
}
