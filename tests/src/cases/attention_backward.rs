//! The backward pass of attention against f64, and its promises: the same bits every time, steps of a ring that add up.

use oxtile::attention::{
    AttentionBackward, AttentionConfig, BackwardElement, BackwardInputs, Gradients, Inputs, Kernels, Layout, Mask, Order, Sink, Window,
};
use oxtile::runtime::Mode;
use oxtile::{Buffer, EmulatedOptions, Error, HostElement, Kind, Runtime};
use oxtile_tests::inputs::Random;
use oxtile_tests::oracle::attention::{Problem, attention};
use oxtile_tests::oracle::attention_backward::{self as oracle, Forward, attention_backward};
use oxtile_tile::num::{Element, bf16, f16};

use super::attention::{Operand, checked, problem};
use super::attention_backward_pass::check;
use super::attention_problem;
use crate::case::{Case, Outcome, Size, equal, stream, text};

trait Differentiable: Operand + BackwardElement + Element + HostElement<Device = Self> {}

impl<T: Operand + BackwardElement + Element> Differentiable for T {}

/// Queries and keys: none, parts of a block, edges on either side, several blocks of both.
const LENGTHS: [[u64; 2]; 6] = [[1, 1], [3, 0], [0, 5], [65, 130], [130, 65], [170, 257]];

const MASKS: [(&str, Mask); 3] = [("full", Mask::Full), ("top_left", Mask::CausalTopLeft), ("bottom_right", Mask::CausalBottomRight)];

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for head_size in [64, 128] {
        for (mask_name, mask) in MASKS {
            let one = AttentionConfig { head_size, mask, ..AttentionConfig::default() };
            for [queries, keys] in if mask == Mask::Full { &LENGTHS[..] } else { &LENGTHS[LENGTHS.len() - 3..] }.iter().copied() {
                // The race detector looks at each kernel, on several blocks of queries and of keys.
                let size = if [queries, keys] == [170, 257] { checked(mask) } else { Size::Large };
                random::<bf16>(&mut cases, mask_name, AttentionConfig { queries, keys, ..one }, Order::Deterministic, size);
            }
            random::<f16>(&mut cases, mask_name, AttentionConfig { queries: 100, keys: 140, ..one }, Order::Fast, checked(mask));
            let grouped = AttentionConfig { batches: 2, heads: 4, key_heads: 2, queries: 70, keys: 140, ..one };
            let size = if head_size == 64 { checked(mask) } else { Size::Large };
            random::<bf16>(&mut cases, mask_name, grouped, Order::Deterministic, size);
            // More tiles than a GPU has multiprocessors.
            let waves = AttentionConfig { batches: 2, heads: 12, key_heads: 6, queries: 300, keys: 1500, ..one };
            random::<bf16>(&mut cases, mask_name, waves, Order::Fast, Size::Waves);
            random::<bf16>(&mut cases, mask_name, waves, Order::Deterministic, Size::Waves);
        }
        let ring = AttentionConfig { head_size, queries: 70, keys: 200, ..AttentionConfig::default() };
        cases.push(Case::new(format!("attention_backward::d{head_size}::ring"), Size::Large, move |r| a_part_of_the_keys(r, &ring)));
        // More tiles than a GPU has multiprocessors.
        let same = AttentionConfig { batches: 16, heads: 4, key_heads: 2, queries: 130, keys: 600, ..ring };
        cases.push(Case::new(format!("attention_backward::d{head_size}::same_bits"), Size::Large, move |r| same_bits(r, &same)));
    }
    // Keys after the last query: a whole block of them, and a part of another.
    for kernels in [Kernels::Fastest, Kernels::Portable] {
        let (mask, head_size) = (Mask::CausalTopLeft, 128);
        let config = AttentionConfig { queries: 100, keys: 300, heads: 2, head_size, mask, kernels, ..AttentionConfig::default() };
        cases.push(Case::new(format!("attention_backward::unseen::{kernels:?}"), Size::Large, move |r| unseen(r, &config)));
    }
    // What a bound before the diagonal takes, and an option that is in the log-sum-exp already.
    for (head_size, queries) in [(64, 150), (128, 70)] {
        let window = Window { left: Some(40), right: Some(9) };
        let config = AttentionConfig { head_size, queries, keys: 200, window, sink: Sink::OffByOne, ..AttentionConfig::default() };
        let problem = attention_problem::Problem::dense(config);
        let name = format!("attention_backward::window::d{head_size}");
        cases.push(Case::new(name, Size::Small, move |r| check::<bf16>(r, &problem, Order::Deterministic)));
    }
    // Rows of several sequences in turn, each mask's kernels in both orders.
    let narrow = Window { left: Some(40), right: Some(9) };
    for (name, mask, window) in [
        ("full", Mask::Full, Window::default()),
        ("bottom_right", Mask::CausalBottomRight, Window::default()),
        ("window", Mask::Full, narrow),
    ] {
        for head_size in [64, 128] {
            let shape = AttentionConfig { batches: 2, heads: 2, key_heads: 1, queries: 70, keys: 40, ..AttentionConfig::default() };
            let config = AttentionConfig { layout: Layout::Sbhd, head_size, mask, window, ..shape };
            let problem = attention_problem::Problem::dense(config);
            cases.push(Case::new(format!("attention_backward::sbhd::d{head_size}::{name}"), Size::Small, move |r| {
                check::<bf16>(r, &problem, Order::Deterministic)?;
                check::<f16>(r, &problem, Order::Fast)
            }));
        }
    }
    // Few tiles of keys, which are split by query heads.
    for (head_size, mask, order) in [
        (64, Mask::CausalBottomRight, Order::Deterministic),
        (64, Mask::Full, Order::Fast),
        (128, Mask::Full, Order::Deterministic),
        (128, Mask::CausalTopLeft, Order::Fast),
    ] {
        let config = AttentionConfig { heads: 6, key_heads: 1, queries: 100, keys: 140, head_size, mask, ..AttentionConfig::default() };
        let name = format!("attention_backward::split::d{head_size}::{}", if order == Order::Fast { "fast" } else { "ordered" });
        // The race detector looks at one of them.
        let size = if head_size == 64 && order == Order::Deterministic { Size::Small } else { Size::Large };
        cases.push(Case::new(name, size, move |r| match order {
            Order::Deterministic => split::<bf16>(r, &config, order),
            Order::Fast => split::<f16>(r, &config, order),
        }));
    }
    cases.push(Case::new("attention_backward::refused", Size::Small, refused));
    cases
}

fn random<T: Differentiable>(cases: &mut Vec<Case>, mask: &str, config: AttentionConfig, order: Order, size: Size) {
    let AttentionConfig { batches, queries, keys, heads, key_heads, head_size, .. } = config;
    let order_name = if order == Order::Fast { "fast" } else { "ordered" };
    let shape = format!("{batches}x{queries}x{keys}x{heads}x{key_heads}");
    let name = format!("attention_backward::{}::d{head_size}::{mask}::{order_name}::{shape}", T::NAME);
    cases.push(Case::new(name, size, move |r: &Runtime| {
        let pass = Pass::<T>::new(&config, keys);
        compare::<T>(&pass.expected(&config, 0), &pass.run(r, &config, order, 0)?)
    }));
}

/// Tensors, of more keys than take part perhaps, and what the forward pass makes of all of them; exact in `T`.
struct Pass<T> {
    problem: Problem,
    inputs: [Vec<f32>; 4],
    out: Vec<f64>,
    log_sum_exp: Vec<f64>,
    element: std::marker::PhantomData<T>,
}

impl<T: Differentiable> Pass<T> {
    /// Normal inputs, for `all_keys` keys.
    fn new(config: &AttentionConfig, all_keys: u64) -> Self {
        let problem = problem(&AttentionConfig { keys: all_keys, ..*config });
        let mut random = Random::new(config.queries * 1000 + config.keys + config.head_size);
        let mut values = |count: usize| -> Vec<f32> { (0..count).map(|_| T::FORMAT.round(random.normal().into()) as f32).collect() };
        let Problem { batches, queries, keys, heads, key_heads, head_size, .. } = problem;
        let [of_queries, of_keys] = [batches * queries * heads * head_size, batches * keys * key_heads * head_size];
        let inputs = [of_queries, of_keys, of_keys, of_queries].map(&mut values);
        let forward = attention(&problem, &inputs[0], &inputs[1], &inputs[2]);
        let out = forward.out.into_iter().map(|x| T::FORMAT.round(x)).collect();
        let log_sum_exp = forward.log_sum_exp.into_iter().map(|x| f64::from(x as f32)).collect();
        Self { problem, inputs, out, log_sum_exp, element: std::marker::PhantomData }
    }

    /// The same without the batches after the first.
    fn first_batch(&self) -> Self {
        let batches = self.problem.batches;
        Self {
            problem: Problem { batches: 1, ..self.problem },
            inputs: self.inputs.each_ref().map(|values| values[..values.len() / batches].to_vec()),
            out: self.out[..self.out.len() / batches].to_vec(),
            log_sum_exp: self.log_sum_exp[..self.log_sum_exp.len() / batches].to_vec(),
            element: self.element,
        }
    }

    /// The part of one batch's keys from `first` on.
    fn keys(&self, config: &AttentionConfig, first: usize) -> [&[f32]; 2] {
        let row = self.problem.key_heads * self.problem.head_size;
        let part = first * row..(first * row + config.batches as usize * config.keys as usize * row);
        [&self.inputs[1][part.clone()], &self.inputs[2][part]]
    }

    fn expected(&self, config: &AttentionConfig, first: usize) -> oracle::Gradients {
        let [k, v] = self.keys(config, first);
        let forward = Forward { out: &self.out, log_sum_exp: &self.log_sum_exp };
        attention_backward(&problem(config), [&self.inputs[0], k, v, &self.inputs[3]], forward)
    }

    /// What the kernels make of the keys from `first` on.
    fn run(&self, runtime: &Runtime, config: &AttentionConfig, order: Order, first: usize) -> Result<Found, String> {
        let stream = stream(runtime)?;
        let encode = |values: &mut dyn Iterator<Item = f64>| {
            let values: Vec<T> = values.map(|x| T::of(T::FORMAT.encode(x) as u16)).collect();
            text(Buffer::from_slice(&stream, &values))
        };
        let [k, v] = self.keys(config, first);
        let [q, k, v, grad_out] = [&self.inputs[0], k, v, &self.inputs[3]].map(|values| encode(&mut values.iter().map(|&x| f64::from(x))));
        let (q, k, v, grad_out, out) = (q?, k?, v?, grad_out?, encode(&mut self.out.iter().copied())?);
        let log_sum_exp: Vec<f32> = self.log_sum_exp.iter().map(|&x| x as f32).collect();
        let log_sum_exp = text(Buffer::from_slice(&stream, &log_sum_exp))?;
        // What is not written is seen.
        let poison = |length: u64| text(Buffer::from_slice(&stream, &vec![T::of(0x7bff); length as usize]));
        let (mut grad_q, mut grad_k, mut grad_v) = (poison(q.len())?, poison(k.len())?, poison(v.len())?);
        let backward = text(AttentionBackward::<T>::new(runtime, *config, order))?;
        let inputs = BackwardInputs {
            forward: Inputs::new(q.view(), k.view(), v.view()),
            out: out.view().into(),
            log_sum_exp: log_sum_exp.view(),
            grad_out: grad_out.view().into(),
        };
        let gradients = Gradients::new(grad_q.view_mut(), grad_k.view_mut(), grad_v.view_mut());
        let mut bound = text(backward.bind(&stream, inputs, gradients))?;
        text(bound.run(&stream))?;
        if config.heads > 1 {
            // The second run finds counters and sums as the first left them.
            text(bound.run(&stream))?;
        }
        drop(bound);
        let bits =
            |buffer: &Buffer<T>| -> Result<Vec<u16>, String> { Ok(text(buffer.to_vec(&stream))?.into_iter().map(T::bits).collect()) };
        Ok([bits(&grad_q)?, bits(&grad_k)?, bits(&grad_v)?])
    }
}

/// The bits of the gradients of queries, keys and values.
type Found = [Vec<u16>; 3];

/// Every element within what rounding allows, and each tensor within less.
fn compare<T: Differentiable>(expected: &oracle::Gradients, found: &Found) -> Outcome {
    for (tensor, name) in ["dq", "dk", "dv"].into_iter().enumerate() {
        let (mut error, mut norm) = (0.0, 0.0);
        let expected = expected.values[tensor].iter().zip(&expected.magnitudes[tensor]);
        for (i, ((&value, &magnitude), &bits)) in expected.zip(&found[tensor]).enumerate() {
            let found = T::FORMAT.decode(bits.into());
            // A weight, and a score's gradient, is off by half a unit of T, and by the approximate exponential of a score that f32 rounds.
            let bound = (T::HALF_UNIT + 2e-4) * magnitude + T::HALF_UNIT * value.abs() + 1e-6;
            let off = (found - value).abs();
            if off.is_nan() || off > bound {
                return Err(format!("{name}[{i}] is {found}, expected {value} within {bound}"));
            }
            error += off * off;
            norm += value * value;
        }
        let relative = if norm == 0.0 { error } else { (error / norm).sqrt() };
        // What torch's kernels reach in bf16 is 0.6 of half a unit.
        if relative > 0.8 * T::HALF_UNIT + 1e-5 {
            return Err(format!("{name}: relative Frobenius error {relative:.2e}"));
        }
    }
    Ok(())
}

/// Tiles that are split, as the choice says; in order, the bits are the same every time.
fn split<T: Differentiable>(runtime: &Runtime, config: &AttentionConfig, order: Order) -> Outcome {
    let choice = text(config.choose_backward::<T>())?;
    if !choice.why.contains("tiles split in 6 by query heads") {
        return Err(format!("{choice:?}"));
    }
    let pass = Pass::<T>::new(config, config.keys);
    let found = pass.run(runtime, config, order, 0)?;
    compare::<T>(&pass.expected(config, 0), &found)?;
    let again = pass.run(runtime, config, order, 0)?;
    // Gradients of queries are added up in any order if it is fast.
    let first = if order == Order::Fast { 1 } else { 0 };
    ["dq", "dk", "dv"].into_iter().enumerate().skip(first).try_for_each(|(i, name)| equal(&format!("{name} again"), &again[i], &found[i]))
}

/// Keys that no query sees have gradients of zero, to the bit.
fn unseen(runtime: &Runtime, config: &AttentionConfig) -> Outcome {
    let pass = Pass::<bf16>::new(config, config.keys);
    let found = pass.run(runtime, config, Order::Deterministic, 0)?;
    compare::<bf16>(&pass.expected(config, 0), &found)?;
    let seen = (config.queries * config.key_heads * config.head_size) as usize;
    [("dk", 1), ("dv", 2)].into_iter().try_for_each(|(name, tensor)| {
        let rest = &found[tensor][seen..];
        equal(&format!("{name} of keys that no query sees"), rest, &vec![0; rest.len()])
    })
}

/// A step of a ring: the log-sum-exp and the result are those of all keys, the gradients those of a part.
fn a_part_of_the_keys(runtime: &Runtime, config: &AttentionConfig) -> Outcome {
    let pass = Pass::<bf16>::new(config, 2 * config.keys);
    for first in [0, config.keys as usize] {
        compare::<bf16>(&pass.expected(config, first), &pass.run(runtime, config, Order::Deterministic, first)?)?;
    }
    Ok(())
}

/// In order, the bits are the same in every run and under every grid.
fn same_bits(runtime: &Runtime, config: &AttentionConfig) -> Outcome {
    let config = match runtime.kind() {
        Kind::Cuda => config,
        // More tiles than multiprocessors, and several that add to each block of queries.
        Kind::Emulated => &AttentionConfig { batches: 2, keys: 300, ..*config },
    };
    let pass = Pass::<bf16>::new(config, config.keys);
    let once = pass.run(runtime, config, Order::Deterministic, 0)?;
    let again = |runtime: &Runtime, how: &str| {
        let found = pass.run(runtime, config, Order::Deterministic, 0)?;
        ["dq", "dk", "dv"].into_iter().enumerate().try_for_each(|(i, name)| equal(&format!("{name} {how}"), &found[i], &once[i]))
    };
    if runtime.kind() == Kind::Cuda {
        (0..20).try_for_each(|run| again(runtime, &format!("in run {run}")))?;
        // Fewer tiles than multiprocessors.
        let alone = pass.first_batch().run(runtime, &AttentionConfig { batches: 1, ..*config }, Order::Deterministic, 0)?;
        return ["dq", "dk", "dv"]
            .into_iter()
            .enumerate()
            .try_for_each(|(i, name)| equal(&format!("{name} of the first batch, alone"), &alone[i], &once[i][..alone[i].len()]));
    }
    [1, 3, 7].into_iter().try_for_each(|multiprocessors| {
        let options =
            EmulatedOptions { mode: Mode::Fast, multiprocessors, seed: Some(multiprocessors.into()), ..EmulatedOptions::default() };
        again(&text(Runtime::emulated_with(options))?, &format!("on {multiprocessors} multiprocessors"))
    })
}

fn refused(runtime: &Runtime) -> Outcome {
    let good = AttentionConfig { queries: 8, keys: 8, head_size: 64, ..AttentionConfig::default() };
    let expect = |config: AttentionConfig, words: &[&str]| match AttentionBackward::<bf16>::new(runtime, config, Order::Fast) {
        Err(error @ Error::Invalid { .. }) if words.iter().all(|word| error.to_string().contains(word)) => Ok(()),
        Err(error) => Err(format!("{error}, where {words:?} are to be named")),
        Ok(_) => Err(format!("{config:?} is not refused")),
    };
    expect(AttentionConfig { head_size: 264, ..good }, &["head_size is 264", "a multiple of 8 up to 256"])?;
    expect(AttentionConfig { heads: 6, key_heads: 4, ..good }, &["key_heads is 4", "divisor of heads", "6"])?;
    let choice = text(AttentionConfig { head_size: 128, ..good }.choose_backward::<f16>())?;
    if choice.kernel != Some("attention_backward__f16__d128__queries80__span80") || !choice.why.contains("128 keys by 80 queries") {
        return Err(format!("{choice:?}"));
    }
    let stream = stream(runtime)?;
    let backward = text(AttentionBackward::<bf16>::new(runtime, good, Order::Fast))?;
    let (q, log_sum_exp) = (text(Buffer::<bf16>::zeros(&stream, 512))?, text(Buffer::<f32>::zeros(&stream, 9))?);
    let [mut dq, mut dk, mut dv] =
        [text(Buffer::<bf16>::zeros(&stream, 512))?, text(Buffer::zeros(&stream, 512))?, text(Buffer::zeros(&stream, 512))?];
    let all = q.view();
    let inputs =
        BackwardInputs { forward: Inputs::new(all, all, all), out: all.into(), log_sum_exp: log_sum_exp.view(), grad_out: all.into() };
    match backward.backward(&stream, inputs, Gradients::new(dq.view_mut(), dk.view_mut(), dv.view_mut())) {
        Err(Error::Length { what: "AttentionBackward, log_sum_exp", expected: 8, found: 9 }) => Ok(()),
        other => Err(format!("{other:?}")),
    }
}
