//! Planted bugs of context parallelism: what ranks compute with each of them is not what the whole gives, under every seed.
//!
//! Messages are tampered with ([`context_tampered`](crate::context_tampered)), sums of gradients replaced ([`context_sums`](crate::context_sums)), and arguments are other ones. A bug that no seam plants is put into
//! what ranks are held against instead: a rule that is wrong for the oracle differs from the right one as a wrong operation would.
//!
//! | planted bug | named test |
//! |---|---|
//! | keys of rank `r + i` for those of `r - i`, chunks in another order, keys without values, keys of one owner left out | [`messages_that_are_tampered_with`] |
//! | gradients of keys that stay where they were computed, or go to another rank | [`messages_that_are_tampered_with`] |
//! | the same of 8 bits: TransformerEngine #2737 | `context_fp8::transformer_engine_keeps_gradients_of_8_bits` |
//! | largest scores of this rank alone, of bshd by gather and by ring, and of packed sequences with a rank of padding | [`messages_that_are_tampered_with`] |
//! | a sink in two steps; lengths by ranks; padding that is seen, or left | [`arguments_that_are_tampered_with`] |
//! | a right window by the longest sequence: TransformerEngine #2829 | [`transformer_engine_has_the_window_of_the_longest_sequence`] |
//! | gradients of keys and values summed in `bf16`: TransformerEngine's rings | `context_sums::transformer_engine_sums_in_bf16` |
//! | the same summed as they arrive | `context_sums::sums_in_the_order_of_arrival` |
//! | running results in `bf16` | [`sums_are_of_f32`]: held against what steps that round would give, of values whose sums no seed changes |
//! | flags: not waited for, set early, not reset, also in a graph, of all owners but one | `context_protocol` |
//! | a section off by one, the flag of another chunk or of none, the rank of another owner | `tables_of_wrong_flags_are_reported`, `tables_of_wrong_flags_of_packed_sequences_are_reported` (`tests/src/mutation/attention_arriving.rs`, `attention_arriving_packed.rs`) |
//! | a chunk that a window shows and that is not sent, or is sent to another rank; a rank whose gradients are left out, or are added though it gave none | numbers of pairs of a query and a key that no seed changes: `what_is_seen_is_sent` (`context_parallel/pieces.rs`), `context_fused::options_of_both_passes` |
//! | lengths and diagonals of steps | the arrays of `tests/src/cases/thd.rs`, against all pairs of a query and a key: numbers that no seed changes |

use std::panic::{AssertUnwindSafe, catch_unwind};

use oxtile::Result;
use oxtile::attention::{AttentionConfig, Kernels, Layout, Mask, Sink, Window};
use oxtile::comm::Rank;
use oxtile::context_parallel::{ContextParallel, ContextParallelConfig, Partition, Schedule, Transport};
use oxtile::num::bf16;

use crate::context_case::Case;
use crate::context_parallel::BASE;
use crate::context_ranks::Ranks;
use crate::context_tampered::{Bug, Tampered};
use crate::support::is_long;
use crate::whole_attention::{Results, Whole};

pub const SMALL: AttentionConfig =
    AttentionConfig { queries: 12, keys: 12, heads: 1, key_heads: 1, head_size: 8, kernels: Kernels::Portable, ..BASE };

const PACKED: AttentionConfig = AttentionConfig { layout: Layout::Packed, batches: 2, queries: 24, keys: 24, ..SMALL };

/// A long sequence, and one of which two ranks have padding alone.
fn packed(attention: AttentionConfig) -> Case {
    Case { lengths: vec![[11, 12], [2, 12]], ..Case::new(3, attention) }
}

/// What ranks find of the inputs over such messages.
fn found(case: &Case, whole: &Whole, bug: Bug) -> Result<Vec<Results>> {
    found_by(case, whole, bug, true)
}

/// The same without a backward pass, if it is not asked for.
fn found_by(case: &Case, whole: &Whole, bug: Bug, has_backward: bool) -> Result<Vec<Results>> {
    let ranks = Ranks::new(case)?;
    let AttentionConfig { keys, key_heads, head_size, .. } = case.config.attention;
    let keys = keys / u64::from(case.ranks) * key_heads * head_size * 2;
    let tampered: Vec<_> = ranks.world.ranks.iter().map(|of| Tampered { of, bug, keys }).collect();
    let streams = &ranks.world.streams;
    let make = |(stream, messages)| ContextParallel::<bf16>::new(stream, Transport::collective(messages), case.config);
    let operations = streams.iter().zip(&tampered).map(make).collect::<Result<Vec<_>>>()?;
    let mut tensors = ranks.tensors::<bf16>(whole)?;
    for is_backward in [false, true].into_iter().take(1 + usize::from(has_backward)) {
        for ((operation, stream), tensors) in operations.iter().zip(streams).zip(&mut tensors) {
            if is_backward {
                tensors.backward(case, operation, stream)?.run(stream)?;
            } else {
                tensors.set_sequences(case, operation, stream)?;
                tensors.forward(case, operation, stream)?.run(stream)?;
            }
        }
    }
    tensors.iter().zip(streams).map(|(tensors, stream)| tensors.results(stream)).collect()
}

/// Whether each rank has its part of what is expected.
fn is_right(case: &Case, found: Result<Vec<Results>>, expected: &Results) -> bool {
    let Ok(found) = found else { return false };
    let compare = || case.world().ranks().zip(&found).for_each(|(rank, found)| case.compare(rank, found, expected));
    catch_unwind(AssertUnwindSafe(compare)).is_ok()
}

/// The same of a forward pass.
fn is_forward_right(case: &Case, found: Result<Vec<Results>>, expected: &Results) -> bool {
    let with_gradients = |(rank, found): (Rank, Results)| {
        let Results { grad_q, grad_k, grad_v, grad_sink, .. } = case.of_rank(rank, expected);
        Results { grad_q, grad_k, grad_v, grad_sink, ..found }
    };
    is_right(case, found.map(|found| case.world().ranks().zip(found).map(with_gradients).collect()), expected)
}

/// Each of 32 seeds, of inputs and of the scheduler.
pub fn seeds(case: &Case) -> impl Iterator<Item = Case> + use<'_> {
    (1..=32).map(|seed| Case { seed, ..case.clone() })
}

#[test]
fn messages_that_are_tampered_with() {
    let full = AttentionConfig { mask: Mask::Full, ..SMALL };
    let largest = |attention| Case::new(3, AttentionConfig { max_logit: true, ..attention }).by(Schedule::Gather);
    let by_steps = largest(SMALL).by(Schedule::Ring);
    // Ranks 1 and 2 have padding alone.
    let of_packed = Case { lengths: vec![[2, 12], [1, 12]], ..largest(PACKED) };
    let by = |schedule| Case::new(3, SMALL).by(schedule);
    let cases = [
        (Bug::OwnerAfter, by(Schedule::Ring)),
        (Bug::ChunksSwapped, by(Schedule::Ring)),
        (Bug::ChunksSwapped, by(Schedule::Gather)),
        (Bug::ValuesAssumed, by(Schedule::Ring)),
        (Bug::ValuesAssumed, by(Schedule::Gather)),
        (Bug::OneOwnerLeftOut, by(Schedule::Ring)),
        (Bug::GradientsKept, by(Schedule::Ring)),
        (Bug::GradientsKept, by(Schedule::Gather)),
        (Bug::GradientsToAnother, Case::new(3, full)),
        (Bug::GradientsToAnother, Case::new(3, full).by(Schedule::Gather)),
        (Bug::MaxLogitKept, largest(SMALL)),
        (Bug::MaxLogitKept, by_steps),
        (Bug::MaxLogitKept, of_packed),
    ];
    for (bug, case) in &cases {
        for case in seeds(case) {
            let whole = case.whole();
            let expected = whole.solve();
            if case.seed == 1 {
                assert!(is_right(&case, found(&case, &whole, Bug::Nothing), &expected), "{case:?} without a bug");
            }
            let is_seen = match bug {
                Bug::GradientsKept | Bug::GradientsToAnother => !is_right(&case, found(&case, &whole, *bug), &expected),
                _ => !is_forward_right(&case, found_by(&case, &whole, *bug, false), &expected),
            };
            assert!(is_seen, "{bug:?} is not seen by {case:?}");
        }
    }
}

#[test]
fn arguments_that_are_tampered_with() {
    // The score of a sink that two steps count.
    let case = Case::new(2, AttentionConfig { sink: Sink::Learnable, ..SMALL });
    for case in seeds(&case) {
        let whole = case.whole();
        let twice = Whole { sink: whole.sink.iter().map(|sink| sink + 2.0_f64.ln()).collect(), ..whole.clone() };
        assert!(!is_forward_right(&case, found_by(&case, &twice, Bug::Nothing, false), &whole.solve()), "{case:?}");
    }
    let ring = packed(PACKED);
    let gather = ring.clone().by(Schedule::Gather);
    for case in seeds(&ring).chain(seeds(&gather)) {
        let whole = case.whole();
        let expected = whole.solve();
        // Lengths that ranks have equal parts of, and padding that is taken for tokens.
        for lengths in [vec![[9, 12], [0, 12]], vec![[12, 12], [12, 12]]] {
            let planted = Case { lengths, ..case.clone() };
            assert!(!is_forward_right(&case, found_by(&planted, &whole, Bug::Nothing, false), &expected), "{planted:?}");
        }
        // Padding as it was before.
        let mut left = found_by(&case, &whole, Bug::Nothing, false).unwrap();
        assert!(is_forward_right(&case, Ok(left.clone()), &expected), "{case:?}");
        left.iter_mut().for_each(|of_rank| of_rank.out.iter_mut().filter(|x| **x == 0.0).for_each(|x| *x = f64::NAN));
        assert!(!is_forward_right(&case, Ok(left), &expected), "{case:?}");
    }
}

/// TransformerEngine #2829: bounds of windows are computed once, for the longest sequence, so that those of shorter ones are as much further to the right. Rows of the shorter sequence are
/// those of an operation with that window.
#[test]
fn transformer_engine_has_the_window_of_the_longest_sequence() {
    let window = Window { left: Some(3), right: Some(1) };
    let case = Case { lengths: vec![[12, 12], [8, 12]], ..Case::new(3, AttentionConfig { window, mask: Mask::Full, ..PACKED }) };
    let gather = case.clone().by(Schedule::Gather);
    for case in seeds(&case).chain(seeds(&gather)) {
        let (whole, has_backward) = (case.whole(), case.seed == 1);
        let expected = whole.solve();
        let right = found_by(&case, &whole, Bug::Nothing, has_backward).unwrap();
        let judge = if has_backward { is_right } else { is_forward_right };
        assert!(judge(&case, Ok(right.clone()), &expected), "{case:?}");
        let attention = AttentionConfig { window: Window { right: Some(1 + 12 - 8), ..window }, ..case.config.attention };
        let shifted = Case { config: ContextParallelConfig { attention, ..case.config }, ..case.clone() };
        let shifted = found_by(&shifted, &whole, Bug::Nothing, has_backward).unwrap();
        // Of one head of 8 elements; each rank has 4 rows of either sequence.
        let planted = right.into_iter().zip(shifted).map(|(right, shifted)| {
            let rows = |right: &[f64], shifted: &[f64], row: usize| [&right[..4 * row], &shifted[4 * row..]].concat();
            Results {
                out: rows(&right.out, &shifted.out, 8),
                log_sum_exp: rows(&right.log_sum_exp, &shifted.log_sum_exp, 1),
                grad_q: rows(&right.grad_q, &shifted.grad_q, 8),
                grad_k: rows(&right.grad_k, &shifted.grad_k, 8),
                grad_v: rows(&right.grad_v, &shifted.grad_v, 8),
                ..right
            }
        });
        assert!(!judge(&case, Ok(planted.collect()), &expected), "{case:?}");
    }
}

/// A `bf16` near a number.
fn rounded(x: f64) -> f64 {
    half::bf16::from_f64(x).to_f64()
}

/// Values and gradients of ranks that cancel: a sum in `bf16` loses what is left of them.
#[test]
fn sums_are_of_f32() {
    const RANKS: u32 = 3;
    let attention = AttentionConfig { mask: Mask::Full, ..SMALL };
    for schedule in [Schedule::Ring, Schedule::Pull, Schedule::Gather] {
        let base = Case::new(RANKS, attention).by(schedule);
        let config = ContextParallelConfig { partition: Partition::Contiguous, ..base.config };
        // The values that count are the same under all seeds.
        for case in seeds(&Case { config, ..base }).take(if is_long() { 32 } else { 1 }) {
            let mut whole = case.whole();
            let of_rank = [256.0, 1.0, -256.0];
            let rows = whole.v.len() / RANKS as usize;
            // Equal weights of all keys.
            whole.q.fill(0.0);
            for (at, rank) in (0..whole.v.len()).map(|at| (at, at / rows)) {
                (whole.v[at], whole.grad_out[at]) = (of_rank[rank], of_rank[rank]);
            }
            let expected = whole.solve();
            let third = 1.0 / 3.0;
            assert!(expected.out.iter().chain(&expected.grad_v).all(|x| (x - third).abs() < 1e-9));
            // What sums have that are rounded in each step.
            let gradient = of_rank.into_iter().fold(0.0, |sum, part| rounded(sum + rounded(part * third)));
            // The steps of rank 1: its own keys, those of rank 0, those of rank 2.
            let steps = [of_rank[1], of_rank[0], of_rank[2]].into_iter().zip(1..);
            let out = steps.fold(0.0, |sum, (part, step)| rounded(sum * f64::from(step - 1) / f64::from(step) + part / f64::from(step)));
            assert!([gradient, out].iter().all(|sum| (sum - third).abs() > 0.1), "{gradient} and {out} are as good");
            for found in case.results_of(&whole).unwrap() {
                assert!(found.out.iter().chain(&found.grad_v).all(|x| (x - third).abs() < 2e-3), "{case:?}");
            }
        }
    }
}
