//! Attention by the kernels that run on any GPU: the checks of Hopper's, and windows.

use oxtile::attention::{Attention, AttentionConfig, Kernels, Layout, Mask, Padding, Sink, Window};
use oxtile::{Error, Runtime};
use oxtile_tile::num::{Element, bf16, f16};

use super::attention::{Operand, attend, check, checked, visible};
use super::attention_problem::Problem;
use crate::case::{Case, Outcome, Size, text};

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

/// Sequences that lie otherwise: rows of several sequences in turn, packed ones with rows of NaN before, between and behind them.
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
    if choice.kernel != "attention_forward_portable__f16__d64" || !choice.why.contains("64 queries by 64 keys on mma") {
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
    expect(AttentionConfig { head_size: 256, ..good }, "head_size is 256: 64 or 128")?;
    expect(AttentionConfig { soft_cap: Some(30.0), ..good }, "soft_cap is 30")?;
    expect(AttentionConfig { sink: Sink::OffByOne, ..good }, "sink is OffByOne")?;
    expect(AttentionConfig { max_logit: true, ..good }, "max_logit is true")
}
