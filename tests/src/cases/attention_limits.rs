//! What the forward kernels on Hopper refuse to be launched with: each argument by which they would leave their memory, by its name.

use std::marker::PhantomData;

use oxtile::tensor::{SequenceRows, Strided, TensorMap, TensorMapMut};
use oxtile::{Buffer, Error, Runtime};
use oxtile_kernels::attention::{
    AttentionForward, AttentionForwardArgs, AttentionForwardFp8, AttentionForwardFp8Args, Causal, ChosenArgument, DenseArgument, FAR,
    FP8_KEYS, Fp8DenseArgument, Fp8InputsArgument, Fp8OptionsArgument, Fp8PackedArgument, Fp8ResultsArgument, Fp8ScalesArgument, Heads,
    LEFT, Narrow, Optioned, OptionsArgument, PackedArgument, PackedCausal, Pair, RIGHT, RingCausal, RingStep, RingStepArgument, Rounded,
    RoundedArgument, RowMapsArgument, RunningArgument, Scores, SequencesArgument, Shape, TileOrderArgument, WARP_ROWS, WARPGROUP_QUERIES,
    Window, Workspace,
};
use oxtile_tile::launch::DeviceView;
use oxtile_tile::layout::{Linear, Swizzle64, Swizzle128};
use oxtile_tile::num::{bf16, e4m3};

use crate::case::{Case, Outcome, Size, stream, text};

pub fn cases() -> Vec<Case> {
    vec![
        Case::new("attention::refused::arguments", Size::Small, dense),
        Case::new("attention_fp8::refused::arguments", Size::Small, eight_bits),
        Case::new("attention_fp8::refused::sequences", Size::Small, eight_bit_sequences),
        Case::new("attention_general::refused::arguments", Size::Small, general),
        Case::new("attention_packed::refused::arguments", Size::Small, packed),
        Case::new("attention_ring::refused::arguments", Size::Small, ring),
    ]
}

pub(super) fn refuses(argument: &str, refused: oxtile::Result<()>) -> Outcome {
    match refused {
        Err(Error::Argument { error, .. }) if error.argument == argument => Ok(()),
        other => Err(format!("{other:?}, where `{argument}` is to be refused")),
    }
}

/// Dense tensors: two batches of two heads of three queries and keys.
const ROWS: Strided<4> = Strided { shape: [2, 2, 3, 64], strides: [384, 192, 64, 1] };
const SHAPE: Shape = Shape { batches: 2, heads: 2, group: 1, queries: 3, keys: 3 };

/// Packed ones: two sequences of two queries and two keys, two heads of 16 elements.
const SEQUENCES: SequenceRows = SequenceRows { rows: 4, row: 32, heads: 2, head: 16, size: 16 };
const HEADS: Heads = Heads { batches: 2, heads: 2, group: 1, step: 0 };
/// Sums of lengths by which the second sequence has all four rows: more than statistics have that give each sequence two.
pub(super) const LATE: [u32; 3] = [0, 0, 4];

fn dense(runtime: &Runtime) -> Outcome {
    type Problem<'a> = DenseArgument<'a, bf16, 64, 64, 128, Rounded<bf16, 64, 4>, true>;
    let stream = stream(runtime)?;
    let kernel = text(runtime.load::<AttentionForward<bf16, 64, 64, 128, Narrow, Causal>>())?;
    let (tensor, mut out) = (text(Buffer::<bf16>::zeros(&stream, 768))?, text(Buffer::<bf16>::zeros(&stream, 768))?);
    let q = text(TensorMap::<_, WARPGROUP_QUERIES, 64, Swizzle128, 4>::strided(&stream, tensor.view(), ROWS))?;
    let k = text(TensorMap::<_, 128, 64, Swizzle128, 4>::strided(&stream, tensor.view(), ROWS))?;
    let mut out = text(TensorMapMut::<_, WARPGROUP_QUERIES, 64, Swizzle128, 4>::strided(&stream, out.view_mut(), ROWS))?;
    let (mut log_sum_exp, mut counter) = (text(Buffer::<f32>::zeros(&stream, 12))?, text(Buffer::<u32>::zeros(&stream, 2))?);
    let mut launch = |counters: u64, change: &dyn Fn(&mut Problem<'_>)| {
        let mut counter = counter.view_mut();
        let mut problem = Problem {
            q: q.view(),
            k: k.view(),
            v: k.view(),
            target: RoundedArgument { out: out.view_mut(), log_sum_exp: log_sum_exp.view_mut() },
            shape: SHAPE,
            order: TileOrderArgument { counter: counter.slice_mut(0, counters), section: 1 },
            diagonal: 0,
            scale: 1.0,
        };
        change(&mut problem);
        kernel.launch(&stream, AttentionForwardArgs { problem, marker: PhantomData })
    };
    text(launch(1, &|_| {}))?;
    refuses("order.counter", launch(2, &|_| {}))?;
    for (name, change) in [
        ("shape.group", (|problem| problem.shape.group = 3) as fn(&mut Problem<'_>)),
        ("shape.heads", |problem| (problem.shape.heads, problem.shape.group) = (3, 2)),
        ("shape.queries", |problem| problem.shape.queries = 1 << 30),
        ("shape.queries", |problem| (problem.shape.batches, problem.shape.heads) = (1 << 31, 1)),
        ("shape.keys", |problem| problem.shape.keys = 1 << 30),
        ("diagonal", |problem| problem.diagonal = FAR + 1),
        ("diagonal", |problem| problem.diagonal = i32::MIN),
        ("order.section", |problem| problem.order.section = 0),
        ("order.section", |problem| problem.order.section = 1 << 31),
        ("target.log_sum_exp", |problem| problem.shape.queries = 4),
        ("target.log_sum_exp", |problem| problem.shape.batches = 3),
    ] {
        refuses(name, launch(1, &change))?;
    }
    Ok(())
}

/// A step of a ring: what its running result may be.
fn ring(runtime: &Runtime) -> Outcome {
    type Target<'a> = RunningArgument<'a, bf16, true>;
    let stream = stream(runtime)?;
    let kernel = text(runtime.load::<AttentionForward<bf16, 64, 64, 128, Narrow, RingCausal>>())?;
    let (tensor, mut rounded) = (text(Buffer::<bf16>::zeros(&stream, 768))?, text(Buffer::<bf16>::zeros(&stream, 768 + 2))?);
    let q = text(TensorMap::<_, WARPGROUP_QUERIES, 64, Swizzle128, 4>::strided(&stream, tensor.view(), ROWS))?;
    let k = text(TensorMap::<_, 128, 64, Swizzle128, 4>::strided(&stream, tensor.view(), ROWS))?;
    let (mut sums, mut log_sum_exp) = (text(Buffer::<f32>::zeros(&stream, 768 + 1))?, text(Buffer::<f32>::zeros(&stream, 12))?);
    let mut counter = text(Buffer::<u32>::zeros(&stream, 1))?;
    let mut mapped = text(Buffer::<f32>::zeros(&stream, 2 * 768))?;
    let (left, right) = mapped.view_mut().split_at(768);
    let mut left = text(TensorMapMut::<_, WARP_ROWS, LEFT, Linear, 4>::strided(&stream, left, ROWS))?;
    let mut right = text(TensorMapMut::<_, WARP_ROWS, RIGHT, Linear, 4>::strided(&stream, right, ROWS))?;
    let mut launch_with = |is_mapped: bool, [begin, end]: [u64; 2], rounds: Option<[u64; 2]>, change: &dyn Fn(&mut Target<'_>)| {
        let (mut sums, mut rounded) = (sums.view_mut(), rounded.view_mut());
        let mut target = Target {
            sums: sums.slice_mut(begin, end),
            log_sum_exp: log_sum_exp.view_mut(),
            rounded: rounds.map(|[begin, end]| rounded.slice_mut(begin, end)),
            begins: false,
            size: 64,
            batch_stride: 384,
            head_stride: 192,
            row_stride: 64,
        };
        change(&mut target);
        let rows = is_mapped.then(|| RowMapsArgument { left: left.view_mut(), right: right.view_mut() });
        let target = RingStepArgument { running: target, rows };
        let order = TileOrderArgument { counter: counter.view_mut(), section: 1 };
        let problem: DenseArgument<'_, _, 64, 64, 128, RingStep<bf16, 4>, true> =
            DenseArgument { q: q.view(), k: k.view(), v: k.view(), target, shape: SHAPE, order, diagonal: 0, scale: 1.0 };
        kernel.launch(&stream, AttentionForwardArgs { problem, marker: PhantomData })
    };
    let whole = [0, 768];
    text(launch_with(true, whole, None, &|target| target.begins = true))?;
    text(launch_with(true, whole, Some(whole), &|_| {}))?;
    // Rounded rows that leave in 16 bytes.
    let change: fn(&mut Target<'_>) = |target| (target.batch_stride, target.row_stride) = (380, 62);
    text(launch_with(true, whole, None, &change))?;
    refuses("target.batch_stride", launch_with(true, whole, Some(whole), &change))?;
    refuses("target.row_stride", launch_with(true, whole, Some(whole), &|target| target.row_stride = 62))?;
    refuses("target.size", launch_with(true, whole, Some(whole), &|target| target.size = 60))?;
    refuses("target.rounded", launch_with(true, whole, Some([2, 770]), &|_| {}))?;
    let mut launch = |sums, rounds, change: &dyn Fn(&mut Target<'_>)| launch_with(false, sums, rounds, change);
    text(launch(whole, None, &|target| target.begins = true))?;
    text(launch(whole, Some(whole), &|_| {}))?;
    text(launch(whole, Some([2, 770]), &|_| {}))?;
    refuses("target.sums", launch([1, 769], None, &|_| {}))?;
    refuses("target.rounded", launch(whole, Some([1, 769]), &|_| {}))?;
    refuses("target.rounded", launch(whole, Some([0, 767]), &|_| {}))?;
    refuses("target.batch_stride", launch([0, 766], None, &|_| {}))?;
    refuses("target.size", launch([0, 0], None, &|_| {}))?;
    for (name, change) in [
        ("target.size", (|target| target.size = 63) as fn(&mut Target<'_>)),
        ("target.size", |target| target.size = 66),
        ("target.row_stride", |target| target.row_stride = 65),
        ("target.head_stride", |target| target.head_stride = 193),
        ("target.batch_stride", |target| target.batch_stride = 385),
        ("target.row_stride", |target| target.row_stride = 354),
        ("target.head_stride", |target| target.head_stride = 578),
        ("target.batch_stride", |target| target.batch_stride = 386),
        ("target.row_stride", |target| target.row_stride = u64::MAX - 1),
    ] {
        refuses(name, launch(whole, None, &change))?;
    }
    Ok(())
}

/// The lengths of arrays of a launch of 8 bits.
#[derive(Clone, Copy)]
struct EightBits {
    q: u64,
    k: u64,
    v: u64,
    counters: u64,
    diagonals: u64,
    sinks: u64,
}

fn eight_bits(runtime: &Runtime) -> Outcome {
    type Problem<'a> = Fp8DenseArgument<'a, 64, Swizzle64, true>;
    let stream = stream(runtime)?;
    let kernel = text(runtime.load::<AttentionForwardFp8<64, Swizzle64, Causal>>())?;
    // A batch of two heads of three queries.
    let rows = Strided { shape: [1, 2, 3, 64], strides: [384, 192, 64, 1] };
    let (tensor, mut out) = (text(Buffer::<e4m3>::zeros(&stream, 384))?, text(Buffer::<bf16>::zeros(&stream, 384))?);
    let q = text(TensorMap::<_, WARPGROUP_QUERIES, 64, Swizzle64, 4>::strided(&stream, tensor.view(), rows))?;
    let k = text(TensorMap::<_, FP8_KEYS, 64, Swizzle64, 4>::strided(&stream, tensor.view(), rows))?;
    let mut out = text(TensorMapMut::<_, WARPGROUP_QUERIES, 64, Swizzle128, 4>::strided(&stream, out.view_mut(), rows))?;
    let (mut log_sum_exp, mut counter) = (text(Buffer::<f32>::zeros(&stream, 6))?, text(Buffer::<u32>::zeros(&stream, 2))?);
    let mut counter = counter.view_mut();
    let scales = text(Buffer::from_slice(&stream, &[1_f32; 3]))?;
    let mut launch = |[of_q, of_k, of_v]: [u64; 3], counters: u64, change: &dyn Fn(&mut Problem<'_>)| {
        let mut problem = Problem {
            inputs: Fp8InputsArgument { q: q.view(), k: k.view(), v: k.view() },
            scales: Fp8ScalesArgument { q: scales.view().slice(0, of_q), k: scales.view().slice(0, of_k), v: scales.view().slice(0, of_v) },
            results: Fp8ResultsArgument { out: out.view_mut(), log_sum_exp: log_sum_exp.view_mut() },
            shape: Shape { batches: 1, heads: 2, group: 1, queries: 3, keys: 3 },
            order: TileOrderArgument { counter: counter.slice_mut(0, counters), section: 1 },
            diagonal: 0,
            scale: 1.0,
        };
        change(&mut problem);
        kernel.launch(&stream, AttentionForwardFp8Args { problem })
    };
    let right = [2, 1, 2];
    text(launch(right, 1, &|_| {}))?;
    refuses("order.counter", launch(right, 2, &|_| {}))?;
    for (name, scales) in [("scales.q", [3, 1, 1]), ("scales.k", [1, 3, 1]), ("scales.v", [1, 1, 3])] {
        refuses(name, launch(scales, 1, &|_| {}))?;
    }
    for (name, change) in [
        ("shape.group", (|problem| problem.shape.group = 3) as fn(&mut Problem<'_>)),
        ("shape.heads", |problem| (problem.shape.heads, problem.shape.group) = (3, 2)),
        ("shape.queries", |problem| problem.shape.queries = 1 << 30),
        ("shape.queries", |problem| (problem.shape.batches, problem.shape.heads) = (1 << 31, 1)),
        ("shape.keys", |problem| problem.shape.keys = 1 << 30),
        ("diagonal", |problem| problem.diagonal = FAR + 1),
        ("order.section", |problem| problem.order.section = 1 << 31),
        ("order.section", |problem| problem.order.section = 0),
        ("results.log_sum_exp", |problem| problem.shape.queries = 4),
    ] {
        refuses(name, launch([1; 3], 1, &change))?;
    }
    Ok(())
}

/// Packed sequences of 8 bits, and the same with options.
fn eight_bit_sequences(runtime: &Runtime) -> Outcome {
    type Packed<'a> = Fp8PackedArgument<'a, 64, Swizzle64, true>;
    type Options<'a> = Fp8OptionsArgument<'a, 64, Swizzle64>;
    let stream = stream(runtime)?;
    let packed = text(runtime.load::<AttentionForwardFp8<64, Swizzle64, PackedCausal>>())?;
    let options = text(runtime.load::<AttentionForwardFp8<64, Swizzle64, Optioned>>())?;
    let (tensor, mut out) = (text(Buffer::<e4m3>::zeros(&stream, 128))?, text(Buffer::<bf16>::zeros(&stream, 128))?);
    let q = text(TensorMap::<_, WARPGROUP_QUERIES, 64, Swizzle64, 5>::sequences(&stream, tensor.view(), SEQUENCES))?;
    let k = text(TensorMap::<_, FP8_KEYS, 64, Swizzle64, 5>::sequences(&stream, tensor.view(), SEQUENCES))?;
    let mut out = text(TensorMapMut::<_, WARPGROUP_QUERIES, 64, Swizzle128, 5>::sequences(&stream, out.view_mut(), SEQUENCES))?;
    let (mut log_sum_exp, mut counter) = (text(Buffer::<f32>::zeros(&stream, 8))?, text(Buffer::<u32>::zeros(&stream, 2))?);
    let (ends, diagonals) = (text(Buffer::from_slice(&stream, &[0_u32, 2, 4]))?, text(Buffer::from_slice(&stream, &[0_i32; 3]))?);
    let late = text(Buffer::from_slice(&stream, &LATE))?;
    let (numbers, right) =
        (text(Buffer::from_slice(&stream, &[1_f32; 3]))?, EightBits { q: 2, k: 1, v: 2, counters: 1, diagonals: 0, sinks: 2 });
    let mut launch_of = |ends: DeviceView<'_, u32>,
                         is_packed: bool,
                         lengths: EightBits,
                         change: &dyn Fn(&mut Packed<'_>),
                         change_options: &dyn Fn(&mut Options<'_>)| {
        let inputs = Fp8InputsArgument { q: q.view(), k: k.view(), v: k.view() };
        let scales = [lengths.q, lengths.k, lengths.v].map(|length| numbers.view().slice(0, length));
        let scales = Fp8ScalesArgument { q: scales[0], k: scales[1], v: scales[2] };
        let results = Fp8ResultsArgument { out: out.view_mut(), log_sum_exp: log_sum_exp.view_mut() };
        let diagonals = (lengths.diagonals > 0).then(|| diagonals.view().slice(0, lengths.diagonals));
        let (sequences, mut counter) = (SequencesArgument { diagonals, ..sequences(ends) }, counter.view_mut());
        let (heads, counter, section_keys) = (HEADS, counter.slice_mut(0, lengths.counters), 2);
        if is_packed {
            let mut problem = Packed { inputs, scales, results, sequences, heads, counter, section_keys, top_left: false, scale: 1.0 };
            change(&mut problem);
            return packed.launch(&stream, AttentionForwardFp8Args { problem });
        }
        let mut problem = Options {
            inputs,
            scales,
            results,
            sequences,
            heads,
            log_rows: 0,
            window: Window { left: FAR, right: FAR, top_left: false },
            scores: Scores { scale: 1.0, cap_limit: 0.0, cap_factor: 0.0 },
            sink: Some(numbers.view().slice(0, lengths.sinks)),
            counter,
            section_keys,
        };
        change_options(&mut problem);
        options.launch(&stream, AttentionForwardFp8Args { problem })
    };
    text(launch_of(late.view(), false, right, &|_| {}, &|problem| problem.log_rows = 2))?;
    text(stream.synchronize())?;
    let mut launch = |is_packed: bool, lengths: EightBits, change: &dyn Fn(&mut Packed<'_>), change_options: &dyn Fn(&mut Options<'_>)| {
        launch_of(ends.view(), is_packed, lengths, change, change_options)
    };
    for is_packed in [true, false] {
        let mut launch_right = |lengths| launch(is_packed, lengths, &|_| {}, &|_| {});
        text(launch_right(right))?;
        for (name, lengths) in [
            ("scales.q", EightBits { q: 3, ..right }),
            ("scales.k", EightBits { k: 3, ..right }),
            ("scales.v", EightBits { v: 3, ..right }),
            ("counter", EightBits { counters: 2, ..right }),
            ("sequences.diagonals", EightBits { diagonals: 3, ..right }),
        ] {
            refuses(name, launch_right(lengths))?;
        }
    }
    refuses("sequences.diagonals", launch(true, EightBits { diagonals: 2, ..right }, &|_| {}, &|_| {}))?;
    text(launch(false, EightBits { diagonals: 2, ..right }, &|_| {}, &|problem| problem.log_rows = 2))?;
    refuses("sink", launch(false, EightBits { sinks: 3, ..right }, &|_| {}, &|_| {}))?;
    for (name, change) in [
        ("sequences.query_ends", (|problem| problem.heads.batches = 1) as fn(&mut Packed<'_>)),
        ("heads.group", |problem| problem.heads.group = 3),
        ("heads.heads", |problem| (problem.heads.heads, problem.heads.group) = (3, 2)),
        ("heads.step", |problem| problem.heads.step = 2),
        ("sequences.query_rows", |problem| problem.sequences.query_rows = 1 << 30),
        ("sequences.key_rows", |problem| problem.sequences.key_rows = 1 << 30),
        ("results.log_sum_exp", |problem| problem.sequences.query_rows = 5),
    ] {
        refuses(name, launch(true, right, &change, &|_| {}))?;
    }
    for (name, change) in [
        ("sequences.query_ends", (|problem| problem.heads.batches = 1) as fn(&mut Options<'_>)),
        ("heads.group", |problem| problem.heads.group = 3),
        ("heads.step", |problem| problem.heads.step = 1),
        ("heads.step", |problem| problem.heads.step = 4),
        ("sequences.key_rows", |problem| problem.sequences.key_rows = 1 << 30),
        ("window.left", |problem| problem.window.left = FAR + 1),
        ("window.right", |problem| problem.window.right = -FAR - 1),
        ("results.log_sum_exp", |problem| problem.sequences.query_rows = 5),
        ("results.log_sum_exp", |problem| problem.log_rows = 3),
    ] {
        refuses(name, launch(false, right, &|_| {}, &change))?;
    }
    Ok(())
}

/// The sequences of a launch, whose arrays are this one.
pub(super) fn sequences(ends: DeviceView<'_, u32>) -> SequencesArgument<'_> {
    SequencesArgument {
        query_ends: ends,
        key_ends: ends,
        query_offsets: ends,
        key_offsets: ends,
        diagonals: None,
        query_rows: 4,
        key_rows: 4,
        padded: false,
    }
}

/// The running result of a launch that has one.
fn of<'p, 'a>(problem: &'p mut OptionsArgument<'a, bf16, 64, 64, 128>) -> &'p mut RunningArgument<'a, bf16, false> {
    problem.target.running.as_mut().expect("a running result")
}

fn general(runtime: &Runtime) -> Outcome {
    type Problem<'a> = OptionsArgument<'a, bf16, 64, 64, 128>;
    let stream = stream(runtime)?;
    let kernel = text(runtime.load::<AttentionForward<bf16, 64, 64, 128, Pair, Optioned>>())?;
    let (tensor, mut out) = (text(Buffer::<bf16>::zeros(&stream, 128))?, text(Buffer::<bf16>::zeros(&stream, 128))?);
    let q = text(TensorMap::<_, WARPGROUP_QUERIES, 64, Swizzle128, 5>::sequences(&stream, tensor.view(), SEQUENCES))?;
    let k = text(TensorMap::<_, 128, 64, Swizzle128, 5>::sequences(&stream, tensor.view(), SEQUENCES))?;
    let mut out = text(TensorMapMut::<_, WARPGROUP_QUERIES, 64, Swizzle128, 5>::sequences(&stream, out.view_mut(), SEQUENCES))?;
    let (mut sums, mut log_sum_exp) = (text(Buffer::<f32>::zeros(&stream, 128 + 1))?, text(Buffer::<f32>::zeros(&stream, 8))?);
    let (mut max_logit, sink) = (text(Buffer::<f32>::zeros(&stream, 2))?, text(Buffer::<f32>::zeros(&stream, 3))?);
    let mut workspace = text(Buffer::<u32>::zeros(&stream, Workspace::words(2)))?;
    let (ends, diagonals) = (text(Buffer::from_slice(&stream, &[0_u32, 2, 4]))?, text(Buffer::from_slice(&stream, &[0_i32; 3]))?);
    let (right, late) = ([2, 2, Workspace::words(2), 2], text(Buffer::from_slice(&stream, &LATE))?);
    let mut launch_of = |ends: DeviceView<'_, u32>,
                         merged: Option<[u64; 2]>,
                         [sinks, logits, words, of_diagonals]: [u64; 4],
                         change: &dyn Fn(&mut Problem<'_>)| {
        let (mut sums, mut log_sum_exp) = (sums.view_mut(), log_sum_exp.view_mut());
        let (mut max_logit, mut workspace) = (max_logit.view_mut(), workspace.view_mut());
        let (running, rounded) = match merged {
            Some([begin, end]) => {
                let (sums, log_sum_exp, rounded) = (sums.slice_mut(begin, end), log_sum_exp.reborrow(), None);
                let [batch_stride, head_stride, row_stride] = [0, 16, 32];
                (Some(RunningArgument { sums, log_sum_exp, rounded, begins: false, size: 16, batch_stride, head_stride, row_stride }), None)
            }
            None => (None, Some(RoundedArgument { out: out.view_mut(), log_sum_exp: log_sum_exp.reborrow() })),
        };
        let mut problem = Problem {
            q: q.view(),
            k: k.view(),
            v: k.view(),
            target: ChosenArgument { running, rounded },
            sequences: SequencesArgument { diagonals: Some(diagonals.view().slice(0, of_diagonals)), ..sequences(ends) },
            heads: HEADS,
            log_rows: 0,
            window: Window { left: FAR, right: FAR, top_left: false },
            scores: Scores { scale: 1.0, cap_limit: 0.0, cap_factor: 0.0 },
            sink: Some(sink.view().slice(0, sinks)),
            max_logit: Some(max_logit.slice_mut(0, logits)),
            workspace: workspace.slice_mut(0, words),
            section_keys: 2,
        };
        change(&mut problem);
        kernel.launch(&stream, AttentionForwardArgs { problem, marker: PhantomData })
    };
    let merged = Some([0, 128]);
    for merged in [None, merged] {
        text(launch_of(late.view(), merged, right, &|problem| problem.log_rows = 2))?;
        text(stream.synchronize())?;
    }
    let mut launch =
        |merged: Option<[u64; 2]>, lengths: [u64; 4], change: &dyn Fn(&mut Problem<'_>)| launch_of(ends.view(), merged, lengths, change);
    text(launch(None, right, &|_| {}))?;
    text(launch(merged, right, &|_| {}))?;
    text(launch(None, right, &|problem| problem.log_rows = 2))?;
    text(launch(None, right, &|problem| (problem.sink, problem.max_logit, problem.sequences.diagonals) = (None, None, None)))?;
    refuses("target.sums", launch(Some([1, 129]), right, &|_| {}))?;
    refuses("target.rounded", launch(merged, right, &|problem| problem.target.running = None))?;
    for (name, change) in [
        ("sequences.query_ends", (|problem| problem.heads.batches = 1) as fn(&mut Problem<'_>)),
        ("heads.group", |problem| problem.heads.group = 3),
        ("heads.heads", |problem| (problem.heads.heads, problem.heads.group) = (3, 2)),
        ("sequences.query_rows", |problem| problem.sequences.query_rows = 1 << 30),
        ("sequences.key_rows", |problem| problem.sequences.key_rows = 1 << 30),
        ("window.left", |problem| problem.window.left = FAR + 1),
        ("window.right", |problem| problem.window.right = -FAR - 1),
        ("heads.step", |problem| problem.heads.step = 1),
        ("heads.step", |problem| problem.heads.step = 4),
        ("target.log_sum_exp", |problem| problem.sequences.query_rows = 5),
        ("target.log_sum_exp", |problem| problem.log_rows = 3),
        ("target.size", |problem| of(problem).size = 15),
        ("target.size", |problem| of(problem).size = 66),
        ("target.head_stride", |problem| of(problem).size = 18),
        ("target.head_stride", |problem| problem.heads.step = 2),
        ("target.row_stride", |problem| of(problem).row_stride = 33),
        ("target.head_stride", |problem| of(problem).row_stride = 34),
        ("target.row_stride", |problem| of(problem).row_stride = 38),
    ] {
        refuses(name, launch(merged, right, &change))?;
    }
    let words = right[2];
    for (name, lengths) in [
        ("sink", [3, 2, words, 2]),
        ("max_logit", [2, 1, words, 2]),
        ("workspace", [2, 2, words - 1, 2]),
        ("sequences.diagonals", [2, 2, words, 3]),
    ] {
        refuses(name, launch(None, lengths, &|_| {}))?;
    }
    Ok(())
}

fn packed(runtime: &Runtime) -> Outcome {
    type Problem<'a> = PackedArgument<'a, bf16, 64, 64, 128, Rounded<bf16, 64, 5>, true>;
    let stream = stream(runtime)?;
    let kernel = text(runtime.load::<AttentionForward<bf16, 64, 64, 128, Narrow, PackedCausal>>())?;
    let (tensor, mut out) = (text(Buffer::<bf16>::zeros(&stream, 128))?, text(Buffer::<bf16>::zeros(&stream, 128))?);
    let q = text(TensorMap::<_, WARPGROUP_QUERIES, 64, Swizzle128, 5>::sequences(&stream, tensor.view(), SEQUENCES))?;
    let k = text(TensorMap::<_, 128, 64, Swizzle128, 5>::sequences(&stream, tensor.view(), SEQUENCES))?;
    let mut out = text(TensorMapMut::<_, WARPGROUP_QUERIES, 64, Swizzle128, 5>::sequences(&stream, out.view_mut(), SEQUENCES))?;
    let (mut log_sum_exp, mut counter) = (text(Buffer::<f32>::zeros(&stream, 8))?, text(Buffer::<u32>::zeros(&stream, 2))?);
    let (ends, diagonals) = (text(Buffer::from_slice(&stream, &[0_u32, 2, 4]))?, text(Buffer::from_slice(&stream, &[0_i32; 2]))?);
    let mut launch = |lengths: [u64; 4], counters: u64, with_diagonals: bool, change: &dyn Fn(&mut Problem<'_>)| {
        let [query_ends, key_ends, query_offsets, key_offsets] = lengths.map(|length| ends.view().slice(0, length));
        let diagonals = with_diagonals.then(|| diagonals.view());
        let mut counter = counter.view_mut();
        let mut problem = Problem {
            q: q.view(),
            k: k.view(),
            v: k.view(),
            target: RoundedArgument { out: out.view_mut(), log_sum_exp: log_sum_exp.view_mut() },
            sequences: SequencesArgument { query_ends, key_ends, query_offsets, key_offsets, diagonals, ..sequences(ends.view()) },
            heads: HEADS,
            counter: counter.slice_mut(0, counters),
            section_keys: 2,
            top_left: false,
            scale: 1.0,
        };
        change(&mut problem);
        kernel.launch(&stream, AttentionForwardArgs { problem, marker: PhantomData })
    };
    text(launch([3; 4], 1, false, &|_| {}))?;
    refuses("counter", launch([3; 4], 2, false, &|_| {}))?;
    refuses("sequences.diagonals", launch([3; 4], 1, true, &|_| {}))?;
    let arrays = ["sequences.query_ends", "sequences.key_ends", "sequences.query_offsets", "sequences.key_offsets"];
    for (i, name) in arrays.into_iter().enumerate() {
        refuses(name, launch(std::array::from_fn(|j| if i == j { 2 } else { 3 }), 1, false, &|_| {}))?;
    }
    for (name, change) in [
        ("heads.group", (|problem| problem.heads.group = 3) as fn(&mut Problem<'_>)),
        ("heads.heads", |problem| (problem.heads.heads, problem.heads.group) = (3, 2)),
        ("heads.step", |problem| problem.heads.step = 2),
        ("sequences.query_rows", |problem| problem.sequences.query_rows = 1 << 30),
        ("sequences.key_rows", |problem| problem.sequences.key_rows = 1 << 30),
        ("target.log_sum_exp", |problem| problem.sequences.query_rows = 5),
        ("target.log_sum_exp", |problem| problem.heads.heads = 3),
    ] {
        refuses(name, launch([3; 4], 1, false, &change))?;
    }
    Ok(())
}
