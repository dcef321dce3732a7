//! Gathered products of operands of every layout and element: each rank's bits are those of a plain product on its own GPU.

use oxtile::kernels::copy::{CopyWords, CopyWordsArgs};
use oxtile::num::{Pod, bf16, e4m3, f16};
use oxtile::overlap::{AllGatherConfig, AllGatherGemm, Gathers, Method};
use oxtile::{Buffer, Graph, Loaded, PinnedBuffer, Result};

use crate::gathered::Side;
use crate::overlap_case::{Operand, Problem, by, cut, elements, words};
use crate::watch::{doing, settle};

/// Rounds of a call each, in turn by the replay of a graph and eagerly, of other operands each.
const ROUNDS: u64 = 6;

/// All of them, on a rank's side.
pub fn compare(side: &Side) -> Result<()> {
    let world = u64::from(side.world.get());
    // One rank has no other method than the last.
    let fused = if world > 1 { Method::Fused } else { Method::Sequential };
    let of = |gathers, [transpose_a, transpose_b]: [bool; 2], method| {
        let config = by(method, Some(cut(2, 2)), [80 * world, 32 * world, 96 * world]);
        AllGatherConfig { transpose_a, transpose_b, gathers, ..config }
    };
    for transposes in [[false, false], [false, true], [true, false], [true, true]] {
        let rows = of(Gathers::Rows, transposes, fused);
        product::<bf16, bf16>(side, rows)?;
        product::<f16, f16>(side, rows)?;
    }
    for (gathers, transposes) in [
        (Gathers::SumOfA, [true, false]),
        (Gathers::SumOfA, [false, true]),
        (Gathers::SumOfA, [false, false]),
        (Gathers::SumOfB, [true, false]),
        (Gathers::SumOfB, [false, true]),
        (Gathers::SumOfB, [false, false]),
    ] {
        product::<bf16, bf16>(side, of(gathers, transposes, fused))?;
        product::<bf16, bf16>(side, of(gathers, transposes, Method::Sequential))?;
    }
    product::<f16, f16>(side, of(Gathers::SumOfA, [true, false], fused))?;
    product::<bf16, f32>(side, of(Gathers::SumOfB, [true, false], fused))?;
    product::<e4m3, bf16>(side, of(Gathers::Rows, [false, true], fused))
}

fn product<T: Operand<O>, O: Pod>(side: &Side, config: AllGatherConfig) -> Result<()> {
    let problem = Problem { ranks: side.world.get(), config };
    let (Side { compute, out, runtime, .. }, me) = (side, side.rank.index());
    let what = format!("{} of {config:?}", std::any::type_name::<T>());
    doing(side.rank, what.clone());
    let gather = AllGatherGemm::<T, O>::new(&side.memory, compute, config)?;
    let (method, len) = (gather.choice().method, problem.product().m * problem.product().n);
    assert_eq!(Some(method), config.overlap.method, "{what}");
    let weight = Buffer::<T>::from_slice(compute, &elements::<T>(&problem.weight(me)))?;
    let shard = |round| elements::<T>(&problem.shard(&problem.operand(round), me));
    let mut own = Buffer::<T>::from_slice(compute, &shard(0))?;
    let mut d = Buffer::<O>::zeros(compute, len)?;
    let mut kept = Buffer::<u32>::zeros(compute, len * size_of::<O>() as u64 / 4)?;
    let copy: Loaded<CopyWords> = runtime.load()?;
    let mut bound = gather.bind(compute, weight.view(), None, d.view_mut())?;
    let graph = Graph::capture(&[compute, out], || bound.copy_shard(compute, &own).and_then(|()| bound.run(compute)))?;
    for round in 0..ROUNDS {
        own.copy_from_pinned(compute, &PinnedBuffer::from_slice(compute, &shard(round))?)?;
        if round % 2 == 0 {
            graph.replay(compute)?;
        } else {
            bound.copy_shard(compute, &own)?;
            bound.run(compute)?;
        }
        copy.launch(compute, CopyWordsArgs { source: bound.result().cast(), target: kept.view_mut() })?;
        settle(compute)?;
        let expected = problem.multiplied::<T, O>(compute, method, me, &problem.operand(round))?;
        assert!(words(compute, &kept)? == expected, "{}, round {round}: {what}", side.rank);
    }
    side.arena.ticket(compute)?.wait()?;
    drop(graph);
    Ok(())
}
