//! Context parallelism on tensors as programs have them: parts of larger ones, used on several streams, by several teams.

use half::bf16 as Half;
use oxtile::attention::{AttentionConfig, BackwardInputs, Gradients, Inputs, Outputs, Sink};
use oxtile::comm::{Rank, Team, WorldSize};
use oxtile::context_parallel::{ContextParallel, Schedule, Transport};
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
        let operations = ranks.operations::<bf16>().unwrap();
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
            let operations = ranks.operations::<bf16>().unwrap();
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
    let put = Case::by_puts;
    for by in [|case: Case| case.by(Schedule::Ring), |case: Case| case.by(Schedule::Pull), put] {
        side_by_side(by);
    }
}

fn side_by_side(by: fn(Case) -> Case) {
    // Ranks of a team of two have twice the rows of a team of four, and so has the arena.
    let all = by(Case::new(4, AttentionConfig { queries: 24, keys: 24, ..SMALL }));
    let two = WorldSize::new(2).unwrap();
    let ranks = Ranks::new(&all).unwrap();
    let case = |team: usize| Case { seed: 1 + team as u64, ..by(Case::new(2, SMALL)) };
    let wholes = [0, 1].map(|team| case(team).whole());
    let size = ranks.world.size();
    // The even ranks, and the odd ones.
    let team = |at: usize| Team::strided(size, Rank::new(at as u32 % 2, size).unwrap(), 2, two).unwrap();
    let members: Vec<_> = size.ranks().enumerate().map(|(at, rank)| team(at).member(rank).unwrap()).collect();
    let communicators: Vec<_> = ranks.world.ranks.iter().enumerate().map(|(at, rank)| rank.team(&team(at)).unwrap().unwrap()).collect();
    let make = |(at, stream)| {
        let transport = match ranks.arenas.get(at) {
            Some(arena) => Transport::symmetric(arena, &members[at]),
            None => Transport::collective(&communicators[at]),
        };
        ContextParallel::<bf16>::new(stream, transport, case(0).config).unwrap()
    };
    let operations: Vec<_> = ranks.world.streams.iter().enumerate().map(make).collect();
    let place = |at: usize| Rank::new(at as u32 / 2, two).unwrap();
    let tensors = |(at, stream)| Tensors::new(&case(at % 2), &wholes[at % 2], place(at), stream).unwrap();
    let mut tensors: Vec<Tensors> = ranks.world.streams.iter().enumerate().map(tensors).collect();
    for forward in [true, false] {
        for (at, stream) in ranks.world.streams.iter().enumerate() {
            let (case, operation) = (case(at % 2), &operations[at]);
            let mut pass =
                if forward { tensors[at].forward(&case, operation, stream) } else { tensors[at].backward(&case, operation, stream) }
                    .unwrap();
            pass.run(stream).unwrap();
        }
    }
    for (at, stream) in ranks.world.streams.iter().enumerate() {
        let found = tensors[at].results(stream).unwrap();
        case(at % 2).compare(place(at), &found, &wholes[at % 2].solve());
    }
    drop(operations);
    ranks.close().unwrap();
}

/// Elements of another type: rounded results, and gradients, of `f16` are as near as its precision.
#[test]
fn elements_may_be_f16() {
    let config = AttentionConfig { sink: Sink::OffByOne, heads: 4, ..SMALL };
    let inner = WorldSize::new(2).unwrap();
    let grid = Case::new(4, AttentionConfig { queries: 16, keys: 16, ..config }).by(Schedule::Hierarchical { inner });
    let cases = [Schedule::Ring, Schedule::Pull, Schedule::Gather, Schedule::AllToAll].map(|schedule| Case::new(2, config).by(schedule));
    for case in cases.into_iter().chain([grid]) {
        let whole = case.whole();
        let expected = whole.solve();
        for (rank, found) in case.world().ranks().zip(case.results_in::<f16>(&whole).unwrap()) {
            case.compare_within(rank, &found, &expected, 2e-3);
        }
    }
}
