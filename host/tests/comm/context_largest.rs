//! The largest score of each head by every schedule: of all launches of a rank, and of all ranks.

use oxtile::attention::{AttentionConfig, Kernels, Layout, Mask, Sink};
use oxtile::comm::WorldSize;
use oxtile::context_parallel::{ContextParallel, ContextParallelConfig, Partition, Schedule, Transport};
use oxtile::num::{bf16, f16};
use oxtile::runtime::Mode;

use crate::context_case::{Case, Element};
use crate::context_parallel::{BASE, WINDOWS, all};
use crate::context_ranks::Ranks;
use crate::whole_attention::Results;

/// Heads that two and four ranks trade.
const LARGEST: AttentionConfig = AttentionConfig { max_logit: true, queries: 24, keys: 24, heads: 4, key_heads: 4, ..BASE };

/// The schedules that find it, of so many ranks.
fn schedules(ranks: u32) -> impl Iterator<Item = Schedule> {
    let inner = Schedule::Hierarchical { inner: WorldSize::new(2).unwrap() };
    let by_keys = [Schedule::Ring, Schedule::Pull, Schedule::Gather];
    by_keys.into_iter().chain([Schedule::AllToAll, inner].into_iter().filter(move |_| ranks.is_multiple_of(2)))
}

fn options() -> impl Iterator<Item = AttentionConfig> {
    [
        LARGEST,
        AttentionConfig { mask: Mask::Full, sink: Sink::OffByOne, ..LARGEST },
        AttentionConfig { layout: Layout::Sbhd, batches: 2, sink: Sink::Learnable, ..LARGEST },
        AttentionConfig { layout: Layout::Bshd, batches: 2, window: WINDOWS[0], mask: Mask::Full, ..LARGEST },
        AttentionConfig { window: WINDOWS[1], sink: Sink::Learnable, ..LARGEST },
        AttentionConfig { soft_cap: Some(3.0), head_size: 256, ..LARGEST },
        AttentionConfig { head_size: 192, value_size: Some(128), mask: Mask::Full, keys: 48, ..LARGEST },
        AttentionConfig { kernels: Kernels::Portable, key_heads: 2, ..LARGEST },
    ]
    .into_iter()
}

#[test]
fn of_every_option() {
    let of = |config: AttentionConfig, ranks| schedules(ranks).map(move |schedule| Case::new(ranks, config).by(schedule));
    all(options().flat_map(|config| [2, 3, 4].into_iter().flat_map(move |ranks| of(config, ranks))));
}

/// A long sequence, and ranks that have padding alone.
#[test]
fn of_packed_sequences() {
    let packed = |config: AttentionConfig, ranks: u32| {
        let unit = 2 * u64::from(ranks);
        let lengths = vec![[2 * unit - 3, 2 * unit], [1, unit], [0, 0]];
        let attention = AttentionConfig { layout: Layout::Packed, batches: 3, queries: 4 * unit, keys: 4 * unit, ..config };
        schedules(ranks).map(move |schedule| Case { lengths: lengths.clone(), ..Case::new(ranks, attention).by(schedule) })
    };
    let plain = AttentionConfig { soft_cap: None, ..LARGEST };
    let options =
        [plain, AttentionConfig { window: WINDOWS[0], mask: Mask::Full, ..plain }, AttentionConfig { sink: Sink::Learnable, ..plain }];
    all(options.into_iter().flat_map(|config| [2, 3, 4].into_iter().flat_map(move |ranks| packed(config, ranks))));
}

/// What sees nothing: no queries, no keys, and a head of which all scores are below zero.
#[test]
fn of_nothing_and_below_zero() {
    let small = AttentionConfig { queries: 12, keys: 12, head_size: 8, kernels: Kernels::Portable, heads: 2, key_heads: 2, ..LARGEST };
    for schedule in [Schedule::Ring, Schedule::Pull, Schedule::Gather] {
        for config in [AttentionConfig { queries: 0, keys: 0, ..small }, AttentionConfig { mask: Mask::Full, keys: 0, ..small }] {
            Case::new(3, config).by(schedule).run().unwrap();
        }
        let case = Case::new(3, small).by(schedule);
        let mut whole = case.whole();
        whole.q.iter_mut().for_each(|x| *x = x.abs() + 0.125);
        whole.k.iter_mut().for_each(|x| *x = -x.abs() - 0.125);
        let expected = whole.solve();
        assert!(expected.max_logit.iter().all(|largest| *largest < 0.0));
        for (rank, found) in case.world().ranks().zip(case.results_of(&whole).unwrap()) {
            for (head, (found, expected)) in found.max_logit.iter().zip(&expected.max_logit).enumerate() {
                assert!(
                    (found - expected).abs() < 2e-3 * expected.abs().max(1.0),
                    "{schedule}, {rank}: head {head} has {found}, not {expected}"
                );
            }
        }
    }
}

fn in_elements<T: Element>(most: f64) {
    for schedule in schedules(4) {
        let case = Case::new(4, LARGEST).by(schedule);
        let whole = case.whole();
        let expected = whole.solve();
        for (rank, found) in case.world().ranks().zip(case.results_in::<T>(&whole).unwrap()) {
            case.compare_within(rank, &found, &expected, most);
        }
    }
}

#[test]
fn of_every_element() {
    in_elements::<bf16>(1e-2);
    in_elements::<f16>(2e-3);
}

/// Numbers of heads travel by symmetric memory alone: the largest scores, and the gradient of a sink.
#[test]
fn by_memory_alone() {
    let small = AttentionConfig { queries: 12, keys: 12, sink: Sink::Learnable, heads: 3, key_heads: 3, ..LARGEST };
    let pull = Case::new(3, small).by(Schedule::Pull);
    // Rank 0 reads no keys of others, whose flags tell it nothing of them.
    let contiguous = ContextParallelConfig { partition: Partition::Contiguous, ..pull.config };
    for case in [Case { config: contiguous, ..pull.clone() }, pull, Case::new(3, small).by_puts()] {
        let case = Case { mode: Mode::Check, ..case };
        let ranks = Ranks::new(&case).unwrap();
        let make = |((arena, member), stream)| ContextParallel::<bf16>::new(stream, Transport::symmetric(arena, member), case.config);
        let transports = ranks.arenas.iter().zip(&ranks.members).zip(&ranks.world.streams);
        let operations: Vec<_> = transports.map(|transport| make(transport).unwrap()).collect();
        let whole = case.whole();
        let mut tensors = ranks.tensors::<bf16>(&whole).unwrap();
        // Several times, as each round waits for the numbers of the one before to be read.
        for is_backward in [false, false, true, false, true] {
            for ((operation, stream), tensors) in operations.iter().zip(&ranks.world.streams).zip(&mut tensors) {
                let pass = if is_backward { tensors.backward(&case, operation, stream) } else { tensors.forward(&case, operation, stream) };
                pass.unwrap().run(stream).unwrap();
            }
        }
        let expected = whole.solve();
        for ((rank, stream), tensors) in case.world().ranks().zip(&ranks.world.streams).zip(&tensors) {
            case.compare(rank, &tensors.results(stream).unwrap(), &expected);
        }
    }
}

/// The same bits whatever comes first, by messages and by memory.
#[test]
fn in_every_order() {
    let small = AttentionConfig { queries: 8, keys: 8, head_size: 8, heads: 2, key_heads: 2, kernels: Kernels::Portable, ..LARGEST };
    for schedule in [Schedule::Ring, Schedule::Pull] {
        let case = Case::new(2, small).by(schedule);
        let whole = case.whole();
        let found = |seed| Case { seed, mode: Mode::Check, ..case.clone() }.results_of(&whole).unwrap();
        let of = |found: Vec<Results>| found.into_iter().map(|found| found.max_logit).collect::<Vec<_>>();
        let first = of(found(1));
        for seed in 2..=crate::support::seeds() / 4 {
            assert_eq!(of(found(seed)), first, "{schedule}, seed {seed}");
        }
    }
}
