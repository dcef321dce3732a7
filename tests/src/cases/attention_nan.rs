//! Queries and keys that are not numbers: rows that see one are not numbers, in the result and in the log-sum-exp, and all others are as f64
//! has them, rows of padding zeros.

use oxtile::attention::{AttentionConfig, Kernels, Layout, Mask, Order, Output, Sink, Window};
use oxtile_tile::num::{bf16, f16};

use super::attention::Operand;
use super::attention_backward_pass::check;
use super::attention_problem::{Problem, Row};
use crate::case::{Case, Size};

/// A query; a key of the block that is walked over first, which the last ten queries see; one of a later block, which most see.
const ROWS: [(&str, Row); 3] = [("query", Row::Query(37)), ("first key", Row::Key(290)), ("later key", Row::Key(250))];

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    // Query `i` sees keys up to `i + 230`.
    let base =
        AttentionConfig { queries: 70, keys: 300, heads: 2, head_size: 64, mask: Mask::CausalBottomRight, ..AttentionConfig::default() };
    for [size, value] in [[64, 64], [128, 128], [192, 128], [256, 256]] {
        let config = AttentionConfig { head_size: size, value_size: Some(value), key_parts: Some(1), ..base };
        push::<bf16>(&mut cases, &format!("dense::d{size}"), config);
        push::<bf16>(&mut cases, &format!("full::d{size}"), AttentionConfig { mask: Mask::Full, ..config });
        push::<bf16>(&mut cases, &format!("divided::d{size}"), AttentionConfig { key_parts: Some(3), ..config });
        push::<bf16>(&mut cases, &format!("general::d{size}"), AttentionConfig { max_logit: true, ..config });
        if size <= 128 {
            let packed = AttentionConfig { layout: Layout::Packed, key_parts: None, ..config };
            push::<bf16>(&mut cases, &format!("packed::d{size}"), packed);
            push::<f16>(&mut cases, &format!("packed::full::d{size}"), AttentionConfig { mask: Mask::Full, ..packed });
        }
        let packed = AttentionConfig { layout: Layout::Packed, max_logit: true, key_parts: None, ..config };
        push::<bf16>(&mut cases, &format!("general::packed::d{size}"), packed);
        push::<bf16>(&mut cases, &format!("merged::d{size}"), AttentionConfig { output: Output::Merged, ..config });
    }
    push::<f16>(&mut cases, "dense::f16", AttentionConfig { key_parts: Some(1), ..base });
    push::<f16>(&mut cases, "divided::f16", AttentionConfig { key_parts: Some(3), ..base });
    let window = Window { left: Some(100), right: Some(0) };
    push::<f16>(&mut cases, "general::f16", AttentionConfig { window, sink: Sink::OffByOne, soft_cap: Some(9.0), ..base });
    for head_size in [64, 128] {
        let config = AttentionConfig { head_size, kernels: Kernels::Portable, ..base };
        push::<bf16>(&mut cases, &format!("portable::d{head_size}"), config);
        push::<bf16>(&mut cases, &format!("portable::packed::d{head_size}"), AttentionConfig { layout: Layout::Packed, ..config });
        push::<f16>(&mut cases, &format!("portable::sbhd::d{head_size}"), AttentionConfig { layout: Layout::Sbhd, ..config });
    }
    for [size, value] in [[40, 64], [128, 128], [192, 128]] {
        let config = AttentionConfig { head_size: size, value_size: Some(value), kernels: Kernels::Portable, ..base };
        push::<bf16>(&mut cases, &format!("portable::general::d{size}"), AttentionConfig { sink: Sink::OffByOne, ..config });
        let packed = AttentionConfig { layout: Layout::Packed, sink: Sink::OffByOne, ..config };
        push::<bf16>(&mut cases, &format!("portable::general::packed::d{size}"), packed);
        push::<bf16>(&mut cases, &format!("portable::merged::d{size}"), AttentionConfig { output: Output::Merged, ..config });
    }
    values(&mut cases);
    backward(&mut cases);
    cases
}

/// A value that every query sees which sees any: the first 40 queries see none, and get zeros.
fn values(cases: &mut Vec<Case>) {
    let base = AttentionConfig { queries: 70, keys: 30, heads: 2, mask: Mask::CausalBottomRight, ..AttentionConfig::default() };
    for [size, value] in [[64, 64], [128, 128], [192, 128]] {
        let config = AttentionConfig { head_size: size, value_size: Some(value), key_parts: Some(1), ..base };
        let packed = AttentionConfig { layout: Layout::Packed, key_parts: None, ..config };
        let options = [
            ("dense", config),
            ("divided", AttentionConfig { key_parts: Some(3), ..config }),
            ("general", AttentionConfig { max_logit: true, ..config }),
            ("packed", packed),
            ("merged", AttentionConfig { output: Output::Merged, ..config }),
            ("portable", AttentionConfig { kernels: Kernels::Portable, key_parts: None, ..config }),
        ];
        for (name, config) in options {
            let problem = Problem { nan: Some(Row::Value(0)), ..Problem::of(config) };
            let name = format!("attention_nan::{name}::d{size}::value");
            cases.push(Case::new(name, Size::Large, move |runtime| problem.check::<bf16>(runtime)));
        }
    }
}

/// The gradients of each kernel: they are NaN where a row that is NaN takes part, and for the other sequence those of f64. All
/// keys are seen, as a product of tiles takes hidden ones times zero.
fn backward(cases: &mut Vec<Case>) {
    let base = AttentionConfig { batches: 2, queries: 20, keys: 30, heads: 2, head_size: 64, ..AttentionConfig::default() };
    for kernels in [Kernels::Fastest, Kernels::Portable] {
        for head_size in [64, 128] {
            let config = AttentionConfig { head_size, kernels, ..base };
            let options = [
                ("plain", config),
                ("general", AttentionConfig { value_size: Some(56), ..config }),
                ("cap", AttentionConfig { soft_cap: Some(30.0), ..config }),
                ("sink", AttentionConfig { sink: Sink::Learnable, ..config }),
            ];
            for (name, config) in options {
                for (row_name, row) in [("query", Row::Query(7)), ("key", Row::Key(9))] {
                    let problem = Problem { nan: Some(row), ..Problem::dense(config) };
                    let name = format!("attention_nan::backward::{kernels:?}::d{head_size}::{name}::{row_name}");
                    cases.push(Case::new(name, Size::Large, move |runtime| check::<bf16>(runtime, &problem, Order::Deterministic)));
                }
            }
        }
    }
}

fn push<T: Operand>(cases: &mut Vec<Case>, name: &str, config: AttentionConfig) {
    for (row_name, row) in ROWS {
        let problem = Problem { nan: Some(row), ..Problem::of(config) };
        cases.push(Case::new(format!("attention_nan::{name}::{row_name}"), Size::Large, move |runtime| problem.check::<T>(runtime)));
    }
}
