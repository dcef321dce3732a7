//! Planted bugs of sums: gradients of keys and values are added up otherwise than in `f32` and in the order of ranks.
//!
//! Queries are zero, so that all weights are equal and the gradient of a value is known to the bit: a quarter of the gradients of the result that each of 4 ranks has.

use oxtile::attention::{AttentionConfig, Mask};
use oxtile::context_parallel::{ContextParallel, ContextParallelConfig, Partition, Schedule};
use oxtile::num::bf16;
use oxtile::sum_parts::SumParts;
use oxtile::{Buffer, Result, Runtime, Stream};
use oxtile_tile::launch::{DeviceView, DeviceViewMut};

use crate::context_bugs::{SMALL, seeds};
use crate::context_case::Case;
use crate::context_ranks::Ranks;

/// Adds up so many parts, so far apart.
type Sum = Box<dyn Fn(&Stream, DeviceView<'_, f32>, u32, u64, DeviceViewMut<'_, bf16>) -> Result<()> + Send + Sync>;

/// How they are added up.
#[derive(Clone, Copy, Debug, PartialEq)]
enum How {
    /// As they are.
    Right,
    /// Each sum is rounded.
    InBf16,
    /// In the order in which they came, of which the part of rank 1 is the last: the others by so many places from rank 0 on.
    ByArrival(usize),
}

fn sum(runtime: &Runtime, how: How) -> Result<Sum> {
    let (round, add, copy) =
        (SumParts::<f32, bf16>::new(runtime)?, SumParts::<bf16, bf16>::new(runtime)?, SumParts::<f32, f32>::new(runtime)?);
    Ok(Box::new(move |stream, parts, count, stride, target| {
        let len = target.len();
        let part = |at: u64| parts.slice(at * stride, at * stride + len);
        match how {
            _ if count == 1 => round.run(stream, parts, count, stride, target),
            How::Right => round.run(stream, parts, count, stride, target),
            How::InBf16 => {
                let (mut pair, mut sum) = (Buffer::<bf16>::zeros(stream, 2 * len)?, Buffer::<bf16>::zeros(stream, len)?);
                round.run(stream, part(0), 1, 0, sum.view_mut())?;
                for at in 1..count.into() {
                    let (mut running, mut next) = pair.view_mut().split_at(len);
                    add.run(stream, sum.view(), 1, 0, running.reborrow())?;
                    round.run(stream, part(at), 1, 0, next.reborrow())?;
                    add.run(stream, pair.view(), 2, len, sum.view_mut())?;
                }
                add.run(stream, sum.view(), 1, 0, target)
            }
            How::ByArrival(first) => {
                let mut order: Vec<u64> = (0..count.into()).filter(|rank| *rank != 1).collect();
                let others = order.len();
                order.rotate_left(first % others);
                order.push(1);
                let mut came = Buffer::<f32>::zeros(stream, u64::from(count) * len)?;
                for (at, rank) in (0..).zip(order) {
                    let place = came.view_mut().split_at(at * len).1.split_at(len).0;
                    copy.run(stream, part(rank), 1, 0, place)?;
                }
                round.run(stream, came.view(), count, len, target)
            }
        }
    }))
}

/// The gradients of values that ranks find, of results whose gradients are the same in all rows of a rank.
fn gradients(case: &Case, of_rank: [f64; 4], how: How) -> Vec<f64> {
    let mut whole = case.whole();
    whole.q.fill(0.0);
    let rows = whole.grad_out.len() / of_rank.len();
    whole.grad_out.iter_mut().enumerate().for_each(|(at, x)| *x = of_rank[at / rows]);
    let ranks = Ranks::new(case).unwrap();
    let mut operations: Vec<ContextParallel<'_, bf16>> = ranks.operations().unwrap();
    operations.iter_mut().for_each(|operation| operation.replace_sum(|| sum(&ranks.world.runtime, how).unwrap()));
    let mut tensors = ranks.tensors::<bf16>(&whole).unwrap();
    for is_backward in [false, true] {
        for ((operation, stream), tensors) in operations.iter().zip(&ranks.world.streams).zip(&mut tensors) {
            let pass = if is_backward { tensors.backward(case, operation, stream) } else { tensors.forward(case, operation, stream) };
            pass.unwrap().run(stream).unwrap();
        }
    }
    tensors.iter().zip(&ranks.world.streams).flat_map(|(tensors, stream)| tensors.results(stream).unwrap().grad_v).collect()
}

/// Four ranks whose parts follow one another, by each schedule that adds up gradients, of each seed.
fn cases() -> impl Iterator<Item = Case> {
    let attention = AttentionConfig { mask: Mask::Full, queries: 16, keys: 16, ..SMALL };
    let of = move |schedule| {
        let case = Case::new(4, attention).by(schedule);
        // Nothing is summed in the forward pass: the one of the fewest launches.
        Case { config: ContextParallelConfig { partition: Partition::Contiguous, forward: Schedule::Gather, ..case.config }, ..case }
    };
    [Schedule::Ring, Schedule::Pull, Schedule::Gather].into_iter().flat_map(move |schedule| seeds(&of(schedule)).collect::<Vec<_>>())
}

/// TransformerEngine's rings keep sums of gradients in `bf16`: what is left of parts that cancel is lost.
#[test]
fn transformer_engine_sums_in_bf16() {
    for case in cases() {
        let scale = 2.0_f64.powi((case.seed % 8) as i32);
        let of_rank = [1024.0, 1.0, -1024.0, 0.0].map(|x| x * scale);
        let is = |found: &[f64], expected: f64| found.iter().all(|x| *x == expected);
        assert!(case.seed > 2 || is(&gradients(&case, of_rank, How::Right), scale / 4.0), "{case:?}");
        let planted = gradients(&case, of_rank, How::InBf16);
        assert!(!planted.iter().any(|x| *x == scale / 4.0), "{case:?}: {planted:?}");
    }
}

/// The order of ranks has bits of its own, which no order of arrival has in which rank 1 is the last.
#[test]
fn sums_in_the_order_of_arrival() {
    for case in cases() {
        let large = 2.0_f64.powi(30);
        let of_rank = [large, 1.0, -large, 0.5];
        // In the order of ranks 1 is lost beside the large one.
        assert!(case.seed > 2 || gradients(&case, of_rank, How::Right).iter().all(|x| *x == 0.125), "{case:?}");
        let planted = gradients(&case, of_rank, How::ByArrival(case.seed as usize));
        assert!(!planted.contains(&0.125), "{case:?}: {planted:?}");
    }
}
