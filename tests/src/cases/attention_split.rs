//! Attention whose keys are divided among blocks, and heads that are rows of one, against f64.

use oxtile::attention::{Attention, AttentionConfig, Kernels, Layout, Mask, Sink};
use oxtile::tensor::{Strided, TensorMap};
use oxtile::{Buffer, Error, Runtime};
use oxtile_kernels::attention::{
    AttentionCombine, AttentionCombineArgs, AttentionForwardSplit, AttentionForwardSplitArgs, CombinedArgument, FAR, Narrow, PartsArgument,
    PartsMutArgument, Shape, SplitInputsArgument, WARPGROUP_QUERIES,
};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::num::{bf16, f16};

use super::attention;
use super::attention_limits::refuses;
use super::attention_problem::Problem;
use crate::case::{Case, Outcome, Size, stream, text};

const MASKS: [(&str, Mask); 3] = [("full", Mask::Full), ("top_left", Mask::CausalTopLeft), ("bottom_right", Mask::CausalBottomRight)];

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let base =
        AttentionConfig { head_size: 64, queries: 3, keys: 300, heads: 4, key_heads: 2, key_parts: Some(2), ..AttentionConfig::default() };
    for (name, mask) in MASKS {
        // The race detector looks at each kernel once, on parts of one block and of two.
        push(&mut cases, name, AttentionConfig { mask, ..base }, mask == Mask::CausalBottomRight);
        // Two tiles; the causal ones see less than the last parts have.
        let tiles = AttentionConfig { mask, queries: 140, heads: 1, key_heads: 1, key_parts: Some(3), ..base };
        let problem = Problem { one_hot: true, ..Problem::dense(tiles) };
        cases.push(Case::new(format!("attention_split::{name}::visible"), Size::Large, move |r| problem.check::<bf16>(r)));
        // A single query: heads are rows of one, unless it sees its first key alone.
        for parts in [1, 2] {
            let config = AttentionConfig { mask, batches: 2, queries: 1, heads: 6, key_parts: Some(parts), ..base };
            push(&mut cases, &format!("{name}::single::{parts}"), config, mask == Mask::Full);
        }
    }
    push(&mut cases, "more parts than blocks", AttentionConfig { keys: 140, key_parts: Some(5), ..base }, false);
    push(&mut cases, "most parts", AttentionConfig { keys: 1000, key_parts: Some(32), scale: Some(1.0), ..base }, false);
    push(&mut cases, "no keys", AttentionConfig { keys: 0, ..base }, false);
    for queries in [1, 5] {
        let config = AttentionConfig { layout: Layout::Sbhd, batches: 2, queries, ..base };
        push(&mut cases, &format!("sbhd::{queries}"), config, false);
    }
    for (size, value) in [(40, 24), (128, 128), (192, 128), (256, 256), (136, 200)] {
        let config = AttentionConfig { head_size: size, value_size: Some(value), keys: 290, mask: Mask::CausalBottomRight, ..base };
        push(&mut cases, &format!("sizes::{size}x{value}"), config, size == value);
        let halves = AttentionConfig { queries: 1, keys: 150, ..config };
        cases
            .push(Case::new(format!("attention_split::f16::{size}x{value}"), Size::Large, move |r| Problem::dense(halves).check::<f16>(r)));
    }
    cases.push(Case::new("attention_split::chosen", Size::Small, chosen));
    cases.push(Case::new("attention_split::refused", Size::Small, parts_refused));
    cases.push(Case::new("attention_split::refused::combine", Size::Small, combine_refused));
    cases
}

fn push(cases: &mut Vec<Case>, name: &str, config: AttentionConfig, checked: bool) {
    let size = if checked { Size::Small } else { Size::Large };
    cases.push(Case::new(format!("attention_split::{name}"), size, move |runtime| Problem::dense(config).check::<bf16>(runtime)));
}

/// Which kernel a device takes, and what is refused.
fn chosen(runtime: &Runtime) -> Outcome {
    let device = text(runtime.device(0))?;
    let few = AttentionConfig { head_size: 64, queries: 1, keys: 4096, heads: 4, key_heads: 4, ..AttentionConfig::default() };
    let expect = |config: AttentionConfig, kernel: &str, why: &str| {
        let choice = text(config.choose_on::<bf16>(&device))?;
        if choice.kernel == Some(kernel) && choice.why.contains(why) { Ok(()) } else { Err(format!("{config:?} takes {choice:?}")) }
    };
    let (split, whole) = ("attention_forward_split__bf16__d64__v64__keys128__narrow", "attention_forward__bf16__d64__v64__keys128__narrow");
    // One tile, whatever the device: four heads that are rows of one.
    expect(AttentionConfig { key_heads: 1, ..few }, split, "4 heads that share keys as rows of one")?;
    expect(AttentionConfig { key_heads: 1, ..few }, split, "keys in")?;
    expect(AttentionConfig { keys: 300, ..few }, &format!("{whole}__full"), "all keys")?;
    expect(AttentionConfig { key_parts: Some(1), ..few }, &format!("{whole}__full"), "all keys")?;
    expect(AttentionConfig { batches: 1 << 10, ..few }, &format!("{whole}__full"), "all keys")?;
    expect(AttentionConfig { key_parts: Some(7), keys: 300, ..few }, split, "keys in 7 parts")?;
    // A query that sees its first key alone has nothing to divide.
    expect(AttentionConfig { mask: Mask::CausalTopLeft, ..few }, &format!("{whole}__causal"), "causal")?;
    let refuse = |config: AttentionConfig, words: &[&str]| match Attention::<bf16>::new(runtime, config) {
        Err(error @ Error::Invalid { .. }) if words.iter().all(|word| error.to_string().contains(word)) => Ok(()),
        other => Err(format!("{other:?}, where {words:?} are to be named")),
    };
    refuse(AttentionConfig { key_parts: Some(33), ..few }, &["key_parts is 33", "from 1 to 32"])?;
    refuse(AttentionConfig { key_parts: Some(0), ..few }, &["key_parts is 0"])?;
    refuse(AttentionConfig { key_parts: Some(2), sink: Sink::OffByOne, ..few }, &["key_parts is 2", "1 with sink"])?;
    refuse(AttentionConfig { key_parts: Some(2), kernels: Kernels::Portable, ..few }, &["key_parts", "2"])?;
    // As the device has it, and the second run as the first.
    attention::check::<bf16>(runtime, &AttentionConfig { key_heads: 1, keys: 1100, ..few }, 1.0)
}

/// Each argument by which the kernel would leave its memory is refused, by its name.
fn parts_refused(runtime: &Runtime) -> Outcome {
    type Attend = AttentionForwardSplit<bf16, 64, 64, 128, Narrow>;
    type Args<'a> = AttentionForwardSplitArgs<'a, bf16, 64, 64, 128, Narrow>;
    let stream = stream(runtime)?;
    let kernel = text(runtime.load::<Attend>())?;
    // Two batches of two heads of three queries, in two parts.
    let rows = Strided { shape: [2, 2, 3, 64], strides: [384, 192, 64, 1] };
    let (tensor, parts) = (text(Buffer::<bf16>::zeros(&stream, 768))?, 2 * 12);
    let q = text(TensorMap::<_, WARPGROUP_QUERIES, 64, Swizzle128, 4>::strided(&stream, tensor.view(), rows))?;
    let k = text(TensorMap::<_, 128, 64, Swizzle128, 4>::strided(&stream, tensor.view(), rows))?;
    let (mut sums, mut logs) = (text(Buffer::<f32>::zeros(&stream, parts * 64 + 2))?, text(Buffer::<f32>::zeros(&stream, parts))?);
    let mut sums = sums.view_mut();
    let mut launch = |start: u64, change: &dyn Fn(&mut Args<'_>)| {
        let mut args = Args {
            inputs: SplitInputsArgument { q: q.view(), k: k.view(), v: k.view() },
            parts: PartsMutArgument { sums: sums.slice_mut(start, start + parts * 64), logs: logs.view_mut(), count: 2, size: 64 },
            shape: Shape { batches: 2, heads: 2, group: 1, queries: 3, keys: 3 },
            diagonal: FAR,
            scale: 1.0,
            marker: std::marker::PhantomData,
        };
        change(&mut args);
        kernel.launch(&stream, args)
    };
    text(launch(0, &|_| {}))?;
    refuses("parts.sums", launch(1, &|_| {}))?;
    refuses("parts.count", launch(0, &|args| args.parts.count = 33))?;
    refuses("parts.logs", launch(0, &|args| args.parts.count = 3))?;
    refuses("parts.logs", launch(0, &|args| args.shape.queries = 4))?;
    refuses("parts.logs", launch(0, &|args| args.shape.batches = 1))?;
    refuses("shape.group", launch(0, &|args| args.shape.group = 3))?;
    refuses("shape.heads", launch(0, &|args| (args.shape.heads, args.shape.group) = (3, 2)))?;
    refuses("shape.keys", launch(0, &|args| args.shape.keys = 1 << 30))?;
    refuses("shape.queries", launch(0, &|args| args.shape.queries = 1 << 30))?;
    refuses("diagonal", launch(0, &|args| args.diagonal = -FAR - 1))?;
    refuses("parts.size", launch(0, &|args| args.parts.size = 63))?;
    refuses("parts.size", launch(0, &|args| args.parts.size = 66))?;
    refuses("parts.sums", launch(0, &|args| args.parts.size = 62))?;
    refuses("parts.count * shape.heads * shape.batches", launch(0, &|args| args.shape.batches = 1 << 31))
}

/// The same of what puts parts together.
fn combine_refused(runtime: &Runtime) -> Outcome {
    let stream = stream(runtime)?;
    let kernel = text(runtime.load::<AttentionCombine<bf16>>())?;
    // Two batches of two heads of three rows, in two parts.
    let sums = text(Buffer::<f32>::zeros(&stream, 2 * 12 * 8 + 2))?;
    let logs = text(Buffer::<f32>::zeros(&stream, 2 * 12))?;
    let (mut out, mut log_sum_exp) = (text(Buffer::<bf16>::zeros(&stream, 12 * 8 + 2))?, text(Buffer::<f32>::zeros(&stream, 12))?);
    let mut out = out.view_mut();
    let mut launch = |[of_sums, of_out]: [u64; 2], change: &dyn Fn(&mut AttentionCombineArgs<'_, bf16>)| {
        let mut args = AttentionCombineArgs {
            parts: PartsArgument { sums: sums.view().slice(of_sums, of_sums + 2 * 12 * 8), logs: logs.view(), count: 2, size: 8 },
            result: CombinedArgument {
                out: out.slice_mut(of_out, of_out + 12 * 8),
                log_sum_exp: log_sum_exp.view_mut(),
                heads: 2,
                rows: 3,
                batch_stride: 48,
                head_stride: 8,
                row_stride: 16,
            },
        };
        change(&mut args);
        kernel.launch(&stream, args)
    };
    text(launch([0, 0], &|_| {}))?;
    refuses("parts.sums", launch([1, 0], &|_| {}))?;
    refuses("result.out", launch([0, 1], &|_| {}))?;
    refuses("parts.count", launch([0, 0], &|args| args.parts.count = 33))?;
    refuses("parts.logs", launch([0, 0], &|args| args.parts.count = 3))?;
    refuses("parts.size", launch([0, 0], &|args| args.parts.size = 7))?;
    refuses("parts.sums", launch([0, 0], &|args| args.parts.size = 10))?;
    refuses("result.log_sum_exp", launch([0, 0], &|args| args.result.rows = 5))?;
    refuses("result.log_sum_exp", launch([0, 0], &|args| args.result.heads = 0))?;
    for (name, change) in [
        ("result.batch_stride", (|args| args.result.batch_stride = 50) as fn(&mut AttentionCombineArgs<'_, bf16>)),
        ("result.batch_stride", |args| args.result.batch_stride = 47),
        ("result.batch_stride", |args| args.result.batch_stride = u64::MAX - 1),
        ("result.batch_stride", |args| args.result.head_stride = 10),
        ("result.head_stride", |args| args.result.head_stride = 96),
        ("result.head_stride", |args| args.result.head_stride = 7),
        ("result.row_stride", |args| args.result.row_stride = 46),
        ("result.row_stride", |args| args.result.row_stride = 15),
    ] {
        refuses(name, launch([0, 0], &change))?;
    }
    Ok(())
}
