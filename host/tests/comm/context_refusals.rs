//! What context parallelism refuses: before anything is enqueued, with what to do instead.

use oxtile::Result;
use oxtile::attention::{AttentionConfig, Layout, Sink};
use oxtile::comm::{EmulatedCommunicator, Rank, Team, WorldSize};
use oxtile::context_parallel::{ContextParallel, ContextParallelConfig, Schedule, Transport};
use oxtile::num::bf16;
use oxtile::symmetric::{Arena, ArenaOptions};

use crate::context_calls::SMALL;
use crate::context_case::Case;
use crate::context_ranks::Ranks;

/// What cannot be is refused before anything is enqueued, with what to do instead.
#[test]
fn what_cannot_be_is_refused() {
    let ranks = Ranks::new(&Case::new(2, SMALL)).unwrap();
    let refused = |attention: AttentionConfig, schedule, part: &str| {
        let config = ContextParallelConfig::new(attention).by(schedule);
        let error = ContextParallel::<bf16>::new(&ranks.world.streams[0], ranks.transport(0), config).unwrap_err().to_string();
        assert!(error.contains(part), "{part}: {error}");
    };
    refused(AttentionConfig { queries: 14, keys: 14, ..SMALL }, Schedule::Auto, "pad the sequence to 16");
    refused(AttentionConfig { keys: 24, ..SMALL }, Schedule::Auto, "12 queries and 24 keys");
    let inner = Schedule::Hierarchical { inner: WorldSize::new(2).unwrap() };
    refused(AttentionConfig { heads: 3, key_heads: 3, ..SMALL }, Schedule::AllToAll, "take ring or gather");
    refused(SMALL, Schedule::Pull, "give Transport::symmetric or Transport::both");
    refused(SMALL, inner, "Transport::with_grid");
    refused(AttentionConfig { diagonals: true, layout: Layout::Packed, ..SMALL }, Schedule::Auto, "they follow from the parts");
    refused(AttentionConfig { key_heads: 0, ..SMALL }, Schedule::Auto, "at least 1");
    // What a schedule does not have names those that do.
    let of_grid = Ranks::new(&Case::new(2, SMALL).by(inner)).unwrap();
    let config = ContextParallelConfig::new(AttentionConfig { heads: 3, key_heads: 3, ..SMALL }).by(inner);
    let error = ContextParallel::<bf16>::new(&of_grid.world.streams[0], of_grid.transport(0), config).unwrap_err().to_string();
    assert!(error.contains("take ring or gather"), "{error}");
    // Tensors that do not fit, one of each.
    let case = Case::new(2, AttentionConfig { sink: Sink::Learnable, ..SMALL });
    let ranks = Ranks::new(&case).unwrap();
    let operations = ranks.operations::<bf16>().unwrap();
    let mut tensors = ranks.tensors(&case.whole()).unwrap();
    let without = Case::new(2, SMALL);
    let error = tensors[0].forward(&without, &operations[0], &ranks.world.streams[0]).unwrap_err().to_string();
    assert!(error.contains("sink") && error.contains("Learnable"), "{error}");
}

/// Sizes whose products no device holds, and a member of another world than the arena's, are refused as well: nothing wraps, and no other rank's memory is written.
#[test]
fn what_no_device_holds_is_refused() {
    let case = Case::new(2, SMALL).by(Schedule::Pull);
    let ranks = Ranks::new(&case).unwrap();
    let stream = &ranks.world.streams[0];
    let error = |transport, attention: AttentionConfig, schedule| {
        let config = ContextParallelConfig::new(attention).by(schedule);
        ContextParallel::<bf16>::new(stream, transport, config).map(drop).unwrap_err().to_string()
    };
    let many = 1 << 29;
    let large = AttentionConfig { queries: many, keys: many, heads: many, key_heads: many, batches: many, ..SMALL };
    for layout in [Layout::Bshd, Layout::Sbhd, Layout::Packed] {
        for schedule in [Schedule::Auto, Schedule::Ring, Schedule::Pull, Schedule::AllToAll] {
            let error = error(ranks.transport(0), AttentionConfig { layout, ..large }, schedule);
            assert!(error.contains("fewer batches or shorter sequences"), "{layout:?}, {schedule}: {error}");
        }
    }
    // 2^32 rows of all ranks, which 32 bits do not count.
    let rows = AttentionConfig { queries: many, keys: many, batches: 8, ..SMALL };
    assert!(error(ranks.transport(0), rows, Schedule::Ring).contains("4294967296 rows"));
    let rows = AttentionConfig { queries: many, keys: many, batches: 2, ..SMALL };
    for schedule in [Schedule::Ring, Schedule::Gather] {
        let error = error(ranks.transport(0), rows, schedule);
        assert!(
            error.contains("1073741824 rows of all ranks") && error.contains("take all-to-all of dense tensors, or fewer batches"),
            "{schedule}: {error}"
        );
    }
    let config = ContextParallelConfig::new(large);
    assert_eq!(config.arena_bytes(case.world(), 2), u64::MAX);
    // Rank 0 of a world of three, in an arena of two.
    let member = Team::all(WorldSize::new(3).unwrap()).member(Rank::ZERO).unwrap();
    for schedule in [Schedule::Auto, Schedule::Pull, Schedule::AllToAll] {
        let error = error(Transport::symmetric(&ranks.arenas[0], &member), AttentionConfig { heads: 3, key_heads: 3, ..SMALL }, schedule);
        assert!(error.contains("in an arena of 2"), "{error}");
    }
}

/// What has no room in the arena goes by messages where it can, and the plan states why; what cannot is refused with the bytes that are missing.
#[test]
fn an_arena_that_is_too_small() {
    for (schedule, taken) in [(Schedule::Auto, None), (Schedule::AllToAll, Some(Schedule::AllToAll)), (Schedule::Pull, None)] {
        let case = Case::new(2, SMALL).by(Schedule::Pull);
        let mut ranks = Ranks::new(&case).unwrap();
        let of = ContextParallelConfig::new(SMALL).by(schedule);
        let needed = of.arena_bytes(case.world(), 2);
        let options = ArenaOptions { bytes: 1 << 9, ..case.options() };
        assert!(needed > options.bytes);
        let open = |rank: &EmulatedCommunicator| Arena::open(rank, options.clone());
        let small = ranks.world.ranks.iter().map(open).collect::<Result<Vec<_>>>().unwrap();
        let large = std::mem::replace(&mut ranks.arenas, small);
        let make = |at: usize| ContextParallel::<bf16>::new(&ranks.world.streams[at], ranks.transport(at), of);
        if schedule == Schedule::Pull {
            let error = make(0).map(drop).unwrap_err().to_string();
            assert!(error.contains("512 bytes left") && error.contains("ArenaOptions::bytes"), "{error}");
            continue;
        }
        let operations = [make(0).unwrap(), make(1).unwrap()];
        for pass in [&operations[0].plan().forward, &operations[0].plan().backward] {
            assert!(taken.is_none_or(|taken| taken == pass.schedule) && pass.schedule != Schedule::Pull, "{pass}");
            let why = format!("{} {:?}", pass.why, pass.refused);
            assert!(why.contains("512 bytes left") && why.contains("ArenaOptions::bytes"), "{why}");
        }
        let whole = case.whole();
        let mut tensors = ranks.tensors::<bf16>(&whole).unwrap();
        for is_backward in [false, true] {
            for ((operation, stream), tensors) in operations.iter().zip(&ranks.world.streams).zip(&mut tensors) {
                let pass = if is_backward { tensors.backward(&case, operation, stream) } else { tensors.forward(&case, operation, stream) };
                pass.unwrap().run(stream).unwrap();
            }
        }
        let expected = whole.solve();
        for ((rank, stream), tensors) in case.world().ranks().zip(&ranks.world.streams).zip(&tensors) {
            case.compare(rank, &tensors.results(stream).unwrap(), &expected);
        }
        drop((operations, large));
    }
}
