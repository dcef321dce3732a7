//! Softmax cross entropy: the loss of each row of logits and, in the same launch, its gradient.
//!
//! Floor: 4 bytes a logit of 16 bits, where a row is read once; 6 where it is read again for the gradient (`Twice`, `Elements`: rows that shared
//! memory does not hold; the second read goes backwards, so that it finds the last part in caches).
//!
//! A block has a row. Each thread keeps the maximum of its logits so far and the sum of exponentials relative to it, which is scaled when the maximum
//! rises; then the block agrees on both. All exponentials are to base 2.
//!
//! `reading` has the policies of how a row is read, `running` what a thread knows of it so far.
//!
//! | barrier | waits for |
//! |---|---|
//! | in `block::max_f32`, `block::sum_f32` | the results of all warps; all reads of the target's logit, before the first gradient is written |

use oxtile_tile::prelude::*;

mod reading;
mod running;

pub use reading::*;
use running::{Running, power};

/// Threads of a block, of which two share a multiprocessor.
const THREADS: u32 = 512;
/// Elements of a piece.
const PIECE: usize = 8;
/// Pieces that a thread has in flight at most.
const UNROLL: usize = 4;

#[derive(SharedStorage)]
struct Shared<T: Half, R: Reading> {
    row: R::Memory<T>,
    maxima: ReduceStorage,
    sums: ReduceStorage,
    totals: ReduceStorage,
}

/// What the loss is besides cross entropy.
#[derive(Clone, Copy, Debug, Parameter)]
pub struct Rule {
    /// The target of rows that count for nothing: their loss and gradients are 0.
    pub ignored: i32,
    /// The part of the target's weight that all logits share alike: 0 for none, less than 1.
    pub smoothing: f32,
    /// The factor of the gradients, not of the losses: 1 / rows for a mean.
    pub scale: f32,
}

/// The loss of each row of logits, `ln(sum(exp(x))) - x[target]` where nothing is smoothed, and its gradient `softmax(x) - (x is the target)`.
///
/// Without `logits` they are in `gradient`, which is written over. Without `gradient` there are losses alone. A target that is not in
/// `0..width` and is not the ignored one makes the loss NaN. A NaN or +Inf among the logits makes the row's loss and gradients NaN. Logits below -1e30
/// count as -Inf. Where something is smoothed, logits of -Inf other than the target's are left out of the mean and have a gradient of 0, so that
/// masked ones do no harm.
#[kernel(threads = THREADS, grid = grid, shared = Shared<T, R>, min_blocks = 2)]
#[instances(T = [bf16, f16], R = [Once, Twice, Elements])]
pub fn cross_entropy<T: Half, R: Reading>(
    logits: Option<Global<T>>,
    gradient: Option<GlobalMut<T>>,
    targets: Global<i32>,
    losses: GlobalMut<f32>,
    width: u32,
    rule: Rule,
) {
    let shared = Shared::<T, R>::claim();
    let index = u64::from(block::index()[0]);
    let (target, is_first) = (targets.load(index), thread::index() == 0);
    let row = Logits::<T, R> { logits, gradient: gradient.unwrap_or_default(), kept: shared.row, start: index * u64::from(width), width };
    let groups = width.div_ceil(THREADS * (PIECE * R::UNROLL) as u32);
    if target == rule.ignored {
        for group in 0..if gradient.is_some() { groups } else { 0 } {
            row.write(group, |_, _| 0.0);
        }
        if is_first {
            losses.store(index, 0.0);
        }
        return;
    }
    let at_target = if target.cast_unsigned() < width { row.load(target.cast_unsigned()) } else { f32::NAN };
    let mut running = Running::NOTHING;
    for group in 0..groups {
        running = running.join::<R>(&row.read(group), rule.smoothing != 0.0);
    }
    let maximum = block::max_f32(running.maximum, shared.maxima);
    let sum = block::sum_f32(running.sum * power(running.maximum - maximum), shared.sums);
    let alike = rule.smoothing * num::reciprocal(width as f32);
    let total = if rule.smoothing != 0.0 { alike * block::sum_f32(running.total, shared.totals) } else { 0.0 };
    if is_first {
        // A target's logit of -Inf makes the loss Inf, which 0 times it would not be.
        losses.store(index, num::ln(sum) + (1.0 - rule.smoothing) * (maximum - at_target) + (rule.smoothing * maximum - total));
    }
    if gradient.is_some() {
        let (inverse, of_target) = (num::reciprocal(sum), alike + (1.0 - rule.smoothing));
        for group in (0..groups).rev() {
            let logits = row.read_again(group);
            row.write(group, |(piece, j), at| {
                let logit = logits[piece][j];
                // The loss has no part of a logit that the mean leaves out.
                let of_others = if logit == f32::NEG_INFINITY { 0.0 } else { alike };
                let weight = if at == target.cast_unsigned() { of_target } else { of_others };
                (power(logit - maximum) * inverse - weight) * rule.scale
            });
        }
    }
}

fn grid<T: Half, R: Reading>(args: &CrossEntropyArgs<'_, T, R>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let (rows, width) = (args.targets.len(), u64::from(args.width));
    LaunchError::check_limit("width", width, if R::KEPT > 0 { R::KEPT.into() } else { i32::MAX as u64 })?;
    LaunchError::check_length("losses", rows, args.losses.len())?;
    let tensors = [
        ("logits", args.logits.as_ref().map(|logits| (logits.len(), logits.address()))),
        ("gradient", args.gradient.as_ref().map(|gradient| (gradient.len(), gradient.address()))),
    ];
    if args.logits.is_none() && args.gradient.is_none() {
        LaunchError::check_length("logits", rows.saturating_mul(width), 0)?;
    }
    for (name, length, address) in tensors.into_iter().filter_map(|(name, tensor)| tensor.map(|(length, address)| (name, length, address)))
    {
        LaunchError::check_length(name, rows.saturating_mul(width), length)?;
        if R::IS_OF_VECTORS {
            LaunchError::check_multiple("width", PIECE as u64, width)?;
            LaunchError::check_alignment(name, 16, address)?;
        }
    }
    Grid::cover("targets", rows, 1)
}
