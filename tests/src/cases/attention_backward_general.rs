//! The general backward pass of attention on Hopper against f64, as the portable one is. Rows that belong to no sequence hold NaN, so
//! that none of them is used; what the kernels do not write is seen.

use oxtile::attention::{AttentionConfig, GradientOutput, Layout, Mask, Order, Padding, Sink, Window};
use oxtile_tile::num::{bf16, f16};

use super::attention_backward_pass::{Differentiable, check, ring, same_bits};
use super::attention_problem::Problem;
use crate::case::{Case, Size};

const FAMILY: &str = "attention_backward_general";

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    // One head, so that a value size alone asks for these kernels.
    let base = AttentionConfig { head_size: 64, value_size: Some(56), ..AttentionConfig::default() };
    let window = |left, right| Window { left, right };
    // Bounds inside a block, between blocks, over several; rows, and keys, that see nothing.
    let masks = [
        ("top_left", Mask::CausalTopLeft, window(None, None)),
        ("bottom_right", Mask::CausalBottomRight, window(None, None)),
        ("band", Mask::Full, window(Some(64), Some(0))),
        ("nothing", Mask::CausalTopLeft, window(Some(0), None)),
    ];
    for (name, mask, window) in masks {
        for [queries, keys] in [[20, 150], [150, 20]] {
            let config = AttentionConfig { queries, keys, mask, window, ..base };
            push::<bf16>(&mut cases, &format!("mask::{name}::{queries}x{keys}"), Problem::dense(config), Order::Deterministic);
        }
    }
    let shape = AttentionConfig { queries: 20, keys: 30, heads: 2, ..base };
    let options = [
        ("cap", AttentionConfig { soft_cap: Some(2.0), scale: Some(0.5), ..shape }),
        ("cap::largest", AttentionConfig { soft_cap: Some(1000.0), ..shape }),
        ("cap::small weights", AttentionConfig { soft_cap: Some(50.0), scale: Some(4.0), mask: Mask::CausalBottomRight, ..shape }),
        ("sink::one", AttentionConfig { sink: Sink::OffByOne, ..shape }),
        ("sink::learnable", AttentionConfig { sink: Sink::Learnable, mask: Mask::CausalTopLeft, batches: 2, ..shape }),
        ("added", AttentionConfig { gradients: GradientOutput::Added, ..shape }),
        ("bshd", AttentionConfig { batches: 2, heads: 4, key_heads: 2, ..shape }),
        ("sbhd", AttentionConfig { layout: Layout::Sbhd, batches: 2, heads: 4, key_heads: 2, sink: Sink::Learnable, ..shape }),
        ("sbhd::added", AttentionConfig { layout: Layout::Sbhd, batches: 2, heads: 2, gradients: GradientOutput::Added, ..shape }),
    ];
    for (name, config) in options {
        push::<bf16>(&mut cases, name, Problem::dense(config), Order::Deterministic);
    }
    // Heads smaller than tiles, and each tile.
    for (size, value) in [(40, 64), (96, 96), (128, 72)] {
        let config =
            AttentionConfig { head_size: size, value_size: Some(value), queries: 70, keys: 20, mask: Mask::CausalBottomRight, ..base };
        push::<bf16>(&mut cases, &format!("sizes::{size}x{value}"), Problem::dense(config), Order::Deterministic);
    }
    let half = AttentionConfig { head_size: 128, soft_cap: Some(20.0), mask: Mask::CausalBottomRight, queries: 70, keys: 140, ..base };
    push::<f16>(&mut cases, "f16", Problem::dense(half), Order::Fast);
    push::<f16>(&mut cases, "f16::d64", Problem::dense(AttentionConfig { queries: 20, keys: 30, ..base }), Order::Deterministic);
    // The kernels of each format that are left.
    let few = AttentionConfig { mask: Mask::CausalBottomRight, queries: 20, keys: 30, ..base };
    let capped = AttentionConfig { soft_cap: Some(20.0), ..few };
    push::<f16>(&mut cases, "f16::d64::cap", Problem::dense(capped), Order::Deterministic);
    push::<f16>(&mut cases, "f16::d128", Problem::dense(AttentionConfig { head_size: 128, ..few }), Order::Deterministic);
    push::<bf16>(&mut cases, "cap::d128", Problem::dense(AttentionConfig { head_size: 128, ..capped }), Order::Deterministic);
    packed(&mut cases, AttentionConfig { layout: Layout::Packed, heads: 2, value_size: None, ..base });
    for (head_size, mask) in [(64, Mask::Full), (128, Mask::CausalBottomRight)] {
        let large = AttentionConfig { layout: Layout::Packed, value_size: None, head_size, mask, heads: 4, key_heads: 1, ..base };
        let lengths = vec![[[0, 150], [0, 210]], [[150, 300], [210, 330]]];
        let orders = [("large", Order::Deterministic), ("large::fast", Order::Fast)];
        for (name, order) in orders {
            push::<bf16>(&mut cases, &format!("{name}::d{head_size}"), Problem::packed(large, lengths.clone()), order);
        }
    }
    for (name, window) in [("ring", window(None, None)), ("ring::diagonals", window(Some(12), Some(3)))] {
        let config = AttentionConfig { value_size: None, window, ..base };
        cases.push(Case::new(format!("{FAMILY}::{name}"), Size::Small, move |r| ring(r, config, Order::Fast)));
    }
    // Three tiles that add to each block of queries, of sequences that differ in length.
    let same = AttentionConfig { layout: Layout::Packed, heads: 2, key_heads: 1, sink: Sink::Learnable, value_size: None, ..base };
    let same = Problem::packed(same, vec![[[0, 140], [0, 300]], [[140, 20], [300, 150]]]);
    cases.push(Case::new(format!("{FAMILY}::same_bits"), Size::Large, move |r| same_bits(r, &same)));
    cases
}

/// Sequences of all lengths, with padding and without, that begin anywhere; some are all padding.
fn packed(cases: &mut Vec<Case>, base: AttentionConfig) {
    let mixed = vec![[[0, 0], [0, 5]], [[0, 1], [5, 0]], [[1, 140], [5, 20]], [[141, 7], [25, 150]]];
    // The padding of the second is more than a block of queries, and more than a tile of keys.
    let padded = vec![[[3, 20], [1, 30]], [[80, 0], [40, 4]], [[220, 1], [190, 0]], [[225, 10], [200, 15]]];
    // Sequences lie in another order than their lengths are counted in.
    let mirrored = vec![[[150, 70], [60, 40]], [[0, 130], [0, 30]]];
    let causal = AttentionConfig { mask: Mask::CausalBottomRight, ..base };
    let shared = AttentionConfig { key_heads: 1, sink: Sink::Learnable, ..causal };
    push::<bf16>(cases, "packed", Problem::packed(causal, mixed), Order::Deterministic);
    push::<bf16>(cases, "packed::mirrored", Problem { padding: Padding::Kept, ..Problem::packed(base, mirrored) }, Order::Fast);
    push::<bf16>(cases, "padded::zeroed", Problem::packed(shared, padded.clone()), Order::Deterministic);
    push::<bf16>(cases, "padded::kept", Problem { padding: Padding::Kept, ..Problem::packed(base, padded.clone()) }, Order::Fast);
    // Sums of lengths that do not begin at 0: more than there are queries, and such that a block would be missing.
    push::<bf16>(cases, "sums of 1000", Problem { first: 1000, ..Problem::packed(causal, padded.clone()) }, Order::Deterministic);
    let one = Problem::packed(causal, vec![[[0, 130], [0, 40]]]);
    push::<bf16>(cases, "sums of 200", Problem { first: 200, ..one }, Order::Deterministic);
    let windows = AttentionConfig { window: Window { left: Some(9), right: Some(2) }, gradients: GradientOutput::Added, ..base };
    push::<bf16>(cases, "padded::added", Problem::packed(windows, padded), Order::Deterministic);
}

fn push<T: Differentiable>(cases: &mut Vec<Case>, name: &str, problem: Problem, order: Order) {
    // Masks need no race detector, which sees them in packed sequences too.
    let size = if problem.config.keys > 300 || name.starts_with("mask") { Size::Large } else { Size::Small };
    cases.push(Case::new(format!("{FAMILY}::{name}"), size, move |runtime| check::<T>(runtime, &problem, order)));
}
