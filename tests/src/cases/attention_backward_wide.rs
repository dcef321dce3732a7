//! The backward pass of heads above 128 on Hopper against f64, as the portable one is. Rows that belong to no sequence hold NaN, so that none of
//! them is used; what the kernels do not write is seen.

use oxtile::Runtime;
use oxtile::attention::{AttentionConfig, GradientOutput, Kernels, Layout, Mask, Order, Padding, Sink, Window};
use oxtile_tile::num::{bf16, f16};

use super::attention_backward_pass::{Differentiable, check, ring, same_bits};
use super::attention_problem::Problem;
use crate::case::{Case, Outcome, Size, text};

const FAMILY: &str = "attention_backward_wide";
/// These kernels know no other.
const ORDER: Order = Order::Deterministic;

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let base = AttentionConfig { head_size: 192, value_size: Some(128), ..AttentionConfig::default() };
    let large = AttentionConfig { head_size: 256, value_size: None, ..base };
    let window = |left, right| Window { left, right };
    // Bounds inside a block, between blocks, over several; rows, and keys, that see nothing; both sizes.
    push::<bf16>(&mut cases, "full::70x150", Problem::dense(AttentionConfig { queries: 70, keys: 150, ..base }));
    push::<bf16>(&mut cases, "full::d256", Problem::dense(AttentionConfig { queries: 150, keys: 70, ..large }));
    push::<bf16>(&mut cases, "one query", Problem::dense(AttentionConfig { queries: 1, keys: 65, ..large }));
    let masks = [
        ("top_left", Mask::CausalTopLeft, window(None, None), [20, 150]),
        ("bottom_right", Mask::CausalBottomRight, window(None, None), [150, 80]),
        ("band", Mask::Full, window(Some(64), Some(0)), [150, 150]),
        ("nothing", Mask::CausalTopLeft, window(Some(0), None), [150, 20]),
    ];
    for (name, mask, window, [queries, keys]) in masks {
        push::<bf16>(&mut cases, &format!("mask::{name}"), Problem::dense(AttentionConfig { queries, keys, mask, window, ..base }));
    }
    let shape = AttentionConfig { queries: 20, keys: 30, heads: 4, key_heads: 2, batches: 2, ..base };
    let options = [
        ("sink", AttentionConfig { sink: Sink::Learnable, mask: Mask::CausalTopLeft, ..shape }),
        ("sbhd::added", AttentionConfig { layout: Layout::Sbhd, gradients: GradientOutput::Added, ..shape }),
    ];
    for (name, config) in options {
        push::<bf16>(&mut cases, name, Problem::dense(config));
    }
    // Heads smaller than tiles.
    let small = AttentionConfig { head_size: 136, value_size: Some(200), heads: 2, mask: Mask::CausalBottomRight, ..shape };
    push::<bf16>(&mut cases, "sizes::136x200", Problem::dense(small));
    for (name, config) in [("f16", base), ("f16::d256", large)] {
        push::<f16>(&mut cases, name, Problem::dense(AttentionConfig { queries: 9, keys: 20, ..config }));
    }
    // Sequences of all lengths, with padding and without, that begin anywhere; some are all padding.
    let mixed = vec![[[0, 0], [0, 5]], [[0, 1], [5, 0]], [[1, 140], [5, 20]], [[141, 7], [25, 150]]];
    let padded = vec![[[3, 20], [1, 30]], [[80, 0], [40, 4]], [[290, 1], [130, 0]], [[295, 10], [140, 15]]];
    let base = AttentionConfig { layout: Layout::Packed, heads: 2, ..base };
    let causal = AttentionConfig { mask: Mask::CausalBottomRight, ..base };
    push::<bf16>(&mut cases, "packed", Problem::packed(causal, mixed));
    let shared = AttentionConfig { key_heads: 1, sink: Sink::Learnable, ..causal };
    push::<bf16>(&mut cases, "padded::zeroed", Problem::packed(shared, padded.clone()));
    let windows = AttentionConfig { window: window(Some(9), Some(2)), gradients: GradientOutput::Added, ..base };
    push::<bf16>(&mut cases, "padded::added", Problem { padding: Padding::Kept, ..Problem::packed(windows, padded) });
    let lengths = vec![[[0, 150], [0, 210]], [[150, 300], [210, 330]]];
    let many = AttentionConfig { heads: 4, key_heads: 1, head_size: 256, value_size: None, ..causal };
    push::<bf16>(&mut cases, "large", Problem::packed(many, lengths));
    let steps = AttentionConfig { layout: Layout::Bshd, heads: 1, ..base };
    cases.push(Case::new(format!("{FAMILY}::ring"), Size::Large, move |r| ring(r, steps, ORDER)));
    let same = Problem::packed(AttentionConfig { key_heads: 1, ..base }, vec![[[0, 140], [0, 70]], [[140, 20], [70, 150]]]);
    cases.push(Case::new(format!("{FAMILY}::same_bits"), Size::Large, move |r| same_bits(r, &same)));
    cases.push(Case::new(format!("{FAMILY}::chosen"), Size::Small, chosen));
    cases
}

fn push<T: Differentiable>(cases: &mut Vec<Case>, name: &str, problem: Problem) {
    // Masks, and blocks without one, need no race detector, which sees them in packed sequences too.
    let size = if problem.config.keys > 300 || name.starts_with("mask") || name.starts_with("full") { Size::Large } else { Size::Small };
    cases.push(Case::new(format!("{FAMILY}::{name}"), size, move |runtime| check::<T>(runtime, &problem, ORDER)));
}

/// Which kernels are taken and why.
fn chosen(runtime: &Runtime) -> Outcome {
    let good = AttentionConfig { queries: 8, keys: 8, head_size: 192, value_size: Some(128), ..AttentionConfig::default() };
    let device = text(runtime.device(0))?;
    let choose = |config: AttentionConfig, words: &[&str]| {
        let choice = text(config.choose_backward_on::<f16>(&device))?;
        let said = choice.to_string();
        if words.iter().all(|word| said.contains(word)) { Ok(()) } else { Err(format!("{said}, where {words:?} are to be named")) }
    };
    choose(good, &["attention_backward_wide_keys__f16__d192__v128__queries96", "wgmma", "for head sizes above 128"])?;
    choose(AttentionConfig { value_size: Some(136), ..good }, &["attention_backward_wide_keys__f16__d256__v256", "padded to 256 and 256"])?;
    choose(
        AttentionConfig { soft_cap: Some(3.0), ..good },
        &["attention_backward_portable__f16__panels4", "head sizes above 128, soft_cap"],
    )?;
    choose(AttentionConfig { keys: 0, sink: Sink::Learnable, ..good }, &["attention_backward_portable__f16__panels4", "empty tensors"])?;
    choose(
        AttentionConfig { kernels: Kernels::Portable, ..good },
        &["attention_backward_portable__f16__panels4", "for value_size, head_size, kernels"],
    )
}
