//! Attention of 8 bits over a sequence that is spread over ranks.

use std::panic::{AssertUnwindSafe, catch_unwind};

use oxtile::attention::{AttentionConfig, BackwardInputs, Gradients, Inputs, Layout, Mask, Outputs, Sink, Window};
use oxtile::context_parallel::{ContextParallelConfig, ContextParallelFp8, Partition, Schedule, Transport};
use oxtile::num::bf16;
use oxtile::quantize::{CurrentScaling, ScaleOptions};
use oxtile::{Buffer, Result};

use crate::context_case::{Case, Tensors};
use crate::context_parallel::BASE;
use crate::context_ranks::Ranks;
use crate::context_tampered::{Bug, Tampered};
use crate::support::seeds;
use crate::whole_attention::{Results, Whole};

/// What the oracle may differ by: probabilities have 3 bits after the first.
const MOST: f64 = 6e-2;

/// The whole problem with operands as one device would cast them: by the largest magnitude of the whole tensor.
fn cast(case: &Case, whole: &Whole) -> Result<Whole> {
    let ranks = Ranks::new(&Case { ranks: 1, ..case.clone() })?;
    let stream = &ranks.world.streams[0];
    let casts = CurrentScaling::<f32>::new(&ranks.world.runtime, ScaleOptions::default())?;
    let tensor = |values: &[f64]| -> Result<Vec<f64>> {
        let input = Buffer::from_slice(stream, &values.iter().map(|x| *x as f32).collect::<Vec<_>>())?;
        let mut output = Buffer::<f32>::zeros(stream, input.len())?;
        casts.dequantize(stream, &casts.quantize(stream, input.view())?, output.view_mut())?;
        Ok(output.to_vec(stream)?.into_iter().map(f64::from).collect())
    };
    Ok(Whole { q: tensor(&whole.q)?, k: tensor(&whole.k)?, v: tensor(&whole.v)?, ..whole.clone() })
}

/// What every rank finds by a call of each pass.
fn results(case: &Case, whole: &Whole) -> Result<Vec<Results>> {
    results_over(case, whole, Over::Messages(Bug::Nothing))
}

/// Over what codes travel.
#[derive(Clone, Copy, Debug)]
enum Over {
    /// With the arena, if the case has one.
    Messages(Bug),
    Memory,
}

/// The same over messages that are tampered with, or over memory alone.
fn results_over(case: &Case, whole: &Whole, over: Over) -> Result<Vec<Results>> {
    let ranks = Ranks::new(case)?;
    let streams = &ranks.world.streams;
    let AttentionConfig { batches, keys, key_heads, head_size, .. } = case.config.attention;
    let keys = batches * keys / u64::from(case.ranks) * key_heads * head_size * 2;
    let bug = if let Over::Messages(bug) = over { bug } else { Bug::Nothing };
    let tampered: Vec<_> = ranks.world.ranks.iter().map(|of| Tampered { of, bug, keys }).collect();
    let transport = |at: usize| match (over, ranks.arenas.get(at)) {
        (Over::Memory, Some(arena)) => Transport::symmetric(arena, &ranks.members[at]),
        (_, Some(arena)) => Transport::both(&tampered[at], arena, &ranks.members[at]),
        _ => Transport::collective(&tampered[at]),
    };
    let make = |(at, stream)| ContextParallelFp8::new(stream, transport(at), case.config);
    let operations = streams.iter().enumerate().map(make).collect::<Result<Vec<_>>>()?;
    let mut tensors = ranks.tensors::<bf16>(whole)?;
    for forward in [true, false] {
        for ((operation, stream), Tensors { inputs: [q, k, v, grad], outputs: [out, grad_q, grad_k, grad_v], log_sum_exp, .. }) in
            operations.iter().zip(streams).zip(&mut tensors)
        {
            // Other ranks put into this memory as soon as they begin.
            if ranks.arenas.is_empty() {
                operation.spoil_memory(stream)?;
            }
            let inputs = Inputs::new(q.view(), k.view(), v.view());
            if forward {
                operation.bind_forward(stream, inputs, Outputs::new(out.view_mut(), log_sum_exp.view_mut()))?.run(stream)?;
            } else {
                let (out, log_sum_exp, grad_out) = (out.view().into(), log_sum_exp.view(), grad.view().into());
                let gradients = Gradients::new(grad_q.view_mut(), grad_k.view_mut(), grad_v.view_mut());
                operation.bind_backward(stream, BackwardInputs { forward: inputs, out, log_sum_exp, grad_out }, gradients)?.run(stream)?;
            }
        }
    }
    let found = tensors.iter().zip(streams).map(|(tensors, stream)| tensors.results(stream)).collect();
    drop(operations);
    ranks.close()?;
    found
}

fn cases() -> Vec<Case> {
    let dense = AttentionConfig { queries: 48, keys: 48, heads: 4, key_heads: 2, ..BASE };
    let two = AttentionConfig { batches: 2, ..dense };
    let long = AttentionConfig { queries: 300, keys: 300, head_size: 128, heads: 1, key_heads: 1, ..BASE };
    let full = AttentionConfig { mask: Mask::Full, keys: 60, queries: 24, ..dense };
    let gather = |ranks, attention| Case::new(ranks, attention).by(Schedule::Gather);
    let by = |case: Case, backward| Case { config: ContextParallelConfig { backward, ..case.config }, ..case };
    let contiguous = |case: Case| Case { config: ContextParallelConfig { partition: Partition::Contiguous, ..case.config }, ..case };
    vec![
        gather(1, dense),
        by(gather(2, two), Schedule::Ring),
        by(gather(2, AttentionConfig { queries: 512, keys: 512, heads: 2, key_heads: 1, ..BASE }), Schedule::Fused),
        by(gather(2, AttentionConfig { layout: Layout::Sbhd, ..two }), Schedule::AllToAll),
        by(contiguous(gather(3, two)), Schedule::Auto),
        gather(3, full),
        by(gather(3, long), Schedule::Ring),
        gather(2, AttentionConfig { queries: 0, keys: 0, ..dense }),
        Case::new(2, two).by(Schedule::AllToAll),
        // Two ranks have each key head.
        Case::new(4, dense).by(Schedule::AllToAll),
        Case::new(4, AttentionConfig { layout: Layout::Sbhd, ..two }).by_puts(),
        contiguous(by(Case::new(2, full).by_puts(), Schedule::Pull)),
        by(Case::new(2, wide()).by_puts(), Schedule::Auto),
        Case::new(2, AttentionConfig { queries: 0, keys: 0, ..dense }).by_puts(),
    ]
}

/// Several groups of heads.
fn wide() -> AttentionConfig {
    AttentionConfig { queries: 16, keys: 16, heads: 32, key_heads: 32, head_size: 128, ..BASE }
}

/// By symmetric memory alone: scales are agreed on, codes are traded, and gradients go back.
#[test]
fn codes_travel_by_memory_alone() {
    let attention = AttentionConfig { queries: 24, keys: 24, heads: 3, key_heads: 3, ..BASE };
    for (forward, backward) in [(Schedule::AllToAll, Schedule::Pull), (Schedule::Auto, Schedule::Auto)] {
        let case = Case { has_puts: true, ..Case::new(3, attention) };
        let case = Case { config: ContextParallelConfig { forward, backward, ..case.config }, ..case };
        let mut whole = case.whole();
        case.tell_ranks_apart(&mut whole);
        let expected = cast(&case, &whole).unwrap().solve();
        for (rank, found) in case.world().ranks().zip(results_over(&case, &whole, Over::Memory).unwrap()) {
            case.compare_within(rank, &found, &expected, MOST);
        }
    }
}

/// Traded heads have the bits of one device, whose kernel attends to them: in the forward pass, and with the backward pass by traded heads there too.
#[test]
fn traded_codes_have_the_bits_of_one_device() {
    let small = AttentionConfig { queries: 16, keys: 16, heads: 4, key_heads: 4, ..BASE };
    for case in [Case::new(2, small).by(Schedule::AllToAll), Case::new(2, wide()).by_puts()] {
        let whole = case.whole();
        let alone = Case { ranks: 1, has_puts: false, ..case.clone() };
        let one = &results(&alone, &whole).unwrap()[0];
        for (rank, found) in case.world().ranks().zip(results(&case, &whole).unwrap()) {
            let one = case.of_rank(rank, one);
            assert!(found.out == one.out && found.log_sum_exp == one.log_sum_exp, "{case:?}, {rank}");
            assert!(found.grad_q == one.grad_q && found.grad_k == one.grad_k && found.grad_v == one.grad_v, "{case:?}, {rank}");
        }
    }
}

/// Each rank's part against the whole of the operands that one device would make: so scales are those of all ranks, one rank's values are 4 times the one's before.
#[test]
fn every_rank_casts_by_the_scales_of_all() {
    for case in cases() {
        let mut whole = case.whole();
        case.tell_ranks_apart(&mut whole);
        let expected = cast(&case, &whole).unwrap().solve();
        for (rank, found) in case.world().ranks().zip(results(&case, &whole).unwrap()) {
            case.compare_within(rank, &found, &expected, MOST);
        }
    }
}

/// TransformerEngine #2737: the backward pass of 8 bits keeps the gradients of keys and values where they were computed. With messages of gradients left out every seed is told from what is
/// right, by whichever schedule gradients go to their owner.
#[test]
fn transformer_engine_keeps_gradients_of_8_bits() {
    let attention = AttentionConfig { queries: 8, keys: 8, heads: 1, key_heads: 1, ..BASE };
    for seed in 1..=seeds() {
        let backward = [Schedule::Gather, Schedule::Ring][seed as usize % 2];
        let case = Case { seed, ..Case::new(2, attention).by(Schedule::Gather) };
        let case = Case { config: ContextParallelConfig { backward, ..case.config }, ..case };
        let whole = case.whole();
        let expected = cast(&case, &whole).unwrap().solve();
        let is_right = |bug| {
            let found = results_over(&case, &whole, Over::Messages(bug)).unwrap();
            let compare = || case.world().ranks().zip(&found).for_each(|(rank, found)| case.compare_within(rank, found, &expected, MOST));
            catch_unwind(AssertUnwindSafe(compare)).is_ok()
        };
        assert!(is_right(Bug::Nothing), "seed {seed}");
        assert!(!is_right(Bug::GradientsKept), "seed {seed}: gradients that were kept pass for those of all ranks");
    }
}

/// Beyond the kernel of 8 bits, by name and with what to take instead.
#[test]
fn what_eight_bits_do_not_have_is_refused() {
    let ranks = Ranks::new(&Case::new(2, BASE)).unwrap();
    let refused = |attention: AttentionConfig, schedule, parts: [&str; 2]| {
        let config = ContextParallelConfig { forward: schedule, ..ContextParallelConfig::new(attention) };
        let error = ContextParallelFp8::new(&ranks.world.streams[0], ranks.transport(0), config).unwrap_err().to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{parts:?}: {error}");
    };
    refused(BASE, Schedule::Ring, ["ring cannot be taken of 8 bits", "take gather or all-to-all"]);
    refused(AttentionConfig { heads: 3, key_heads: 3, ..BASE }, Schedule::AllToAll, ["all-to-all cannot be taken", "heads is 3"]);
    refused(AttentionConfig { sink: Sink::OffByOne, ..BASE }, Schedule::Auto, ["sink", "ContextParallel of bf16"]);
    refused(AttentionConfig { soft_cap: Some(3.0), ..BASE }, Schedule::Auto, ["soft_cap", "ContextParallel of bf16"]);
    refused(AttentionConfig { head_size: 96, ..BASE }, Schedule::Gather, ["head_size", "64 or 128"]);
    refused(AttentionConfig { max_logit: true, ..BASE }, Schedule::Gather, ["max_logit", "ContextParallel of bf16"]);
    refused(AttentionConfig { layout: Layout::Packed, ..BASE }, Schedule::Gather, ["layout", "Bshd or Sbhd"]);
    let window = Window { left: Some(3), right: None };
    refused(AttentionConfig { window, ..BASE }, Schedule::Gather, ["window", "ContextParallel of bf16"]);
    // What memory alone has not is not named as what to take.
    let of_memory = Ranks::new(&Case::new(2, BASE).by_puts()).unwrap();
    let error = |forward, attention| {
        let (stream, transport) = (&of_memory.world.streams[0], Transport::symmetric(&of_memory.arenas[0], &of_memory.members[0]));
        let config = ContextParallelConfig { forward, ..ContextParallelConfig::new(attention) };
        ContextParallelFp8::new(stream, transport, config).unwrap_err().to_string()
    };
    let gathered = error(Schedule::Gather, BASE);
    assert!(gathered.contains("take all-to-all, or give Transport::both") && !gathered.contains("pull"), "{gathered}");
    let none = error(Schedule::Auto, AttentionConfig { heads: 3, key_heads: 3, ..BASE });
    assert!(none.contains("gather and all-to-all alone") && none.contains("heads is 3") && none.contains("Transport::both"), "{none}");
}
