//! Calls of context parallelism: in any order of streams, in graphs, of several layers, and what goes wrong.

use std::time::{Duration, Instant};

use oxtile::attention::{AttentionConfig, Kernels, Layout, Mask, Window};
use oxtile::comm::WorldSize;
use oxtile::context_parallel::{ContextParallel, ContextParallelConfig, Plan, Schedule};
use oxtile::num::bf16;
use oxtile::runtime::Mode;
use oxtile::{Graph, Result};

use crate::context_case::{Case, Of};
use crate::context_parallel::{BASE, WINDOWS};
use crate::context_ranks::Ranks;
use crate::support::{is_long, seeds};
use crate::whole_attention::Results;

/// Small enough to be run under many seeds with all checks.
pub const SMALL: AttentionConfig = AttentionConfig { queries: 12, keys: 12, heads: 2, key_heads: 2, head_size: 8, ..BASE };

/// One of every schedule.
fn schedules() -> impl Iterator<Item = Case> {
    let inner = WorldSize::new(2).unwrap();
    let few = [Schedule::Ring, Schedule::Pull, Schedule::Gather].map(|schedule| Case::new(3, SMALL).by(schedule));
    let traded = Case::new(2, SMALL).by(Schedule::AllToAll);
    let put = Case::new(3, AttentionConfig { heads: 3, key_heads: 3, ..SMALL }).by_puts();
    let both = Case::new(4, AttentionConfig { queries: 16, keys: 16, ..SMALL }).by(Schedule::Hierarchical { inner });
    few.into_iter().chain([traded, put, both, Case::new(3, SMALL).fused()])
}

/// Bits do not depend on the order of streams, copies and messages, and no order is a race: of every schedule, and under more seeds of the smallest problems.
#[test]
fn the_same_bits_in_every_order() {
    schedules().for_each(|case| same_bits(&case, seeds() / 16));
}

#[test]
fn the_same_bits_in_many_orders() {
    let one = AttentionConfig { queries: 8, keys: 8, heads: 1, key_heads: 1, kernels: Kernels::Portable, ..SMALL };
    let by_keys = [Schedule::Ring, Schedule::Pull, Schedule::Gather].map(|schedule| Case::new(2, one).by(schedule));
    let by_heads = Case::new(2, AttentionConfig { heads: 2, key_heads: 2, ..one });
    let attention = AttentionConfig { layout: Layout::Packed, batches: 2, ..by_heads.config.attention };
    let packed = Case { lengths: vec![[3, 4], [4, 4]], ..Case::new(2, attention) }.by_puts();
    by_keys
        .iter()
        .chain([&by_heads.clone().by(Schedule::AllToAll), &by_heads.by_puts(), &packed])
        .for_each(|case| same_bits(case, seeds()));
}

pub fn same_bits(case: &Case, seeds: u64) {
    let of = |seed| Case { seed, mode: Mode::Check, ..case.clone() };
    let inputs = case.whole();
    let mut first: Option<Vec<Results>> = None;
    for seed in 1..=seeds {
        let found = of(seed).results_of(&inputs).unwrap();
        let first = first.get_or_insert_with(|| found.clone());
        for (rank, (found, first)) in case.world().ranks().zip(found.iter().zip(&*first)) {
            let same =
                [(&found.out, &first.out), (&found.grad_q, &first.grad_q), (&found.grad_k, &first.grad_k), (&found.grad_v, &first.grad_v)];
            assert!(same.iter().all(|(a, b)| a == b), "{case:?}, {rank}, seed {seed}");
        }
    }
    let expected = inputs.solve();
    first.iter().flatten().zip(case.world().ranks()).for_each(|(found, rank)| case.compare(rank, found, &expected));
}

/// A graph of both passes, captured before any call, and replayed with other inputs.
#[test]
fn a_first_call_may_be_captured() {
    for case in schedules() {
        captured(&case).unwrap();
    }
}

/// A graph serves batches of other sequences, given before each replay: of queries, and of keys that have other lengths.
#[test]
fn a_graph_serves_other_sequences() {
    let batches = [[[7, 8], [0, 0], [16, 16]], [[15, 16], [3, 8], [0, 0]], [[0, 8], [8, 8], [1, 8]]];
    let attention =
        AttentionConfig { layout: Layout::Packed, batches: 3, queries: 24, keys: 24, heads: 2, key_heads: 2, mask: Mask::Full, ..SMALL };
    let of = |round: usize| Case {
        lengths: batches[round].to_vec(),
        key_lengths: Some(batches[(round + 1) % 3].to_vec()),
        ..Case::new(2, attention)
    };
    let by = |by: fn(Case) -> Case| captured_in(&by(of(0)), |round| by(of(round as usize % 3))).unwrap();
    by(|case| case);
    by(|case| case.by(Schedule::Pull));
    by(|case| case.by(Schedule::Gather));
    by(|case| case.by(Schedule::AllToAll));
    by(Case::by_puts);
    by(Case::fused);
    // Both passes in one launch each: 48 rows for each one.
    by(|case| {
        let attention = AttentionConfig { queries: 24 * 48, keys: 24 * 48, heads: 1, key_heads: 1, head_size: 64, ..case.config.attention };
        let config = ContextParallelConfig { attention, ..case.config };
        let long = |lengths: &[[u64; 2]]| lengths.iter().map(|[some, all]| [some * 48, all * 48]).collect::<Vec<_>>();
        Case { lengths: long(&case.lengths), key_lengths: case.key_lengths.as_deref().map(long), config, ..case }.by(Schedule::Fused)
    });
}

pub fn captured(case: &Case) -> Result<()> {
    captured_in(case, |_| case.clone())
}

/// The same of each round's sequences.
fn captured_in(case: &Case, of_round: impl Fn(u64) -> Case) -> Result<()> {
    let ranks = Ranks::new(case)?;
    let operations = ranks.operations::<bf16>()?;
    let mut tensors = ranks.tensors(&case.whole())?;
    ranks.set_sequences(&operations, &tensors)?;
    // One after another, as each pass holds the tensors that it writes.
    let mut graphs = Vec::new();
    for ((operation, stream), tensors) in operations.iter().zip(&ranks.world.streams).zip(&mut tensors) {
        let others = operation.streams();
        let streams: Vec<_> = std::iter::once(stream).chain(others).collect();
        let mut forward = tensors.forward(case, operation, stream)?;
        let first = Graph::capture(&streams, || forward.run(stream))?;
        drop(forward);
        let mut backward = tensors.backward(case, operation, stream)?;
        let second = Graph::capture(&streams, || backward.run(stream))?;
        drop(backward);
        graphs.push([first, second]);
    }
    for round in 1..4 {
        let case = Case { seed: round, ..of_round(round) };
        let whole = case.whole();
        for (((rank, stream), tensors), operation) in
            ranks.world.size().ranks().zip(&ranks.world.streams).zip(&mut tensors).zip(&operations)
        {
            tensors.renew(&case, &whole, rank, stream)?;
            tensors.set_sequences(&case, operation, stream)?;
        }
        for pass in 0..2 {
            for (graphs, stream) in graphs.iter_mut().zip(&ranks.world.streams) {
                graphs[pass].replay(stream)?;
            }
        }
        let expected = whole.solve();
        for ((rank, stream), tensors) in ranks.world.size().ranks().zip(&ranks.world.streams).zip(&tensors) {
            case.compare(rank, &tensors.results(stream)?, &expected);
        }
    }
    drop(graphs);
    drop(operations);
    ranks.close()
}

/// Two layers share an operation: both forward passes, then both backward passes.
#[test]
fn layers_take_turns() {
    for case in schedules() {
        two_layers(&case).unwrap();
    }
}

pub fn two_layers(case: &Case) -> Result<()> {
    let ranks = Ranks::new(case)?;
    let operations = ranks.operations::<bf16>()?;
    let wholes = [1, 2].map(|seed| Case { seed, ..case.clone() }.whole());
    let mut layers = [ranks.tensors(&wholes[0])?, ranks.tensors(&wholes[1])?];
    ranks.set_sequences(&operations, &layers[0])?;
    for forward in [true, false] {
        for layer in if forward { [0, 1] } else { [1, 0] } {
            for ((operation, stream), tensors) in operations.iter().zip(&ranks.world.streams).zip(&mut layers[layer]) {
                let mut pass =
                    if forward { tensors.forward(case, operation, stream)? } else { tensors.backward(case, operation, stream)? };
                pass.run(stream)?;
            }
        }
    }
    for (whole, tensors) in wholes.iter().zip(&layers) {
        let expected = whole.solve();
        for ((rank, stream), tensors) in ranks.world.size().ranks().zip(&ranks.world.streams).zip(tensors) {
            case.compare(rank, &tensors.results(stream)?, &expected);
        }
    }
    drop(operations);
    ranks.close()
}

/// A rank may be many passes ahead: all of them are enqueued before the next rank has begun, eager ones after those of a graph. No put or get meets what a late rank still reads.
#[test]
fn ranks_run_ahead() {
    let one = AttentionConfig { queries: 8, keys: 8, heads: 1, key_heads: 1, kernels: Kernels::Portable, ..SMALL };
    let two = Case::new(2, AttentionConfig { heads: 2, key_heads: 2, ..one });
    let three = Case::new(3, AttentionConfig { queries: 12, keys: 12, heads: 3, key_heads: 3, ..one });
    let waiting = Case::new(2, AttentionConfig { kernels: Kernels::Fastest, ..one }).fused();
    for case in [Case::new(2, one).by(Schedule::Pull), two.by_puts(), three.by_puts(), waiting] {
        (1..=seeds() / 8).for_each(|seed| run_ahead(&Case { seed, mode: Mode::Check, ..case.clone() }).unwrap());
    }
}

pub fn run_ahead(case: &Case) -> Result<()> {
    let ranks = Ranks::new(case)?;
    let operations = ranks.operations::<bf16>()?;
    let wholes = [1, 2].map(|seed| Case { seed, ..case.clone() }.whole());
    let mut layers = [ranks.tensors(&wholes[0])?, ranks.tensors(&wholes[1])?];
    ranks.set_sequences(&operations, &layers[0])?;
    let mut graphs = Vec::new();
    for (at, (operation, stream)) in operations.iter().zip(&ranks.world.streams).enumerate() {
        let streams: Vec<_> = std::iter::once(stream).chain(operation.streams()).collect();
        let mut pass = layers[0][at].forward(case, operation, stream)?;
        let graph = Graph::capture(&streams, || pass.run(stream))?;
        drop(pass);
        graph.replay(stream)?;
        for (layer, is_backward) in [(1, false), (1, true), (0, true), (1, false), (0, false), (0, true)] {
            let tensors = &mut layers[layer][at];
            let mut pass =
                if is_backward { tensors.backward(case, operation, stream)? } else { tensors.forward(case, operation, stream)? };
            pass.run(stream)?;
        }
        graphs.push(graph);
    }
    for (whole, tensors) in wholes.iter().zip(&layers) {
        let expected = whole.solve();
        for ((rank, stream), tensors) in ranks.world.size().ranks().zip(&ranks.world.streams).zip(tensors) {
            case.compare(rank, &tensors.results(stream)?, &expected);
        }
    }
    drop((graphs, operations));
    ranks.close()
}

/// Ranks that make different operations are told both.
#[test]
fn another_operation_of_another_rank_is_named() {
    let case = Case::new(2, SMALL);
    let ranks = Ranks::new(&case).unwrap();
    let other = ContextParallelConfig { attention: AttentionConfig { window: WINDOWS[0], mask: Mask::Full, ..SMALL }, ..case.config };
    let make = |at: usize, config| ContextParallel::<bf16>::new(&ranks.world.streams[at], ranks.transport(at), config).unwrap();
    let operations = [make(0, case.config), make(1, other)];
    let mut tensors = ranks.tensors(&case.whole()).unwrap();
    for _ in 0..2 {
        let error = tensors[0].forward(&case, &operations[0], &ranks.world.streams[0]).unwrap_err().to_string();
        assert!(error.contains("CausalBottomRight") && error.contains("left: Some(5)"), "{error}");
    }
}

/// The bits of one device: of both passes where heads are traded, and of the forward pass where all keys are gathered.
#[test]
fn traded_heads_and_gathered_keys_have_the_bits_of_one_device() {
    // Chunks of 128 rows, as the kernels' tiles; the second one's key heads are shared.
    let dense = AttentionConfig { queries: 512, keys: 512, head_size: 64, key_heads: 2, ..BASE };
    let shared = AttentionConfig { heads: 4, ..AttentionConfig { queries: 128, keys: 128, ..dense } };
    let lengths = vec![[120, 128], [128, 128], [256, 256]];
    let packed = AttentionConfig { layout: Layout::Packed, batches: 3, mask: Mask::Full, ..dense };
    let cases = [
        Case::new(2, dense).by(Schedule::AllToAll),
        Case::new(2, shared).by(Schedule::AllToAll),
        Case { lengths: lengths.clone(), ..Case::new(2, packed).by(Schedule::AllToAll) },
        Case { lengths, ..Case::new(2, AttentionConfig { mask: Mask::CausalBottomRight, ..packed }).by(Schedule::Gather) },
        Case::new(2, dense).by(Schedule::Gather),
    ];
    for case in cases {
        let whole = case.whole();
        let [one] = &Case { ranks: 1, config: case.config.by(Schedule::AllToAll), ..case.clone() }.results_of(&whole).unwrap()[..] else {
            panic!("one rank");
        };
        for (rank, found) in case.world().ranks().zip(case.results_of(&whole).unwrap()) {
            let one = case.of_rank(rank, one);
            let mut same = vec![("out", found.out == one.out), ("log-sum-exp", found.log_sum_exp == one.log_sum_exp)];
            if case.config.forward == Schedule::AllToAll {
                let gradients = [(&found.grad_q, &one.grad_q), (&found.grad_k, &one.grad_k), (&found.grad_v, &one.grad_v)];
                same.extend(["gradient of q", "gradient of k", "gradient of v"].into_iter().zip(gradients.map(|(a, b)| a == b)));
            }
            assert!(same.iter().all(|(_, same)| *same), "{case:?}, {rank}: {same:?}");
        }
    }
}

/// Ranks whose keys and values differ by powers of two and four.
#[test]
fn every_rank_is_seen_for_itself() {
    for case in schedules() {
        let mut whole = case.whole();
        case.tell_ranks_apart(&mut whole);
        let expected = whole.solve();
        for (rank, found) in case.world().ranks().zip(case.results_of(&whole).unwrap()) {
            case.compare(rank, &found, &expected);
        }
    }
}

/// Values that are one in the column of their key: a result is above zero just where its query sees the key.
#[test]
fn results_have_the_pattern_of_the_mask() {
    let windows = [Window::default(), WINDOWS[0], WINDOWS[1]];
    let masks = windows.into_iter().flat_map(|window| [Mask::CausalBottomRight, Mask::Full].map(|mask| (window, mask)));
    for (of, (window, mask)) in masks.enumerate() {
        // In quick runs each schedule has two of the masks.
        for (_, mut case) in (0..).zip(schedules()).filter(|(at, _)| is_long() || (at + of) % 3 == 0) {
            let attention = &mut case.config.attention;
            (attention.window, attention.mask, attention.head_size) = (window, mask, 16);
            let AttentionConfig { queries, heads, key_heads, layout, .. } = *attention;
            // Packed sequences in one launch have no windows.
            if window != Window::default() && layout == Layout::Packed && case.schedules().contains(&Schedule::Fused) {
                continue;
            }
            let mut whole = case.whole();
            whole.v.iter_mut().enumerate().for_each(|(at, v)| *v = if at / (16 * key_heads as usize) == at % 16 { 1.0 } else { 0.0 });
            for (rank, found) in case.world().ranks().zip(case.results_of(&whole).unwrap()) {
                for (at, out) in found.out.iter().enumerate() {
                    let (row, key) = (at / (16 * heads as usize), (at % 16) as u64);
                    let query = case.token(rank, Of::Queries, row) as u64;
                    let is_seen = key < queries
                        && (mask == Mask::Full || key <= query)
                        && window.left.is_none_or(|left| key + left >= query)
                        && window.right.is_none_or(|right| key <= query + right);
                    assert_eq!(*out > 0.0, is_seen, "{case:?}, {rank}: query {query}, key {key} is {out}");
                }
            }
        }
    }
}

/// A rank that does not come is named: by pull within the arena's deadline, in whichever pass; by messages at once, as the virtual cluster sees that no rank calls.
#[test]
fn a_rank_that_does_not_come_is_named() {
    // The second one is longer than a pass of all ranks takes on a machine that has much else to do.
    for (passes, deadline) in [(0, 300), (1, 3000)].map(|(passes, deadline)| (passes, Duration::from_millis(deadline))) {
        let case = Case { deadline, ..Case::new(2, SMALL).by(Schedule::Pull) };
        let ranks = Ranks::new(&case).unwrap();
        let operations = ranks.operations::<bf16>().unwrap();
        let mut tensors = ranks.tensors(&case.whole()).unwrap();
        for at in if passes == 0 { 0..1 } else { 0..2 } {
            tensors[at].forward(&case, &operations[at], &ranks.world.streams[at]).unwrap().run(&ranks.world.streams[at]).unwrap();
        }
        let stream = &ranks.world.streams[0];
        if passes == 1 {
            ranks.arenas[0].ticket(stream).unwrap().wait().unwrap();
            tensors[0].backward(&case, &operations[0], stream).unwrap().run(stream).unwrap();
        }
        let start = Instant::now();
        let error = ranks.arenas[0].ticket(stream).unwrap().wait().unwrap_err().to_string();
        assert!(error.contains("rank 1") && error.contains("keys of context parallelism"), "after {passes} passes: {error}");
        assert!(start.elapsed() < deadline + Duration::from_secs(1), "{:?}", start.elapsed());
    }
    let case = Case::new(2, SMALL);
    let ranks = Ranks::new(&case).unwrap();
    let operations = ranks.operations::<bf16>().unwrap();
    let mut tensors = ranks.tensors(&case.whole()).unwrap();
    let stream = &ranks.world.streams[0];
    tensors[0].forward(&case, &operations[0], stream).unwrap().run(stream).unwrap();
    let error = stream.synchronize().unwrap_err().to_string();
    assert!(error.contains("rank 1"), "{error}");
}

/// The memory of each pass, by the formulas of docs/context-parallel.md; what passes share is counted once.
#[test]
fn memory_is_that_of_each_pass() {
    let tall = AttentionConfig { queries: 1024, keys: 1024, head_size: 64, ..SMALL };
    let [kv, q, rows] = [512 * 2 * (64 + 64), 512 * 2 * 64, 512 * 2];
    let ring = [6 * kv + 4 * q + 4 * rows + 2 * q, (14 + 4 * 2) * kv + 4 * q + 8 * rows + 2 * q];
    // Of pull keys and values lie in the arena too.
    let pull = ring.map(|bytes| bytes + 2 * kv);
    let gather = [(2 + 4 * 2) * kv + 4 * rows + 2 * q, (2 + 16 * 2) * kv + 4 * q + 8 * rows + 2 * q];
    // By puts heads lie where they are used, and results in blocks too: out and the log-sum-exp here, three gradients there.
    let puts = [2 * (q + kv) + 4 * q + 8 * rows, 6 * (q + kv) + 6 * q + 8 * rows];
    let cases = [
        (Case::new(2, tall), ring),
        (Case::new(2, tall).by(Schedule::Pull), pull),
        (Case::new(2, tall).by(Schedule::Gather), gather),
        (Case::new(2, tall).by_puts(), puts),
    ];
    for (case, expected) in cases {
        let ranks = Ranks::new(&case).unwrap();
        let operations = ranks.operations::<bf16>().unwrap();
        let plan = operations[0].plan();
        let passes = [plan.forward.memory, plan.backward.memory];
        for (pass, expected) in passes.into_iter().zip(expected) {
            // Arrays, sinks and numbers of a head are small.
            assert!((expected..expected + 2048).contains(&pass), "{case:?}: {pass}, not {expected}");
        }
        assert!(passes.iter().all(|pass| *pass <= plan.bytes) && plan.bytes < passes.iter().sum(), "{case:?}: {plan}");
        assert!(plan.to_string().contains(&format!("{} of memory", passes[0])), "{plan}");
    }
    // Passes of two routes share no keys of other ranks.
    let config = ContextParallelConfig { backward: Schedule::Ring, ..Case::new(2, tall).by(Schedule::Gather).config };
    let ranks = Ranks::new(&Case { config, ..Case::new(2, tall) }).unwrap();
    let operations = ranks.operations::<bf16>().unwrap();
    let Plan { forward, backward, .. } = operations[0].plan();
    assert!((gather[0]..gather[0] + 2048).contains(&forward.memory) && (ring[1]..ring[1] + 2048).contains(&backward.memory));
}
