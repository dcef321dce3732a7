//! What the backward kernels refuse to be launched with: a section that has no order, a result that goes nowhere or to two tensors, what bulk copies cannot read.

use oxtile::tensor::{SequenceRows, Strided, TensorMap, TensorMapMut};
use oxtile::{Buffer, Runtime};
use oxtile_kernels::attention::{
    AttentionBackward, AttentionBackwardArgs, AttentionBackwardBlocks, AttentionBackwardBlocksArgs, AttentionBackwardConvert,
    AttentionBackwardConvertArgs, AttentionBackwardConvertGeneral, AttentionBackwardConvertGeneralArgs, AttentionBackwardDeltas,
    AttentionBackwardDeltasArgs, AttentionBackwardGeneral, AttentionBackwardGeneralArgs, AttentionBackwardPortable,
    AttentionBackwardPortableArgs, AttentionBackwardReduce, AttentionBackwardReduceArgs, AttentionBackwardSink, AttentionBackwardSinkArgs,
    BACKWARD_KEYS, BackwardTensorsArgument, BlockStatisticsArgument, DenseKeysArgument, FAR, Heads, KeyGradientsArgument, KeyHeads,
    KeyOrderArgument, KeyPartsArgument, KeySumsArgument, Mask, PortableTargetArgument, PortableTensorsArgument, QueryStatisticsArgument,
    QuerySumsArgument, QueryTargetArgument, ResultRowsArgument, Scores, SequenceKeysArgument, SequencesArgument, WARPGROUP_KEYS, Window,
    partial_elements,
};
use oxtile_tile::launch::DeviceView;
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::num::bf16;

use super::attention_limits::{LATE, refuses, sequences};
use crate::case::{Case, Outcome, Size, equal, stream, text};

pub fn cases() -> Vec<Case> {
    vec![
        Case::new("attention_backward::refused::arguments", Size::Small, dense),
        Case::new("attention_backward::refused::sums", Size::Small, sums),
        Case::new("attention_backward_general::refused::arguments", Size::Small, general),
        Case::new("attention_backward_general::refused::arguments::queries", Size::Small, queries),
        Case::new("attention_backward_portable::refused::arguments", Size::Small, portable),
        Case::new("attention_backward_deltas::refused::arguments", Size::Small, deltas),
        Case::new("attention_backward_blocks::rows_without_room", Size::Small, without_room),
    ]
}

/// Queries of a block.
const QUERIES: usize = 128;
/// No factor that matters, no cap.
const SCORES: Scores = Scores { scale: 1.0, cap_limit: 0.0, cap_factor: 0.0 };
const ALL: Window = Window { left: FAR, right: FAR, top_left: false };

/// The elements of statistics, of sums and of parts of gradients: a block of queries, or a tile of keys, for each of four heads.
const OF_STATISTICS: u64 = 4 * QUERIES as u64;
const OF_SUMS: u64 = OF_STATISTICS * 64;
const OF_PARTIALS: u64 = 4 * partial_elements(64);

/// Two batches of two heads of three queries and keys.
fn dense(runtime: &Runtime) -> Outcome {
    type Problem<'a> = DenseKeysArgument<'a, bf16, 64, QUERIES, true>;
    let rows = Strided { shape: [2, 2, 3, 64], strides: [384, 192, 64, 1] };
    let stream = stream(runtime)?;
    let kernel = text(runtime.load::<AttentionBackward<bf16, 64, QUERIES, 64, true>>())?;
    let tensor = text(Buffer::<bf16>::zeros(&stream, 768))?;
    let (mut grad_k, mut grad_v) = (text(Buffer::<bf16>::zeros(&stream, 768))?, text(Buffer::<bf16>::zeros(&stream, 768))?);
    let q = text(TensorMap::<_, QUERIES, 64, Swizzle128, 4>::strided(&stream, tensor.view(), rows))?;
    let k = text(TensorMap::<_, BACKWARD_KEYS, 64, Swizzle128, 4>::strided(&stream, tensor.view(), rows))?;
    let mut grad_k = text(TensorMapMut::<_, WARPGROUP_KEYS, 64, Swizzle128, 4>::strided(&stream, grad_k.view_mut(), rows))?;
    let mut grad_v = text(TensorMapMut::<_, WARPGROUP_KEYS, 64, Swizzle128, 4>::strided(&stream, grad_v.view_mut(), rows))?;
    let statistics = text(Buffer::<f32>::zeros(&stream, OF_STATISTICS + 1))?;
    let (mut sums, mut turns) = (text(Buffer::<f32>::zeros(&stream, OF_SUMS + 1))?, text(Buffer::<u32>::zeros(&stream, 4))?);
    let mut partials = text(Buffer::<f32>::zeros(&stream, OF_PARTIALS + 1))?;
    let mut counter = text(Buffer::<u32>::zeros(&stream, 2))?;
    let mut launch_at = |[offsets, deltas, of_sums]: [u64; 3], in_parts: Option<u64>, counters: u64, change: &dyn Fn(&mut Problem<'_>)| {
        let (mut counter, mut sums, mut partials) = (counter.view_mut(), sums.view_mut(), partials.view_mut());
        let gradients = KeyGradientsArgument { k: grad_k.view_mut(), v: grad_v.view_mut() };
        let mut problem = Problem {
            tensors: BackwardTensorsArgument {
                q: q.view(),
                grad_out: q.view(),
                k: k.view(),
                v: k.view(),
                offsets: statistics.view().slice(offsets, offsets + OF_STATISTICS),
                deltas: statistics.view().slice(deltas, deltas + OF_STATISTICS),
            },
            sums: QuerySumsArgument { values: sums.slice_mut(of_sums, of_sums + OF_SUMS), turns: turns.view_mut(), blocks: 1 },
            gradients: in_parts.is_none().then_some(gradients),
            partials: in_parts.map(|begin| partials.slice_mut(begin, begin + OF_PARTIALS)),
            heads: KeyHeads { batches: 2, heads: 2, group: 1, splits: 1, step: 0 },
            mask: Mask { queries: 3, keys: 3, first: -FAR, last: FAR },
            order: KeyOrderArgument { counter: counter.slice_mut(0, counters), section: 1, ordered: false },
            scale: 1.0,
        };
        change(&mut problem);
        kernel.launch(&stream, AttentionBackwardArgs { problem })
    };
    text(launch_at([0; 3], Some(0), 1, &|_| {}))?;
    refuses("problem.tensors.offsets", launch_at([1, 0, 0], None, 1, &|_| {}))?;
    refuses("problem.tensors.deltas", launch_at([0, 1, 0], None, 1, &|_| {}))?;
    refuses("problem.sums.values", launch_at([0, 0, 1], None, 1, &|_| {}))?;
    refuses("problem.partials", launch_at([0; 3], Some(1), 1, &|_| {}))?;
    let mut launch = |counters: u64, change: &dyn Fn(&mut Problem<'_>)| launch_at([0; 3], None, counters, change);
    text(launch(1, &|_| {}))?;
    // More heads than there are.
    text(launch(1, &|problem| problem.order.section = i32::MAX as u32))?;
    refuses("problem.order.counter", launch(2, &|_| {}))?;
    for (name, change) in [
        ("problem.order.section", (|problem| problem.order.section = 0) as fn(&mut Problem<'_>)),
        ("problem.order.section", |problem| problem.order.section = 1 << 31),
        ("problem.order.section", |problem| (problem.mask.keys, problem.order.section) = (129, 1 << 30)),
        ("problem.partials", |problem| problem.gradients = None),
    ] {
        refuses(name, launch(1, &change))?;
    }
    Ok(())
}

/// What comes after the kernel of dense tensors: sums and parts that do not begin at a multiple of 16 bytes.
fn sums(runtime: &Runtime) -> Outcome {
    let rows = Strided { shape: [2, 2, 3, 64], strides: [384, 192, 64, 1] };
    let stream = stream(runtime)?;
    let (mut first, mut second) = (text(Buffer::<bf16>::zeros(&stream, 768))?, text(Buffer::<bf16>::zeros(&stream, 768))?);
    let mut queries = text(Buffer::<bf16>::zeros(&stream, 768))?;
    let mut grad_q = text(TensorMapMut::<_, QUERIES, 64, Swizzle128, 4>::strided(&stream, queries.view_mut(), rows))?;
    let convert = text(runtime.load::<AttentionBackwardConvert<bf16, 64, QUERIES, 64>>())?;
    let (mut sums, mut turns) = (text(Buffer::<f32>::zeros(&stream, OF_SUMS + 1))?, text(Buffer::<u32>::zeros(&stream, 4))?);
    let mut launch = |begin: u64| {
        let mut values = sums.view_mut();
        let sums = QuerySumsArgument { values: values.slice_mut(begin, begin + OF_SUMS), turns: turns.view_mut(), blocks: 1 };
        convert.launch(&stream, AttentionBackwardConvertArgs { sums, grad_q: grad_q.view_mut(), heads: 2, scale: 1.0 })
    };
    text(launch(0))?;
    refuses("sums.values", launch(1))?;
    let mut grad_k = text(TensorMapMut::<_, WARPGROUP_KEYS, 64, Swizzle128, 4>::strided(&stream, first.view_mut(), rows))?;
    let mut grad_v = text(TensorMapMut::<_, WARPGROUP_KEYS, 64, Swizzle128, 4>::strided(&stream, second.view_mut(), rows))?;
    let reduce = text(runtime.load::<AttentionBackwardReduce<bf16, 64>>())?;
    let mut partials = text(Buffer::<f32>::zeros(&stream, OF_PARTIALS + 1))?;
    let mut launch = |begin: u64| {
        let (mut values, gradients) = (partials.view_mut(), KeyGradientsArgument { k: grad_k.view_mut(), v: grad_v.view_mut() });
        let values = values.slice_mut(begin, begin + OF_PARTIALS);
        let parts = KeyPartsArgument { values, splits: 1, heads: 4, key_blocks: 1, split_step: 4, head_step: 1 };
        reduce.launch(&stream, AttentionBackwardReduceArgs { parts, gradients, heads: 2 })
    };
    text(launch(0))?;
    refuses("parts.values", launch(1))
}

/// Packed: two sequences of two queries and two keys, two heads of 16 elements.
const SEQUENCES: SequenceRows = SequenceRows { rows: 4, row: 32, heads: 2, head: 16, size: 16 };
/// Blocks of queries of a head, of which each sequence has one.
const BLOCKS: u32 = 2;
/// Queries that they have room for, of both heads.
const ROWS: u64 = 2 * BLOCKS as u64 * QUERIES as u64;

fn general(runtime: &Runtime) -> Outcome {
    type Problem<'a> = SequenceKeysArgument<'a, bf16, 64, QUERIES, false>;
    let stream = stream(runtime)?;
    let kernel = text(runtime.load::<AttentionBackwardGeneral<bf16, 64, QUERIES, 64, false>>())?;
    let tensor = text(Buffer::<bf16>::zeros(&stream, 128))?;
    let (mut grad_k, mut grad_v) = (text(Buffer::<bf16>::zeros(&stream, 128))?, text(Buffer::<bf16>::zeros(&stream, 128))?);
    let (mut sum_k, mut sum_v) = (text(Buffer::<f32>::zeros(&stream, 128))?, text(Buffer::<f32>::zeros(&stream, 128))?);
    let q = text(TensorMap::<_, QUERIES, 64, Swizzle128, 5>::sequences(&stream, tensor.view(), SEQUENCES))?;
    let k = text(TensorMap::<_, BACKWARD_KEYS, 64, Swizzle128, 5>::sequences(&stream, tensor.view(), SEQUENCES))?;
    let mut grad_k = text(TensorMapMut::<_, WARPGROUP_KEYS, 64, Swizzle128, 5>::sequences(&stream, grad_k.view_mut(), SEQUENCES))?;
    let mut grad_v = text(TensorMapMut::<_, WARPGROUP_KEYS, 64, Swizzle128, 5>::sequences(&stream, grad_v.view_mut(), SEQUENCES))?;
    let statistics = text(Buffer::<f32>::zeros(&stream, ROWS + 1))?;
    let (mut sums, mut turns) = (text(Buffer::<f32>::zeros(&stream, ROWS * 64 + 1))?, text(Buffer::<u32>::zeros(&stream, 4))?);
    let (mut counter, ends) = (text(Buffer::<u32>::zeros(&stream, 2))?, text(Buffer::from_slice(&stream, &[0_u32, 2, 4]))?);
    let mut launch_at =
        |[offsets, deltas, of_sums]: [u64; 3], [size, value_size]: [u32; 2], counters: u64, change: &dyn Fn(&mut Problem<'_>)| {
            let (mut counter, mut sums) = (counter.view_mut(), sums.view_mut());
            let (mut sum_k, mut sum_v) = (sum_k.view_mut(), sum_v.view_mut());
            let (sum_k, sum_v) = (sum_k.slice_mut(0, 8 * u64::from(size)), sum_v.slice_mut(0, 8 * u64::from(value_size)));
            let mut problem = Problem {
                tensors: BackwardTensorsArgument {
                    q: q.view(),
                    grad_out: q.view(),
                    k: k.view(),
                    v: k.view(),
                    offsets: statistics.view().slice(offsets, offsets + ROWS),
                    deltas: statistics.view().slice(deltas, deltas + ROWS),
                },
                sums: QuerySumsArgument { values: sums.slice_mut(of_sums, of_sums + ROWS * 64), turns: turns.view_mut(), blocks: BLOCKS },
                gradients: Some(KeyGradientsArgument { k: grad_k.view_mut(), v: grad_v.view_mut() }),
                added: Some(KeySumsArgument { k: sum_k, v: sum_v, size, value_size }),
                grad_scale: 1.0,
                sequences: sequences(ends.view()),
                heads: KeyHeads { batches: 2, heads: 2, group: 1, splits: 1, step: 0 },
                window: ALL,
                scores: SCORES,
                order: KeyOrderArgument { counter: counter.slice_mut(0, counters), section: 2, ordered: false },
            };
            change(&mut problem);
            kernel.launch(&stream, AttentionBackwardGeneralArgs { problem })
        };
    for (name, starts) in
        [("problem.tensors.offsets", [1, 0, 0]), ("problem.tensors.deltas", [0, 1, 0]), ("problem.sums.values", [0, 0, 1])]
    {
        refuses(name, launch_at(starts, [16; 2], 1, &|problem| problem.added = None))?;
    }
    // Sums as long as such rows ask for.
    refuses("problem.added.k", launch_at([0; 3], [12, 16], 1, &|problem| problem.gradients = None))?;
    refuses("problem.added.v", launch_at([0; 3], [16, 12], 1, &|problem| problem.gradients = None))?;
    let mut launch = |counters: u64, change: &dyn Fn(&mut Problem<'_>)| launch_at([0; 3], [16; 2], counters, change);
    text(launch(1, &|problem| problem.gradients = None))?;
    text(launch(1, &|problem| problem.added = None))?;
    // Keys of a section: any number of them is right.
    text(launch(1, &|problem| (problem.added, problem.order.section) = (None, 0)))?;
    text(launch(1, &|problem| (problem.added, problem.order.section) = (None, u32::MAX)))?;
    refuses("problem.gradients", launch(1, &|_| {}))?;
    refuses("problem.gradients", launch(1, &|problem| (problem.gradients, problem.added) = (None, None)))?;
    refuses("problem.order.counter", launch(2, &|problem| problem.added = None))
}

/// Where the gradients of queries go.
fn queries(runtime: &Runtime) -> Outcome {
    type Args<'a> = AttentionBackwardConvertGeneralArgs<'a, bf16, 64, QUERIES, 64>;
    let stream = stream(runtime)?;
    let kernel = text(runtime.load::<AttentionBackwardConvertGeneral<bf16, 64, QUERIES, 64>>())?;
    let (mut rounded, mut added) = (text(Buffer::<bf16>::zeros(&stream, 128))?, text(Buffer::<f32>::zeros(&stream, 128))?);
    let mut rounded = text(TensorMapMut::<_, QUERIES, 64, Swizzle128, 5>::sequences(&stream, rounded.view_mut(), SEQUENCES))?;
    let (mut sums, mut turns) = (text(Buffer::<f32>::zeros(&stream, ROWS * 64))?, text(Buffer::<u32>::zeros(&stream, 4))?);
    let ends = text(Buffer::from_slice(&stream, &[0_u32, 2, 4]))?;
    let mut launch = |change: &dyn Fn(&mut Args<'_>)| {
        let mut args = Args {
            sums: QuerySumsArgument { values: sums.view_mut(), turns: turns.view_mut(), blocks: BLOCKS },
            target: QueryTargetArgument { rounded: Some(rounded.view_mut()), added: Some(added.view_mut()), size: 16, scale: 1.0 },
            sequences: sequences(ends.view()),
            heads: Heads { batches: 2, heads: 2, group: 1, step: 0 },
        };
        change(&mut args);
        kernel.launch(&stream, args)
    };
    text(launch(&|args| args.target.rounded = None))?;
    text(launch(&|args| args.target.added = None))?;
    refuses("target.size", launch(&|args| (args.target.rounded, args.target.size) = (None, 12)))?;
    refuses("target.rounded", launch(&|_| {}))?;
    refuses("target.rounded", launch(&|args| (args.target.rounded, args.target.added) = (None, None)))
}

type PortableArgs<'a, const OF_KEYS: bool> = AttentionBackwardPortableArgs<'a, bf16, 1, 64, 1, OF_KEYS>;

/// The arguments of either kernel.
fn portable_args<'a, const OF_KEYS: bool>(
    tensor: DeviceView<'a, bf16>,
    (statistics, rows): (DeviceView<'a, f32>, u32),
    sequences: SequencesArgument<'a>,
    target: PortableTargetArgument<'a, bf16>,
) -> PortableArgs<'a, OF_KEYS> {
    PortableArgs {
        tensors: PortableTensorsArgument { q: tensor, k: tensor, v: tensor, grad_out: tensor, size: 16, value_size: 16 },
        statistics: QueryStatisticsArgument { log_sum_exp: statistics, deltas: statistics, rows },
        target,
        sequences,
        heads: Heads { batches: 2, heads: 2, group: 1, step: 0 },
        window: ALL,
        scores: SCORES,
    }
}

fn portable(runtime: &Runtime) -> Outcome {
    let stream = stream(runtime)?;
    let of_keys = text(runtime.load::<AttentionBackwardPortable<bf16, 1, 64, 1, true>>())?;
    let of_queries = text(runtime.load::<AttentionBackwardPortable<bf16, 1, 64, 1, false>>())?;
    let (tensor, statistics) = (text(Buffer::<bf16>::zeros(&stream, 128))?, text(Buffer::<f32>::zeros(&stream, 8))?);
    let (mut grad, mut grad_v) = (text(Buffer::<bf16>::zeros(&stream, 128))?, text(Buffer::<bf16>::zeros(&stream, 128))?);
    let (mut sum, mut sum_v) = (text(Buffer::<f32>::zeros(&stream, 128))?, text(Buffer::<f32>::zeros(&stream, 128))?);
    let ends = text(Buffer::from_slice(&stream, &[0_u32, 2, 4]))?;
    let late = text(Buffer::from_slice(&stream, &LATE))?;
    let mut launch_of =
        |(ends, rows): (DeviceView<'_, u32>, u32), row_tiles: u32, keys: bool, [rounded, rounded_v, added, added_v]: [bool; 4]| {
            let target = PortableTargetArgument {
                grad: rounded.then(|| grad.view_mut()),
                grad_v: rounded_v.then(|| grad_v.view_mut()),
                grad_sum: added.then(|| sum.view_mut()),
                grad_v_sum: added_v.then(|| sum_v.view_mut()),
                scale: 1.0,
                row_tiles,
            };
            let (tensor, statistics, sequences) = (tensor.view(), (statistics.view(), rows), sequences(ends));
            match keys {
                true => of_keys.launch(&stream, portable_args(tensor, statistics, sequences, target)),
                false => of_queries.launch(&stream, portable_args(tensor, statistics, sequences, target)),
            }
        };
    for (keys, given) in [(true, [true, true, false, false]), (false, [true, false, false, false])] {
        text(launch_of((late.view(), 2), 1, keys, given))?;
        text(stream.synchronize())?;
    }
    let mut launch_tiles = |row_tiles: u32, keys: bool, given: [bool; 4]| launch_of((ends.view(), 0), row_tiles, keys, given);
    // No sequence has more rows than the tensor.
    refuses("target.row_tiles", launch_tiles(2, true, [true, true, false, false]))?;
    refuses("target.row_tiles", launch_tiles(2, false, [true, false, false, false]))?;
    let mut launch = |keys: bool, given: [bool; 4]| launch_tiles(1, keys, given);
    text(launch(true, [true, true, false, false]))?;
    text(launch(true, [false, false, true, true]))?;
    text(launch(false, [true, false, false, false]))?;
    text(launch(false, [false, false, true, false]))?;
    for keys in [true, false] {
        refuses("target.grad", launch(keys, [false, true, false, false]))?;
        refuses("target.grad", launch(keys, [true, true, true, false]))?;
    }
    refuses("target.grad_v", launch(true, [true, false, false, false]))?;
    refuses("target.grad_v", launch(true, [false, false, true, false]))?;
    refuses("target.grad_v", launch(true, [true, true, false, true]))
}

/// Three heads of two rows.
fn deltas(runtime: &Runtime) -> Outcome {
    let stream = stream(runtime)?;
    let kernel = text(runtime.load::<AttentionBackwardDeltas<bf16>>())?;
    let (result, mut deltas) = (text(Buffer::<bf16>::zeros(&stream, 6 * 24))?, text(Buffer::<f32>::zeros(&stream, 6))?);
    let mut launch = |size: u32, lanes: u32| {
        let of_result = result.view().slice(0, 6 * u64::from(size));
        let result = ResultRowsArgument { out: of_result, grad_out: of_result, rows: 2, heads: 3, size, lanes };
        kernel.launch(&stream, AttentionBackwardDeltasArgs { result, deltas: deltas.view_mut() })
    };
    text(launch(16, 2))?;
    text(launch(24, 4))?;
    refuses("result.size", launch(12, 2))?;
    refuses("result.size", launch(24, 2))?;
    refuses("result.lanes", launch(24, 3))?;
    refuses("result.lanes", launch(24, 64))
}

/// A sequence with more queries than the statistics have rows of a sequence: what is beyond is not read.
fn without_room(runtime: &Runtime) -> Outcome {
    const SIZE: u32 = 64;
    let stream = stream(runtime)?;
    let (sink, mut grad_sink) = (text(Buffer::<f32>::zeros(&stream, 2))?, text(Buffer::<f32>::zeros(&stream, 2))?);
    let (given, ends) = (text(Buffer::from_slice(&stream, &[1_f32; 8]))?, text(Buffer::from_slice(&stream, &LATE))?);
    let rows = BLOCKS * SIZE;
    let mut offsets = text(Buffer::<f32>::zeros(&stream, 2 * u64::from(rows)))?;
    let mut deltas = text(Buffer::<f32>::zeros(&stream, 2 * u64::from(rows)))?;
    let args = AttentionBackwardSinkArgs {
        sink: sink.view(),
        grad_sink: grad_sink.view_mut(),
        statistics: QueryStatisticsArgument { log_sum_exp: given.view(), deltas: given.view(), rows: 2 },
        sequences: sequences(ends.view()),
        batches: 2,
    };
    text(text(runtime.load::<AttentionBackwardSink>())?.launch(&stream, args))?;
    let args = AttentionBackwardBlocksArgs {
        queries: QueryStatisticsArgument { log_sum_exp: given.view(), deltas: given.view(), rows: 2 },
        statistics: BlockStatisticsArgument { offsets: offsets.view_mut(), deltas: deltas.view_mut(), blocks: BLOCKS, size: SIZE, rows },
        sequences: sequences(ends.view()),
        heads: Heads { batches: 2, heads: 2, group: 1, step: 0 },
    };
    text(text(runtime.load::<AttentionBackwardBlocks>())?.launch(&stream, args))?;
    // Two queries of either head, in the second sequence's block.
    let second = |i: usize| (SIZE as usize..SIZE as usize + 2).contains(&(i % rows as usize));
    let expected: Vec<f32> = (0..2 * rows as usize).map(|i| if second(i) { 1.0 } else { 0.0 }).collect();
    equal("deltas", &text(deltas.to_vec(&stream))?, &expected)?;
    let sums = text(grad_sink.to_vec(&stream))?;
    // Each of two queries takes exp(-1).
    let is_right = sums.iter().all(|sum| (sum + 2.0 * (-1_f32).exp()).abs() < 1e-5);
    if is_right { Ok(()) } else { Err(format!("gradients of sinks are {sums:?}")) }
}
