//! Attention on parts of larger tensors: some rows of them, keys and values by turns in one buffer. Results are those of copies without gaps, to the
//! bit, and nothing outside of the parts is read or written.

use oxtile::attention::{
    Attention, AttentionBackward, AttentionConfig, AttentionElement, BackwardInputs, BackwardStep, GradientOutput, Gradients, Inputs,
    Kernels, Layout, Mask, Order, Output, Outputs, Scales, Sequences, Window,
};
use oxtile::tensor::{Heads, HeadsMut};
use oxtile::{Buffer, Error, HostElement, Runtime, Stream};
use oxtile_tests::inputs::Random;
use oxtile_tests::oracle::formats::{BF16, E4M3};
use oxtile_tile::launch::{DeviceView, DeviceViewMut};
use oxtile_tile::num::{bf16, e4m3};

use crate::case::{Case, Outcome, Size, equal, stream, text};

/// How keys and values lie.
#[derive(Clone, Copy, PartialEq)]
enum Keys {
    /// In a buffer each.
    Apart,
    /// In one: in each row first the key heads, then the value heads.
    Interleaved,
}
use Keys::{Apart, Interleaved};

#[derive(Clone, Copy, Debug)]
enum Kind {
    Forward,
    Fp8,
    Backward,
}
use Kind::{Backward, Forward, Fp8};

impl Kind {
    fn push(self, cases: &mut Vec<Case>, name: &str, size: Size, config: AttentionConfig, keys: Keys) {
        let run = match self {
            Forward => forward::<bf16>,
            Fp8 => forward::<e4m3>,
            Backward => backward,
        };
        cases.push(Case::new(format!("attention_heads::{self:?}::{name}"), size, move |runtime| run(runtime, config, keys)));
    }
}

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let base = AttentionConfig { batches: 2, queries: 40, keys: 140, heads: 2, head_size: 64, ..AttentionConfig::default() };
    let window = Window { left: Some(50), right: None };
    let portable = AttentionConfig { kernels: Kernels::Portable, ..base };
    let added = AttentionConfig { gradients: GradientOutput::Added, ..base };
    for layout in [Layout::Bshd, Layout::Sbhd] {
        // Those that see batches of sbhd as heads of a row take them without gaps.
        let by_turns = if layout == Layout::Bshd { Interleaved } else { Apart };
        let wide = AttentionConfig { head_size: 128, ..base };
        for (mask_name, mask) in [("full", Mask::Full), ("causal", Mask::CausalBottomRight)] {
            // The race detector looks at the kernels in other cases; here at a few of the places.
            let checked = if layout == Layout::Bshd && mask != Mask::Full { Size::Small } else { Size::Large };
            let mut push = |kind: Kind, name: &str, size: Size, config: AttentionConfig, keys: Keys| {
                let name = format!("{name}::{layout:?}::{mask_name}");
                kind.push(&mut cases, &name, size, AttentionConfig { layout, mask, ..config }, keys);
            };
            push(Forward, "d64", Size::Small, base, Interleaved);
            push(Forward, "d128", Size::Large, wide, Interleaved);
            push(Forward, "options", checked, AttentionConfig { window, ..base }, by_turns);
            push(Forward, "portable", checked, portable, Apart);
            push(Backward, "d64", checked, base, Interleaved);
            push(Backward, "d128", Size::Large, wide, Interleaved);
            push(Backward, "general", Size::Large, AttentionConfig { soft_cap: Some(9.0), ..base }, by_turns);
            push(Backward, "portable", Size::Large, portable, Apart);
        }
        let mut push = |kind: Kind, name: &str, config: AttentionConfig, keys: Keys| {
            let config = AttentionConfig { layout, mask: Mask::CausalBottomRight, ..config };
            kind.push(&mut cases, &format!("{name}::{layout:?}"), Size::Large, config, keys);
        };
        push(Forward, "d192", AttentionConfig { head_size: 192, value_size: Some(192), ..base }, Interleaved);
        push(Forward, "divided", AttentionConfig { key_parts: Some(2), ..base }, Interleaved);
        for output in [Output::First, Output::Merged, Output::Last] {
            push(Forward, &format!("{output:?}"), AttentionConfig { output, ..base }, Interleaved);
        }
        push(Forward, "options merged", AttentionConfig { window, output: Output::Merged, ..base }, by_turns);
        push(Forward, "portable general", AttentionConfig { soft_cap: Some(9.0), ..portable }, Apart);
        push(Forward, "portable merged", AttentionConfig { output: Output::Merged, ..portable }, Apart);
        push(Fp8, "fp8", base, Interleaved);
        push(Backward, "added", added, Interleaved);
        push(Backward, "general added", AttentionConfig { soft_cap: Some(9.0), ..added }, Apart);
        push(Backward, "portable added", AttentionConfig { kernels: Kernels::Portable, ..added }, Apart);
        // Query heads that share keys are rows of one.
        let folded = AttentionConfig { layout, queries: 1, heads: 4, key_heads: 2, ..base };
        for (name, key_parts) in [("folded", 1), ("folded divided", 2)] {
            let config = AttentionConfig { key_parts: Some(key_parts), ..folded };
            Forward.push(&mut cases, &format!("{name}::{layout:?}"), Size::Small, config, Interleaved);
        }
    }
    for (name, output) in [("packed", Output::Rounded), ("packed merged", Output::Merged)] {
        let config = AttentionConfig { layout: Layout::Packed, output, ..base };
        Forward.push(&mut cases, name, Size::Small, config, Interleaved);
    }
    cases.push(Case::new("attention_heads::halves", Size::Small, halves));
    cases.push(Case::new("attention_heads::refused", Size::Small, refused));
    cases
}

/// Elements of inputs.
trait Value: AttentionElement<Out = bf16> + HostElement<Device = Self> {
    fn of(value: f32) -> Self;
}

impl Value for bf16 {
    fn of(value: f32) -> Self {
        Self::from_bits(BF16.encode(value.into()) as u16)
    }
}

impl Value for e4m3 {
    fn of(value: f32) -> Self {
        Self::from_bits(if value.is_nan() { 0x7f } else { E4M3.encode(value.into()) as u8 })
    }
}

/// Some rows and heads of a tensor.
#[derive(Clone, Copy)]
struct Part {
    shape: [u64; 4],
    sbhd: bool,
    rows: [u64; 2],
    heads: [u64; 2],
}

impl Part {
    /// Its elements in the whole tensor, in the order of a tensor of the same layout without gaps.
    fn places(&self) -> Vec<usize> {
        let [batches, all_rows, all_heads, size] = self.shape;
        let (rows, heads) = (self.rows[0]..self.rows[1], self.heads[0]..self.heads[1]);
        let mut tokens: Vec<(u64, u64)> = (0..batches).flat_map(|batch| rows.clone().map(move |row| (batch, row))).collect();
        if self.sbhd {
            tokens.sort_by_key(|(batch, row)| (*row, *batch));
        }
        let token = |(batch, row): (u64, u64)| if self.sbhd { row * batches + batch } else { batch * all_rows + row };
        let first = |of: (u64, u64)| heads.clone().map(move |head| (token(of) * all_heads + head) * size);
        tokens.into_iter().flat_map(first).flat_map(|first| first..first + size).map(|at| at as usize).collect()
    }

    fn len(&self) -> usize {
        self.shape.iter().product::<u64>() as usize
    }

    fn heads<'a, T>(&self, view: DeviceView<'a, T>) -> Result<Heads<'a, T>, String> {
        let Self { shape, rows: [begin, end], heads: [first, last], .. } = *self;
        let whole = text(if self.sbhd { Heads::sbhd(view, shape) } else { Heads::bshd(view, shape) })?;
        text(text(whole.rows(begin..end))?.heads(first..last))
    }

    fn heads_mut<'a, T>(&self, view: DeviceViewMut<'a, T>) -> Result<HeadsMut<'a, T>, String> {
        let Self { shape, rows: [begin, end], heads: [first, last], .. } = *self;
        let whole = text(if self.sbhd { HeadsMut::sbhd(view, shape) } else { HeadsMut::bshd(view, shape) })?;
        text(text(whole.rows(begin..end))?.heads(first..last))
    }

    /// A copy without gaps.
    fn gather<T: Copy>(&self, whole: &[T]) -> Vec<T> {
        self.places().into_iter().map(|at| whole[at]).collect()
    }

    /// `whole` with the part in it.
    fn scatter<T>(&self, whole: &mut [T], part: Vec<T>) {
        self.places().into_iter().zip(part).for_each(|(at, value)| whole[at] = value);
    }

    /// A tensor that is NaN outside of the parts.
    fn fill<T: Value>(parts: &[Self], random: &mut Random) -> Vec<T> {
        let mut values = vec![T::of(f32::NAN); parts[0].len()];
        for part in parts {
            part.scatter(&mut values, part.places().iter().map(|_| T::of(random.normal())).collect());
        }
        values
    }
}

/// The parts of queries, keys, values and the result.
fn parts(config: &AttentionConfig, keys: Keys) -> [Part; 4] {
    let AttentionConfig { layout, queries, key_heads, head_size, .. } = *config;
    let (batches, sbhd) = (if layout == Layout::Packed { 1 } else { config.batches }, layout == Layout::Sbhd);
    let part = |first: u64, rows: u64, heads: [u64; 2], all_heads: u64, size: u64| Part {
        shape: [batches, rows + 7, all_heads, size],
        sbhd,
        rows: [first, first + rows],
        heads,
    };
    let of_heads = |heads: u64| [0, heads];
    let (heads, value_size) = (config.heads, config.value_size());
    let key_parts = match keys {
        Apart => [
            part(1, config.keys, of_heads(key_heads), key_heads, head_size),
            part(4, config.keys, of_heads(key_heads), key_heads, value_size),
        ],
        Interleaved => [[0, key_heads], [key_heads, 2 * key_heads]].map(|heads| part(3, config.keys, heads, 2 * key_heads, head_size)),
    };
    let [k, v] = key_parts;
    [part(2, queries, of_heads(heads), heads, head_size), k, v, part(5, queries, of_heads(heads), heads, value_size)]
}

/// Keys and values as they lie in parts of larger tensors.
fn keys_and_values<T: Value>([_, k, v, _]: &[Part; 4], keys: Keys, random: &mut Random) -> [Vec<T>; 2] {
    match keys {
        Apart => [Part::fill(&[*k], random), Part::fill(&[*v], random)],
        Interleaved => [Part::fill(&[*k, *v], random), Vec::new()],
    }
}

fn upload<T: HostElement>(stream: &Stream, values: &[T]) -> Result<Buffer<T::Device>, String> {
    text(Buffer::from_slice(stream, values))
}

/// Larger tensors of running results, of results, and log-sum-exps.
type Results = (Vec<f32>, Vec<u16>, Vec<u32>);

fn forward<T: Value>(runtime: &Runtime, config: AttentionConfig, keys: Keys) -> Outcome {
    let (stream, mut random, parts) = (stream(runtime)?, Random::new(23), parts(&config, keys));
    let [of_q, of_k, of_v, of_out] = parts;
    let q = Part::fill::<T>(&[of_q], &mut random);
    let [k, v] = keys_and_values::<T>(&parts, keys, &mut random);
    let values_of = if keys == Interleaved { &k } else { &v };
    // Sequences of 25 and 15 queries, 100 and 40 keys.
    let [query_ends, key_ends] = [upload(&stream, &[0_u32, 25, 40])?, upload(&stream, &[0_u32, 100, 140])?];
    let sequences = (config.layout == Layout::Packed).then(|| Sequences::new(query_ends.view(), key_ends.view()));
    let one = upload(&stream, &[1.0_f32])?;
    let scales = T::IS_SCALED.then(|| Scales { q: one.view(), k: one.view(), v: one.view() });
    let attention = text(Attention::<T>::new(runtime, config))?;
    let rows = of_out.places().len() as u64 / config.value_size();
    let before: Vec<f32> = (0..of_out.len()).map(|_| random.normal()).collect();
    let logs = vec![1.5_f32; rows as usize];
    let attend = |is_whole: bool, [q, k, v]: [Heads<'_, T>; 3], before: &[f32]| -> Result<Results, String> {
        let mut running = upload(&stream, before)?;
        let mut out = upload(&stream, &vec![bf16::from_bits(0x7bff); before.len()])?;
        let mut log_sum_exp = upload(&stream, &logs)?;
        let inputs = Inputs { sequences, scales, ..Inputs::new(q, k, v) };
        let outputs = match (config.output, is_whole) {
            (Output::Rounded, true) => Outputs::new(out.view_mut(), log_sum_exp.view_mut()),
            (Output::Rounded, false) => Outputs::new(of_out.heads_mut(out.view_mut())?, log_sum_exp.view_mut()),
            (Output::Last, true) => Outputs::last(running.view(), out.view_mut(), log_sum_exp.view_mut()),
            (Output::Last, false) => {
                Outputs::last(of_out.heads(running.view())?, of_out.heads_mut(out.view_mut())?, log_sum_exp.view_mut())
            }
            (_, true) => Outputs::merged(running.view_mut(), log_sum_exp.view_mut()),
            (_, false) => Outputs::merged(of_out.heads_mut(running.view_mut())?, log_sum_exp.view_mut()),
        };
        let mut bound = text(attention.bind(&stream, inputs, outputs))?;
        text(bound.run(&stream))?;
        drop(bound);
        let out = text(out.to_vec(&stream))?.into_iter().map(bf16::to_bits).collect();
        let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
        Ok((text(running.to_vec(&stream))?, out, bits(text(log_sum_exp.to_vec(&stream))?)))
    };
    let copies = [upload(&stream, &of_q.gather(&q))?, upload(&stream, &of_k.gather(&k))?, upload(&stream, &of_v.gather(values_of))?];
    let (sums, rounded, logs) = attend(true, copies.each_ref().map(|copy| copy.view().into()), &of_out.gather(&before))?;
    let (q, k, v) = (upload(&stream, &q)?, upload(&stream, &k)?, upload(&stream, &v)?);
    let values_of = if keys == Interleaved { &k } else { &v };
    let found = attend(false, [of_q.heads(q.view())?, of_k.heads(k.view())?, of_v.heads(values_of.view())?], &before)?;
    let (mut expected_sums, mut expected) = (before.clone(), vec![0x7bff; before.len()]);
    of_out.scatter(&mut expected_sums, sums);
    of_out.scatter(&mut expected, rounded);
    let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    equal("running", &bits(&found.0), &bits(&expected_sums))?;
    equal("out", &found.1, &expected)?;
    equal("log_sum_exp", &found.2, &logs)
}

/// Operations on both halves of the rows are bound at the same time, and write to one tensor.
fn halves(runtime: &Runtime) -> Outcome {
    let (stream, mut random) = (&stream(runtime)?, Random::new(31));
    let config = AttentionConfig { batches: 2, queries: 40, keys: 60, heads: 2, head_size: 64, ..AttentionConfig::default() };
    let half = |first: u64| Part { shape: [2, 80, 2, 64], sbhd: false, rows: [first, first + 40], heads: [0, 2] };
    let parts = [half(0), half(40)];
    let q = Part::fill::<bf16>(&parts, &mut random);
    let keys = Part { shape: [2, 60, 1, 64], sbhd: false, rows: [0, 60], heads: [0, 1] };
    let k = upload(stream, &Part::fill::<bf16>(&[keys], &mut random))?;
    let attention = text(Attention::<bf16>::new(runtime, config))?;
    let [mut expected, before] = [(); 2].map(|()| vec![bf16::from_bits(0x7bff); q.len()]);
    let mut log_sum_exp = [(); 2].map(|()| Buffer::<f32>::zeros(stream, 160));
    let [first, second] = log_sum_exp.each_mut().map(|logs| logs.as_mut().expect("memory"));
    for part in &parts {
        let (q, mut out) = (upload(stream, &part.gather(&q))?, upload(stream, &part.gather(&before))?);
        let outputs = Outputs::new(out.view_mut(), first.view_mut());
        text(attention.forward(stream, Inputs::new(q.view(), k.view(), k.view()), outputs))?;
        part.scatter(&mut expected, text(out.to_vec(stream))?);
    }
    let (q, mut out) = (upload(stream, &q)?, upload(stream, &before)?);
    let (low, high) = text(text(HeadsMut::bshd(out.view_mut(), [2, 80, 2, 64]))?.split_rows(40))?;
    let inputs = |part: &Part| Ok::<_, String>(Inputs::new(part.heads(q.view())?, k.view(), k.view()));
    let mut low = text(attention.bind(stream, inputs(&parts[0])?, Outputs::new(low, first.view_mut())))?;
    let mut high = text(attention.bind(stream, inputs(&parts[1])?, Outputs::new(high, second.view_mut())))?;
    text(high.run(stream))?;
    text(low.run(stream))?;
    drop((low, high));
    let bits = |values: &[bf16]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    equal("out", &bits(&text(out.to_vec(stream))?), &bits(&expected))
}

/// Both forms of the pass: at once, and a step of a result that was prepared.
fn backward(runtime: &Runtime, config: AttentionConfig, keys: Keys) -> Outcome {
    gradients(runtime, config, keys, false)?;
    gradients(runtime, config, keys, true)
}

fn gradients(runtime: &Runtime, config: AttentionConfig, keys: Keys, prepared: bool) -> Outcome {
    let (stream, mut random, parts) = (&stream(runtime)?, Random::new(29), parts(&config, keys));
    let [of_q, of_k, of_v, of_out] = parts;
    let q = Part::fill::<bf16>(&[of_q], &mut random);
    let [k, v] = keys_and_values::<bf16>(&parts, keys, &mut random);
    let [out, grad_out] = [(); 2].map(|()| Part::fill::<bf16>(&[of_out], &mut random));
    let rows = of_out.places().len() / config.value_size() as usize;
    let log_sum_exp = upload(stream, &(0..rows).map(|_| 6.0 + random.unit()).collect::<Vec<f32>>())?;
    let backward = text(AttentionBackward::<bf16>::new(runtime, config, Order::Deterministic))?;
    let lens = [of_q.len(), of_k.len(), if keys == Interleaved { 0 } else { of_v.len() }];
    let before = lens.map(|len| (0..len).map(|_| random.normal()).collect::<Vec<f32>>());

    let run = |tensors: [Heads<'_, bf16>; 5], gradients: Gradients<'_, bf16>| -> Outcome {
        let [q, k, v, out, grad_out] = tensors;
        let (forward, log_sum_exp) = (Inputs::new(q, k, v), log_sum_exp.view());
        if !prepared {
            let inputs = BackwardInputs { forward, out, log_sum_exp, grad_out };
            return text(backward.backward(stream, inputs, gradients));
        }
        let mut deltas = upload(stream, &vec![f32::NAN; rows])?;
        text(text(backward.prepare(out, grad_out, deltas.view_mut()))?.run(stream))?;
        let step = BackwardStep { forward, deltas: deltas.view(), log_sum_exp, grad_out };
        let mut bound = text(backward.step(stream, step, gradients))?;
        text(bound.run(stream))
    };
    let values_of = if keys == Interleaved { &k } else { &v };
    let copies = [of_q.gather(&q), of_k.gather(&k), of_v.gather(values_of), of_out.gather(&out), of_out.gather(&grad_out)];
    let mut whole = Vec::new();
    for copy in &copies {
        whole.push(upload(stream, copy)?);
    }
    let whole: [Heads<'_, bf16>; 5] = std::array::from_fn(|i| whole[i].view().into());
    let uploaded = [upload(stream, &q)?, upload(stream, &k)?, upload(stream, &v)?, upload(stream, &out)?, upload(stream, &grad_out)?];
    let values_of = if keys == Interleaved { &uploaded[1] } else { &uploaded[2] };
    let parts_of = [
        of_q.heads(uploaded[0].view())?,
        of_k.heads(uploaded[1].view())?,
        of_v.heads(values_of.view())?,
        of_out.heads(uploaded[3].view())?,
        of_out.heads(uploaded[4].view())?,
    ];
    // What gradients are written to, or added to: without gaps, and in larger tensors.
    macro_rules! compare {
        ($before:expr, $gradients:ident, $bits:expr) => {{
            let before = $before;
            let values_of = if keys == Interleaved { &before[1] } else { &before[2] };
            let copies = [of_q.gather(&before[0]), of_k.gather(&before[1]), of_v.gather(values_of)];
            let [mut dq, mut dk, mut dv] = [upload(stream, &copies[0])?, upload(stream, &copies[1])?, upload(stream, &copies[2])?];
            run(whole, Gradients::$gradients(dq.view_mut(), dk.view_mut(), dv.view_mut()))?;
            let mut expected = before.clone();
            of_q.scatter(&mut expected[0], text(dq.to_vec(stream))?);
            of_k.scatter(&mut expected[1], text(dk.to_vec(stream))?);
            of_v.scatter(&mut expected[if keys == Interleaved { 1 } else { 2 }], text(dv.to_vec(stream))?);
            let [mut dq, mut dk, mut dv] = [upload(stream, &before[0])?, upload(stream, &before[1])?, upload(stream, &before[2])?];
            let grad_q = of_q.heads_mut(dq.view_mut())?;
            let (grad_k, grad_v) = match keys {
                Apart => (of_k.heads_mut(dk.view_mut())?, of_v.heads_mut(dv.view_mut())?),
                Interleaved => {
                    let both = Part { heads: [0, of_v.heads[1]], ..of_k }.heads_mut(dk.view_mut())?;
                    text(both.split_heads(config.key_heads))?
                }
            };
            run(parts_of, Gradients::$gradients(grad_q, grad_k, grad_v))?;
            for ((name, found), expected) in [("q", &dq), ("k", &dk), ("v", &dv)].into_iter().zip(&expected) {
                let bits = |values: &[_]| values.iter().map($bits).collect::<Vec<_>>();
                equal(&format!("gradients of {name}, prepared: {prepared}"), &bits(&text(found.to_vec(stream))?), &bits(expected))?;
            }
        }};
    }
    match config.gradients {
        GradientOutput::Added => compare!(before, added, |x: &f32| x.to_bits()),
        GradientOutput::Rounded => compare!(lens.map(|len| vec![bf16::from_bits(0x7bff); len]), new, |x: &bf16| x.to_bits()),
    }
    Ok(())
}

/// Errors name the tensor, what is wrong with it and what to do.
fn refused(runtime: &Runtime) -> Outcome {
    let stream = &stream(runtime)?;
    let config = AttentionConfig { batches: 2, queries: 4, keys: 4, head_size: 64, ..AttentionConfig::default() };
    let tensor = upload(stream, &vec![bf16::from_bits(0); 4096])?;
    let (view, sums) = (tensor.view(), text(Buffer::<f32>::zeros(stream, 4096))?);
    let contains = |result: Result<(), Error>, words: &str| match result {
        Err(error) if error.to_string().contains(words) => Ok(()),
        other => Err(format!("{other:?} does not say: {words}")),
    };
    let made = |heads: oxtile::Result<Heads<'_, bf16>>| heads.map(|_| ());
    contains(made(Heads::bshd(view, [2, 4, 8, 65])), "Heads: 4096 elements where 4160 are needed")?;
    contains(
        made(Heads::strided(view, [2, 4, 1, 64], [4000, 64, 64])),
        "[batches, rows, heads, size] of [2, 4, 1, 64] with strides of [4000, 64, 64] elements end at element 4256, the view at 4096: give a longer view, or fewer rows",
    )?;
    contains(made(Heads::strided(view, [2, 4, 1, 64], [u64::MAX, 64, 64])), "end at element 2^64 or later")?;
    let heads = text(Heads::bshd(view, [2, 8, 4, 64]))?;
    contains(made(heads.rows(3..9)), "rows 3..9 of 8: ranges rise, and end at 8 at most")?;
    #[expect(clippy::reversed_empty_ranges, reason = "it is refused")]
    contains(made(heads.heads(3..2)), "heads 3..2 of 4")?;
    let mut written = upload(stream, &vec![bf16::from_bits(0); 4096])?;
    contains(
        HeadsMut::strided(written.view_mut(), [2, 4, 2, 64], [128, 128, 64]).map(|_| ()),
        "overlap with strides of [128, 128, 64] elements, and are written: give 128 at least 256",
    )?;

    let attempt = |config: AttentionConfig, q: Heads<'_, bf16>, k: Heads<'_, bf16>, v: Heads<'_, bf16>| {
        let mut out = Buffer::<bf16>::zeros(stream, 2 * 4 * config.heads * 64)?;
        let mut log_sum_exp = Buffer::<f32>::zeros(stream, 2 * 4 * config.heads)?;
        Attention::<bf16>::new(runtime, config)?.forward(stream, Inputs::new(q, k, v), Outputs::new(out.view_mut(), log_sum_exp.view_mut()))
    };
    let whole: Heads<'_, bf16> = view.slice(0, 512).into();
    let rows = text(text(Heads::bshd(view, [2, 8, 4, 64]))?.heads(0..1))?;
    contains(
        attempt(config, whole, text(rows.rows(0..3))?, whole),
        "Attention, k: its [batches, rows, heads, size] are [2, 3, 1, 64], those of the configuration are [2, 4, 1, 64]: give that many, or change the configuration",
    )?;
    contains(attempt(config, whole, text(Heads::strided(view, [2, 4, 1, 64], [300, 68, 64]))?, whole), "no multiple of 16: pad the rows")?;
    let portable = AttentionConfig { kernels: Kernels::Portable, ..config };
    contains(
        attempt(portable, whole, text(rows.rows(0..4))?, whole),
        "Attention, k: [batch, row, head] strides of [2048, 256, 64] elements, but the kernel takes rows of 1 heads without gaps: copy the tensor, or give it such rows",
    )?;
    let capped = AttentionConfig { soft_cap: Some(1.0), ..config };
    contains(
        attempt(capped, text(Heads::sbhd(view.slice(0, 512), [2, 4, 1, 64]))?, whole, whole),
        "Attention, q: [batch, row, head] strides of [64, 128, 64] elements, but the kernel takes batches that are whole rows apart in Layout::Bshd",
    )?;
    contains(
        attempt(AttentionConfig { layout: Layout::Sbhd, ..capped }, whole, text(Heads::bshd(view.slice(0, 512), [2, 4, 1, 64]))?, whole),
        "the kernel takes batches that are 1 heads apart in Layout::Sbhd",
    )?;
    contains(
        attempt(capped, whole, text(rows.rows(0..4))?, whole),
        "Attention, v: [batch, row, head] strides of [256, 64, 64] elements, but the kernel takes batches that are equally many rows apart: \
         here 4, in \"Attention, k\" 8: copy one of them",
    )?;
    let mut last = |running: Heads<'_, f32>| {
        let mut log_sum_exp = Buffer::<f32>::zeros(stream, 8)?;
        let attention = Attention::<bf16>::new(runtime, AttentionConfig { output: Output::Last, ..config })?;
        let outputs = Outputs::last(running, written.view_mut().split_at(512).0, log_sum_exp.view_mut());
        attention.forward(stream, Inputs::new(whole, whole, whole), outputs)
    };
    contains(
        last(text(text(Heads::bshd(sums.view(), [2, 8, 4, 64]))?.heads(0..1).and_then(|heads| heads.rows(0..4)))?),
        "Attention, running: strides are [2048, 256, 64], those of the result [256, 64, 64]: give both the same",
    )?;
    refused_backward(runtime, config, view)
}

fn refused_backward(runtime: &Runtime, config: AttentionConfig, view: DeviceView<'_, bf16>) -> Outcome {
    let stream = &stream(runtime)?;
    let (whole, log_sum_exp) = (Heads::from(view.slice(0, 512)), text(Buffer::<f32>::zeros(stream, 8))?);
    let said = |result: oxtile::Result<()>, words: &str| match result {
        Err(error) if error.to_string().contains(words) => Ok(()),
        other => Err(format!("{other:?} does not say: {words}")),
    };
    let gaps = text(text(Heads::bshd(view, [2, 8, 4, 64]))?.heads(0..1).and_then(|heads| heads.rows(0..4)))?;
    let mut deltas = text(Buffer::<f32>::zeros(stream, 8))?;
    let backward = text(AttentionBackward::<bf16>::new(runtime, config, Order::Fast))?;
    said(
        backward.prepare(gaps, whole, deltas.view_mut()).map(|_| ()),
        "AttentionBackward, out: [row, head] strides of [256, 64] elements, but the kernel that sums rows takes those of a batch without gaps, \
         [64, 64]: copy the tensor",
    )?;
    let added = AttentionConfig { gradients: GradientOutput::Added, ..config };
    let mut sums = [(); 3].map(|()| Buffer::<f32>::zeros(stream, 4096));
    let [q, k, v] = sums.each_mut().map(|sums| sums.as_mut().expect("memory"));
    let mut attempt = |config: AttentionConfig, strides: [u64; 3], value_strides: [u64; 3]| {
        let backward = AttentionBackward::<bf16>::new(runtime, config, Order::Fast)?;
        let inputs =
            BackwardInputs { forward: Inputs::new(whole, whole, whole), out: whole, log_sum_exp: log_sum_exp.view(), grad_out: whole };
        let [k, v] =
            [HeadsMut::strided(k.view_mut(), [2, 4, 1, 64], strides)?, HeadsMut::strided(v.view_mut(), [2, 4, 1, 64], value_strides)?];
        backward.backward(stream, inputs, Gradients::added(q.view_mut().slice_mut(0, 512), k, v))
    };
    said(
        attempt(added, [512, 100, 64], [512, 100, 64]),
        "AttentionBackward, gradients of k: [batch, row, head] strides of [512, 100, 64] elements, but the kernel that adds counts heads of 64, \
         which are neighbours in a row: give it such a tensor",
    )?;
    said(
        attempt(added, [512, 128, 64], [512, 64, 64]),
        "AttentionBackward, gradients of v: strides are [512, 64, 64], those of the keys [512, 128, 64], but they are added by one kernel",
    )?;
    said(
        attempt(AttentionConfig { soft_cap: Some(1.0), ..added }, [512, 128, 64], [512, 128, 64]),
        "AttentionBackward, gradients of k: [batch, row, head] strides of [512, 128, 64] elements, but the kernel takes rows of 1 heads without gaps",
    )
}
