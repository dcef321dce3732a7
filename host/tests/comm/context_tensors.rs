//! Context parallelism on tensors as programs have them: parts of larger ones, used on several streams, by several teams.

use half::bf16 as Half;
use oxtile::attention::{AttentionConfig, BackwardInputs, Gradients, Inputs, Layout, Outputs};
use oxtile::comm::{Rank, Team, WorldSize};
use oxtile::context_parallel::{ContextParallel, Partition, Schedule, Transport};
use oxtile::num::{bf16, f16};
use oxtile::runtime::Mode;
use oxtile::tensor::{Heads, HeadsMut};
use oxtile::{Buffer, Result, Stream};

use crate::context_case::{Case, Tensors};
use crate::context_parallel::BASE;
use crate::context_ranks::Ranks;

const SMALL: AttentionConfig = AttentionConfig { queries: 12, keys: 12, heads: 2, key_heads: 2, head_size: 8, ..BASE };

/// Runs both passes of a rank on queries, keys and values that are heads of one tensor, into gradients that are heads of another.
fn fused(
    case: &Case,
    operation: &ContextParallel<'_, bf16>,
    stream: &Stream,
    tensors: &mut Tensors,
    forward: bool,
    both: &mut [Buffer<bf16>; 2],
) -> Result<()> {
    let AttentionConfig { batches, queries, heads, key_heads, head_size, .. } = case.config.attention;
    let shape = [batches, queries / u64::from(case.ranks), heads + 2 * key_heads, head_size];
    let [all, gradients] = both;
    let part = |range| Heads::bshd(all.view(), shape)?.heads(range);
    let inputs = Inputs::new(part(0..heads)?, part(heads..heads + key_heads)?, part(heads + key_heads..heads + 2 * key_heads)?);
    if forward {
        let outputs = Outputs::new(tensors.outputs[0].view_mut(), tensors.log_sum_exp.view_mut());
        return operation.bind_forward(stream, inputs, outputs)?.run(stream);
    }
    let (grad_q, grad_kv) = HeadsMut::bshd(gradients.view_mut(), shape)?.split_heads(heads)?;
    let (grad_k, grad_v) = grad_kv.split_heads(key_heads)?;
    let (out, log_sum_exp) = (tensors.outputs[0].view().into(), tensors.log_sum_exp.view());
    let inputs = BackwardInputs { forward: inputs, out, log_sum_exp, grad_out: tensors.inputs[3].view().into() };
    operation.bind_backward(stream, inputs, Gradients::new(grad_q, grad_k, grad_v))?.run(stream)
}

/// Each row's heads of three tensors, one after the other; or the other way.
fn interleave(tensors: [&[Half]; 3], rows: usize) -> Vec<Half> {
    let row =
        |at: usize| tensors.into_iter().flat_map(move |tensor| tensor[at * tensor.len() / rows..(at + 1) * tensor.len() / rows].to_vec());
    (0..rows).flat_map(row).collect()
}

/// Heads of one tensor are as good as tensors of their own: the same bits.
#[test]
fn tensors_may_be_heads_of_others() {
    let options = AttentionConfig { batches: 2, heads: 4, key_heads: 2, ..SMALL };
    for case in [Schedule::Ring, Schedule::Gather, Schedule::Pull, Schedule::AllToAll].map(|schedule| Case::new(2, options).by(schedule)) {
        let whole = case.whole();
        let expected = case.results_of(&whole).unwrap();
        let ranks = Ranks::new(&case).unwrap();
        let operations = ranks.operations().unwrap();
        let mut tensors = ranks.tensors(&whole).unwrap();
        let rows = (options.batches * options.queries / 2) as usize;
        let upload = |(tensors, stream): (&Tensors, &Stream)| {
            let [q, k, v] = [0, 1, 2].map(|at| tensors.inputs[at].to_vec_as::<Half>(stream).unwrap());
            let all = interleave([&q, &k, &v], rows);
            let gradients = vec![Half::NAN; all.len()];
            [all, gradients].map(|values| Buffer::<bf16>::from_slice(stream, &values).unwrap())
        };
        let mut both: Vec<_> = tensors.iter().zip(&ranks.world.streams).map(upload).collect();
        for forward in [true, false] {
            for (((operation, stream), tensors), both) in operations.iter().zip(&ranks.world.streams).zip(&mut tensors).zip(&mut both) {
                fused(&case, operation, stream, tensors, forward, both).unwrap();
            }
        }
        for (at, stream) in ranks.world.streams.iter().enumerate() {
            let bits = |values: &[f64]| values.iter().map(|x| Half::from_f64(*x)).collect::<Vec<_>>();
            let [q, k, v] = [&expected[at].grad_q, &expected[at].grad_k, &expected[at].grad_v].map(|values| bits(values));
            assert_eq!(tensors[at].outputs[0].to_vec_as::<Half>(stream).unwrap(), bits(&expected[at].out), "{case:?}");
            assert_eq!(both[at][1].to_vec_as::<Half>(stream).unwrap(), interleave([&q, &k, &v], rows), "{case:?}");
        }
        drop(operations);
        ranks.close().unwrap();
    }
}

/// Each pass by a schedule of its own.
#[test]
fn passes_may_differ() {
    let pairs = [
        (Schedule::AllToAll, Schedule::Ring),
        (Schedule::Gather, Schedule::Ring),
        (Schedule::Ring, Schedule::Gather),
        (Schedule::Pull, Schedule::AllToAll),
        (Schedule::Auto, Schedule::Auto),
    ];
    for (forward, backward) in pairs {
        let mut case = Case::new(2, SMALL);
        (case.config.forward, case.config.backward) = (forward, backward);
        let mixed = case.results_of(&case.whole()).unwrap();
        let expected = case.whole().solve();
        mixed.iter().zip(case.world().ranks()).for_each(|(found, rank)| case.compare(rank, found, &expected));
        let one = |schedule| case.clone().by(schedule).results_of(&case.whole()).unwrap();
        if forward != Schedule::Auto {
            let first = one(forward);
            assert!(mixed.iter().zip(&first).all(|(mixed, first)| mixed.out == first.out), "{forward}");
        }
    }
}

/// The passes of an operation on streams of their own, which nothing but the tensors orders.
#[test]
fn passes_may_be_on_different_streams() {
    for schedule in [Schedule::Ring, Schedule::Pull, Schedule::Gather, Schedule::AllToAll] {
        for seed in 1..3 {
            let case = Case { mode: Mode::Check, seed, ..Case::new(2, SMALL).by(schedule) };
            let ranks = Ranks::new(&case).unwrap();
            let operations = ranks.operations().unwrap();
            let mut tensors = ranks.tensors(&case.whole()).unwrap();
            let others: Vec<_> = ranks.world.ranks.iter().map(|rank| rank.device().stream().unwrap()).collect();
            for _ in 0..2 {
                for (at, operation) in operations.iter().enumerate() {
                    tensors[at].forward(&case, operation, &ranks.world.streams[at]).unwrap().run(&ranks.world.streams[at]).unwrap();
                }
                for (at, operation) in operations.iter().enumerate() {
                    tensors[at].backward(&case, operation, &others[at]).unwrap().run(&others[at]).unwrap();
                }
            }
            let expected = case.whole().solve();
            for (at, rank) in case.world().ranks().enumerate() {
                case.compare(rank, &tensors[at].results(&ranks.world.streams[at]).unwrap(), &expected);
            }
            drop(operations);
            ranks.close().unwrap();
        }
    }
}

/// Two teams of one world, each with a sequence of its own.
#[test]
fn teams_work_side_by_side() {
    let (all, two) = (Case::new(4, SMALL), WorldSize::new(2).unwrap());
    let ranks = Ranks::new(&all).unwrap();
    let case = |team: u64| Case { seed: 1 + team, ..Case::new(2, SMALL) };
    let wholes = [0, 1].map(|team| case(team).whole());
    let size = ranks.world.size();
    // The even ranks, and the odd ones.
    let team = |at: u32| Team::strided(size, Rank::new(at % 2, size).unwrap(), 2, two).unwrap();
    let communicators: Vec<_> = ranks.world.ranks.iter().zip(0..).map(|(rank, at)| rank.team(&team(at)).unwrap().unwrap()).collect();
    let make = |(communicator, stream)| ContextParallel::<bf16>::new(stream, Transport::collective(communicator), case(0).config).unwrap();
    let operations: Vec<_> = communicators.iter().zip(&ranks.world.streams).map(make).collect();
    let mut tensors: Vec<_> = (0..4_usize)
        .map(|at| {
            Tensors::new(&case(at as u64 % 2), &wholes[at % 2], Rank::new(at as u32 / 2, two).unwrap(), &ranks.world.streams[at]).unwrap()
        })
        .collect();
    for forward in [true, false] {
        for (at, stream) in ranks.world.streams.iter().enumerate() {
            let (case, operation) = (case(at as u64 % 2), &operations[at]);
            let mut pass =
                if forward { tensors[at].forward(&case, operation, stream) } else { tensors[at].backward(&case, operation, stream) }
                    .unwrap();
            pass.run(stream).unwrap();
        }
    }
    for (at, stream) in ranks.world.streams.iter().enumerate() {
        let found = tensors[at].results(stream).unwrap();
        case(at as u64 % 2).compare(Rank::new(at as u32 / 2, two).unwrap(), &found, &wholes[at % 2].solve());
    }
}

/// Elements of another type: rounded results of `f16` are as near as its precision.
#[test]
fn elements_may_be_f16() {
    let case = Case::new(2, AttentionConfig { mask: oxtile::attention::Mask::Full, ..SMALL });
    let (ranks, whole) = (Ranks::new(&case).unwrap(), case.whole());
    let expected = whole.solve();
    for schedule in [Schedule::Ring, Schedule::AllToAll] {
        let make = |(at, stream)| ContextParallel::<f16>::new(stream, ranks.transport(at), case.config.by(schedule)).unwrap();
        let operations: Vec<_> = ranks.world.streams.iter().enumerate().map(make).collect();
        let mut outs = Vec::new();
        for ((operation, stream), rank) in operations.iter().zip(&ranks.world.streams).zip(case.world().ranks()) {
            let shape = [12, 2, 8];
            let upload = |values: &[f64]| {
                let part: Vec<_> = case.part(rank, values, shape).into_iter().map(half::f16::from_f64).collect();
                Buffer::<f16>::from_slice(stream, &part).unwrap()
            };
            let (q, k, v) = (upload(&whole.q), upload(&whole.k), upload(&whole.v));
            let (mut out, mut log) = (Buffer::<f16>::zeros(stream, q.len()).unwrap(), Buffer::<f32>::zeros(stream, 12).unwrap());
            let inputs = Inputs::new(q.view(), k.view(), v.view());
            operation.bind_forward(stream, inputs, Outputs::new(out.view_mut(), log.view_mut())).unwrap().run(stream).unwrap();
            outs.push((out, stream, case.part(rank, &expected.out, shape)));
        }
        for (out, stream, expected) in outs {
            let found: Vec<_> = out.to_vec_as::<half::f16>(stream).unwrap().into_iter().map(|x| x.to_f64()).collect();
            let error: f64 = found.iter().zip(&expected).map(|(a, b)| (a - b) * (a - b)).sum::<f64>();
            let norm: f64 = expected.iter().map(|b| b * b).sum();
            assert!((error / norm).sqrt() <= 2e-3, "{schedule}: {}", (error / norm).sqrt());
        }
    }
    assert_eq!((case.config.attention.layout, case.config.partition), (Layout::Bshd, Partition::Zigzag));
}
