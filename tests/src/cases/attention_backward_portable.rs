//! The portable backward pass of attention against f64, of any layout, window, sink, cap and output. Rows that belong to no sequence
//! hold NaN, so that none of them is used; what the kernels do not write is seen.

use oxtile::attention::{
    AttentionBackward, AttentionConfig, BackwardInputs, GradientOutput, Gradients, Inputs, Kernels, Layout, Mask, Order, Padding, Sink,
    Window,
};
use oxtile::{Buffer, Error, Runtime};
use oxtile_tile::num::{bf16, f16};

use super::attention_backward_pass::{Differentiable, check, ring, same_bits};
use super::attention_problem::Problem;
use crate::case::{Case, Outcome, Size, stream, text};

const FAMILY: &str = "attention_backward_portable";
/// These kernels know no other.
const ORDER: Order = Order::Deterministic;

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let base = AttentionConfig { head_size: 64, kernels: Kernels::Portable, ..AttentionConfig::default() };
    let window = |left, right| Window { left, right };
    // Bounds inside a step, between steps, over several; rows, and keys, that see nothing.
    let masks = [
        ("full", Mask::Full, window(None, None)),
        ("top_left", Mask::CausalTopLeft, window(None, None)),
        ("bottom_right", Mask::CausalBottomRight, window(None, None)),
        ("left", Mask::Full, window(Some(5), None)),
        ("right", Mask::Full, window(None, Some(3))),
        ("band", Mask::Full, window(Some(64), Some(0))),
        ("nothing", Mask::CausalTopLeft, window(Some(0), None)),
    ];
    for (name, mask, window) in masks {
        for [queries, keys] in [[9, 75], [75, 9]] {
            let config = AttentionConfig { queries, keys, mask, window, ..base };
            push::<bf16>(&mut cases, &format!("mask::{name}::{queries}x{keys}"), Problem::dense(config));
        }
    }
    for [queries, keys] in [[3, 0], [0, 5]] {
        push::<bf16>(&mut cases, &format!("empty::{queries}x{keys}"), Problem::dense(AttentionConfig { queries, keys, ..base }));
    }
    let shape = AttentionConfig { queries: 20, keys: 30, heads: 2, ..base };
    let options = [
        ("cap", AttentionConfig { soft_cap: Some(2.0), scale: Some(0.5), ..shape }),
        ("cap::largest", AttentionConfig { soft_cap: Some(1000.0), ..shape }),
        ("sink::one", AttentionConfig { sink: Sink::OffByOne, ..shape }),
        ("sink::learnable", AttentionConfig { sink: Sink::Learnable, mask: Mask::CausalTopLeft, batches: 2, ..shape }),
        ("added", AttentionConfig { gradients: GradientOutput::Added, ..shape }),
        ("bshd", AttentionConfig { batches: 2, heads: 4, key_heads: 2, ..shape }),
        ("sbhd", AttentionConfig { layout: Layout::Sbhd, batches: 2, heads: 4, key_heads: 2, sink: Sink::Learnable, ..shape }),
    ];
    for (name, config) in options {
        push::<bf16>(&mut cases, name, Problem::dense(config));
    }
    // Heads smaller than tiles, and each tile.
    for (size, value) in [(40, 64), (96, 96), (192, 128), (256, 256), (136, 200)] {
        let config =
            AttentionConfig { head_size: size, value_size: Some(value), queries: 9, keys: 20, mask: Mask::CausalBottomRight, ..base };
        push::<bf16>(&mut cases, &format!("sizes::{size}x{value}"), Problem::dense(config));
    }
    let half = AttentionConfig { head_size: 128, mask: Mask::CausalBottomRight, queries: 70, keys: 40, ..base };
    push::<f16>(&mut cases, "f16", Problem::dense(half));
    for head_size in [64, 256] {
        let config = AttentionConfig { head_size, queries: 9, keys: 20, ..base };
        push::<f16>(&mut cases, &format!("f16::d{head_size}"), Problem::dense(config));
    }
    packed(&mut cases, AttentionConfig { layout: Layout::Packed, heads: 2, ..base });
    for (head_size, mask) in [(64, Mask::Full), (128, Mask::CausalBottomRight), (256, Mask::CausalTopLeft)] {
        let large = AttentionConfig { head_size, mask, batches: 2, heads: 4, key_heads: 1, queries: 150, keys: 210, ..base };
        push::<bf16>(&mut cases, &format!("large::d{head_size}"), Problem::dense(large));
    }
    for (name, window) in [("ring", window(None, None)), ("ring::diagonals", window(Some(12), Some(3)))] {
        let config = AttentionConfig { window, ..base };
        cases.push(Case::new(format!("{FAMILY}::{name}"), Size::Small, move |r| ring(r, config, ORDER)));
    }
    let same = AttentionConfig { queries: 20, keys: 90, heads: 2, key_heads: 1, sink: Sink::Learnable, ..base };
    cases.push(Case::new(format!("{FAMILY}::same_bits"), Size::Small, move |r| same_bits(r, &Problem::dense(same))));
    cases.push(Case::new(format!("{FAMILY}::refused"), Size::Small, refused));
    cases
}

/// Sequences of all lengths, with padding and without, that begin anywhere; some are all padding.
fn packed(cases: &mut Vec<Case>, base: AttentionConfig) {
    let mixed = vec![[[0, 0], [0, 5]], [[0, 1], [5, 0]], [[1, 70], [5, 20]], [[71, 7], [25, 80]]];
    let padded = vec![[[3, 20], [1, 30]], [[80, 0], [40, 4]], [[90, 1], [50, 0]], [[95, 10], [120, 15]]];
    let causal = AttentionConfig { mask: Mask::CausalBottomRight, ..base };
    let shared = AttentionConfig { key_heads: 1, sink: Sink::Learnable, ..causal };
    push::<bf16>(cases, "packed", Problem::packed(causal, mixed));
    push::<bf16>(cases, "padded::zeroed", Problem::packed(shared, padded.clone()));
    push::<bf16>(cases, "padded::kept", Problem { padding: Padding::Kept, ..Problem::packed(base, padded.clone()) });
    let windows = AttentionConfig { window: Window { left: Some(9), right: Some(2) }, gradients: GradientOutput::Added, ..base };
    push::<bf16>(cases, "padded::added", Problem::packed(windows, padded));
}

fn push<T: Differentiable>(cases: &mut Vec<Case>, name: &str, problem: Problem) {
    let size = if problem.config.keys > 200 { Size::Large } else { Size::Small };
    cases.push(Case::new(format!("{FAMILY}::{name}"), size, move |runtime| check::<T>(runtime, &problem, ORDER)));
}

/// Which kernels are taken and why; what is missing or too much.
fn refused(runtime: &Runtime) -> Outcome {
    let good = AttentionConfig { queries: 8, keys: 8, head_size: 64, ..AttentionConfig::default() };
    let device = text(runtime.device(0))?;
    let choose = |config: AttentionConfig, words: &[&str]| {
        let choice = text(config.choose_backward_on::<f16>(&device))?;
        let said = choice.to_string();
        if words.iter().all(|word| said.contains(word)) { Ok(()) } else { Err(format!("{said}, where {words:?} are to be named")) }
    };
    choose(good, &["attention_backward__f16__d64", "wgmma"])?;
    choose(AttentionConfig { kernels: Kernels::Portable, ..good }, &["attention_backward_portable__f16__panels1", "mma", "for kernels"])?;
    let window = Window { left: Some(3), right: None };
    choose(AttentionConfig { window, head_size: 128, ..good }, &["attention_backward__f16__d128__queries64__span64__masked"])?;
    let capped = AttentionConfig { window, soft_cap: Some(3.0), ..good };
    choose(capped, &["attention_backward_general__f16__d64", "wgmma", "general for soft_cap"])?;
    choose(AttentionConfig { layout: Layout::Packed, keys: 0, ..good }, &["panels1", "for empty tensors"])?;
    let added = AttentionConfig { gradients: GradientOutput::Added, head_size: 96, ..good };
    choose(added, &["attention_backward_general__f16__d128", "padded to 128", "for head_size"])?;
    choose(AttentionConfig { head_size: 64, ..added }, &["attention_backward__f16__d64", "wgmma"])?;
    let stream = stream(runtime)?;
    let zeros = |length: u64| text(Buffer::<f16>::zeros(&stream, length));
    let (q, mut gradients) = (zeros(512)?, [zeros(512)?, zeros(512)?, zeros(512)?]);
    let (log_sum_exp, mut sink) = (text(Buffer::<f32>::zeros(&stream, 8))?, text(Buffer::<f32>::zeros(&stream, 1))?);
    let mut attempt = |config: AttentionConfig, with_sink: bool| {
        let backward = AttentionBackward::<f16>::new(runtime, config, Order::Fast)?;
        let forward = Inputs::new(q.view(), q.view(), q.view());
        let inputs = BackwardInputs { forward, out: q.view().into(), log_sum_exp: log_sum_exp.view(), grad_out: q.view().into() };
        let [dq, dk, dv] = gradients.each_mut().map(Buffer::view_mut);
        backward.backward(&stream, inputs, Gradients { sink: with_sink.then(|| sink.view_mut()), ..Gradients::new(dq, dk, dv) })
    };
    let mut expect = |config: AttentionConfig, with_sink: bool, words: &str| match attempt(config, with_sink) {
        Err(error @ Error::Invalid { .. }) if error.to_string().contains(words) => Ok(()),
        Err(error) => Err(format!("{error}, where {words} is to be said")),
        Ok(()) => Err(format!("{config:?} is not refused")),
    };
    expect(AttentionConfig { gradients: GradientOutput::Added, ..good }, false, "gradients of q: the configuration's gradients are Added")?;
    expect(AttentionConfig { layout: Layout::Packed, ..good }, false, "asks for `sequences`")?;
    expect(AttentionConfig { sink: Sink::Learnable, ..good }, false, "asks for `sink`")?;
    expect(good, true, "the configuration's sink is None")
}
