//! Where the rows of a step's tensors are in those of the rank: all rows of each sequence, or one half of it.

use oxtile_tile::prelude::*;

use super::rows::THREADS;
use super::share::{Located, MOST_ROWS, MOST_WORLD, Starts};

/// Which rows of each sequence a step's tensors have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Part {
    /// All.
    Whole,
    /// The early half.
    Early,
    /// The late half.
    Late,
}

/// The rows of a step.
#[derive(Clone, Copy, Parameter)]
pub struct StepRows {
    /// Where the sequences begin in the whole tensor.
    pub cu_seqlens_padded: Global<u32>,
    /// Ranks that share it.
    pub world: u32,
    /// A [`Part`], as a number.
    pub part: u32,
}

/// Where a row of a step is.
#[derive(Clone, Copy)]
pub struct Place {
    /// Its sequence in the step's tensors.
    pub sequence: Located,
    /// The row in the rank's tensors.
    pub row: u32,
    /// Rows of the sequence in the rank's tensors before those of the step.
    pub before: u32,
    /// Whether it is in the late half.
    pub is_late: bool,
}

impl StepRows {
    /// The place of a row of the step, if a sequence has it.
    #[inline(always)]
    #[track_caller]
    pub fn find(&self, row: u32) -> Option<Place> {
        let starts = Starts { cu_seqlens_padded: self.cu_seqlens_padded, divisor: self.world * self.share_of_rows() };
        let sequence = starts.find(row)?;
        let rows = sequence.end - sequence.start;
        Some(if self.part == Part::Whole as u32 {
            Place { sequence, row, before: 0, is_late: row - sequence.start >= rows / 2 }
        } else if self.part == Part::Early as u32 {
            Place { sequence, row: row + sequence.start, before: 0, is_late: false }
        } else {
            Place { sequence, row: row + sequence.end, before: rows, is_late: true }
        })
    }

    /// Of so many rows of the rank the step has one.
    #[inline(always)]
    pub fn share_of_rows(&self) -> u32 {
        if self.part == Part::Whole as u32 { 1 } else { 2 }
    }
}

impl StepRowsArgument<'_> {
    /// As of the kernel's parameter.
    pub(super) fn share_of_rows(&self) -> u32 {
        if self.part == Part::Whole as u32 { 1 } else { 2 }
    }

    pub(super) fn check(&self) -> Result<(), LaunchError> {
        LaunchError::check_at_least("sequences.cu_seqlens_padded", 1, self.cu_seqlens_padded.len())?;
        LaunchError::check_limit("sequences.cu_seqlens_padded", self.cu_seqlens_padded.len(), MOST_ROWS.into())?;
        LaunchError::check_at_least("sequences.world", 1, self.world.into())?;
        LaunchError::check_limit("sequences.world", self.world.into(), MOST_WORLD.into())?;
        LaunchError::check_limit("sequences.part", self.part.into(), Part::Late as u64)
    }
}

/// Tensors of a number a row and head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Parameter)]
pub struct HeadRows {
    /// Heads.
    pub heads: u32,
    /// Rows of a head in the rank's tensor: of all sequences if packed, of the longest otherwise.
    pub rows: u32,
    /// The same in the step's tensor.
    pub step_rows: u32,
    /// Whether a head has the rows of all sequences, `[heads, rows]`, or each sequence its own heads, `[sequences, heads, rows]`.
    pub is_packed: bool,
}

impl HeadRows {
    /// Where a head's number of a row is in the rank's tensor, and in the step's, if they have it.
    #[inline(always)]
    pub(super) fn places(&self, place: &Place, row: u32, head: u32) -> Option<[u64; 2]> {
        let (first, of_rank, of_step) = if self.is_packed {
            (head, place.row, row)
        } else {
            let within = row - place.sequence.start;
            (place.sequence.number * self.heads + head, within + place.before, within)
        };
        let start = |rows: u32| u64::from(first) * u64::from(rows);
        let is_there = of_rank < self.rows && of_step < self.step_rows;
        if is_there { Some([start(self.rows) + u64::from(of_rank), start(self.step_rows) + u64::from(of_step)]) } else { None }
    }

    /// The places of this thread's row and head.
    #[inline(always)]
    #[track_caller]
    pub(super) fn this_thread(&self, sequences: &StepRows) -> Option<[u64; 2]> {
        let [index, head, _] = block::index();
        let row = index * THREADS + thread::index();
        self.places(&sequences.find(row)?, row, head)
    }

    /// A thread for each row and head of a step.
    pub(super) fn grid(
        self,
        name: &'static str,
        length: u64,
        step_name: &'static str,
        step_length: u64,
        sequences: &StepRowsArgument<'_>,
    ) -> Result<Grid, LaunchError> {
        let tensors = if self.is_packed { 1 } else { sequences.cu_seqlens_padded.len() - 1 };
        let elements = |rows: u32| tensors.saturating_mul(u64::from(self.heads) * u64::from(rows));
        LaunchError::check_length(name, elements(self.rows), length)?;
        LaunchError::check_length(step_name, elements(self.step_rows), step_length)?;
        LaunchError::check_limit("rows.heads", self.heads.into(), u16::MAX.into())?;
        // Sequences and heads are counted in 32 bits.
        LaunchError::check_limit("rows.heads", tensors * u64::from(self.heads), u32::MAX.into())?;
        let rows = tensors * u64::from(self.step_rows);
        LaunchError::check_limit("rows.step_rows", rows, MOST_ROWS.into())?;
        let grid = Grid::cover("rows.step_rows", rows, THREADS)?;
        Ok(if self.heads == 0 { Grid::x(0) } else { Grid { y: self.heads, ..grid } })
    }
}
