//! The forward pass in one launch, whose kernel waits for keys: each rank's part against the whole, the bits of one device, and what is refused.

use oxtile::attention::{AttentionConfig, Kernels, Layout, Mask, Sink, Window};
use oxtile::comm::Team;
use oxtile::context_parallel::{ContextParallel, ContextParallelConfig, Partition, Schedule, Transport};
use oxtile::num::{bf16, f16};

use oxtile::runtime::Mode;

use crate::context_calls::{captured, run_ahead, same_bits, two_layers};
use crate::context_case::{Case, Element, Tensors};
use crate::context_parallel::{BASE, all};
use crate::context_ranks::Ranks;
use crate::support::{is_long, seeds};
use crate::whole_attention::Results;

/// Every world, layout and mask; heads that share keys, and sections of several heads.
#[test]
fn every_world_and_layout() {
    let cases = [1, 2, 3, 4, 8].into_iter().flat_map(|ranks| {
        let rows = if ranks == 8 { 64 } else { 48 };
        let config = AttentionConfig { queries: rows, keys: rows, heads: 4, key_heads: 2, batches: 2, ..BASE };
        let dense = [(Layout::Bshd, 1), (Layout::Bshd, 2), (Layout::Sbhd, 2)];
        let dense = dense.map(|(layout, batches)| AttentionConfig { layout, batches, ..config });
        dense
            .into_iter()
            .flat_map(move |config| [Mask::Full, Mask::CausalTopLeft].map(|mask| AttentionConfig { mask, ..config }))
            .map(move |config| Case::new(ranks, config).fused())
    });
    all(cases);
}

/// Heads of every size for which there is a kernel, with chunks that are whole blocks of keys or not, in several sections.
#[test]
fn every_size_of_heads() {
    let sizes = [(8, None), (64, None), (72, Some(64)), (128, None), (192, Some(128)), (256, None)];
    let cases = sizes.into_iter().flat_map(|(head_size, value_size)| {
        [Mask::Full, Mask::CausalBottomRight].into_iter().flat_map(move |mask| {
            // Two sections.
            let heads = if head_size <= 128 { 6 } else { 2 };
            let config = AttentionConfig { head_size, value_size, mask, heads, key_heads: heads, ..BASE };
            [(2, 36), (2, 512), (3, 60)]
                .map(|(ranks, rows)| Case::new(ranks, AttentionConfig { queries: rows, keys: rows, ..config }).fused())
        })
    });
    all(cases);
}

/// Chunks that are multiples of a tile's queries and of a block's keys give the bits of one device, on every number of ranks.
#[test]
fn bits_are_those_of_one_device() {
    let dense = AttentionConfig { queries: 768, keys: 768, key_heads: 2, ..BASE };
    let cases = [
        Case::new(3, dense),
        Case::new(1, AttentionConfig { queries: 256, keys: 256, ..dense }),
        Case::new(2, AttentionConfig { queries: 512, keys: 512, heads: 10, key_heads: 5, head_size: 128, mask: Mask::Full, ..dense }),
        Case::new(2, AttentionConfig { queries: 512, keys: 512, layout: Layout::Sbhd, batches: 2, ..dense }),
    ];
    for case in cases {
        let bits = bits_of::<bf16>(&case);
        assert!(bits, "{case:?}");
    }
    assert!(bits_of::<f16>(&Case::new(2, AttentionConfig { queries: 512, keys: 512, ..dense })));
}

fn bits_of<T: Element>(case: &Case) -> bool {
    let (whole, fused) = (case.whole(), case.clone().fused());
    // One rank that trades heads alone is one device; keys in one part, as here.
    let attention = AttentionConfig { key_parts: Some(1), ..case.config.attention };
    let one = ContextParallelConfig { attention, ..case.config.by(Schedule::AllToAll) };
    let one = Case { ranks: 1, config: one, ..case.clone() }.results_in::<T>(&whole).unwrap();
    let same = |(rank, found): (_, Results)| {
        let one = case.of_rank(rank, &one[0]);
        found.out == one.out && found.log_sum_exp == one.log_sum_exp
    };
    case.world().ranks().zip(fused.results_in::<T>(&whole).unwrap()).all(same)
}

/// Both passes in one launch each: gradients against the whole, in every world, and those of queries with the bits of one device. Chunks are blocks of 128 keys.
#[test]
fn both_passes() {
    let config = |ranks: u64, attention| {
        Case::new(ranks as u32, AttentionConfig { queries: 256 * ranks, keys: 256 * ranks, ..attention }).by(Schedule::Fused)
    };
    let sizes = || [64, 128].into_iter().flat_map(|head_size| [Mask::Full, Mask::CausalBottomRight].map(|mask| (head_size, mask)));
    let small = [(Layout::Bshd, 1), (Layout::Bshd, 2), (Layout::Sbhd, 2)].into_iter().flat_map(|(layout, batches)| {
        let attention = AttentionConfig { layout, batches, heads: 4, key_heads: 2, ..BASE };
        sizes().flat_map(move |(head_size, mask)| [1, 2].map(|ranks| config(ranks, AttentionConfig { head_size, mask, ..attention })))
    });
    let many = sizes().flat_map(|(head_size, mask)| [3, 4, 8].map(|ranks| config(ranks, AttentionConfig { head_size, mask, ..BASE })));
    all(small.chain(many.filter(|case| is_long() || case.ranks < 4)));
    for case in [config(2, BASE), config(2, AttentionConfig { head_size: 128, mask: Mask::Full, ..BASE })] {
        let whole = case.whole();
        let one = Case { ranks: 1, ..case.clone().by(Schedule::AllToAll) }.results_of(&whole).unwrap();
        for (rank, found) in case.world().ranks().zip(case.results_of(&whole).unwrap()) {
            assert!(found.grad_q == case.of_rank(rank, &one[0]).grad_q, "{case:?}, {rank}");
        }
    }
}

/// Windows that hide chunks, or parts of them, from some ranks or all, on either side; caps, sinks of both kinds and their gradients, largest scores.
#[test]
fn options_of_both_passes() {
    let window = |left, right| Window { left, right };
    let causal = Mask::CausalBottomRight;
    let base = AttentionConfig { heads: 2, key_heads: 1, head_size: 128, mask: causal, ..BASE };
    // In rows of chunks of 128 rows.
    let windows = [
        (causal, window(Some(0), None)),
        (causal, window(Some(127), None)),
        (causal, window(Some(200), Some(70))),
        (Mask::Full, window(Some(130), Some(3))),
        (Mask::Full, window(None, Some(300))),
        (Mask::Full, window(Some(400), None)),
    ];
    let windowed = windows.into_iter().enumerate().flat_map(|(at, (mask, window))| {
        let (head_size, sink) = if at % 2 == 0 { (64, Sink::Learnable) } else { (128, Sink::None) };
        [2, 3].map(|ranks| (ranks, AttentionConfig { mask, window, head_size, sink, max_logit: at > 2, ..base }))
    });
    let others = [
        AttentionConfig { sink: Sink::OffByOne, ..base },
        AttentionConfig { soft_cap: Some(1.5), ..base },
        AttentionConfig { sink: Sink::Learnable, max_logit: true, mask: Mask::Full, ..base },
        AttentionConfig { soft_cap: Some(2.0), window: window(Some(150), None), sink: Sink::Learnable, max_logit: true, ..base },
        AttentionConfig { sink: Sink::Learnable, layout: Layout::Sbhd, batches: 2, max_logit: true, head_size: 64, ..base },
        AttentionConfig { window: window(Some(40), None), batches: 2, heads: 4, key_heads: 2, head_size: 64, ..base },
    ];
    let cases = windowed.chain(others.map(|attention| (2, attention)));
    let of = |(ranks, attention): (u32, AttentionConfig), chunk: u64| {
        let rows = 2 * chunk * u64::from(ranks);
        Case::new(ranks, AttentionConfig { queries: rows, keys: rows, ..attention }).by(Schedule::Fused)
    };
    let case = |of_case| of(of_case, 128);
    cases.map(case).step_by(if is_long() { 1 } else { 5 }).for_each(|case| case.run().unwrap());
    // Chunks of several blocks, of which some are seen in part: what no rank stores of them is zero.
    let near = AttentionConfig { window: window(Some(100), None), heads: 1, head_size: 64, ..base };
    of((2, near), 256).run().unwrap();
    if is_long() {
        let both_sides = AttentionConfig { mask: Mask::Full, window: window(Some(100), Some(3)), ..near };
        [(2, both_sides), (3, near), (3, both_sides)].into_iter().for_each(|of_case| of(of_case, 384).run().unwrap());
        all(windows.into_iter().map(|(mask, window)| case((5, AttentionConfig { mask, window, head_size: 64, ..base }))));
    }
}

/// Forward alone, of sizes for which there is no backward pass, and chunks that are no whole blocks of keys: a block has keys of chunks that are hidden.
#[test]
fn options_of_every_size_of_heads() {
    let sizes = [(8, None), (64, None), (128, None), (192, Some(128)), (256, None)];
    let cases = sizes.into_iter().enumerate().flat_map(|(at, (head_size, value_size))| {
        let window = Window { left: Some(10), right: if at % 2 == 0 { Some(9) } else { None } };
        let mask = if at % 2 == 0 { Mask::Full } else { Mask::CausalTopLeft };
        let config = AttentionConfig { head_size, value_size, mask, window, sink: Sink::Learnable, heads: 2, key_heads: 2, ..BASE };
        let config = AttentionConfig { soft_cap: (at % 2 == 1).then_some(3.0), max_logit: true, ..config };
        [(2, 36), (3, 60)].map(|(ranks, rows)| Case::new(ranks, AttentionConfig { queries: rows, keys: rows, ..config }).fused())
    });
    all(cases);
}

/// A window, sinks and largest scores: passes in graphs, of layers by turns, by ranks that run ahead; the bits of one device, and the same in every run.
#[test]
fn options_in_any_order() {
    let window = Window { left: Some(150), right: None };
    let attention = AttentionConfig { queries: 768, keys: 768, heads: 1, window, max_logit: true, ..BASE };
    let case = Case::new(3, AttentionConfig { key_heads: 1, sink: Sink::Learnable, ..attention }).by(Schedule::Fused);
    captured(&case).unwrap();
    two_layers(&case).unwrap();
    (1..=seeds() / 32).for_each(|seed| run_ahead(&Case { seed, mode: Mode::Check, ..case.clone() }).unwrap());
    same_bits(&case, seeds() / 16);
    assert!(bits_of::<bf16>(&case), "{case:?}");
    let whole = case.whole();
    let one = Case { ranks: 1, ..case.clone().by(Schedule::AllToAll) }.results_of(&whole).unwrap();
    for (rank, found) in case.world().ranks().zip(case.results_of(&whole).unwrap()) {
        let one = case.of_rank(rank, &one[0]);
        assert!(found.grad_q == one.grad_q && found.max_logit == one.max_logit, "{case:?}, {rank}");
    }
}

/// With at most so many of the bytes that all heads take, in 1/1000.
fn capped(case: Case, share: u64) -> Case {
    let all = case.config.arena_bytes(case.world(), 2);
    Case { config: ContextParallelConfig { gathered_bytes: Some(all * share / 1000), ..case.config }, ..case }
}

/// Groups of heads that take turns in two places have the bits of all heads in one launch, of every result: with options, in graphs, in any order of streams, under no more memory than
/// the cap.
#[test]
fn groups_of_heads_take_turns() {
    let base = AttentionConfig { queries: 512, keys: 512, heads: 8, key_heads: 4, ..BASE };
    let options = AttentionConfig { window: Window { left: Some(150), right: None }, sink: Sink::Learnable, max_logit: true, ..base };
    let of = |attention| Case::new(2, attention).by(Schedule::Fused);
    let plain = of(AttentionConfig { head_size: 128, mask: Mask::Full, layout: Layout::Sbhd, heads: 4, ..base });
    for case in [of(options), plain] {
        let whole = case.whole();
        let all = case.results_of(&whole).unwrap();
        let some = capped(case.clone(), 510);
        let ranks = Ranks::new(&some).unwrap();
        let operations = ranks.operations::<bf16>().unwrap();
        let plan = operations[0].plan();
        assert_eq!([plan.forward.launches, plan.backward.launches], [4, 4], "{plan}");
        assert!(plan.bytes <= some.config.gathered_bytes.unwrap(), "{plan}");
        assert_eq!(plan.forward.received, ranks_plan(&case).forward.received);
        drop(operations);
        ranks.close().unwrap();
        for (found, all) in some.results_of(&whole).unwrap().iter().zip(&all) {
            assert!(bits(found) == bits(all), "{some:?}");
        }
        some.run().unwrap();
    }
    let case = capped(of(AttentionConfig { heads: 4, ..options }), 510);
    captured(&case).unwrap();
    two_layers(&case).unwrap();
    (1..=seeds() / 32).for_each(|seed| run_ahead(&Case { seed, mode: Mode::Check, ..case.clone() }).unwrap());
    same_bits(&case, seeds() / 32);
    // As many as fit: of two groups each would be there, as with one.
    let few = capped(of(AttentionConfig { key_heads: 2, ..base }), 990);
    let refused = Ranks::new(&few).unwrap();
    let error = ContextParallel::<bf16>::new(&refused.world.streams[0], refused.transport(0), few.config).unwrap_err().to_string();
    assert!(error.contains("gathered_bytes is") && error.contains("as many groups as there are key heads"), "{error}");
}

/// The bits of all results.
fn bits(of: &Results) -> Vec<u64> {
    let Results { out, log_sum_exp, max_logit, grad_q, grad_k, grad_v, grad_sink } = of;
    [out, log_sum_exp, max_logit, grad_q, grad_k, grad_v, grad_sink].into_iter().flatten().map(|x| x.to_bits()).collect()
}

fn ranks_plan(case: &Case) -> oxtile::context_parallel::Plan {
    let ranks = Ranks::new(case).unwrap();
    ContextParallel::<bf16>::new(&ranks.world.streams[0], ranks.transport(0), case.config).unwrap().plan().clone()
}

/// Both passes in a graph before any call, of two layers by turns, by ranks that run ahead, and in any order of streams: always the same bits.
#[test]
fn passes_in_any_order() {
    let attention = AttentionConfig { queries: 512, keys: 512, heads: 1, ..BASE };
    let case = Case::new(2, attention).by(Schedule::Fused);
    captured(&case).unwrap();
    two_layers(&case).unwrap();
    (1..=seeds() / 32).for_each(|seed| run_ahead(&Case { seed, mode: Mode::Check, ..case.clone() }).unwrap());
    same_bits(&case, seeds() / 16);
    let mut whole = case.whole();
    case.tell_ranks_apart(&mut whole);
    let expected = whole.solve();
    for (rank, found) in case.world().ranks().zip(case.results_of(&whole).unwrap()) {
        case.compare(rank, &found, &expected);
    }
}

/// Passes of two layers on streams of their own, which nothing but the operation orders: no kernel takes the flags of the pass before for its own.
#[test]
fn passes_on_streams_of_their_own() {
    for seed in 1..=4 {
        let attention = AttentionConfig { queries: 512, keys: 512, heads: 1, ..BASE };
        let case = Case { seed, mode: Mode::Check, ..Case::new(2, attention).by(Schedule::Fused) };
        let ranks = Ranks::new(&case).unwrap();
        let operations = ranks.operations::<bf16>().unwrap();
        let wholes = [1, 2].map(|seed| Case { seed, ..case.clone() }.whole());
        let others: Vec<_> = ranks.world.ranks.iter().map(|rank| rank.device().stream().unwrap()).collect();
        let mut layers = wholes.each_ref().map(|whole| ranks.tensors::<bf16>(whole).unwrap());
        for is_backward in [false, true] {
            for (at, operation) in operations.iter().enumerate() {
                for (tensors, stream) in layers.iter_mut().zip([&ranks.world.streams[at], &others[at]]) {
                    let pass = if is_backward { Tensors::backward } else { Tensors::forward };
                    pass(&mut tensors[at], &case, operation, stream).unwrap().run(stream).unwrap();
                }
            }
        }
        for (whole, tensors) in wholes.iter().zip(&layers) {
            let expected = whole.solve();
            for ((rank, tensors), stream) in case.world().ranks().zip(tensors).zip(&ranks.world.streams) {
                case.compare(rank, &tensors.results(stream).unwrap(), &expected);
            }
        }
        drop(operations);
        ranks.close().unwrap();
    }
}

/// Four sections, of four key heads each, take turns on three streams of puts.
#[test]
fn more_sections_than_streams_of_puts() {
    let packed = AttentionConfig { layout: Layout::Packed, heads: 16, key_heads: 16, head_size: 128, queries: 512, keys: 512, ..BASE };
    Case { lengths: vec![[512, 512]], ..Case::new(2, packed).by(Schedule::Fused) }.run().unwrap();
}

/// Kernels are loaded with the operation: a load may wait for all work of the device, which waits for other ranks later.
#[test]
fn passes_load_nothing() {
    let options = AttentionConfig { sink: Sink::Learnable, max_logit: true, queries: 512, keys: 512, ..BASE };
    let packed = AttentionConfig { layout: Layout::Packed, queries: 512, keys: 512, ..BASE };
    for attention in [options, packed, AttentionConfig { head_size: 128, mask: Mask::Full, ..options }] {
        let lengths = if attention.layout == Layout::Packed { vec![[512, 512]] } else { Vec::new() };
        let case = Case { lengths, ..Case::new(2, attention).by(Schedule::Fused) };
        let ranks = Ranks::new(&case).unwrap();
        let (operations, mut tensors) = (ranks.operations::<bf16>().unwrap(), ranks.tensors(&case.whole()).unwrap());
        ranks.set_sequences(&operations, &tensors).unwrap();
        let loads = || ranks.world.runtime.loads();
        let before = loads();
        for is_backward in [false, true] {
            for ((operation, tensors), stream) in operations.iter().zip(&mut tensors).zip(&ranks.world.streams) {
                let bound =
                    if is_backward { tensors.backward(&case, operation, stream) } else { tensors.forward(&case, operation, stream) };
                bound.unwrap().run(stream).unwrap();
            }
        }
        ranks.world.streams.iter().for_each(|stream| stream.synchronize().unwrap());
        assert_eq!(loads() - before, 0, "{attention:?}");
        drop(operations);
        ranks.close().unwrap();
    }
}

/// What it does not take is refused by name, with what to take instead.
#[test]
fn what_is_not_taken_is_refused() {
    let refused = |config: ContextParallelConfig, has_arena: bool, parts: [&str; 2]| {
        let ranks = Ranks::new(&Case { config, ..Case::new(2, BASE) }).unwrap();
        let transport = if has_arena { ranks.transport(0) } else { Transport::collective(&ranks.world.ranks[0]) };
        let error = ContextParallel::<bf16>::new(&ranks.world.streams[0], transport, config).unwrap_err().to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    };
    let of = |attention| ContextParallelConfig::new(attention).by(Schedule::Fused);
    let forward = |attention| ContextParallelConfig { backward: Schedule::Ring, ..of(attention) };
    let long = AttentionConfig { layout: Layout::Packed, queries: 512, keys: 512, ..BASE };
    let window = Window { left: Some(5), right: None };
    refused(of(AttentionConfig { window, ..long }), true, ["fused cannot be taken", "window: take pull, gather or all-to-all"]);
    refused(of(AttentionConfig { sink: Sink::OffByOne, ..long }), true, ["fused", "sink"]);
    refused(of(AttentionConfig { max_logit: true, ..long }), true, ["fused", "max_logit"]);
    let batches = AttentionConfig { queries: 512, keys: 512, batches: 2, heads: 4, key_heads: 4, ..BASE };
    let most = of(batches).arena_bytes(oxtile::comm::WorldSize::new(2).unwrap(), 2) * 51 / 100;
    refused(ContextParallelConfig { gathered_bytes: Some(most), ..of(batches) }, true, ["fused", "dense tensors of one batch"]);
    refused(of(AttentionConfig { soft_cap: Some(9.0), queries: 512, keys: 512, ..BASE }), true, ["gradients", "soft_cap"]);
    refused(of(AttentionConfig { layout: Layout::Packed, ..BASE }), true, ["fused", "1 sequences in 48 rows"]);
    refused(of(AttentionConfig { mask: Mask::Full, keys: 24, ..BASE }), true, ["fused", "as many of both"]);
    refused(of(AttentionConfig { kernels: Kernels::Portable, ..BASE }), true, ["fused", "Portable"]);
    refused(of(AttentionConfig { queries: 0, keys: 0, ..BASE }), true, ["fused", "nothing to attend to"]);
    refused(ContextParallelConfig { partition: Partition::Contiguous, ..of(BASE) }, true, ["fused", "zigzag"]);
    refused(forward(BASE), false, ["fused", "Transport::symmetric"]);
    refused(of(BASE), true, ["fused", "chunks are of 12 rows"]);
    // Slots are counted as the arena counts its ranks.
    let config = of(AttentionConfig { queries: 512, keys: 512, ..BASE });
    let turned = Ranks::new(&Case { config, ..Case::new(2, config.attention) }).unwrap();
    let team = Team::new(turned.world.size(), &[1, 0].map(|rank| turned.world.rank(rank))).unwrap();
    let member = team.member(turned.world.rank(0)).unwrap();
    let transport = Transport::symmetric(&turned.arenas[0], &member);
    let error = ContextParallel::<bf16>::new(&turned.world.streams[0], transport, config).unwrap_err().to_string();
    assert!(error.contains("a team of all ranks in their order"), "{error}");
    // More than a grid has rows for; in an arena that would be too small as well.
    let many = of(AttentionConfig { queries: 512, keys: 512, batches: 1 << 14, heads: 4, key_heads: 4, ..BASE });
    let config = ContextParallelConfig { forward: Schedule::Ring, ..many };
    let error = ContextParallel::<bf16>::new(&turned.world.streams[0], turned.transport(0), config).unwrap_err().to_string();
    assert!(error.contains("65536 key heads of all batches"), "{error}");
    refused(of(AttentionConfig { queries: 512, keys: 512, head_size: 192, ..BASE }), true, ["fused", "gradients"]);
}
