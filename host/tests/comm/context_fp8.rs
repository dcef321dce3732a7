//! Attention of 8 bits over a sequence that is spread over ranks.

use std::panic::{AssertUnwindSafe, catch_unwind};

use oxtile::attention::{AttentionConfig, BackwardInputs, Gradients, Inputs, Layout, Mask, Outputs, Sink};
use oxtile::comm::Rank;
use oxtile::context_parallel::{ContextParallelConfig, ContextParallelFp8, Partition, Schedule};
use oxtile::num::bf16;
use oxtile::quantize::{CurrentScaling, ScaleOptions};
use oxtile::{Buffer, Result};

use crate::context_case::{Case, Tensors};
use crate::context_parallel::BASE;
use crate::context_ranks::Ranks;
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
    let ranks = Ranks::new(case)?;
    let streams = &ranks.world.streams;
    let make = |(at, stream)| ContextParallelFp8::new(stream, ranks.transport(at), case.config);
    let operations = streams.iter().enumerate().map(make).collect::<Result<Vec<_>>>()?;
    let mut tensors = ranks.tensors::<bf16>(whole)?;
    for forward in [true, false] {
        for ((operation, stream), Tensors { inputs: [q, k, v, grad], outputs: [out, grad_q, grad_k, grad_v], log_sum_exp, .. }) in
            operations.iter().zip(streams).zip(&mut tensors)
        {
            operation.spoil_memory(stream)?;
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
        by(gather(2, AttentionConfig { layout: Layout::Sbhd, ..two }), Schedule::AllToAll),
        by(contiguous(gather(3, two)), Schedule::Auto),
        gather(3, full),
        by(gather(3, long), Schedule::Ring),
        gather(2, AttentionConfig { queries: 0, keys: 0, ..dense }),
    ]
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

/// The gradients of keys and values by the queries of one rank alone.
fn of_one_rank(case: &Case, whole: &Whole, rank: Rank) -> Results {
    let AttentionConfig { queries, heads, .. } = case.config.attention;
    let mut alone = whole.clone();
    let row = (heads * case.config.attention.value_size()) as usize;
    let own = (0..(queries / u64::from(case.ranks)) as usize).map(|row| case.token(rank, queries, row)).collect::<Vec<_>>();
    let others = alone.grad_out.chunks_mut(row).enumerate().filter(|(token, _)| !own.contains(token));
    others.for_each(|(_, values)| values.fill(0.0));
    alone.solve()
}

/// As in TransformerEngine's pull request #2737, whose backward pass of 8 bits keeps the gradients of keys and values where they were computed: that is told from what is right,
/// by every seed and on every rank whose keys another one sees.
#[test]
fn gradients_that_stay_are_seen() {
    let attention = AttentionConfig { queries: 8, keys: 8, heads: 1, key_heads: 1, ..BASE };
    for seed in 1..=seeds() {
        let case = Case { seed, ..Case::new(2, attention).by(Schedule::Gather) };
        let whole = case.whole();
        let cast = cast(&case, &whole).unwrap();
        let expected = cast.solve();
        for (rank, found) in case.world().ranks().zip(results(&case, &whole).unwrap()) {
            case.compare_within(rank, &found, &expected, MOST);
            let local = case.of_rank(rank, &of_one_rank(&case, &cast, rank));
            let kept = Results { grad_k: local.grad_k, grad_v: local.grad_v, ..found };
            let told = catch_unwind(AssertUnwindSafe(|| case.compare_within(rank, &kept, &expected, MOST)));
            assert!(told.is_err(), "seed {seed}, {rank}: gradients that were kept pass for those of all ranks");
        }
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
    refused(BASE, Schedule::Ring, ["ring cannot be taken of 8 bits", "take gather"]);
    refused(AttentionConfig { sink: Sink::OffByOne, ..BASE }, Schedule::Auto, ["sink", "ContextParallel of bf16"]);
    refused(AttentionConfig { soft_cap: Some(3.0), ..BASE }, Schedule::Auto, ["soft_cap", "ContextParallel of bf16"]);
    refused(AttentionConfig { head_size: 96, ..BASE }, Schedule::Gather, ["head_size", "64 or 128"]);
    refused(AttentionConfig { max_logit: true, ..BASE }, Schedule::Gather, ["max_logit", "ContextParallel of bf16"]);
    refused(AttentionConfig { layout: Layout::Packed, ..BASE }, Schedule::Gather, ["layout", "Bshd or Sbhd"]);
}
