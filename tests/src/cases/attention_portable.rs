//! Attention by the kernels that run on any GPU: the checks of Hopper's, and windows.

use oxtile::attention::{Attention, AttentionConfig, Kernels, Layout, Mask, Output, Padding, Sink, Window};
use oxtile::{Buffer, Error, Runtime};
use oxtile_kernels::attention::{
    AttentionForwardPortable, AttentionForwardPortableArgs, AttentionForwardPortableGeneral, AttentionForwardPortableGeneralArgs, FAR,
    Heads, InputsArgument, LogSumExpArgument, MaxLogitArgument, PortableGeneralResultsArgument, PortableResultsArgument, Scores,
    SequencesArgument, SizedInputsArgument, Window as Seen, Workspace,
};
use oxtile_tile::num::{Element, bf16, f16};

use super::attention::{Operand, attend, check, checked, visible};
use super::attention_limits::refuses;
use super::attention_problem::Problem;
use crate::case::{Case, Outcome, Size, stream, text};

/// Queries and keys: nothing to see, parts of a tile, edges on either side, several steps.
const LENGTHS: [[u64; 2]; 3] = [[3, 0], [9, 130], [70, 5]];
const MASKS: [(&str, Mask); 3] = [("full", Mask::Full), ("top_left", Mask::CausalTopLeft), ("bottom_right", Mask::CausalBottomRight)];

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for head_size in [64, 128] {
        for (mask_name, mask) in MASKS {
            let one = AttentionConfig { head_size, mask, kernels: Kernels::Portable, ..AttentionConfig::default() };
            let large = AttentionConfig { batches: 2, heads: 2, key_heads: 1, queries: 130, keys: 200, ..one };
            random::<bf16>(&mut cases, mask_name, large);
            random::<f16>(&mut cases, mask_name, large);
            if head_size == 128 {
                random::<bf16>(&mut cases, mask_name, AttentionConfig { queries: 9, keys: 70, ..one });
                continue;
            }
            for [queries, keys] in LENGTHS {
                random::<bf16>(&mut cases, mask_name, AttentionConfig { queries, keys, ..one });
            }
            // Scores of which few count, and maxima that rise from step to step.
            random::<bf16>(&mut cases, mask_name, AttentionConfig { queries: 9, keys: 200, scale: Some(1.0), ..one });
            let config = AttentionConfig { queries: 20, keys: 70, ..one };
            let name = format!("attention_portable::{mask_name}::visible");
            cases.push(Case::new(name, Size::Large, move |r| visible::<bf16>(r, &config)));
        }
    }
    for (left, right) in [(Some(17), None), (Some(20), Some(9))] {
        let name = format!("attention_portable::window::{left:?}::{right:?}");
        cases.push(Case::new(name, Size::Small, move |r| window(r, Window { left, right })));
    }
    layouts(&mut cases);
    cases.push(Case::new("attention_portable::refused", Size::Small, refused));
    cases.push(Case::new("attention_portable::general::refused", Size::Small, arguments));
    cases.push(Case::new("attention_portable::refused::arguments", Size::Small, plain));
    cases.push(Case::new("attention_portable::rows_without_room", Size::Small, without_room));
    cases
}

fn random<T: Operand + Element>(cases: &mut Vec<Case>, mask: &str, config: AttentionConfig) {
    let AttentionConfig { batches, queries, keys, heads, key_heads, head_size, scale, .. } = config;
    let name = format!("attention_portable::{}::d{head_size}::{mask}::{batches}x{queries}x{keys}x{heads}x{key_heads}", T::NAME);
    let size = if scale.is_some() { 2.0 } else { 1.0 };
    // The race detector looks at one kernel of each head size, on several steps.
    let of_one = if head_size == 64 { checked(config.mask) == Size::Small } else { config.mask == Mask::Full };
    let case_size = if of_one && scale.is_none() && queries == 9 { Size::Small } else { Size::Large };
    cases.push(Case::new(name, case_size, move |r| check::<T>(r, &config, size)));
}

/// Sequences that lie otherwise: rows of several sequences in turn, packed ones with rows of NaN before, between and after them.
fn layouts(cases: &mut Vec<Case>) {
    let base = AttentionConfig { heads: 2, key_heads: 1, head_size: 64, kernels: Kernels::Portable, ..AttentionConfig::default() };
    let mut push = |name: &str, problem: Problem| {
        cases.push(Case::new(format!("attention_portable::{name}"), Size::Large, move |runtime| problem.check::<bf16>(runtime)));
    };
    push("sbhd", Problem::dense(AttentionConfig { layout: Layout::Sbhd, batches: 3, queries: 9, keys: 70, ..base }));
    let config = AttentionConfig { layout: Layout::Packed, mask: Mask::CausalBottomRight, ..base };
    // First row and rows, of queries and of keys: nothing to see, more than a tile and a step, more queries than keys.
    let sequences = vec![[[3, 1], [2, 0]], [[10, 70], [5, 90]], [[90, 0], [0, 4]], [[95, 7], [100, 3]]];
    for (name, padding) in [("zeroed", Padding::Zeroed), ("kept", Padding::Kept)] {
        push(&format!("packed::{name}"), Problem { padding, ..Problem::packed(config, sequences.clone()) });
    }
    let window = Window { left: Some(9), right: Some(2) };
    push("packed::window", Problem::packed(AttentionConfig { mask: Mask::Full, window, ..config }, sequences));
}

/// As [`visible`], of windows alone: keys that a query sees have equal weights.
fn window(runtime: &Runtime, window: Window) -> Outcome {
    let (queries, keys) = (20, 150);
    let config = AttentionConfig { queries, keys, head_size: 64, window, kernels: Kernels::Portable, ..AttentionConfig::default() };
    let sees = |i: u64, j: u64| {
        let (left, right) = (window.left.unwrap_or(1000), window.right.unwrap_or(1000));
        j + left + queries >= i + keys && j + queries <= i + keys + right
    };
    for first in (0..keys).step_by(64) {
        let mut v = vec![0.0; (keys * 64) as usize];
        for (column, key) in (first..keys.min(first + 64)).enumerate() {
            v[key as usize * 64 + column] = 1.0;
        }
        let inputs = [&vec![0.0; (queries * 64) as usize][..], &vec![0.0; (keys * 64) as usize], &v];
        let (out, _) = attend::<bf16>(runtime, &config, inputs)?;
        for (at, &found) in out.iter().enumerate() {
            let (query, key) = (at as u64 / 64, first + at as u64 % 64);
            let seen = (0..keys).filter(|&key| sees(query, key)).count();
            let value = if key < keys && sees(query, key) { 1.0 / seen as f64 } else { 0.0 };
            if (found - value).abs() > value / 128.0 {
                return Err(format!("query {query} gives key {key} the weight {found}, expected {value}"));
            }
        }
    }
    Ok(())
}

fn refused(runtime: &Runtime) -> Outcome {
    let good = AttentionConfig { queries: 8, keys: 8, head_size: 64, kernels: Kernels::Portable, ..AttentionConfig::default() };
    let device = text(runtime.device(0))?;
    let choice = text(AttentionConfig { layout: Layout::Sbhd, ..good }.choose_on::<f16>(&device))?;
    if choice.kernel != Some("attention_forward_portable__f16__d64") || !choice.why.contains("64 queries by 64 keys on mma") {
        return Err(format!("{choice:?}"));
    }
    let fastest = text(AttentionConfig { kernels: Kernels::Fastest, ..good }.choose_on::<f16>(&device))?;
    if !fastest.why.contains("wgmma") {
        return Err(format!("{fastest:?}"));
    }
    let expect = |config: AttentionConfig, word: &str| match Attention::<bf16>::new(runtime, config) {
        Err(error @ Error::Invalid { .. }) if error.to_string().contains(word) => Ok(()),
        other => Err(format!("{other:?}, where {word} is to be named")),
    };
    expect(AttentionConfig { key_parts: Some(2), ..good }, "key_parts is 2: 1 or none")?;
    expect(AttentionConfig { head_size: 264, ..good }, "head_size is 264: a multiple of 8 up to 256")?;
    let general = |config: AttentionConfig, kernel: &str, why: &str| {
        let choice = text(config.choose_on::<bf16>(&device))?;
        if choice.kernel == Some(kernel) && choice.why.ends_with(why) { Ok(()) } else { Err(format!("{config:?} takes {choice:?}")) }
    };
    let kernel = |panels: u64, keys: u64| format!("attention_forward_portable_general__bf16__panels{panels}__keys{keys}");
    let options = AttentionConfig { soft_cap: Some(30.0), sink: Sink::OffByOne, output: Output::Merged, max_logit: true, ..good };
    let why = "64 queries by 64 keys on mma, heads of 64 and 64 padded to 64, general for soft_cap, sink, output, max_logit";
    general(options, &kernel(1, 64), why)?;
    general(AttentionConfig { head_size: 72, ..good }, &kernel(2, 64), "heads of 72 and 72 padded to 128, general for head_size")?;
    let why = "64 queries by 32 keys on mma, heads of 192 and 128 padded to 256, general for value_size, head_size";
    general(AttentionConfig { head_size: 192, value_size: Some(128), ..good }, &kernel(4, 32), why)
}

/// Each argument by which the general kernel would leave its memory is refused, by its name.
fn arguments(runtime: &Runtime) -> Outcome {
    type Args<'a> = AttentionForwardPortableGeneralArgs<'a, bf16, 1, 64>;
    let stream = stream(runtime)?;
    let kernel = text(runtime.load::<AttentionForwardPortableGeneral<bf16, 1, 64>>())?;
    // Two sequences of four queries and two keys, two heads of 16 and 8 elements that share keys.
    let of_keys = text(Buffer::<bf16>::zeros(&stream, 2 * 2 * 16))?;
    let of_queries = text(Buffer::<bf16>::zeros(&stream, 2 * 4 * 2 * 16 + 8))?;
    let (mut out, mut running) =
        (text(Buffer::<bf16>::zeros(&stream, 2 * 4 * 2 * 8 + 1))?, text(Buffer::<f32>::zeros(&stream, 2 * 4 * 2 * 8 + 1))?);
    let (mut log_sum_exp, mut max_logit) = (text(Buffer::<f32>::zeros(&stream, 16))?, text(Buffer::<f32>::zeros(&stream, 2))?);
    let mut workspace = text(Buffer::<u32>::zeros(&stream, Workspace::words(2)))?;
    let sink = text(Buffer::<f32>::zeros(&stream, 3))?;
    let [queries, keys] = [[0_u32, 4, 8], [0, 2, 4]].map(|ends| text(Buffer::from_slice(&stream, &ends)));
    let (queries, keys) = (queries?, keys?);
    let (mut out, mut running, mut max_logit, mut workspace) =
        (out.view_mut(), running.view_mut(), max_logit.view_mut(), workspace.view_mut());
    let right = [2, 2, Workspace::words(2)];
    let mut launch =
        |[of_q, of_out, of_running]: [u64; 3], merged: bool, [sinks, logits, words]: [u64; 3], change: &dyn Fn(&mut Args<'_>)| {
            let mut args = Args {
                inputs: SizedInputsArgument {
                    q: of_queries.view().slice(of_q, of_q + 256),
                    k: of_keys.view(),
                    v: of_keys.view().slice(0, 32),
                    size: 16,
                    value_size: 8,
                    sink: Some(sink.view().slice(0, sinks)),
                },
                results: PortableGeneralResultsArgument {
                    out: (!merged).then(|| out.slice_mut(of_out, of_out + 128)),
                    running: merged.then(|| running.slice_mut(of_running, of_running + 128)),
                    log_sum_exp: LogSumExpArgument { values: log_sum_exp.view_mut(), rows: 4 },
                    max_logit: Some(MaxLogitArgument { values: max_logit.slice_mut(0, logits), workspace: workspace.slice_mut(0, words) }),
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
                window: Seen { left: FAR, right: FAR, top_left: false },
                scores: Scores { scale: 1.0, cap_limit: 0.0, cap_factor: 0.0 },
            };
            change(&mut args);
            kernel.launch(&stream, args)
        };
    text(launch([0, 0, 0], false, right, &|_| {}))?;
    text(launch([0, 0, 0], true, right, &|_| {}))?;
    text(launch([0, 0, 0], false, right, &|args| (args.results.max_logit, args.inputs.sink) = (None, None)))?;
    refuses("inputs.q", launch([1, 0, 0], false, right, &|_| {}))?;
    refuses("results.out", launch([0, 1, 0], false, right, &|_| {}))?;
    refuses("results.out", launch([0, 0, 0], false, right, &|args| args.results.out = None))?;
    refuses("results.running", launch([0, 0, 1], true, right, &|_| {}))?;
    for (name, change) in [
        ("sequences.query_ends", (|args| args.heads.batches = 1) as fn(&mut Args<'_>)),
        ("heads.group", |args| args.heads.group = 3),
        ("heads.heads", |args| (args.heads.heads, args.heads.group) = (3, 2)),
        ("sequences.query_rows", |args| args.sequences.query_rows = 1 << 30),
        ("sequences.key_rows", |args| args.sequences.key_rows = 1 << 30),
        ("window.left", |args| args.window.left = FAR + 1),
        ("window.right", |args| args.window.right = i32::MIN),
        ("row_tiles", |args| args.row_tiles = 2),
        ("inputs.size", |args| args.inputs.size = 12),
        ("inputs.size", |args| args.inputs.size = 72),
        ("inputs.value_size", |args| args.inputs.value_size = 4),
        ("inputs.value_size", |args| args.inputs.value_size = 72),
        ("heads.step", |args| args.heads.step = 1),
        ("heads.step", |args| args.heads.step = 4),
        ("inputs.q", |args| args.sequences.query_rows = 9),
        ("inputs.k", |args| args.sequences.key_rows = 5),
        ("inputs.k", |args| args.heads.group = 1),
        ("inputs.v", |args| args.inputs.value_size = 16),
        ("results.log_sum_exp.values", |args| args.results.log_sum_exp.rows = 5),
    ] {
        refuses(name, launch([0, 0, 0], false, right, &change))?;
    }
    for (name, lengths) in [
        ("inputs.sink", [3, 2, right[2]]),
        ("inputs.sink", [0, 2, right[2]]),
        ("results.max_logit.values", [2, 1, right[2]]),
        ("results.max_logit.workspace", [2, 2, right[2] - 1]),
    ] {
        refuses(name, launch([0, 0, 0], false, lengths, &|_| {}))?;
    }
    Ok(())
}

/// The same of the kernel without options.
fn plain(runtime: &Runtime) -> Outcome {
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
            window: Seen { left: FAR, right: FAR, top_left: false },
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

/// Two sequences of 128 queries, for 64 of which the log-sum-exp has room: each has its own 64, and nothing is written after them.
fn without_room(runtime: &Runtime) -> Outcome {
    const ROWS: u32 = 64;
    let stream = stream(runtime)?;
    let kernel = text(runtime.load::<AttentionForwardPortable<bf16, 64>>())?;
    let (of_queries, of_keys) = (text(Buffer::<bf16>::zeros(&stream, 256 * 64))?, text(Buffer::<bf16>::zeros(&stream, 3 * 64))?);
    let mut out = text(Buffer::<bf16>::zeros(&stream, 256 * 64))?;
    let mut log_sum_exp = text(Buffer::from_slice(&stream, &[7_f32; 192]))?;
    let [queries, keys] = [[0_u32, 128, 256], [0, 1, 3]].map(|ends| text(Buffer::from_slice(&stream, &ends)));
    let (queries, keys) = (queries?, keys?);
    let args = AttentionForwardPortableArgs {
        inputs: InputsArgument { q: of_queries.view(), k: of_keys.view(), v: of_keys.view() },
        results: PortableResultsArgument {
            out: out.view_mut(),
            log_sum_exp: LogSumExpArgument { values: log_sum_exp.view_mut().split_at(128).0, rows: ROWS },
        },
        sequences: SequencesArgument {
            query_ends: queries.view(),
            key_ends: keys.view(),
            query_offsets: queries.view(),
            key_offsets: keys.view(),
            diagonals: None,
            query_rows: 256,
            key_rows: 3,
            padded: false,
        },
        heads: Heads { batches: 2, heads: 1, group: 1, step: 0 },
        row_tiles: 2,
        window: Seen { left: FAR, right: FAR, top_left: false },
        scale: 1.0,
    };
    text(kernel.launch(&stream, args))?;
    // All scores are 0: of one key, and of two.
    for (at, found) in (0..).zip(text(log_sum_exp.to_vec(&stream))?) {
        let expected = [0.0, core::f32::consts::LN_2, 7.0][at / ROWS as usize];
        if (found - expected).abs() > 1e-5 {
            return Err(format!("log_sum_exp[{at}] is {found}, expected {expected}"));
        }
    }
    Ok(())
}
