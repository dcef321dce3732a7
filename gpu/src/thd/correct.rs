//! What a step of a ring adds to a rank's log-sum-exps, results and gradients: to all rows of each sequence, or to one half of it.
//!
//! Floor: what the step wrote is read once, what it is added to is read and written once. A warp has a row of results or gradients, a thread a
//! log-sum-exp.

use oxtile_tile::prelude::*;

use super::rows::{THREADS, WARPS, this_row};
use super::share::MOST_ROWS;
use super::step_rows::{HeadRows, StepRows};
use crate::sum_parts::Summed;

/// Elements of a lane's turn.
const ELEMENTS: u32 = 8;

/// Each log-sum-exp of `part` is that of the same row and head in `whole`.
#[kernel(threads = THREADS, grid = read_grid)]
pub fn lse_read_half(whole: Global<f32>, part: GlobalMut<f32>, sequences: StepRows, rows: HeadRows) {
    if let Some([at, of_part]) = rows.this_thread(&sequences) {
        part.store(of_part, whole.load(at));
    }
}

/// Each log-sum-exp of `whole` that a step has, too, becomes that of the scores of both.
#[kernel(threads = THREADS, grid = correct_grid)]
pub fn lse_correct(whole: GlobalMut<f32>, step: Global<f32>, sequences: StepRows, rows: HeadRows) {
    if let Some([at, of_step]) = rows.this_thread(&sequences) {
        let (before, added) = (whole.load(at), step.load(of_step));
        let (larger, smaller) = if before >= added { (before, added) } else { (added, before) };
        // No score at all adds nothing, to nothing either, of which the difference would be NaN.
        let both = if smaller == f32::NEG_INFINITY { larger } else { larger + num::ln(1.0 + num::exp(smaller - larger)) };
        whole.store(at, both);
    }
}

/// Adds the result of a step, `[its rows, heads, size]`, to `out`, `[rows, heads, size]`, by the weight `exp(step_lse - lse)` of its scores among all.
/// An element that is 0 adds 0, whatever the weight: of a row that saw no key the weight is NaN.
#[kernel(threads = THREADS, grid = out_grid)]
#[instances(Out = [f32], Step = [f32, bf16, f16])]
#[instances(Out = [bf16], Step = [bf16])]
#[instances(Out = [f16], Step = [f16])]
pub fn out_correct<Out: Summed, Step: Summed>(
    out: GlobalMut<Out>,
    step: Global<Step>,
    lse: Global<f32>,
    step_lse: Global<f32>,
    sequences: StepRows,
    rows: HeadRows,
    size: u32,
) {
    let (row, width) = (this_row(), rows.heads * size);
    if let Some(place) = sequences.find(row) {
        let (from, to) = (u64::from(row) * u64::from(width), u64::from(place.row) * u64::from(width));
        if from < step.len() && to < out.len() {
            let mut element = ELEMENTS * thread::lane();
            while element < width {
                // The divisor is not zero, as there is an element; `max(1)` saves its check.
                if let Some([at, of_step]) = rows.places(&place, row, element / size.max(1)) {
                    let weight = num::exp(step_lse.load(of_step) - lse.load(at));
                    let (from, to) = (from + u64::from(element), to + u64::from(element));
                    let (before, added) = (Out::unpack(|i| out.load_vector(to + i)), Step::load_eight(&step, from));
                    let added = added.map(|x| if x == 0.0 { 0.0 } else { x * weight });
                    Out::store_eight(&out, to, core::array::from_fn(|i| before[i] + added[i]));
                }
                element += ELEMENTS * warp::LANES;
            }
        }
    }
}

/// What a step's gradient does to a half of each sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Change {
    /// Nothing: the step has no gradient of it.
    None,
    /// It is added.
    Add,
    /// It replaces what was there.
    Copy,
}

/// A [`Change`] for each half, as numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Parameter)]
pub struct Changes {
    /// Of the early half.
    pub early: u32,
    /// Of the late half.
    pub late: u32,
}

/// Brings the gradients of a step, `[groups, step_rows, width]`, into `gradient`, `[groups, rows, width]`. A step that changes one half has no rows of the
/// other. Sums are rounded to nearest even, other rows stay as they are.
#[kernel(threads = THREADS, grid = gradient_grid)]
#[instances(T = [f32, bf16, f16])]
pub fn grad_correct<T: Summed>(gradient: GlobalMut<T>, step: Global<T>, sequences: StepRows, changes: Changes, step_rows: u32, width: u32) {
    let (row, group) = (this_row(), block::index()[1]);
    let rows = step_rows * sequences.share_of_rows();
    if let Some(place) = sequences.find(row)
        && row < step_rows
        && place.row < rows
    {
        let change = if place.is_late { changes.late } else { changes.early };
        let from = (u64::from(group) * u64::from(step_rows) + u64::from(row)) * u64::from(width);
        let to = (u64::from(group) * u64::from(rows) + u64::from(place.row)) * u64::from(width);
        let mut element = ELEMENTS * thread::lane();
        while element < width {
            let (from, to) = (from + u64::from(element), to + u64::from(element));
            if change == Change::Add as u32 {
                let (before, added) = (T::unpack(|i| gradient.load_vector(to + i)), T::load_eight(&step, from));
                T::store_eight(&gradient, to, core::array::from_fn(|i| before[i] + added[i]));
            } else if change == Change::Copy as u32 {
                for i in (0..u64::from(ELEMENTS)).step_by(Vector::<T>::LANES) {
                    gradient.store_vector(to + i, step.load_vector(from + i));
                }
            }
            element += ELEMENTS * warp::LANES;
        }
    }
}

fn read_grid(args: &LseReadHalfArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    args.sequences.check()?;
    args.rows.grid("whole", args.whole.len(), "part", args.part.len(), &args.sequences)
}

fn correct_grid(args: &LseCorrectArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    args.sequences.check()?;
    args.rows.grid("whole", args.whole.len(), "step", args.step.len(), &args.sequences)
}

fn out_grid<Out: Summed, Step: Summed>(args: &OutCorrectArgs<'_, Out, Step>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    args.sequences.check()?;
    args.rows.grid("lse", args.lse.len(), "step_lse", args.step_lse.len(), &args.sequences)?;
    LaunchError::check_multiple("size", ELEMENTS.into(), args.size.into())?;
    let width = u64::from(args.rows.heads) * u64::from(args.size);
    LaunchError::check_limit("size", width, MOST_ROWS.into())?;
    LaunchError::check_multiple("out", width, args.out.len())?;
    LaunchError::check_multiple("step", width, args.step.len())?;
    LaunchError::check_alignment("out", 16, args.out.address())?;
    LaunchError::check_alignment("step", 16, args.step.address())?;
    rows_grid("step", args.step.len().checked_div(width).unwrap_or(0))
}

fn gradient_grid<T: Summed>(args: &GradCorrectArgs<'_, T>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    args.sequences.check()?;
    LaunchError::check_limit("step_rows", args.step_rows.into(), MOST_ROWS.into())?;
    LaunchError::check_multiple("width", ELEMENTS.into(), args.width.into())?;
    LaunchError::check_limit("width", args.width.into(), MOST_ROWS.into())?;
    let group = u64::from(args.step_rows) * u64::from(args.width);
    let groups = args.step.len().checked_div(group).unwrap_or(0);
    LaunchError::check_length("step", groups * group, args.step.len())?;
    LaunchError::check_length("gradient", groups * group * u64::from(args.sequences.share_of_rows()), args.gradient.len())?;
    LaunchError::check_alignment("step", 16, args.step.address())?;
    LaunchError::check_alignment("gradient", 16, args.gradient.address())?;
    LaunchError::check_limit("groups", groups, u16::MAX.into())?;
    let grid = rows_grid("step_rows", args.step_rows.into())?;
    Ok(if groups == 0 { Grid::x(0) } else { Grid { y: groups as u32, ..grid } })
}

fn rows_grid(name: &'static str, rows: u64) -> Result<Grid, LaunchError> {
    LaunchError::check_limit(name, rows, MOST_ROWS.into())?;
    Grid::cover(name, rows, WARPS)
}
