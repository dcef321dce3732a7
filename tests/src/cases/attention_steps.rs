//! Steps of rings that begin and end: the first one writes a running result whatever was there, those in the middle merge theirs into it, the
//! last one rounds it into a tensor. All steps together are attention to all keys, against f64.

use oxtile::attention::Output::{self, First, Last, Merged};
use oxtile::attention::{Attention, AttentionConfig, Inputs, Kernels, Layout, Mask, Outputs, Padding, Sequences, Target, Window};
use oxtile::{Buffer, Error, Runtime, Stream};
use oxtile_tile::launch::DeviceViewMut;
use oxtile_tile::num::{bf16, f16};

use super::attention::Operand;
use super::attention_general::{Found, Tensors, UNTOUCHED, UNTOUCHED_SUM, encode};
use super::attention_problem::{Problem, Row, each};
use crate::case::{Case, Outcome, Size, equal, stream, text};

/// The keys of a step: the first and how many, of each sequence.
type Keys = Vec<[usize; 2]>;

/// A ring whose steps see all keys once.
#[derive(Clone)]
struct Ring {
    /// All keys. Its output says where that of the last step goes.
    whole: Problem,
    steps: Vec<(Keys, Output)>,
    /// Whether every step has mask and window of the whole, with the diagonals of its keys. Else the first step has the mask.
    diagonals: bool,
}

const ORDER: [Output; 4] = [First, Merged, Merged, Last];

pub fn cases() -> Vec<Case> {
    let mut cases = vec![
        Case::new("attention_ring::refused", Size::Small, refused),
        Case::new("attention_ring::refused::diagonals", Size::Small, refused_diagonals),
    ];
    let base = AttentionConfig { head_size: 64, ..AttentionConfig::default() };
    dense(&mut cases, base);
    packed(&mut cases, base);
    diagonals(&mut cases, base);
    diagonals(&mut cases, AttentionConfig { kernels: Kernels::Portable, ..base });
    cases
}

const MASKS: [(&str, Mask); 2] = [("full", Mask::Full), ("causal", Mask::CausalBottomRight)];

fn dense(cases: &mut Vec<Case>, base: AttentionConfig) {
    // A step without keys is among them.
    let parts = [[130, 70], [60, 70], [60, 0], [0, 60]];
    for (name, mask) in MASKS {
        let config = AttentionConfig { queries: 70, keys: 200, mask, ..base };
        let shared = AttentionConfig { batches: 2, heads: 4, key_heads: 2, ..config };
        for layout in [Layout::Bshd, Layout::Sbhd] {
            let ring = Ring::dense(AttentionConfig { layout, ..shared }, parts, ORDER);
            push::<bf16>(cases, &format!("{layout:?}::{name}"), Size::Small, ring);
        }
        for (size, value) in [(40, 64), (80, 80), (128, 128), (192, 128), (136, 200), (256, 256)] {
            let config = AttentionConfig { head_size: size, value_size: Some(value), batches: 2, ..config };
            push::<bf16>(cases, &format!("{size}x{value}::{name}"), Size::Large, Ring::dense(config, parts, ORDER));
        }
        // Each kernel under the race detector.
        for (size, value) in [(64, 64), (128, 128), (192, 128), (256, 256)] {
            let config = AttentionConfig { head_size: size, value_size: Some(value), queries: 20, keys: 45, mask, ..base };
            let ring = Ring::dense(config, [[25, 20], [0, 25]], [First, Last]);
            push::<f16>(cases, &format!("f16::{size}::{name}"), Size::Small, ring.clone());
            if size > 64 {
                push::<bf16>(cases, &format!("bf16::{size}::{name}"), Size::Small, ring);
            }
        }
        // Rows whose log-sum-exp is -inf count as zeros, whatever is there.
        push::<bf16>(cases, &format!("garbage::{name}"), Size::Small, Ring::dense(config, parts, [Merged, Merged, Merged, Last]));
        for (row_name, nan) in [("query", Row::Query(5)), ("first key", Row::Key(195)), ("later key", Row::Key(10))] {
            let ring = Ring::dense(config, parts, ORDER);
            let ring = Ring { whole: Problem { nan: Some(nan), ..ring.whole }, ..ring };
            push::<bf16>(cases, &format!("nan::{name}::{row_name}"), Size::Large, ring);
        }
        let empty = AttentionConfig { keys: 0, ..shared };
        push::<bf16>(cases, &format!("no keys::{name}"), Size::Small, Ring::dense(empty, [[0, 0], [0, 0]], [First, Last]));
    }
    // Rows that see nothing in any step.
    let few = AttentionConfig { queries: 150, keys: 60, mask: Mask::CausalBottomRight, ..base };
    push::<bf16>(cases, "nothing seen", Size::Large, Ring::dense(few, [[0, 60], [60, 0]], [First, Last]));
    // The kernels with options have no first and no last step.
    for size in [64, 128, 256] {
        let config = AttentionConfig { queries: 20, keys: 60, head_size: size, soft_cap: Some(4.0), output: Merged, ..base };
        push::<bf16>(cases, &format!("garbage::options::{size}"), Size::Large, Ring::dense(config, [[30, 30], [0, 30]], [Merged; 2]));
    }
}

fn packed(cases: &mut Vec<Case>, base: AttentionConfig) {
    // Padding before, between and after; a sequence without queries, one without keys, one whose tiles are all padding.
    let sequences = vec![[[3, 60], [1, 70]], [[70, 0], [90, 4]], [[210, 1], [100, 0]], [[220, 20], [101, 30]]];
    let steps: [Keys; 4] = [
        vec![[10, 60], [4, 0], [0, 0], [10, 20]],
        vec![[10, 0], [0, 0], [0, 0], [4, 6]],
        vec![[4, 6], [0, 4], [0, 0], [4, 0]],
        vec![[0, 4], [0, 0], [0, 0], [0, 4]],
    ];
    for (name, mask) in MASKS {
        for (head_size, size) in [(64, Size::Small), (128, Size::Large), (72, Size::Large)] {
            let config = AttentionConfig { layout: Layout::Packed, heads: 4, key_heads: 2, head_size, mask, ..base };
            let whole = Problem::packed(config, sequences.clone());
            let ring = Ring { whole, steps: steps.clone().into_iter().zip(ORDER).collect(), diagonals: false };
            push::<bf16>(cases, &format!("packed::{head_size}::{name}"), size, ring.clone());
            let kept = Ring { whole: Problem { padding: Padding::Kept, ..ring.whole.clone() }, ..ring.clone() };
            push::<bf16>(cases, &format!("packed::{head_size}::{name}::kept"), Size::Large, kept);
            let steps = ring.steps.iter().map(|(keys, output)| (keys.clone(), if *output == First { Merged } else { *output }));
            let garbage = Ring { steps: steps.collect(), ..ring.clone() };
            push::<bf16>(cases, &format!("packed::{head_size}::{name}::garbage"), Size::Large, garbage);
        }
        for head_size in [64, 128] {
            let config = AttentionConfig { layout: Layout::Packed, head_size, mask, ..base };
            let whole = Problem::packed(config, vec![[[0, 9], [0, 30]], [[12, 20], [30, 20]]]);
            let steps = vec![(vec![[21, 9], [0, 20]], First), (vec![[0, 21], [0, 0]], Last)];
            let ring = Ring { whole, steps, diagonals: false };
            push::<f16>(cases, &format!("f16::packed::{head_size}::{name}"), Size::Small, ring.clone());
            if head_size > 64 {
                push::<bf16>(cases, &format!("bf16::packed::{head_size}::{name}"), Size::Small, ring);
            }
        }
    }
}

/// Keys cut at either end, with windows that count from the diagonal of all of them.
fn diagonals(cases: &mut Vec<Case>, base: AttentionConfig) {
    let sequences = vec![[[0, 70], [2, 200]], [[75, 0], [210, 9]], [[80, 40], [220, 30]]];
    let keys: [Keys; 3] = [vec![[110, 90], [0, 3], [20, 10]], vec![[50, 60], [3, 6], [0, 0]], vec![[0, 50], [9, 0], [0, 20]]];
    let windows = [
        ("left", Mask::Full, Window { left: Some(30), right: None }),
        ("right", Mask::Full, Window { left: None, right: Some(20) }),
        ("band", Mask::Full, Window { left: Some(45), right: Some(8) }),
        ("causal", Mask::CausalBottomRight, Window::default()),
        ("causal band", Mask::CausalBottomRight, Window { left: Some(100), right: None }),
    ];
    for (name, mask, window) in windows {
        let (of_64, kernels) = match base.kernels {
            Kernels::Fastest => (if name == "band" { Size::Small } else { Size::Large }, ""),
            Kernels::Portable => (if name == "right" { Size::Small } else { Size::Large }, "portable::"),
        };
        for (head_size, size) in [(64, of_64), (128, Size::Large)] {
            let config = AttentionConfig { layout: Layout::Packed, head_size, mask, window, output: Merged, ..base };
            let whole = Problem { padding: Padding::Kept, ..Problem::packed(config, sequences.clone()) };
            let ring = Ring { whole, steps: keys.clone().map(|keys| (keys, Merged)).into(), diagonals: true };
            push::<bf16>(cases, &format!("diagonals::{kernels}{head_size}::{name}"), size, ring);
        }
    }
}

fn push<T: Operand>(cases: &mut Vec<Case>, name: &str, size: Size, ring: Ring) {
    cases.push(Case::new(format!("attention_ring::steps::{name}"), size, move |runtime| ring.check::<T>(runtime)));
}

impl Ring {
    /// Of a dense layout, whose sequences all have the same steps.
    fn dense<const STEPS: usize>(config: AttentionConfig, parts: [[usize; 2]; STEPS], outputs: [Output; STEPS]) -> Self {
        let keys = parts.map(|part| vec![part; config.batches as usize]);
        Self { whole: Problem::dense(config), steps: keys.into_iter().zip(outputs).collect(), diagonals: false }
    }

    fn check<T: Operand>(&self, runtime: &Runtime) -> Outcome {
        let stream = stream(runtime)?;
        let (tensors, config) = (self.whole.tensors::<T>(0), self.whole.config);
        let q = upload::<T>(&stream, &tensors.q)?;
        let rows = tensors.q.len() / config.head_size as usize;
        let elements = rows * config.value_size() as usize;
        let before = if self.diagonals { self.whole.running(elements) } else { vec![f32::NAN; elements] };
        let mut running = text(Buffer::from_slice(&stream, &before))?;
        let mut out = upload::<T>(&stream, &vec![UNTOUCHED; elements])?;
        let mut log_sum_exp = text(Buffer::from_slice(&stream, &self.logs(rows)))?;
        for (number, &(_, output)) in self.steps.iter().enumerate() {
            let before = text(running.to_vec(&stream))?;
            let target = match output {
                Last => Target::Last { running: running.view().into(), out: out.view_mut().into() },
                _ => Target::Merged(running.view_mut().into()),
            };
            self.step(runtime, number, (&tensors, &q), target, log_sum_exp.view_mut())?;
            if output == Last {
                let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
                equal("the running result after the last step", &bits(text(running.to_vec(&stream))?), &bits(before))?;
            }
        }
        let out = match config.output {
            Merged => text(running.to_vec(&stream))?.into_iter().map(f64::from).collect(),
            _ => text(out.to_vec(&stream))?.into_iter().map(|x| T::FORMAT.decode(x.bits().into())).collect(),
        };
        self.whole.compare::<T>(&tensors, &Found { out, log_sum_exp: text(log_sum_exp.to_vec(&stream))?, max_logit: Vec::new() })
    }

    /// The log-sum-exp before: -inf in each row that is merged, else more than any comes to.
    fn logs(&self, rows: usize) -> Vec<f32> {
        let mut logs = vec![UNTOUCHED_SUM; rows];
        if self.steps[0].1 == First {
            return logs;
        }
        let AttentionConfig { layout, batches, queries, heads, .. } = self.whole.config;
        let [batches, queries, heads] = [batches, queries, heads].map(|n| n as usize);
        for (batch, head, row) in (0..batches).flat_map(|b| (0..heads).flat_map(move |h| (0..queries).map(move |r| (b, h, r)))) {
            if row < self.whole.lengths(batch)[0] {
                logs[self.whole.statistics(batch, head) + row] = f32::NEG_INFINITY;
            }
            if layout == Layout::Packed && (self.whole.is_zeroed(0, row) || self.whole.config.output == Merged) {
                logs[head * queries + row] = f32::NEG_INFINITY;
            }
        }
        logs
    }

    /// One step: the keys of `k` and `v` that it sees, a tensor of their own if the layout is dense.
    fn step<T: Operand>(
        &self,
        runtime: &Runtime,
        number: usize,
        (tensors, q): (&Tensors, &Buffer<T>),
        out: Target<'_, T>,
        log_sum_exp: DeviceViewMut<'_, f32>,
    ) -> Outcome {
        let (stream, whole, (keys, output)) = (&stream(runtime)?, self.whole.config, &self.steps[number]);
        let packed = whole.layout == Layout::Packed;
        let config = AttentionConfig {
            keys: if packed { whole.keys } else { keys[0][1] as u64 },
            mask: if number == 0 || self.diagonals { whole.mask } else { Mask::Full },
            diagonals: self.diagonals,
            output: *output,
            ..whole
        };
        let (k, v) = match packed {
            true => (upload::<T>(stream, &tensors.k)?, upload::<T>(stream, &tensors.v)?),
            false => {
                let part = |tensor, size| upload::<T>(stream, &self.part(tensor, keys, config, size));
                (part(&tensors.k, config.head_size)?, part(&tensors.v, config.value_size())?)
            }
        };
        let [query_ends, _, query_offsets, _] = self.whole.arrays();
        let sequences = &self.whole.sequences;
        let key_ends = [0].into_iter().chain(keys.iter().scan(0, |end, [_, count]| {
            *end += *count as u32;
            Some(*end)
        }));
        let key_offsets = sequences.iter().zip(keys).map(|(of, [first, _])| (of[1][0] + first) as u32).chain([0]);
        let aligned = sequences.iter().zip(keys).map(|(of, [first, _])| of[1][1] as i32 - of[0][1] as i32 - *first as i32);
        let array = |values: Vec<u32>| text(Buffer::from_slice(stream, &values));
        let arrays = [array(query_ends)?, array(key_ends.collect())?, array(query_offsets)?, array(key_offsets.collect())?];
        let aligned = text(Buffer::from_slice(stream, &aligned.collect::<Vec<_>>()))?;
        let sequences = packed.then(|| Sequences {
            cu_seqlens_q_padded: Some(arrays[2].view()),
            cu_seqlens_kv_padded: Some(arrays[3].view()),
            diagonals: config.diagonals.then(|| aligned.view()),
            padding: self.whole.padding,
            ..Sequences::new(arrays[0].view(), arrays[1].view())
        });
        let inputs = Inputs { sequences, ..Inputs::new(q.view(), k.view(), v.view()) };
        text(text(Attention::<T>::new(runtime, config))?.forward(stream, inputs, Outputs { out, log_sum_exp, max_logit: None }))
    }

    /// The rows of a dense tensor of keys or of values that a step has.
    fn part(&self, tensor: &[f32], keys: &Keys, config: AttentionConfig, size: u64) -> Vec<f32> {
        let (heads, size, part) = (config.key_heads as usize, size as usize, Problem::dense(config));
        let mut rows = vec![f32::NAN; config.batches as usize * keys[0][1] * heads * size];
        for (batch, [first, count]) in keys.iter().enumerate() {
            let (from, to) = (self.whole.place(batch, 1, heads, size), part.place(batch, 1, heads, size));
            for (row, head, element) in each([*count, heads, size]) {
                rows[to.at(row, head, element)] = tensor[from.at(first + row, head, element)];
            }
        }
        rows
    }
}

fn upload<T: Operand>(stream: &Stream, values: &[f32]) -> Result<Buffer<T>, String> {
    text(Buffer::from_slice(stream, &values.iter().map(|&x| T::of(encode(T::FORMAT, x))).collect::<Vec<T>>()))
}

/// What is refused says what to do instead.
fn refused(runtime: &Runtime) -> Outcome {
    let good = AttentionConfig { queries: 8, keys: 8, head_size: 64, output: First, ..AttentionConfig::default() };
    let expect = |config: AttentionConfig, words: &str| match Attention::<bf16>::new(runtime, config) {
        Err(error @ Error::Invalid { .. }) if error.to_string().contains(words) => Ok(()),
        other => Err(format!("{other:?}, where {words} is to be said")),
    };
    let instead = "fill the log-sum-exp with -inf, merge every step, and round the sum";
    let capped = AttentionConfig { soft_cap: Some(3.0), max_logit: true, ..good };
    expect(capped, &format!("output is First: Rounded or Merged with soft_cap, max_logit: {instead}"))?;
    expect(AttentionConfig { output: Last, ..capped }, &format!("output is Last: Rounded or Merged with soft_cap, max_logit: {instead}"))?;
    let large = AttentionConfig { layout: Layout::Packed, head_size: 192, ..good };
    expect(large, &format!("output is First: Rounded or Merged with packed heads of more than 128 elements: {instead}"))?;
    let portable = AttentionConfig { kernels: Kernels::Portable, ..good };
    expect(portable, "output is First: Rounded or Merged: the kernels for any GPU merge every step")?;
    expect(AttentionConfig { key_parts: Some(2), ..good }, "key_parts is 2: 1 with output")?;
    let stream = stream(runtime)?;
    let (q, mut out) = (text(Buffer::<bf16>::zeros(&stream, 512))?, text(Buffer::<bf16>::zeros(&stream, 512))?);
    let (mut running, mut log_sum_exp) = (text(Buffer::<f32>::zeros(&stream, 512))?, text(Buffer::<f32>::zeros(&stream, 8))?);
    let attempt = |output: Output, outputs: Outputs<'_, bf16>| {
        let attention = Attention::<bf16>::new(runtime, AttentionConfig { output, ..good })?;
        attention.forward(&stream, Inputs::new(q.view(), q.view(), q.view()), outputs)
    };
    let said = |refused: oxtile::Result<()>, words: &str| match refused {
        Err(error @ Error::Invalid { .. }) if error.to_string().contains(words) => Ok(()),
        other => Err(format!("{other:?}, where {words} is to be said")),
    };
    let rounded = attempt(First, Outputs::new(out.view_mut(), log_sum_exp.view_mut()));
    said(rounded, "the configuration's output is First: give `Outputs::merged`")?;
    let merged = attempt(Last, Outputs::merged(running.view_mut(), log_sum_exp.view_mut()));
    said(merged, "the configuration's output is Last: give `Outputs::last`")?;
    let last = attempt(Output::Rounded, Outputs::last(running.view(), out.view_mut(), log_sum_exp.view_mut()));
    said(last, "the configuration's output is Rounded: give `Outputs::new`")?;
    match attempt(Last, Outputs::last(running.view().slice(0, 511), out.view_mut(), log_sum_exp.view_mut())) {
        Err(Error::Length { what: "Attention, running", expected: 512, found: 511 }) => Ok(()),
        other => Err(format!("{other:?}")),
    }
}

/// Diagonals that are missing, too much, too few, or of no sequence.
fn refused_diagonals(runtime: &Runtime) -> Outcome {
    let stream = stream(runtime)?;
    let window = Window { left: Some(3), right: Some(2) };
    let good =
        AttentionConfig { layout: Layout::Packed, queries: 8, keys: 8, head_size: 64, window, diagonals: true, ..Default::default() };
    let (q, mut out) = (text(Buffer::<bf16>::zeros(&stream, 512))?, text(Buffer::<bf16>::zeros(&stream, 512))?);
    let mut log_sum_exp = text(Buffer::<f32>::zeros(&stream, 8))?;
    let (ends, aligned) = (text(Buffer::from_slice(&stream, &[0_u32, 8]))?, text(Buffer::from_slice(&stream, &[0_i32; 2]))?);
    let mut attempt = |config: AttentionConfig, given: Option<u64>| {
        let diagonals = given.map(|count| aligned.view().slice(0, count));
        let sequences = Sequences { diagonals, ..Sequences::new(ends.view(), ends.view()) };
        let sequences = (config.layout == Layout::Packed).then_some(sequences);
        let inputs = Inputs { sequences, ..Inputs::new(q.view(), q.view(), q.view()) };
        Attention::<bf16>::new(runtime, config)?.forward(&stream, inputs, Outputs::new(out.view_mut(), log_sum_exp.view_mut()))
    };
    text(attempt(good, Some(1)))?;
    for (config, given, words) in [
        (good, None, "the configuration asks for `diagonals`, which is none: give it"),
        (AttentionConfig { diagonals: false, ..good }, Some(1), "`diagonals` is given, which the configuration does not ask for"),
        (AttentionConfig { layout: Layout::Bshd, ..good }, None, "diagonals is true: false unless the layout is Packed"),
        (good, Some(2), "Attention, diagonals"),
    ] {
        match attempt(config, given) {
            Err(error) if error.to_string().contains(words) => {}
            other => return Err(format!("{other:?}, where {words} is to be said")),
        }
    }
    Ok(())
}
