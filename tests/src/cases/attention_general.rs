//! Attention of any layout, window, sink, cap and output, against f64. Rows that belong to no sequence hold NaN, so that none of
//! them is used; what the kernel does not write is seen.

use oxtile::attention::{
    Attention, AttentionConfig, Inputs, Kernels, Layout, Mask, Output, Outputs, Padding, Sequences, Sink, Target, Window,
};
use oxtile::{Buffer, Runtime};
use oxtile_tests::inputs::Random;
use oxtile_tests::oracle::formats::Format;
use oxtile_tile::num::{bf16, f16};

use super::attention::Operand;
use super::attention_problem::{Place, Problem, Row, each};
use crate::case::{Case, Outcome, Size, agrees, equal, stream, text};

/// What the output holds before.
pub(super) const UNTOUCHED: f32 = 77.0;
/// What the log-sum-exp holds before: more than any row comes to.
pub(super) const UNTOUCHED_SUM: f32 = 66.0;

pub fn cases() -> Vec<Case> {
    [Kernels::Fastest, Kernels::Portable].into_iter().flat_map(cases_of).collect()
}

fn cases_of(kernels: Kernels) -> Vec<Case> {
    let mut cases = Vec::new();
    let base = AttentionConfig { heads: 2, head_size: 64, kernels, ..AttentionConfig::default() };
    let window = |left, right| Window { left, right };
    // Every side of the window, with bounds inside a block of keys, between blocks, over several; rows that see nothing.
    let windows = [
        ("left", Mask::Full, window(Some(5), None)),
        ("right", Mask::Full, window(None, Some(3))),
        ("band", Mask::Full, window(Some(130), Some(0))),
        ("nothing", Mask::CausalTopLeft, window(Some(0), None)),
        ("bottom_right", Mask::CausalBottomRight, window(Some(40), Some(9))),
    ];
    for (name, mask, window) in windows {
        for [queries, keys] in [[70, 300], [150, 60]] {
            let config = AttentionConfig { queries, keys, mask, window, heads: 1, ..base };
            dense(&mut cases, &format!("window::{name}::{queries}x{keys}"), config);
            let problem = Problem { one_hot: true, ..Problem::dense(config) };
            if [queries, keys] == [150, 60] || name == "band" {
                push(&mut cases, &format!("window::{name}::{queries}x{keys}::visible"), problem);
            }
        }
    }
    let shape = AttentionConfig { queries: 67, keys: 140, ..base };
    dense(&mut cases, "cap", AttentionConfig { soft_cap: Some(2.0), scale: Some(0.5), ..shape });
    // Rows that see nothing, and equal scores.
    for (name, scale, soft_cap) in [("largest", 1e8, None), ("smallest", 1e-20, None), ("smallest::cap", 1e-20, Some(1e-20))] {
        let config = AttentionConfig { queries: 150, keys: 60, window: window(Some(3), Some(0)), scale: Some(scale), soft_cap, ..base };
        push(&mut cases, &format!("scale::{name}"), Problem { one_hot: true, ..Problem::dense(config) });
    }
    dense(&mut cases, "cap::largest", AttentionConfig { soft_cap: Some(1000.0), scale: Some(2.0), ..shape });
    dense(&mut cases, "cap::causal", AttentionConfig { soft_cap: Some(30.0), mask: Mask::CausalBottomRight, max_logit: true, ..shape });
    dense(&mut cases, "sink::one", AttentionConfig { sink: Sink::OffByOne, ..shape });
    dense(&mut cases, "sink::learnable", AttentionConfig { sink: Sink::Learnable, mask: Mask::CausalTopLeft, ..shape });
    dense(&mut cases, "sink::nothing seen", AttentionConfig { sink: Sink::Learnable, keys: 0, ..shape });
    dense(&mut cases, "max_logit", AttentionConfig { max_logit: true, heads: 4, key_heads: 2, batches: 2, ..shape });
    dense(&mut cases, "max_logit::none", AttentionConfig { max_logit: true, keys: 0, ..shape });
    dense(&mut cases, "max_logit::empty", AttentionConfig { max_logit: true, queries: 0, ..shape });
    dense(&mut cases, "max_logit::empty::merged", AttentionConfig { max_logit: true, queries: 0, output: Output::Merged, ..shape });
    for layout in [Layout::Bshd, Layout::Sbhd] {
        let config = AttentionConfig { layout, batches: 3, heads: 4, key_heads: 2, queries: 40, keys: 70, max_logit: true, ..base };
        dense(&mut cases, &format!("{layout:?}"), config);
        dense(&mut cases, &format!("{layout:?}::merged"), AttentionConfig { output: Output::Merged, ..config });
    }
    // Heads smaller than tiles, and each tile.
    for (size, value) in [(40, 64), (96, 96), (128, 128), (192, 128), (256, 256), (136, 200)] {
        let config = AttentionConfig { head_size: size, value_size: Some(value), queries: 70, keys: 150, heads: 1, ..base };
        let name = format!("sizes::{size}x{value}");
        dense(&mut cases, &format!("{name}::dense"), AttentionConfig { mask: Mask::CausalBottomRight, ..config });
        if [192, 256].contains(&size) {
            dense(&mut cases, &format!("{name}::full::dense"), config);
        }
        dense(&mut cases, &name, AttentionConfig { sink: Sink::OffByOne, mask: Mask::CausalBottomRight, ..config });
        dense(&mut cases, &format!("{name}::merged"), AttentionConfig { output: Output::Merged, ..config });
    }
    let few = AttentionConfig { queries: 20, keys: 150, heads: 1, ..base };
    halves(&mut cases, few);
    if kernels == Kernels::Fastest {
        checked(&mut cases, few);
    }
    dense(&mut cases, "sbhd::dense", AttentionConfig { layout: Layout::Sbhd, batches: 2, queries: 40, keys: 70, ..base });
    packed(&mut cases, base);
    cases
}

/// How the names of cases begin.
fn family(kernels: Kernels) -> &'static str {
    match kernels {
        Kernels::Fastest => "attention_general",
        Kernels::Portable => "attention_portable::general",
    }
}

/// Each kernel of `f16` elements that [`attention`](super::attention) does not have.
fn halves(cases: &mut Vec<Case>, base: AttentionConfig) {
    let mut push = |name: &str, config: AttentionConfig| {
        let (family, problem) = (family(config.kernels), Problem::of(config));
        let (name, size) = (
            format!("{family}::f16::{}::{name}", config.head_size),
            // The kernels of larger heads have more panels, of which 192 has those of 256.
            if config.kernels == Kernels::Fastest || name == "cap" && config.head_size != 192 { Size::Small } else { Size::Large },
        );
        cases.push(Case::new(name, size, move |runtime| problem.check::<f16>(runtime)));
    };
    for (size, value) in [(64, 64), (128, 128), (192, 128), (256, 256)] {
        let config = AttentionConfig { head_size: size, value_size: Some(value), ..base };
        if size > 128 {
            push("full", config);
            push("causal", AttentionConfig { mask: Mask::CausalBottomRight, ..config });
        }
        if size <= 128 {
            let packed = AttentionConfig { layout: Layout::Packed, ..config };
            push("packed", packed);
            push("packed::causal", AttentionConfig { mask: Mask::CausalBottomRight, ..packed });
        }
        push("window", AttentionConfig { window: Window { left: Some(9), right: Some(2) }, ..config });
        if base.kernels == Kernels::Portable {
            push("cap", AttentionConfig { soft_cap: Some(9.0), ..config });
        }
    }
}

/// Kernels of `bf16` elements that the race detector sees in no other case.
fn checked(cases: &mut Vec<Case>, base: AttentionConfig) {
    let window = Window { left: Some(9), right: Some(2) };
    let general = [[128, 128], [192, 128], [256, 256]]
        .map(|[head_size, value]| ("window", AttentionConfig { head_size, value_size: Some(value), window, ..base }));
    let packed = AttentionConfig { layout: Layout::Packed, head_size: 128, ..base };
    let packed = [("packed", packed), ("packed::causal", AttentionConfig { mask: Mask::CausalBottomRight, ..packed })];
    for (name, config) in general.into_iter().chain(packed) {
        let (name, problem) = (format!("attention_general::bf16::{}::{name}", config.head_size), Problem::of(config));
        cases.push(Case::new(name, Size::Small, move |runtime| problem.check::<bf16>(runtime)));
    }
}

/// Sequences of all lengths, with padding and without, that share keys, that begin anywhere.
fn packed(cases: &mut Vec<Case>, base: AttentionConfig) {
    let tight = |lengths: &[[usize; 2]]| -> Vec<[[usize; 2]; 2]> {
        let mut at = [0, 0];
        let mut place = |side: usize, rows: usize| {
            at[side] += rows;
            [at[side] - rows, rows]
        };
        lengths.iter().map(|&[queries, keys]| [place(0, queries), place(1, keys)]).collect()
    };
    let mixed = [[0, 5], [1, 0], [130, 40], [7, 200], [0, 0], [65, 65]];
    let masks = [
        ("full", Mask::Full, Window::default()),
        ("bottom_right", Mask::CausalBottomRight, Window::default()),
        ("top_left", Mask::CausalTopLeft, Window::default()),
        ("window", Mask::Full, Window { left: Some(20), right: Some(4) }),
    ];
    for (name, mask, window) in masks {
        let config = AttentionConfig { layout: Layout::Packed, mask, window, ..base };
        let problem = Problem::packed(config, tight(&mixed));
        push(cases, &format!("packed::{name}"), problem.clone());
        push(cases, &format!("packed::{name}::visible"), Problem { one_hot: true, ..problem });
    }
    if base.kernels == Kernels::Fastest {
        // A block passes over many sequences, most of them without tiles, on its way to its next tile.
        let short: Vec<_> = (0..2048).map(|i| [if i % 16 < 2 { i / 16 % 4 } else { 0 }, i / 64 % 4]).collect();
        push(cases, "packed::thousands", Problem::packed(AttentionConfig { layout: Layout::Packed, heads: 1, ..base }, tight(&short)));
    }
    let config = AttentionConfig { layout: Layout::Packed, mask: Mask::CausalBottomRight, ..base };
    // Padding before, between and after; a sequence whose tiles are all padding.
    let padded = vec![[[3, 60], [1, 70]], [[200, 0], [90, 4]], [[340, 1], [100, 0]], [[350, 20], [101, 30]]];
    // Two chunks of a sequence that see one set of keys, as ranks of context parallelism have them, in one launch.
    let pair = vec![[[40, 30], [0, 150]], [[0, 30], [0, 60]]];
    for (of, config) in [("", config), ("max_logit::", AttentionConfig { max_logit: true, ..config })] {
        for (name, padding) in [("zeroed", Padding::Zeroed), ("kept", Padding::Kept)] {
            push(cases, &format!("padded::{of}{name}"), Problem { padding, first: 1000, ..Problem::packed(config, padded.clone()) });
        }
        push(cases, &format!("pair::{of}kept"), Problem { padding: Padding::Kept, ..Problem::packed(config, pair.clone()) });
    }
    // Heads that share keys, and are smaller than tiles.
    for (size, value) in [(40, 64), (128, 128), (72, 128)] {
        let config = AttentionConfig { head_size: size, value_size: Some(value), heads: 4, key_heads: 2, ..config };
        push(cases, &format!("packed::{size}x{value}"), Problem::packed(config, tight(&mixed)));
        push(
            cases,
            &format!("packed::{size}x{value}::full"),
            Problem::packed(AttentionConfig { mask: Mask::Full, ..config }, tight(&mixed)),
        );
    }
    let config = AttentionConfig { max_logit: true, ..config };
    let merged = AttentionConfig { output: Output::Merged, ..config };
    push(cases, "padded::merged", Problem { padding: Padding::Kept, ..Problem::packed(merged, padded) });
}

fn dense(cases: &mut Vec<Case>, name: &str, config: AttentionConfig) {
    push(cases, name, Problem::dense(config));
}

fn push(cases: &mut Vec<Case>, name: &str, problem: Problem) {
    // Masks need no race detector, what is the same at every head size needs it once, and heads that are padded to a size as that size.
    let AttentionConfig { head_size, mask, window, kernels, .. } = problem.config;
    let whole = [64, 128, 192, 256].contains(&head_size);
    let masked = mask == Mask::CausalTopLeft || (window != Window::default() && !name.contains("band") && !name.starts_with("packed"));
    let large = problem.one_hot || problem.sequences.len() > 100 || masked || !whole || (head_size > 64 && !name.ends_with("dense"));
    let size = match kernels {
        Kernels::Fastest if large => Size::Large,
        Kernels::Fastest => Size::Small,
        // Each kernel once, of which one merges and looks for the largest score.
        Kernels::Portable if ["Sbhd::merged", "sizes::128x128", "sizes::256x256", "max_logit::empty"].contains(&name) => Size::Small,
        Kernels::Portable => Size::Large,
    };
    cases.push(Case::new(format!("{}::{name}", family(kernels)), size, move |runtime| problem.check::<bf16>(runtime)));
}

/// What the kernel is given, and what it gives.
pub(super) struct Tensors {
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub sink: Vec<f32>,
}

pub(super) struct Found {
    pub out: Vec<f64>,
    pub log_sum_exp: Vec<f32>,
    pub max_logit: Vec<f32>,
}

impl Problem {
    pub(super) fn tensors<T: Operand>(&self, first_key: usize) -> Tensors {
        self.tensors_in(T::FORMAT, first_key)
    }

    /// Random numbers of a format, or values that name their key, from `first_key` on; NaN in rows of no sequence.
    pub(super) fn tensors_in(&self, format: &Format, first_key: usize) -> Tensors {
        let AttentionConfig { layout, batches, heads, key_heads, head_size, queries, keys, .. } = self.config;
        let [heads, key_heads, size, value_size] = [heads, key_heads, head_size, self.config.value_size()].map(|n| n as usize);
        let rows = |rows: u64| if layout == Layout::Packed { rows } else { batches * rows } as usize;
        let mut random = Random::new(queries * 1000 + keys + head_size);
        let nothing = |count: usize| vec![f32::NAN; count];
        let mut tensors = Tensors {
            q: nothing(rows(queries) * heads * size),
            k: nothing(rows(keys) * key_heads * size),
            v: nothing(rows(keys) * key_heads * value_size),
            sink: (0..heads).map(|head| head as f32 - 1.5).collect(),
        };
        for batch in 0..batches as usize {
            let lengths = self.lengths(batch);
            let sides =
                [(&mut tensors.q, 0, heads, size), (&mut tensors.k, 1, key_heads, size), (&mut tensors.v, 1, key_heads, value_size)];
            for (number, (tensor, side, heads, size)) in sides.into_iter().enumerate() {
                let place = self.place(batch, side, heads, size);
                for (row, head, element) in each([lengths[side], heads, size]) {
                    let nan = [Row::Query(row), Row::Key(row), Row::Value(row)][number];
                    let value = match (self.one_hot, number) {
                        _ if batch == 0 && element == 0 && self.nan == Some(nan) => f32::NAN,
                        (false, _) => format.round(f64::from(random.normal())) as f32,
                        (true, 2) => f32::from(u8::from(row == first_key + element)),
                        (true, _) => 0.0,
                    };
                    tensor[place.at(row, head, element)] = value;
                }
            }
        }
        tensors
    }

    fn run<T: Operand>(&self, runtime: &Runtime, tensors: &Tensors) -> Result<Found, String> {
        let stream = stream(runtime)?;
        let AttentionConfig { layout, heads, sink, output, max_logit, .. } = self.config;
        let upload =
            |values: &[f32]| text(Buffer::from_slice(&stream, &values.iter().map(|&x| T::of(encode(T::FORMAT, x))).collect::<Vec<T>>()));
        let (q, k, v) = (upload(&tensors.q)?, upload(&tensors.k)?, upload(&tensors.v)?);
        let sink_scores = text(Buffer::from_slice(&stream, &tensors.sink))?;
        let array = |values: Vec<u32>| text(Buffer::from_slice(&stream, &values));
        let [queries, keys, query_offsets, key_offsets] = self.arrays();
        let arrays = [array(queries)?, array(keys)?, array(query_offsets)?, array(key_offsets)?];
        let sequences = (layout == Layout::Packed).then(|| Sequences {
            cu_seqlens_q_padded: Some(arrays[2].view()),
            cu_seqlens_kv_padded: Some(arrays[3].view()),
            padding: self.padding,
            ..Sequences::new(arrays[0].view(), arrays[1].view())
        });
        let elements = q.len() / self.config.head_size * self.config.value_size();
        let rows = q.len() / self.config.head_size;
        let running = output == Output::Merged;
        let mut out = upload(&vec![UNTOUCHED; elements as usize])?;
        let mut merged = text(Buffer::from_slice(&stream, &if running { self.running(elements as usize) } else { Vec::new() }))?;
        let before = if running { f32::NEG_INFINITY } else { UNTOUCHED_SUM };
        let mut log_sum_exp = text(Buffer::from_slice(&stream, &vec![before; rows as usize]))?;
        let mut largest = text(Buffer::from_slice(&stream, &vec![f32::NAN; if max_logit { heads as usize } else { 0 }]))?;
        let attention = text(Attention::<T>::new(runtime, self.config))?;
        let inputs =
            Inputs { sequences, sink: (sink == Sink::Learnable).then(|| sink_scores.view()), ..Inputs::new(q.view(), k.view(), v.view()) };
        let target = if running { Target::Merged(merged.view_mut().into()) } else { Target::Rounded(out.view_mut().into()) };
        let outputs = Outputs { out: target, log_sum_exp: log_sum_exp.view_mut(), max_logit: max_logit.then(|| largest.view_mut()) };
        let mut bound = text(attention.bind(&stream, inputs, outputs))?;
        text(bound.run(&stream))?;
        if !running {
            // The second run finds the workspace as the first left it.
            text(bound.run(&stream))?;
        }
        drop(bound);
        let rounded = text(out.to_vec(&stream))?.into_iter().map(|x| T::FORMAT.decode(x.bits().into()));
        let running: Vec<f64> = text(merged.to_vec(&stream))?.into_iter().map(f64::from).collect();
        Ok(Found {
            out: if running.is_empty() { rounded.collect() } else { running },
            log_sum_exp: text(log_sum_exp.to_vec(&stream))?,
            max_logit: text(largest.to_vec(&stream))?,
        })
    }

    pub(super) fn check<T: Operand>(&self, runtime: &Runtime) -> Outcome {
        let columns = self.config.value_size() as usize;
        let keys = if self.one_hot { (0..self.config.batches as usize).map(|b| self.lengths(b)[1]).max().unwrap_or(0) } else { 1 };
        (0..keys.max(1)).step_by(columns).try_for_each(|first_key| self.check_from::<T>(runtime, first_key))
    }

    /// With values that name the keys from `first_key` on, if they name keys.
    fn check_from<T: Operand>(&self, runtime: &Runtime, first_key: usize) -> Outcome {
        let tensors = self.tensors::<T>(first_key);
        self.compare::<T>(&tensors, &self.run::<T>(runtime, &tensors)?)
    }

    /// What was found with what f64 makes of these tensors, and all that is not to be written with what was there.
    pub(super) fn compare<T: Operand>(&self, tensors: &Tensors, found: &Found) -> Outcome {
        let AttentionConfig { batches, heads, key_heads, sink, output, .. } = self.config;
        let [heads, key_heads, size, value_size] = [heads, key_heads, self.config.head_size, self.config.value_size()].map(|n| n as usize);
        let mut seen = vec![false; found.out.len()];
        let mut largest = vec![f64::NEG_INFINITY; heads];
        let rounding = if output == Output::Merged { 1e-6 } else { T::HALF_UNIT };
        for (batch, head) in (0..batches as usize).flat_map(|batch| (0..heads).map(move |head| (batch, head))) {
            let sink = match sink {
                Sink::None => None,
                Sink::OffByOne => Some(0.0),
                Sink::Learnable => Some(f64::from(tensors.sink[head])),
            };
            let of = |tensor: &[f32], place: Place, head: usize, i: usize, l: usize| f64::from(tensor[place.at(i, head, l)]);
            let (of_q, of_k) = (self.place(batch, 0, heads, size), self.place(batch, 1, key_heads, size));
            let (of_v, of_out) = (self.place(batch, 1, key_heads, value_size), self.place(batch, 0, heads, value_size));
            let key_head = head * key_heads / heads;
            let expected = self.head(batch, sink).attend(
                |i, l| of(&tensors.q, of_q, head, i, l),
                |j, l| of(&tensors.k, of_k, key_head, j, l),
                |j, l| of(&tensors.v, of_v, key_head, j, l),
            );
            largest[head] = largest[head].max(expected.max_logit);
            for (i, &value) in expected.log_sum_exp.iter().enumerate() {
                let found = f64::from(found.log_sum_exp[self.statistics(batch, head) + i]);
                if !agrees(found, value, 1e-5 * value.abs().max(1.0)) {
                    return Err(format!("sequence {batch}, head {head}: log_sum_exp[{i}] is {found}, expected {value}"));
                }
            }
            for (i, &value) in expected.out.iter().enumerate() {
                let at = of_out.at(i / value_size, head, i % value_size);
                seen[at] = true;
                let bound = (T::HALF_UNIT + 2e-4) * expected.magnitudes[i] + rounding * value.abs() + 2e-7;
                if !agrees(found.out[at], value, bound) {
                    let (row, column) = (i / value_size, i % value_size);
                    return Err(format!(
                        "sequence {batch}, head {head}, row {row}, column {column} is {}, expected {value} within {bound}",
                        found.out[at]
                    ));
                }
            }
        }
        let logits: Vec<f64> = found.max_logit.iter().map(|&x| f64::from(x)).collect();
        for (head, (&found, &value)) in logits.iter().zip(&largest).enumerate() {
            if !agrees(found, value, 1e-5 * value.abs().max(1.0)) {
                return Err(format!("max_logit[{head}] is {found}, expected {value}"));
            }
        }
        self.check_rest(found, &seen)
    }

    /// Rows between sequences are zeros, or as before; all others are as before.
    pub(super) fn check_rest(&self, found: &Found, seen: &[bool]) -> Outcome {
        let [heads, value_size, rows] = [self.config.heads, self.config.value_size(), self.config.queries].map(|n| n as usize);
        let padding = |row: usize| self.is_zeroed(0, row);
        let before = if self.config.output == Output::Merged { 0.0 } else { f64::from(UNTOUCHED) };
        let rest = (0..seen.len()).filter(|&at| !seen[at]);
        let expected = |at: usize| if padding(at / (heads * value_size)) { 0.0 } else { before };
        let rest: Vec<usize> = rest.collect();
        let out: Vec<f64> = rest.iter().map(|&at| found.out[at]).collect();
        equal("rows of no sequence", &out, &rest.iter().map(|&at| expected(at)).collect::<Vec<_>>())?;
        let rows_of_none: Vec<usize> = (0..rows).filter(|row| !seen[row * heads * value_size]).collect();
        for row in rows_of_none.into_iter().filter(|_| self.config.layout == Layout::Packed) {
            let sum = found.log_sum_exp[row];
            let merged = self.config.output == Output::Merged;
            let expected = if padding(row) || merged { f32::NEG_INFINITY } else { UNTOUCHED_SUM };
            if sum != expected {
                return Err(format!("log_sum_exp of row {row}, of no sequence, is {sum}, expected {expected}"));
            }
        }
        Ok(())
    }
}

pub(super) fn encode(format: &Format, value: f32) -> u16 {
    if value.is_nan() { 0x7fff } else { format.encode(value.into()) as u16 }
}
