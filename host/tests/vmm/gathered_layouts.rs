//! Gathered products of operands of every layout and element, and beside collectives: each rank's bits are those of a plain product on its own GPU.

use oxtile::comm::{Communicator, HostRank, ReduceOp};
use oxtile::kernels::copy::{CopyWords, CopyWordsArgs};
use oxtile::num::{Pod, bf16, e4m3, f16};
use oxtile::overlap::{AllGatherConfig, AllGatherGemm, Gathers, Method, OverlapConfig};
use oxtile::symmetric::ArenaOptions;
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

/// Each call beside a collective of the arena's communicator on another stream, which one rank enqueues before its call, and the next one after it: the bits of both.
///
/// # Errors
/// What ended the arena or the communicator.
pub fn beside_collectives(rank: HostRank, options: ArenaOptions) -> Result<()> {
    let side = Side::open(&rank, options, 1 << 20)?;
    let (other, world) = (side.compute.device().stream()?, u64::from(side.world.get()));
    let communicator = side.arena.communicator().expect("memory of NCCL has a communicator");
    let mut sums = Buffer::from_slice(&other, &vec![1_u32; 1 << 22])?;
    for method in [Method::Fused, Method::Chunked, Method::Sequential] {
        let config = by(method, Some(cut(2, 1)), [512, 128 * world, 512]);
        // NCCL's kernels need multiprocessors meanwhile.
        let config = AllGatherConfig { overlap: OverlapConfig { margin: 32, ..config.overlap }, ..config };
        product_beside::<bf16, bf16>(&side, config, &mut || communicator.all_reduce(&other, &mut sums, ReduceOp::Sum))?;
    }
    communicator.synchronize(&other)?;
    let expected = 1 << (3 * ROUNDS as u32 * side.world.get().ilog2());
    assert!(sums.to_vec(&other)?.into_iter().all(|sum| sum == expected), "{}: sums beside products", side.rank);
    drop((communicator, sums));
    side.close()?;
    rank.close()
}

fn product<T: Operand<O>, O: Pod>(side: &Side, config: AllGatherConfig) -> Result<()> {
    product_beside::<T, O>(side, config, &mut || Ok(()))
}

fn product_beside<T: Operand<O>, O: Pod>(side: &Side, config: AllGatherConfig, beside: &mut dyn FnMut() -> Result<()>) -> Result<()> {
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
        let is_before = (round + u64::from(me)) % 2 == 0;
        if is_before {
            beside()?;
        }
        if round % 2 == 0 {
            graph.replay(compute)?;
        } else {
            bound.copy_shard(compute, &own)?;
            bound.run(compute)?;
        }
        if !is_before {
            beside()?;
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
