//! A backward pass against f64, of any kernel, layout, window, sink, cap and output. Rows that belong to no sequence hold NaN, so that none of
//! them is used; what the kernels do not write is seen.

use oxtile::attention::{
    AttentionBackward, AttentionConfig, BackwardElement, BackwardInputs, GradientOutput, Gradients, Inputs, Layout, Order, Padding,
    Sequences, Sink, Window,
};
use oxtile::runtime::Mode;
use oxtile::{Buffer, EmulatedOptions, HostElement, Kind, Runtime};
use oxtile_tests::inputs::Random;
use oxtile_tile::num::{Element, bf16};

use super::attention::Operand;
use super::attention_problem::{Place, Problem, Row, each};
use crate::case::{Outcome, agrees, equal, stream, text};

pub(super) trait Differentiable: Operand + BackwardElement + Element + HostElement<Device = Self> {}

impl<T: Operand + BackwardElement + Element> Differentiable for T {}

/// What gradients hold before, in 16 bits; sums hold [`BEFORE`].
const UNTOUCHED: u16 = 0x7bff;
const BEFORE: f32 = 0.5;

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
                    && [Some(Row::Query(row)), Some(Row::Key(row)), Some(Row::Value(row)), None][tensor]
                        .is_some_and(|row| pass.problem.nan == Some(row))
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

    /// The head of a tensor that goes with a query head.
    fn head_in(&self, tensor: usize, head: usize) -> usize {
        let AttentionConfig { heads, key_heads, .. } = self.problem.config;
        if SIDES[tensor] == 0 { head } else { head * key_heads as usize / heads as usize }
    }

    /// Elements of a tensor's rows that go with a query head.
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

    /// Gradients that are never written.
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
        let diagonals = text(Buffer::from_slice(&stream, &problem.diagonals))?;
        let sequences = (config.layout == Layout::Packed).then(|| Sequences {
            cu_seqlens_q_padded: Some(arrays[2].view()),
            cu_seqlens_kv_padded: Some(arrays[3].view()),
            diagonals: config.diagonals.then(|| diagonals.view()),
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

/// Steps of a ring: with the log-sum-exp and the result of all keys, the gradients of two parts add up to those of all. A window counts from the
/// diagonal of all keys, which each part is given.
pub(super) fn ring(runtime: &Runtime, config: AttentionConfig, order: Order) -> Outcome {
    let config = AttentionConfig { layout: Layout::Packed, gradients: GradientOutput::Added, ..config };
    let (queries, keys) = (30, 90);
    let whole = Problem { padding: Padding::Kept, ..Problem::packed(config, vec![[[0, queries], [0, keys]]]) };
    let pass = Pass::<bf16>::new(whole.clone());
    let mut sums = pass.before();
    for part in [[0, 50], [50, 40]] {
        let (config, diagonal) = (
            AttentionConfig { diagonals: config.window != Window::default(), ..whole.config },
            keys as i32 - queries as i32 - part[0] as i32,
        );
        let part = Problem { config, sequences: vec![[[0, queries], part]], diagonals: vec![diagonal], ..whole.clone() };
        let (found, _) = pass.run(runtime, &part, &sums, order)?;
        sums = found.map(|values| values.into_iter().map(|x| x as f32).collect());
    }
    pass.compare(&(sums.map(|values| values.into_iter().map(f64::from).collect()), Vec::new()))
}

/// The bits are the same in every run and under every grid.
pub(super) fn same_bits(runtime: &Runtime, problem: &Problem) -> Outcome {
    let pass = Pass::<bf16>::new(problem.clone());
    let once = pass.run(runtime, problem, &pass.before(), Order::Deterministic)?;
    let again = |runtime: &Runtime, how: &str| {
        let found = pass.run(runtime, problem, &pass.before(), Order::Deterministic)?;
        ["dq", "dk", "dv"].into_iter().enumerate().try_for_each(|(i, name)| equal(&format!("{name} {how}"), &found.0[i], &once.0[i]))?;
        equal(&format!("gradients of sinks {how}"), &found.1, &once.1)
    };
    if runtime.kind() == Kind::Cuda {
        return (0..20).try_for_each(|run| again(runtime, &format!("in run {run}")));
    }
    [1, 5].into_iter().try_for_each(|multiprocessors| {
        let options =
            EmulatedOptions { mode: Mode::Fast, multiprocessors, seed: Some(multiprocessors.into()), ..EmulatedOptions::default() };
        again(&text(Runtime::emulated_with(options))?, &format!("on {multiprocessors} multiprocessors"))
    })
}
