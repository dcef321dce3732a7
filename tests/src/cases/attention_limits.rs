//! What the forward kernels refuse to be launched with: each argument by which they would leave their memory, by its name.

use oxtile::tensor::{SequenceRows, Strided, TensorMap, TensorMapMut};
use oxtile::{Buffer, Error, Runtime};
use oxtile_kernels::attention::{
    AttentionForward, AttentionForwardArgs, AttentionForwardFp8, AttentionForwardFp8Args, AttentionForwardGeneral,
    AttentionForwardGeneralArgs, AttentionForwardPacked, AttentionForwardPackedArgs, AttentionForwardPortable,
    AttentionForwardPortableArgs, FAR, FP8_KEYS, Fp8InputsArgument, Fp8ResultsArgument, Fp8ScalesArgument, Heads, InputsArgument,
    LogSumExpArgument, Narrow, PART, Pair, PortableResultsArgument, SequencesArgument, Shape, Window, Workspace,
};
use oxtile_tile::layout::{Swizzle64, Swizzle128};
use oxtile_tile::num::{bf16, e4m3};

use crate::case::{Case, Outcome, Size, stream, text};

pub fn cases() -> Vec<Case> {
    vec![
        Case::new("attention::refused::arguments", Size::Small, dense),
        Case::new("attention_fp8::refused::arguments", Size::Small, eight_bits),
        Case::new("attention_general::refused::arguments", Size::Small, general),
        Case::new("attention_packed::refused::arguments", Size::Small, packed),
        Case::new("attention_portable::refused::arguments", Size::Small, portable),
    ]
}

pub(super) fn refuses(argument: &str, refused: oxtile::Result<()>) -> Outcome {
    match refused {
        Err(Error::Argument { error, .. }) if error.argument == argument => Ok(()),
        other => Err(format!("{other:?}, where `{argument}` is to be refused")),
    }
}

fn dense(runtime: &Runtime) -> Outcome {
    type Attend = AttentionForward<bf16, 64, 64, 128, Narrow, true>;
    type Args<'a> = AttentionForwardArgs<'a, bf16, 64, 64, 128, Narrow, true>;
    let stream = stream(runtime)?;
    let kernel = text(runtime.load::<Attend>())?;
    // Two batches of two heads of three queries.
    let rows = Strided { shape: [2, 2, 3, 64], strides: [384, 192, 64, 1] };
    let (tensor, mut out) = (text(Buffer::<bf16>::zeros(&stream, 768))?, text(Buffer::<bf16>::zeros(&stream, 768))?);
    let q = text(TensorMap::<_, PART, 64, Swizzle128, 4>::strided(&stream, tensor.view(), rows))?;
    let k = text(TensorMap::<_, 128, 64, Swizzle128, 4>::strided(&stream, tensor.view(), rows))?;
    let mut out = text(TensorMapMut::<_, PART, 64, Swizzle128, 4>::strided(&stream, out.view_mut(), rows))?;
    let (mut log_sum_exp, mut counter) = (text(Buffer::<f32>::zeros(&stream, 12))?, text(Buffer::<u32>::zeros(&stream, 2))?);
    let (mut log_sum_exp, mut counter) = (log_sum_exp.view_mut(), counter.view_mut());
    let mut launch = |counters: u64, change: &dyn Fn(&mut Args<'_>)| {
        let mut args = Args {
            q: q.view(),
            k: k.view(),
            v: k.view(),
            out: out.view_mut(),
            log_sum_exp: log_sum_exp.slice_mut(0, 12),
            counter: counter.slice_mut(0, counters),
            batches: 2,
            heads: 2,
            group: 1,
            rows: 3,
            keys: 3,
            diagonal: 0,
            section: 1,
            scale: 1.0,
            marker: std::marker::PhantomData,
        };
        change(&mut args);
        kernel.launch(&stream, args)
    };
    text(launch(1, &|_| {}))?;
    refuses("counter", launch(2, &|_| {}))?;
    for (name, change) in [
        ("group", (|args| args.group = 3) as fn(&mut Args<'_>)),
        ("heads", |args| (args.heads, args.group) = (3, 2)),
        ("rows", |args| args.rows = 1 << 30),
        ("rows", |args| (args.batches, args.heads) = (1 << 31, 1)),
        ("keys", |args| args.keys = 1 << 30),
        ("diagonal", |args| args.diagonal = FAR + 1),
        ("diagonal", |args| args.diagonal = i32::MIN),
        ("section", |args| args.section = 1 << 31),
        ("section", |args| args.section = 0),
        ("log_sum_exp", |args| args.rows = 4),
        ("log_sum_exp", |args| args.batches = 3),
    ] {
        refuses(name, launch(1, &change))?;
    }
    Ok(())
}

fn eight_bits(runtime: &Runtime) -> Outcome {
    type Args<'a> = AttentionForwardFp8Args<'a, 64, Swizzle64, true>;
    let stream = stream(runtime)?;
    let kernel = text(runtime.load::<AttentionForwardFp8<64, Swizzle64, true>>())?;
    // A batch of two heads of three queries.
    let rows = Strided { shape: [1, 2, 3, 64], strides: [384, 192, 64, 1] };
    let (tensor, mut out) = (text(Buffer::<e4m3>::zeros(&stream, 384))?, text(Buffer::<bf16>::zeros(&stream, 384))?);
    let q = text(TensorMap::<_, PART, 64, Swizzle64, 4>::strided(&stream, tensor.view(), rows))?;
    let k = text(TensorMap::<_, FP8_KEYS, 64, Swizzle64, 4>::strided(&stream, tensor.view(), rows))?;
    let mut out = text(TensorMapMut::<_, PART, 64, Swizzle128, 4>::strided(&stream, out.view_mut(), rows))?;
    let (mut log_sum_exp, mut counter) = (text(Buffer::<f32>::zeros(&stream, 6))?, text(Buffer::<u32>::zeros(&stream, 2))?);
    let mut counter = counter.view_mut();
    let scales = text(Buffer::from_slice(&stream, &[1_f32; 3]))?;
    let mut launch = |[of_q, of_k, of_v]: [u64; 3], counters: u64, change: &dyn Fn(&mut Args<'_>)| {
        let mut args = Args {
            inputs: Fp8InputsArgument { q: q.view(), k: k.view(), v: k.view() },
            scales: Fp8ScalesArgument { q: scales.view().slice(0, of_q), k: scales.view().slice(0, of_k), v: scales.view().slice(0, of_v) },
            results: Fp8ResultsArgument { out: out.view_mut(), log_sum_exp: log_sum_exp.view_mut() },
            counter: counter.slice_mut(0, counters),
            shape: Shape { batches: 1, heads: 2, group: 1, queries: 3, keys: 3 },
            diagonal: 0,
            section: 1,
            scale: 1.0,
        };
        change(&mut args);
        kernel.launch(&stream, args)
    };
    let right = [2, 1, 2];
    text(launch(right, 1, &|_| {}))?;
    refuses("counter", launch(right, 2, &|_| {}))?;
    for (name, scales) in [("scales.q", [3, 1, 1]), ("scales.k", [1, 3, 1]), ("scales.v", [1, 1, 3])] {
        refuses(name, launch(scales, 1, &|_| {}))?;
    }
    for (name, change) in [
        ("shape.group", (|args| args.shape.group = 3) as fn(&mut Args<'_>)),
        ("shape.heads", |args| (args.shape.heads, args.shape.group) = (3, 2)),
        ("shape.queries", |args| args.shape.queries = 1 << 30),
        ("shape.queries", |args| (args.shape.batches, args.shape.heads) = (1 << 31, 1)),
        ("shape.keys", |args| args.shape.keys = 1 << 30),
        ("diagonal", |args| args.diagonal = FAR + 1),
        ("section", |args| args.section = 1 << 31),
        ("section", |args| args.section = 0),
        ("results.log_sum_exp", |args| args.shape.queries = 4),
    ] {
        refuses(name, launch([1; 3], 1, &change))?;
    }
    Ok(())
}

fn general(runtime: &Runtime) -> Outcome {
    type Attend = AttentionForwardGeneral<bf16, 64, 64, 128, Pair>;
    type Args<'a> = AttentionForwardGeneralArgs<'a, bf16, 64, 64, 128, Pair>;
    let stream = stream(runtime)?;
    let kernel = text(runtime.load::<Attend>())?;
    // Two sequences of two queries and two keys, two heads of 16 elements.
    let of_heads = SequenceRows { rows: 4, row: 32, heads: 2, head: 16, size: 16 };
    let (tensor, mut out) = (text(Buffer::<bf16>::zeros(&stream, 128))?, text(Buffer::<bf16>::zeros(&stream, 128))?);
    let q = text(TensorMap::<_, PART, 64, Swizzle128, 5>::sequences(&stream, tensor.view(), of_heads))?;
    let k = text(TensorMap::<_, 128, 64, Swizzle128, 5>::sequences(&stream, tensor.view(), of_heads))?;
    let mut out = text(TensorMapMut::<_, PART, 64, Swizzle128, 5>::sequences(&stream, out.view_mut(), of_heads))?;
    let (mut running, mut log_sum_exp) = (text(Buffer::<f32>::zeros(&stream, 128 + 1))?, text(Buffer::<f32>::zeros(&stream, 8))?);
    let (mut max_logit, sink) = (text(Buffer::<f32>::zeros(&stream, 2))?, text(Buffer::<f32>::zeros(&stream, 3))?);
    let mut workspace = text(Buffer::<u32>::zeros(&stream, Workspace::words(2)))?;
    let ends = text(Buffer::from_slice(&stream, &[0_u32, 2, 4]))?;
    let (mut running, mut max_logit, mut workspace) = (running.view_mut(), max_logit.view_mut(), workspace.view_mut());
    let right = [2, 2, Workspace::words(2)];
    let mut launch = |[begin, end]: [u64; 2], [sinks, logits, words]: [u64; 3], change: &dyn Fn(&mut Args<'_>)| {
        let mut args = Args {
            q: q.view(),
            k: k.view(),
            v: k.view(),
            out: out.view_mut(),
            running: running.slice_mut(begin, end),
            log_sum_exp: log_sum_exp.view_mut(),
            max_logit: max_logit.slice_mut(0, logits),
            sink: sink.view().slice(0, sinks),
            query_ends: ends.view(),
            key_ends: ends.view(),
            query_offsets: ends.view(),
            key_offsets: ends.view(),
            workspace: workspace.slice_mut(0, words),
            batches: 2,
            heads: 2,
            group: 1,
            sequence_heads: 0,
            query_rows: 4,
            key_rows: 4,
            section_keys: 2,
            row_stride: 32,
            value_size: 16,
            statistics_batch: 0,
            statistics_head: 4,
            packed: 1,
            padded: 0,
            left: FAR,
            right: FAR,
            top_left: 0,
            scale: 1.0,
            cap_limit: 0.0,
            cap_factor: 0.0,
            marker: std::marker::PhantomData,
        };
        change(&mut args);
        kernel.launch(&stream, args)
    };
    let (rounded, merged) = ([0, 0], [0, 128]);
    text(launch(rounded, right, &|_| {}))?;
    text(launch(merged, right, &|_| {}))?;
    text(launch(rounded, right, &|args| (args.packed, args.statistics_batch, args.statistics_head) = (0, 4, 2)))?;
    refuses("running", launch([1, 129], right, &|_| {}))?;
    for (name, change) in [
        ("query_ends", (|args| args.batches = 1) as fn(&mut Args<'_>)),
        ("group", |args| args.group = 3),
        ("heads", |args| (args.heads, args.group) = (3, 2)),
        ("query_rows", |args| args.query_rows = 1 << 30),
        ("key_rows", |args| args.key_rows = 1 << 30),
        ("left", |args| args.left = FAR + 1),
        ("right", |args| args.right = -FAR - 1),
        ("sequence_heads", |args| args.sequence_heads = 1),
        ("sequence_heads", |args| args.sequence_heads = 4),
        ("query_rows", |args| args.query_rows = 5),
        ("statistics_batch", |args| args.statistics_batch = 4),
        ("log_sum_exp", |args| args.statistics_head = 5),
        ("statistics_head", |args| args.packed = 0),
        ("log_sum_exp", |args| (args.packed, args.statistics_batch, args.statistics_head) = (0, 5, 2)),
        ("value_size", |args| args.value_size = 15),
        ("value_size", |args| args.value_size = 66),
        ("value_size", |args| args.value_size = 18),
        ("value_size", |args| args.sequence_heads = 2),
        ("row_stride", |args| args.row_stride = 33),
        ("running", |args| args.row_stride = 34),
    ] {
        refuses(name, launch(merged, right, &change))?;
    }
    for (name, lengths) in [("sink", [3, 2, right[2]]), ("max_logit", [2, 1, right[2]]), ("workspace", [2, 2, right[2] - 1])] {
        refuses(name, launch(rounded, lengths, &|_| {}))?;
    }
    Ok(())
}

fn packed(runtime: &Runtime) -> Outcome {
    type Args<'a> = AttentionForwardPackedArgs<'a, bf16, 64, 64, 128, Narrow, true>;
    let stream = stream(runtime)?;
    let kernel = text(runtime.load::<AttentionForwardPacked<bf16, 64, 64, 128, Narrow, true>>())?;
    // Two sequences of two queries and two keys, two heads of 16 elements.
    let of_heads = SequenceRows { rows: 4, row: 32, heads: 2, head: 16, size: 16 };
    let (tensor, mut out) = (text(Buffer::<bf16>::zeros(&stream, 128))?, text(Buffer::<bf16>::zeros(&stream, 128))?);
    let q = text(TensorMap::<_, PART, 64, Swizzle128, 5>::sequences(&stream, tensor.view(), of_heads))?;
    let k = text(TensorMap::<_, 128, 64, Swizzle128, 5>::sequences(&stream, tensor.view(), of_heads))?;
    let mut out = text(TensorMapMut::<_, PART, 64, Swizzle128, 5>::sequences(&stream, out.view_mut(), of_heads))?;
    let (mut log_sum_exp, mut counter) = (text(Buffer::<f32>::zeros(&stream, 8))?, text(Buffer::<u32>::zeros(&stream, 2))?);
    let ends = text(Buffer::from_slice(&stream, &[0_u32, 2, 4]))?;
    let (mut log_sum_exp, mut counter) = (log_sum_exp.view_mut(), counter.view_mut());
    let mut launch = |lengths: [u64; 4], counters: u64, change: &dyn Fn(&mut Args<'_>)| {
        let [query_ends, key_ends, query_offsets, key_offsets] = lengths.map(|length| ends.view().slice(0, length));
        let mut args = Args {
            q: q.view(),
            k: k.view(),
            v: k.view(),
            out: out.view_mut(),
            log_sum_exp: log_sum_exp.slice_mut(0, 8),
            query_ends,
            key_ends,
            query_offsets,
            key_offsets,
            counter: counter.slice_mut(0, counters),
            batches: 2,
            heads: 2,
            group: 1,
            query_rows: 4,
            key_rows: 4,
            section_keys: 2,
            padded: 0,
            top_left: 0,
            scale: 1.0,
            marker: std::marker::PhantomData,
        };
        change(&mut args);
        kernel.launch(&stream, args)
    };
    text(launch([3; 4], 1, &|_| {}))?;
    refuses("counter", launch([3; 4], 2, &|_| {}))?;
    for (i, name) in ["query_ends", "key_ends", "query_offsets", "key_offsets"].into_iter().enumerate() {
        refuses(name, launch(std::array::from_fn(|j| if i == j { 2 } else { 3 }), 1, &|_| {}))?;
    }
    for (name, change) in [
        ("group", (|args| args.group = 3) as fn(&mut Args<'_>)),
        ("heads", |args| (args.heads, args.group) = (3, 2)),
        ("query_rows", |args| args.query_rows = 1 << 30),
        ("key_rows", |args| args.key_rows = 1 << 30),
        ("log_sum_exp", |args| args.query_rows = 5),
        ("log_sum_exp", |args| args.heads = 3),
    ] {
        refuses(name, launch([3; 4], 1, &change))?;
    }
    Ok(())
}

fn portable(runtime: &Runtime) -> Outcome {
    type Args<'a> = AttentionForwardPortableArgs<'a, bf16, 64>;
    let stream = stream(runtime)?;
    let kernel = text(runtime.load::<AttentionForwardPortable<bf16, 64>>())?;
    // Two sequences of four queries and two keys, two heads that share keys.
    let (of_queries, of_keys) = (text(Buffer::<bf16>::zeros(&stream, 1024 + 8))?, text(Buffer::<bf16>::zeros(&stream, 256 + 8))?);
    let (mut out, mut log_sum_exp) = (text(Buffer::<bf16>::zeros(&stream, 1024 + 1))?, text(Buffer::<f32>::zeros(&stream, 16))?);
    let [queries, keys] = [[0_u32, 4, 8], [0, 2, 4]].map(|ends| text(Buffer::from_slice(&stream, &ends)));
    let (queries, keys, mut out) = (queries?, keys?, out.view_mut());
    let mut launch = |[of_q, of_k, of_v, of_out]: [u64; 4], change: &dyn Fn(&mut Args<'_>)| {
        let mut args = Args {
            inputs: InputsArgument {
                q: of_queries.view().slice(of_q, of_q + 1024),
                k: of_keys.view().slice(of_k, of_k + 256),
                v: of_keys.view().slice(of_v, of_v + 256),
            },
            results: PortableResultsArgument {
                out: out.slice_mut(of_out, of_out + 1024),
                log_sum_exp: LogSumExpArgument { values: log_sum_exp.view_mut(), rows: 4 },
            },
            sequences: SequencesArgument {
                query_ends: queries.view(),
                key_ends: keys.view(),
                query_offsets: queries.view(),
                key_offsets: keys.view(),
                diagonals: None,
                query_rows: 8,
                key_rows: 4,
                padded: false,
            },
            heads: Heads { batches: 2, heads: 2, group: 2, step: 0 },
            row_tiles: 1,
            window: Window { left: FAR, right: FAR, top_left: false },
            scale: 1.0,
        };
        change(&mut args);
        kernel.launch(&stream, args)
    };
    let starts = [0; 4];
    text(launch(starts, &|_| {}))?;
    text(launch(starts, &|args| args.results.log_sum_exp.rows = 0))?;
    for (name, starts) in
        [("inputs.q", [1, 0, 0, 0]), ("inputs.k", [0, 1, 0, 0]), ("inputs.v", [0, 0, 1, 0]), ("results.out", [0, 0, 0, 1])]
    {
        refuses(name, launch(starts, &|_| {}))?;
    }
    for (name, change) in [
        ("sequences.query_ends", (|args| args.heads.batches = 1) as fn(&mut Args<'_>)),
        ("heads.group", |args| args.heads.group = 3),
        ("heads.heads", |args| (args.heads.heads, args.heads.group) = (3, 2)),
        ("sequences.query_rows", |args| args.sequences.query_rows = 1 << 30),
        ("sequences.key_rows", |args| args.sequences.key_rows = 1 << 30),
        ("window.left", |args| args.window.left = FAR + 1),
        ("window.right", |args| args.window.right = i32::MIN),
        ("row_tiles", |args| args.row_tiles = 2),
        ("heads.step", |args| args.heads.step = 1),
        ("heads.step", |args| args.heads.step = 4),
        ("inputs.q", |args| args.sequences.query_rows = 9),
        ("inputs.k", |args| args.sequences.key_rows = 5),
        ("inputs.k", |args| args.heads.group = 1),
        ("results.log_sum_exp.values", |args| args.results.log_sum_exp.rows = 5),
        ("sequences.key_ends", |args| args.sequences.key_ends = args.sequences.key_ends.slice(0, 2)),
        ("sequences.query_offsets", |args| args.sequences.query_offsets = args.sequences.query_offsets.slice(0, 2)),
        ("sequences.key_offsets", |args| args.sequences.key_offsets = args.sequences.key_offsets.slice(0, 2)),
    ] {
        refuses(name, launch(starts, &change))?;
    }
    Ok(())
}
