//! Planted bugs of context parallelism: what ranks compute with each of them is not what the whole gives, under every seed.
//!
//! Messages are tampered with by a communicator between the operation and the virtual cluster. Rules are planted in what ranks are held against instead: a rule that is wrong for the
//! oracle differs from the right one as a wrong operation would.
//!
//! | planted bug | named test |
//! |---|---|
//! | keys of rank `r + i` for those of `r - i`, chunks in another order, keys without values, keys of one owner left out | [`messages_that_are_tampered_with`] |
//! | gradients of keys that stay where they were computed (TransformerEngine #2737), or go to another rank | [`messages_that_are_tampered_with`]; of 8 bits `context_fp8::gradients_that_stay_are_seen` |
//! | largest scores of this rank alone, of bshd and of packed sequences with a rank of padding | [`messages_that_are_tampered_with`] |
//! | a sink in two steps; lengths by ranks; padding that is seen, or left | [`arguments_that_are_tampered_with`] |
//! | a right window by the longest sequence (TransformerEngine #2829) | [`a_window_of_the_longest_sequence`] |
//! | running results and gradients in `bf16` | [`sums_are_of_f32`] |
//! | parts summed as they arrive | [`the_order_of_sums_has_bits`], and `context_calls::the_same_bits_in_every_order` |
//! | flags: not waited for, set early, not reset, of all owners but one | `context_protocol` |
//! | a section off by one, lengths and diagonals of steps | the mutants of `step_sequences` (`tests/src/mutation/thd.rs`) |

use std::panic::{AssertUnwindSafe, catch_unwind};

use oxtile::attention::{AttentionConfig, Kernels, Layout, Mask, Sink, Window};
use oxtile::comm::{Communicator, EmulatedCommunicator, Rank, ReduceOp, Reducible, WorldSize};
use oxtile::context_parallel::{ContextParallel, ContextParallelConfig, Partition, Schedule, Transport};
use oxtile::num::{Pod, bf16};
use oxtile::{Error, Result, Stream};
use oxtile_tile::launch::{DeviceView, DeviceViewMut};

use crate::context_case::Case;
use crate::context_parallel::BASE;
use crate::context_ranks::Ranks;
use crate::whole_attention::{Results, Whole};

/// What becomes of messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    Nothing,
    /// Keys of the rank on the other side.
    OwnerAfter,
    /// The chunks of keys and of values in another order.
    ChunksSwapped,
    /// Keys are sent, and their values assumed to be there.
    ValuesAssumed,
    /// Nothing of rank 0 arrives.
    OneOwnerLeftOut,
    /// Gradients of other ranks' keys are not sent.
    GradientsKept,
    /// They are sent to the rank on the other side.
    GradientsToAnother,
    /// Each rank has its own largest scores.
    MaxLogitKept,
}

/// A communicator with a bug.
struct Tampered<'r> {
    of: &'r EmulatedCommunicator,
    bug: Bug,
    /// Bytes of a rank's keys.
    keys: u64,
}

/// A view that is written by one call.
fn part<'a, T>(view: &DeviceViewMut<'a, T>, [start, end]: [u64; 2]) -> DeviceViewMut<'a, T> {
    let access = view.access("a message");
    assert!(start <= end && end <= view.len());
    // SAFETY: elements of the view, for the same owner; parts of one view do not overlap, and one message writes each.
    unsafe { DeviceViewMut::from_raw(access.address + start * size_of::<T>() as u64, end - start, access.owner) }
}

impl Tampered<'_> {
    /// The rank as far on the other side of this one.
    fn mirrored(&self, rank: Rank) -> Rank {
        let world = self.world().get();
        Rank::new((2 * self.rank().index() + world - rank.index()) % world, self.world()).unwrap()
    }

    /// The bug, if it is one of messages of so many bytes: of keys and values, or of their gradients.
    fn bug_of(&self, bytes: u64) -> Bug {
        let of_gradients = matches!(self.bug, Bug::GradientsKept | Bug::GradientsToAnother);
        if of_gradients == (bytes == 2 * self.keys) { self.bug } else { Bug::Nothing }
    }
}

impl Communicator for Tampered<'_> {
    fn rank(&self) -> Rank {
        self.of.rank()
    }

    fn world(&self) -> WorldSize {
        self.of.world()
    }

    fn exchange<T: Pod>(
        &self,
        stream: &Stream,
        sends: &[(Rank, DeviceView<'_, T>)],
        receives: &[(Rank, DeviceViewMut<'_, T>)],
    ) -> Result<()> {
        let all: Vec<_> = receives.iter().map(|(from, view)| (*from, part(view, [0, view.len()]))).collect();
        let bytes = sends.first().map_or(0, |(_, view)| view.len()) * size_of::<T>() as u64;
        let is_first = |rank: Rank| rank.index() == 0;
        match self.bug_of(bytes) {
            Bug::Nothing | Bug::MaxLogitKept => self.of.exchange(stream, sends, &all),
            Bug::OwnerAfter | Bug::GradientsToAnother => {
                let sends: Vec<_> = sends.iter().map(|(to, view)| (self.mirrored(*to), *view)).collect();
                let receives: Vec<_> = all.into_iter().map(|(from, view)| (self.mirrored(from), view)).collect();
                self.of.exchange(stream, &sends, &receives)
            }
            Bug::ChunksSwapped => {
                let halves = |len: u64| [[len / 2, len], [0, len / 2]];
                let sends = sends.iter().flat_map(|(to, view)| halves(view.len()).map(|[start, end]| (*to, view.slice(start, end))));
                let receives = all.iter().flat_map(|(from, view)| {
                    let [second, first] = halves(view.len());
                    [first, second].map(|range| (*from, part(view, range)))
                });
                self.of.exchange(stream, &sends.collect::<Vec<_>>(), &receives.collect::<Vec<_>>())
            }
            Bug::ValuesAssumed => self.of.exchange(stream, &sends[..1], &all[..1]),
            Bug::OneOwnerLeftOut => {
                let sends: Vec<_> = sends.iter().filter(|_| !is_first(self.rank())).copied().collect();
                let receives: Vec<_> = all.into_iter().filter(|(from, _)| !is_first(*from)).collect();
                if sends.is_empty() && receives.is_empty() { Ok(()) } else { self.of.exchange(stream, &sends, &receives) }
            }
            Bug::GradientsKept => Ok(()),
        }
    }

    fn all_gather<'a, T: Pod>(
        &self,
        stream: &Stream,
        shard: impl Into<DeviceView<'a, T>>,
        output: impl Into<DeviceViewMut<'a, T>>,
    ) -> Result<()> {
        self.of.all_gather(stream, shard, output)
    }

    fn all_reduce<'a, T: Reducible>(&self, stream: &Stream, buffer: impl Into<DeviceViewMut<'a, T>>, op: ReduceOp) -> Result<()> {
        if self.bug == Bug::MaxLogitKept { Ok(()) } else { self.of.all_reduce(stream, buffer, op) }
    }

    fn reduce_scatter<'a, T: Reducible>(
        &self,
        stream: &Stream,
        input: impl Into<DeviceView<'a, T>>,
        shard: impl Into<DeviceViewMut<'a, T>>,
        op: ReduceOp,
    ) -> Result<()> {
        self.of.reduce_scatter(stream, input, shard, op)
    }

    fn broadcast<'a, T: Pod>(&self, stream: &Stream, buffer: impl Into<DeviceViewMut<'a, T>>, root: Rank) -> Result<()> {
        self.of.broadcast(stream, buffer, root)
    }

    fn all_to_all<'a, T: Pod>(
        &self,
        stream: &Stream,
        input: impl Into<DeviceView<'a, T>>,
        output: impl Into<DeviceViewMut<'a, T>>,
    ) -> Result<()> {
        self.of.all_to_all(stream, input, output)
    }

    fn group<R>(&self, body: impl FnOnce() -> Result<R>) -> Result<R> {
        self.of.group(body)
    }

    fn split(&self, _: Option<u32>, _: u32) -> Result<Option<Self>> {
        Err(Error::Invalid { what: "Tampered::split", why: "it is not asked for".to_owned() })
    }

    fn barrier(&self, stream: &Stream) -> Result<()> {
        self.of.barrier(stream)
    }
}

const SMALL: AttentionConfig =
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
fn seeds(case: &Case) -> impl Iterator<Item = Case> + use<'_> {
    (1..=32).map(|seed| Case { seed, ..case.clone() })
}

#[test]
fn messages_that_are_tampered_with() {
    let full = AttentionConfig { mask: Mask::Full, ..SMALL };
    let largest = |attention| Case::new(3, AttentionConfig { max_logit: true, ..attention }).by(Schedule::Gather);
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
        (Bug::MaxLogitKept, largest(SMALL)),
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

/// In #2829 bounds of windows are computed once, for the longest sequence, so that those of shorter ones are as much further to the right.
#[test]
fn a_window_of_the_longest_sequence() {
    let window = Window { left: Some(3), right: Some(1) };
    let case = Case { lengths: vec![[12, 12], [8, 12]], ..Case::new(3, AttentionConfig { window, mask: Mask::Full, ..PACKED }) };
    let gather = case.clone().by(Schedule::Gather);
    for case in seeds(&case).chain(seeds(&gather)) {
        let whole = case.whole();
        let found = found_by(&case, &whole, Bug::Nothing, case.seed == 1).unwrap();
        let of = |at: usize, window| {
            let config = AttentionConfig { window, ..whole.config };
            Whole { config, sequences: vec![whole.sequences[at].clone()], ..whole.clone() }.solve()
        };
        // Of rows in other sequences each has zeros, and -inf.
        let both = |[one, other]: [Results; 2]| {
            let sum = |one: &[f64], other: &[f64]| one.iter().zip(other).map(|(a, b)| a + b).collect::<Vec<_>>();
            let largest = |one: &[f64], other: &[f64]| one.iter().zip(other).map(|(a, b)| a.max(*b)).collect::<Vec<_>>();
            Results {
                out: sum(&one.out, &other.out),
                log_sum_exp: largest(&one.log_sum_exp, &other.log_sum_exp),
                grad_q: sum(&one.grad_q, &other.grad_q),
                grad_k: sum(&one.grad_k, &other.grad_k),
                grad_v: sum(&one.grad_v, &other.grad_v),
                ..one
            }
        };
        let (right, shifted) =
            (both([of(0, window), of(1, window)]), both([of(0, window), of(1, Window { right: Some(1 + 12 - 8), ..window })]));
        if case.seed == 1 {
            assert!(is_right(&case, Ok(found.clone()), &right), "{case:?}");
        }
        assert!(is_forward_right(&case, Ok(found.clone()), &right), "{case:?}");
        assert!(!is_forward_right(&case, Ok(found), &shifted), "{case:?}");
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
        // The values are the same under all seeds.
        for case in seeds(&Case { config, ..base }).take(4) {
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

/// Parts have other bits in another order: gradients as large as those that [the same bits](crate::context_calls) are asked of.
#[test]
fn the_order_of_sums_has_bits() {
    for seed in 1..=32 {
        let case = Case { seed, ..Case::new(3, AttentionConfig { mask: Mask::Full, ..SMALL }) };
        let whole = case.whole();
        // The gradient of a key by the queries of each rank.
        let of_rank = |rank: usize| {
            let mut part = whole.clone();
            part.grad_out.iter_mut().enumerate().filter(|(at, _)| at / 8 % 3 != rank).for_each(|(_, x)| *x = 0.0);
            part.solve().grad_v.iter().map(|x| *x as f32).collect::<Vec<_>>()
        };
        let parts = [0, 1, 2].map(of_rank);
        let sum = |order: [usize; 3]| -> Vec<u32> {
            (0..parts[0].len()).map(|at| order.into_iter().fold(0.0, |sum, rank| sum + parts[rank][at]).to_bits()).collect()
        };
        assert_ne!(sum([0, 1, 2]), sum([2, 1, 0]), "seed {seed}");
    }
}
