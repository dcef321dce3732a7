//! What the backward pass keeps of queries, the kernel of it that needs no keys, and the gradients of sinks.

use core::f32::consts::LOG2_E;

use oxtile_tile::num::{Pod, exp2, fma};
use oxtile_tile::prelude::*;

use super::sequence::Sequences;
use super::shape::{Checked, MOST_BLOCKS};

const THREADS: u32 = 256;

/// What the backward pass keeps of each query of the result: `[heads, rows of all sequences]` if `rows` is 0, else `[batches, heads, rows]`.
#[derive(Clone, Copy, Parameter)]
pub struct QueryStatistics {
    /// The natural logarithm of each row's sum of exponentials.
    pub log_sum_exp: Global<f32>,
    /// The row sums of `O dO`.
    pub deltas: Global<f32>,
    /// Queries of a sequence, if sequences have statistics of their own.
    pub rows: u32,
}

impl QueryStatistics {
    /// The place of query `row` of a head of sequence `batch`.
    #[inline(always)]
    pub(super) fn place(&self, [batch, head, heads]: [u32; 3], sequences: &Sequences, query_offset: u32, row: u32) -> u64 {
        match self.rows {
            0 => u64::from(head) * u64::from(sequences.query_rows) + u64::from(query_offset + row),
            rows => u64::from(batch * heads + head) * u64::from(rows) + u64::from(row),
        }
    }

    /// The offset and the delta at a place: what makes weights of scores to base 2, and gradients of scores of those of weights. A query that sees
    /// nothing has no weights.
    #[inline(always)]
    #[track_caller]
    pub(super) fn load(&self, at: u64) -> [f32; 2] {
        let log_sum = self.log_sum_exp.load(at);
        [if log_sum == f32::NEG_INFINITY { log_sum } else { -LOG2_E * log_sum }, self.deltas.load(at)]
    }
}

impl QueryStatisticsArgument<'_> {
    /// Statistics for `heads` of each of `batches` sequences.
    pub(super) fn check(&self, [batches, heads]: [u32; 2], query_rows: u32) -> Checked {
        let rows = match self.rows {
            0 => query_rows.into(),
            rows => u64::from(batches) * u64::from(rows),
        };
        let all = u64::from(heads).saturating_mul(rows);
        LaunchError::check_length("statistics.log_sum_exp", all, self.log_sum_exp.len())?;
        LaunchError::check_length("statistics.deltas", all, self.deltas.len())
    }
}

/// A result and its gradient, `[batches, rows, heads, size]`.
#[derive(Clone, Copy, Parameter)]
pub struct ResultRows<T: Pod> {
    /// The result.
    pub out: Global<T>,
    /// The gradient.
    pub grad_out: Global<T>,
    /// Rows of a batch.
    pub rows: u32,
    /// Heads of a row.
    pub heads: u32,
    /// Elements of a row of a head, a multiple of 8.
    pub size: u32,
    /// Lanes that share a row: a power of two up to 32, which times 8 elements is at least `size`.
    pub lanes: u32,
}

/// `deltas`, `[batches, heads, rows]`, are the sums of `O dO` over rows.
///
/// Floor: both tensors are read once, by lanes that hold 16 bytes each.
#[kernel(threads = THREADS, grid = deltas_grid)]
#[instances(T = [bf16, f16])]
pub fn attention_backward_deltas<T: Float + Pod>(result: ResultRows<T>, deltas: GlobalMut<f32>) {
    let ResultRows { out, grad_out, rows, heads, size, lanes } = result;
    // No divisor is zero, as there is a block; `max(1)` saves its check.
    let (lanes, heads, rows) = (lanes.max(1), heads.max(1), rows.max(1));
    let (index, lane) = (block::index()[0] * (THREADS / lanes) + thread::index() / lanes, thread::index() % lanes);
    let element = lane * Vector::<T>::LANES as u32;
    let inside = u64::from(index) < deltas.len();
    let at = u64::from(index) * u64::from(size) + u64::from(element);
    let delta = row_delta(&out, &grad_out, at, inside && element < size, lanes);
    if inside && lane == 0 {
        let (head, row, batch) = (index % heads, index / heads % rows, index / heads / rows);
        deltas.store((u64::from(batch) * u64::from(heads) + u64::from(head)) * u64::from(rows) + u64::from(row), delta);
    }
}

/// The sum of `O dO` over a row, in each of the `lanes` that share it, a power of two: each has 16 bytes of it from element `at` on,
/// if they are `inside`. All lanes of the warp call it.
#[inline(always)]
#[track_caller]
pub(super) fn row_delta<T: Float + Pod>(out: &Global<T>, grad_out: &Global<T>, at: u64, inside: bool, lanes: u32) -> f32 {
    let mut delta = 0.0;
    if inside {
        let (a, b) = (out.load_vector(at), grad_out.load_vector(at));
        for i in 0..Vector::<T>::LANES {
            delta = fma(a.lane(i).to_f32(), b.lane(i).to_f32(), delta);
        }
    }
    let mut flip = lanes / 2;
    while flip > 0 {
        delta += warp::shuffle_xor(delta, flip);
        flip /= 2;
    }
    delta
}

fn deltas_grid<T: Float + Pod>(args: &AttentionBackwardDeltasArgs<'_, T>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let (ResultRowsArgument { out, grad_out, rows, heads, size, lanes }, deltas) = (&args.result, args.deltas.len());
    let elements = deltas.saturating_mul((*size).into());
    for (name, view) in [("result.out", out), ("result.grad_out", grad_out)] {
        LaunchError::check_length(name, elements, view.len())?;
        LaunchError::check_alignment(name, 16, view.address())?;
    }
    LaunchError::check_multiple("deltas", u64::from(*rows) * u64::from(*heads), deltas)?;
    LaunchError::check_limit("result.lanes", (*lanes).into(), 32)?;
    // Lanes that are no power of two are to be padded to the next one.
    LaunchError::check_multiple("result.lanes", lanes.next_power_of_two().into(), (*lanes).into())?;
    LaunchError::check_multiple("result.size", Vector::<T>::LANES as u64, (*size).into())?;
    LaunchError::check_limit("result.size", (*size).into(), u64::from(*lanes) * Vector::<T>::LANES as u64)?;
    LaunchError::check_limit("deltas", deltas, MOST_BLOCKS)?;
    Grid::cover("deltas", deltas, THREADS / (*lanes).max(1))
}

#[derive(SharedStorage)]
struct Shared {
    partial: SharedArray<f32, { (THREADS / 32) as usize }>,
}

/// `grad_sink` of each head is the sum of `-exp(sink - lse) delta` over the queries of all sequences: what the sink's weight, which
/// has no value, takes from the result.
///
/// One block a head adds in one order.
#[kernel(threads = THREADS, grid = sink_grid, shared = Shared)]
pub fn attention_backward_sink(
    sink: Global<f32>,
    grad_sink: GlobalMut<f32>,
    statistics: QueryStatistics,
    sequences: Sequences,
    batches: u32,
) {
    let partial = Shared::claim().partial;
    let (head, heads) = (block::index()[0], block::count()[0]);
    let score = sink.load(head.into()) * LOG2_E;
    let mut sum = 0.0;
    for batch in 0..batches {
        let sequence = sequences.without_diagonals().get(batch).cut(statistics.rows);
        let first = statistics.place([batch, head, heads], &sequences, sequence.query_offset, 0);
        let mut row = thread::index();
        while row < sequence.queries {
            let at = first + u64::from(row);
            let log_sum = statistics.log_sum_exp.load(at);
            // A log-sum-exp that counts the sink is finite.
            let weight = if log_sum == f32::NEG_INFINITY { 0.0 } else { exp2(fma(log_sum, -LOG2_E, score)) };
            sum = fma(-weight, statistics.deltas.load(at), sum);
            row += THREADS;
        }
    }
    let of_warp = warp::sum_f32(sum);
    if thread::lane() == 0 {
        partial.store(thread::warp(), of_warp);
    }
    block::sync();
    if thread::index() == 0 {
        let mut sum = 0.0;
        for warp in 0..THREADS / 32 {
            sum += partial.load(warp);
        }
        grad_sink.store(head.into(), sum);
    }
}

fn sink_grid(args: &AttentionBackwardSinkArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let heads = args.sink.len();
    LaunchError::check_length("grad_sink", heads, args.grad_sink.len())?;
    LaunchError::check_limit("sink", heads, MOST_BLOCKS)?;
    args.sequences.check(args.batches)?;
    args.statistics.check([args.batches, heads as u32], args.sequences.query_rows)?;
    Ok(Grid::x(heads as u32))
}
