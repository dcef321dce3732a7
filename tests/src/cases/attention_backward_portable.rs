//! The portable backward pass of attention against f64, of any layout, window, sink, cap and output. Rows that belong to no sequence
//! hold NaN, so that none of them is used; what the kernels do not write is seen.

use oxtile::attention::{
    AttentionBackward, AttentionConfig, BackwardElement, BackwardInputs, GradientOutput, Gradients, Inputs, Kernels, Layout, Mask, Order,
    Padding, Sequences, Sink, Window,
};
use oxtile::{Buffer, EmulatedOptions, Error, HostElement, Kind, Runtime};
use oxtile_tests::inputs::Random;
use oxtile_tile::num::{Element, bf16, f16};

use super::attention::Operand;
use super::attention_problem::{Place, Problem, Row, each};
use crate::case::{Case, Outcome, Size, agrees, equal, stream, text};

pub(super) trait Differentiable: Operand + BackwardElement + Element + HostElement<Device = Self> {}

impl<T: Operand + BackwardElement + Element> Differentiable for T {}

/// What gradients hold before, in 16 bits; sums hold [`BEFORE`].
const UNTOUCHED: u16 = 0x7bff;
const BEFORE: f32 = 0.5;

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
    cases.push(Case::new(format!("{FAMILY}::ring"), Size::Small, move |r| ring(r, base, ORDER)));
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

/// A problem's gradients against f64.
pub(super) fn check<T: Differentiable>(runtime: &Runtime, problem: &Problem, order: Order) -> Outcome {
    let pass = Pass::<T>::new(problem.clone());
    pass.compare(&pass.run(runtime, problem, &pass.before(), order)?)
}

/// The gradients of queries, keys and values, and of the sink.
pub(super) type Found = ([Vec<f64>; 3], Vec<f32>);

/// Tensors, exact in `T`, and what the forward pass makes of them.
pub(super) struct Pass<T> {
    pub problem: Problem,
    /// `Q`, `K`, `V` and `dO`.
    pub inputs: [Vec<f32>; 4],
    sink: Vec<f32>,
    pub out: Vec<f32>,
    pub log_sum_exp: Vec<f32>,
    element: std::marker::PhantomData<T>,
}

/// Of `Q`, `K`, `V` and `dO`: 0 for rows of queries, 1 for rows of keys.
const SIDES: [usize; 4] = [0, 1, 1, 0];

impl<T: Differentiable> Pass<T> {
    pub fn new(problem: Problem) -> Self {
        let config = problem.config;
        let mut random = Random::new(config.queries * 1000 + config.keys + config.head_size);
        let rows =
            [config.queries, config.keys].map(|rows| if config.layout == Layout::Packed { rows } else { config.batches * rows } as usize);
        let mut pass = Self {
            inputs: [0, 1, 2, 3].map(|tensor| vec![f32::NAN; rows[SIDES[tensor]] * heads_of(&config, tensor) * size_of(&config, tensor)]),
            sink: (0..config.heads).map(|head| head as f32 - 0.5).collect(),
            out: vec![f32::NAN; rows[0] * heads_of(&config, 3) * size_of(&config, 3)],
            log_sum_exp: vec![f32::NAN; rows[0] * heads_of(&config, 3)],
            problem,
            element: std::marker::PhantomData,
        };
        for (batch, tensor) in (0..config.batches as usize).flat_map(|batch| [0, 1, 2, 3].map(|tensor| (batch, tensor))) {
            let place = pass.place(batch, tensor);
            let shape = [pass.problem.lengths(batch)[SIDES[tensor]], heads_of(&config, tensor), size_of(&config, tensor)];
            let nan = |row: usize| {
                batch == 0
                    && [Some(Row::Query(row)), Some(Row::Key(row)), None, None][tensor].is_some_and(|row| pass.problem.nan == Some(row))
            };
            for (row, head, element) in each(shape) {
                let value = T::FORMAT.round(random.normal().into()) as f32;
                pass.inputs[tensor][place.at(row, head, element)] = if element == 0 && nan(row) { f32::NAN } else { value };
            }
        }
        for (batch, head) in pass.heads() {
            let (size, first) = (size_of(&config, 3), pass.problem.statistics(batch, head));
            let (attended, place) = (
                pass.head(batch, head).attend(pass.of(batch, head, 0), pass.of(batch, head, 1), pass.of(batch, head, 2)),
                pass.place(batch, 3),
            );
            for (i, value) in attended.out.into_iter().enumerate() {
                pass.out[place.at(i / size, head, i % size)] = if value.is_nan() { f32::NAN } else { T::FORMAT.round(value) as f32 };
            }
            for (i, value) in attended.log_sum_exp.into_iter().enumerate() {
                pass.log_sum_exp[first + i] = value as f32;
            }
        }
        pass
    }

    /// All sequences and query heads.
    fn heads(&self) -> impl Iterator<Item = (usize, usize)> + use<T> {
        let heads = self.problem.config.heads as usize;
        (0..self.problem.config.batches as usize).flat_map(move |batch| (0..heads).map(move |head| (batch, head)))
    }

    fn place(&self, batch: usize, tensor: usize) -> Place {
        let config = &self.problem.config;
        self.problem.place(batch, SIDES[tensor], heads_of(config, tensor), size_of(config, tensor))
    }

    /// The head of a tensor that goes with a head of queries.
    fn head_in(&self, tensor: usize, head: usize) -> usize {
        let AttentionConfig { heads, key_heads, .. } = self.problem.config;
        if SIDES[tensor] == 0 { head } else { head * key_heads as usize / heads as usize }
    }

    /// Elements of a tensor's rows that go with a head of queries.
    fn of(&self, batch: usize, head: usize, tensor: usize) -> impl Fn(usize, usize) -> f64 {
        let (place, head) = (self.place(batch, tensor), self.head_in(tensor, head));
        move |row, element| f64::from(self.inputs[tensor][place.at(row, head, element)])
    }

    fn head(&self, batch: usize, head: usize) -> oxtile_tests::oracle::attention_head::Head {
        let sink = match self.problem.config.sink {
            Sink::None => None,
            Sink::OffByOne => Some(0.0),
            Sink::Learnable => Some(f64::from(self.sink[head])),
        };
        self.problem.head(batch, sink)
    }

    /// Gradients that nobody wrote.
    pub fn before(&self) -> [Vec<f32>; 3] {
        [0, 1, 2].map(|tensor| vec![BEFORE; self.inputs[tensor].len()])
    }

    /// Gradients of where a problem's sequences are, which may be other than those of the forward pass. Sums are added to `before`.
    pub fn run(&self, runtime: &Runtime, problem: &Problem, before: &[Vec<f32>; 3], order: Order) -> Result<Found, String> {
        let (stream, config) = (stream(runtime)?, problem.config);
        let upload = |values: &[f32]| {
            let bits = values.iter().map(|&x| if x.is_nan() { 0x7fff } else { T::FORMAT.encode(x.into()) as u16 });
            text(Buffer::from_slice(&stream, &bits.map(T::of).collect::<Vec<T>>()))
        };
        let [q, k, v, grad_out] = &self.inputs;
        let (q, k, v, grad_out, out) = (upload(q)?, upload(k)?, upload(v)?, upload(grad_out)?, upload(&self.out)?);
        let (log_sum_exp, sink) = (text(Buffer::from_slice(&stream, &self.log_sum_exp))?, text(Buffer::from_slice(&stream, &self.sink))?);
        let array = |values: Vec<u32>| text(Buffer::from_slice(&stream, &values));
        let [queries, keys, query_offsets, key_offsets] = problem.arrays();
        let arrays = [array(queries)?, array(keys)?, array(query_offsets)?, array(key_offsets)?];
        let sequences = (config.layout == Layout::Packed).then(|| Sequences {
            cu_seqlens_q_padded: Some(arrays[2].view()),
            cu_seqlens_kv_padded: Some(arrays[3].view()),
            padding: problem.padding,
            ..Sequences::new(arrays[0].view(), arrays[1].view())
        });
        let rounded = |length: u64| text(Buffer::from_slice(&stream, &vec![T::of(UNTOUCHED); length as usize]));
        let sums = |values: &Vec<f32>| text(Buffer::from_slice(&stream, values));
        let (mut grad_q, mut grad_k, mut grad_v) = (rounded(q.len())?, rounded(k.len())?, rounded(v.len())?);
        let (mut sum_q, mut sum_k, mut sum_v) = (sums(&before[0])?, sums(&before[1])?, sums(&before[2])?);
        let learnable = config.sink == Sink::Learnable;
        let mut grad_sink = text(Buffer::from_slice(&stream, &vec![f32::NAN; if learnable { config.heads as usize } else { 0 }]))?;
        let backward = text(AttentionBackward::<T>::new(runtime, config, order))?;
        let forward = Inputs { sequences, sink: learnable.then(|| sink.view()), ..Inputs::new(q.view(), k.view(), v.view()) };
        let inputs = BackwardInputs { forward, out: out.view().into(), log_sum_exp: log_sum_exp.view(), grad_out: grad_out.view().into() };
        let added = config.gradients == GradientOutput::Added;
        let gradients = match added {
            false => Gradients::new(grad_q.view_mut(), grad_k.view_mut(), grad_v.view_mut()),
            true => Gradients::added(sum_q.view_mut(), sum_k.view_mut(), sum_v.view_mut()),
        };
        let gradients = Gradients { sink: learnable.then(|| grad_sink.view_mut()), ..gradients };
        text(backward.backward(&stream, inputs, gradients))?;
        let grads = [&grad_q, &grad_k, &grad_v].map(|grad| text(grad.to_vec(&stream)));
        let sums = [&sum_q, &sum_k, &sum_v].map(|sum| text(sum.to_vec(&stream)));
        let mut found = [Vec::new(), Vec::new(), Vec::new()];
        for (tensor, (grad, sum)) in grads.into_iter().zip(sums).enumerate() {
            let values = grad?.into_iter().map(|x| T::FORMAT.decode(x.bits().into()));
            found[tensor] = if added { sum?.into_iter().map(f64::from).collect() } else { values.collect() };
        }
        Ok((found, text(grad_sink.to_vec(&stream))?))
    }

    /// Every element within what rounding allows, each sequence's part of each tensor within less, and the rest as it was.
    pub fn compare(&self, (found, grad_sink): &Found) -> Outcome {
        let config = self.problem.config;
        let added = config.gradients == GradientOutput::Added;
        let start = if added { f64::from(BEFORE) } else { 0.0 };
        let mut seen = [0, 1, 2].map(|tensor| vec![false; found[tensor].len()]);
        let mut sink = vec![[0.0; 2]; config.heads as usize];
        for batch in 0..config.batches as usize {
            let mut expected = [0, 1, 2].map(|tensor| vec![[0.0; 2]; found[tensor].len()]);
            for (head, sink) in sink.iter_mut().enumerate() {
                let (first, place) = (self.problem.statistics(batch, head), self.place(batch, 3));
                let tensors = [0, 1, 2, 3].map(|tensor| self.of(batch, head, tensor));
                let log_sum_exp: Vec<f64> = (0..self.problem.lengths(batch)[0]).map(|i| f64::from(self.log_sum_exp[first + i])).collect();
                let gradients = self.head(batch, head).differentiate(
                    [&tensors[0], &tensors[1], &tensors[2], &tensors[3]],
                    &|row, element| f64::from(self.out[place.at(row, head, element)]),
                    &log_sum_exp,
                );
                *sink = [0, 1].map(|i| sink[i] + gradients.sink[i]);
                for tensor in 0..3 {
                    let (place, size, head) = (self.place(batch, tensor), size_of(&config, tensor), self.head_in(tensor, head));
                    for (i, (value, magnitude)) in gradients.values[tensor].iter().zip(&gradients.magnitudes[tensor]).enumerate() {
                        let at = place.at(i / size, head, i % size);
                        seen[tensor][at] = true;
                        expected[tensor][at] = [expected[tensor][at][0] + value, expected[tensor][at][1] + magnitude];
                    }
                }
            }
            for (tensor, name) in ["dq", "dk", "dv"].into_iter().enumerate() {
                let (place, heads, size) = (self.place(batch, tensor), heads_of(&config, tensor), size_of(&config, tensor));
                let (mut error, mut norm) = (0.0, 0.0);
                for (row, head, element) in each([self.problem.lengths(batch)[SIDES[tensor]], heads, size]) {
                    let at = place.at(row, head, element);
                    let ([value, magnitude], found) = (expected[tensor][at], found[tensor][at] - start);
                    let bound = (T::HALF_UNIT + 2e-4) * magnitude + T::HALF_UNIT * value.abs() + 1e-6;
                    if !agrees(found, value, bound) {
                        return Err(format!(
                            "sequence {batch}: {name} of row {row}, head {head}, element {element} is {found}, expected {value} within {bound}"
                        ));
                    }
                    if value.is_finite() {
                        (error, norm) = (error + (found - value).powi(2), norm + value * value);
                    }
                }
                let relative = if norm == 0.0 { error } else { (error / norm).sqrt() };
                if relative > 0.8 * T::HALF_UNIT + 1e-5 {
                    return Err(format!("sequence {batch}: {name} has a relative Frobenius error of {relative:.2e}"));
                }
            }
        }
        for (head, (&found, [value, magnitude])) in grad_sink.iter().zip(sink).enumerate() {
            if !agrees(f64::from(found), value, 1e-5 * magnitude + 1e-6) {
                return Err(format!("the gradient of sink {head} is {found}, expected {value}"));
            }
        }
        for (tensor, name) in ["dq", "dk", "dv"].into_iter().enumerate() {
            let row_elements = heads_of(&config, tensor) * size_of(&config, tensor);
            let before = if added { start } else { T::FORMAT.decode(UNTOUCHED.into()) };
            let rest: Vec<usize> = (0..seen[tensor].len()).filter(|&at| !seen[tensor][at]).collect();
            let expected = |at: usize| if !added && self.problem.is_zeroed(SIDES[tensor], at / row_elements) { 0.0 } else { before };
            let (found, expected): (Vec<f64>, Vec<f64>) = rest.iter().map(|&at| (found[tensor][at], expected(at))).unzip();
            equal(&format!("rows of {name} of no sequence"), &found, &expected)?;
        }
        Ok(())
    }
}

/// Heads of `Q`, `K`, `V` or `dO`.
fn heads_of(config: &AttentionConfig, tensor: usize) -> usize {
    [config.heads, config.key_heads][SIDES[tensor]] as usize
}

/// Elements of a row of a head of `Q`, `K`, `V` or `dO`.
fn size_of(config: &AttentionConfig, tensor: usize) -> usize {
    (if tensor < 2 { config.head_size } else { config.value_size() }) as usize
}

/// Steps of a ring: with the log-sum-exp and the result of all keys, the gradients of two parts add up to those of all.
pub(super) fn ring(runtime: &Runtime, config: AttentionConfig, order: Order) -> Outcome {
    let config = AttentionConfig { layout: Layout::Packed, gradients: GradientOutput::Added, ..config };
    let whole = Problem { padding: Padding::Kept, ..Problem::packed(config, vec![[[0, 30], [0, 90]]]) };
    let pass = Pass::<bf16>::new(whole.clone());
    let mut sums = pass.before();
    for keys in [[0, 50], [50, 40]] {
        let part = Problem { sequences: vec![[[0, 30], keys]], ..whole.clone() };
        let (found, _) = pass.run(runtime, &part, &sums, order)?;
        sums = found.map(|values| values.into_iter().map(|x| x as f32).collect());
    }
    pass.compare(&(sums.map(|values| values.into_iter().map(f64::from).collect()), Vec::new()))
}

/// The bits are the same in every run and under every grid.
pub(super) fn same_bits(runtime: &Runtime, problem: &Problem) -> Outcome {
    let pass = Pass::<bf16>::new(problem.clone());
    let once = pass.run(runtime, problem, &pass.before(), ORDER)?;
    let again = |runtime: &Runtime, how: &str| {
        let found = pass.run(runtime, problem, &pass.before(), ORDER)?;
        ["dq", "dk", "dv"].into_iter().enumerate().try_for_each(|(i, name)| equal(&format!("{name} {how}"), &found.0[i], &once.0[i]))?;
        equal(&format!("gradients of sinks {how}"), &found.1, &once.1)
    };
    if runtime.kind() == Kind::Cuda {
        return (0..20).try_for_each(|run| again(runtime, &format!("in run {run}")));
    }
    [1, 5].into_iter().try_for_each(|multiprocessors| {
        let options = EmulatedOptions { multiprocessors, seed: Some(multiprocessors.into()), ..EmulatedOptions::default() };
        again(&text(Runtime::emulated_with(options))?, &format!("on {multiprocessors} multiprocessors"))
    })
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
    choose(AttentionConfig { head_size: 192, value_size: Some(128), ..good }, &["panels4", "padded to 256", "for head sizes above 128"])?;
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
