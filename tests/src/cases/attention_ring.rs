//! Steps of a ring: keys that come in parts, merged in place, are as keys at once, of which a row may be NaN; gradients of parts add up.

use oxtile::attention::{
    Attention, AttentionBackward, AttentionConfig, BackwardStep, GradientOutput, Gradients, Inputs, Kernels, Layout, Mask, Order, Output,
    Outputs, Sequences, Sink,
};
use oxtile::{Buffer, Runtime};
use oxtile_tests::inputs::Random;
use oxtile_tests::oracle::attention_head::Head;
use oxtile_tests::oracle::formats::BF16;
use oxtile_tile::num::bf16;

use super::attention::Operand;
use super::attention_backward_pass::Pass;
use super::attention_general::encode;
use super::attention_problem::{Problem, Row};
use crate::case::{Case, Outcome, Size, agrees, stream, text};

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for kernels in [Kernels::Fastest, Kernels::Portable] {
        // A query, and a key of the second part.
        for (name, nan) in [("numbers", None), ("nan query", Some(Row::Query(5))), ("nan key", Some(Row::Key(60)))] {
            let size = if kernels == Kernels::Fastest && nan.is_none() { Size::Small } else { Size::Large };
            cases.push(Case::new(format!("attention_ring::{kernels:?}::{name}"), size, move |runtime| ring(runtime, kernels, nan, None)));
        }
        for step in [0, 2] {
            let name = format!("attention_ring::{kernels:?}::sink of step {step}");
            cases.push(Case::new(name, Size::Large, move |runtime| ring(runtime, kernels, None, Some(step))));
        }
    }
    // The kernels of each head size, layout and option: a step that sees all of its keys, and one that is causal.
    for (name, config) in [
        ("d64", AttentionConfig { head_size: 64, ..AttentionConfig::default() }),
        ("d128", AttentionConfig { head_size: 128, heads: 4, key_heads: 2, ..AttentionConfig::default() }),
        ("sbhd", AttentionConfig { head_size: 64, layout: Layout::Sbhd, batches: 2, heads: 2, ..AttentionConfig::default() }),
        ("cap", AttentionConfig { head_size: 64, soft_cap: Some(20.0), ..AttentionConfig::default() }),
        ("portable", AttentionConfig { head_size: 64, kernels: Kernels::Portable, ..AttentionConfig::default() }),
    ] {
        let gradients = GradientOutput::Added;
        let whole = AttentionConfig { queries: 70, keys: 120, mask: Mask::CausalBottomRight, gradients, ..config };
        cases.push(Case::new(format!("attention_ring::backward::{name}"), Size::Small, move |runtime| backward(runtime, whole)));
    }
    cases
}

/// What is prepared once serves the steps of both parts of the keys, whose gradients add up to those of all. The last as many keys as there are
/// queries are seen up to the diagonal, those before them by all.
fn backward(runtime: &Runtime, config: AttentionConfig) -> Outcome {
    let (stream, pass) = (stream(runtime)?, Pass::<bf16>::new(Problem::dense(config)));
    let upload = |values: &[f32]| {
        let values: Vec<_> = values.iter().map(|&x| bf16::from_bits(BF16.encode(x.into()) as u16)).collect();
        text(Buffer::from_slice(&stream, &values))
    };
    let [q, k, v, grad_out] = &pass.inputs;
    let (q, k, v, grad_out, out) = (upload(q)?, upload(k)?, upload(v)?, upload(grad_out)?, upload(&pass.out)?);
    let log_sum_exp = text(Buffer::from_slice(&stream, &pass.log_sum_exp))?;
    let [mut grad_q, mut grad_k, mut grad_v] = pass.before().map(|sums| Buffer::from_slice(&stream, &sums));
    let [grad_q, grad_k, grad_v] = [&mut grad_q, &mut grad_k, &mut grad_v].map(|sums| sums.as_mut().expect("memory"));
    let mut deltas = text(Buffer::from_slice(&stream, &vec![f32::NAN; pass.log_sum_exp.len()]))?;
    let row = config.key_heads * config.head_size * if config.layout == Layout::Sbhd { config.batches } else { 1 };
    for (begin, end, mask) in [(0, 50, Mask::Full), (50, 120, Mask::CausalBottomRight)] {
        let backward = AttentionBackward::<bf16>::new(runtime, AttentionConfig { keys: end - begin, mask, ..config }, Order::Deterministic);
        let backward = text(backward)?;
        if begin == 0 {
            let mut prepare = text(backward.prepare(out.view(), grad_out.view(), deltas.view_mut()))?;
            text(prepare.run(&stream))?;
        }
        let inputs = BackwardStep {
            forward: Inputs::new(q.view(), k.view().slice(begin * row, end * row), v.view().slice(begin * row, end * row)),
            deltas: deltas.view(),
            log_sum_exp: log_sum_exp.view(),
            grad_out: grad_out.view().into(),
        };
        let (mut of_k, mut of_v) = (grad_k.view_mut(), grad_v.view_mut());
        let gradients = Gradients::added(grad_q.view_mut(), of_k.slice_mut(begin * row, end * row), of_v.slice_mut(begin * row, end * row));
        text(text(backward.step(&stream, inputs, gradients))?.run(&stream))?;
    }
    let found = [grad_q, grad_k, grad_v].map(|sums| text(sums.to_vec(&stream)));
    let [q, k, v] = found.map(|sums| sums.map(|sums| sums.into_iter().map(f64::from).collect::<Vec<_>>()));
    pass.compare(&([q?, k?, v?], Vec::new()))
}

/// One step has the sink, if any.
fn ring(runtime: &Runtime, kernels: Kernels, nan: Option<Row>, sink: Option<usize>) -> Outcome {
    let stream = stream(runtime)?;
    let (rows, size, parts) = (70_usize, 64_usize, [[0_u32, 50], [50, 150], [200, 9]]);
    let mut random = Random::new(9);
    let mut values = |count: usize| (0..count).map(|_| BF16.round(f64::from(random.normal())) as f32).collect::<Vec<_>>();
    let (mut q, mut k, mut v) = (values(rows * size), values(209 * size), values(209 * size));
    match nan {
        Some(Row::Query(row)) => q[row * size] = f32::NAN,
        Some(Row::Key(row)) => k[row * size] = f32::NAN,
        Some(Row::Value(row)) => v[row * size] = f32::NAN,
        None => {}
    }
    let encode = |&x: &f32| bf16::from_bits(encode(&BF16, x));
    let upload = |values: &[f32]| text(Buffer::from_slice(&stream, &values.iter().map(encode).collect::<Vec<_>>()));
    let tensors = [upload(&q)?, upload(&k)?, upload(&v)?];
    let config = AttentionConfig {
        layout: Layout::Packed,
        queries: rows as u64,
        keys: 209,
        head_size: size as u64,
        output: Output::Merged,
        kernels,
        ..AttentionConfig::default()
    };
    // What is not zero before counts as zeros where the log-sum-exp is -inf.
    let mut out = text(Buffer::from_slice(&stream, &vec![f32::NAN; rows * size]))?;
    let mut log_sum_exp = text(Buffer::from_slice(&stream, &vec![f32::NEG_INFINITY; rows]))?;
    let attention = text(Attention::<bf16>::new(runtime, config))?;
    let with_sink = text(Attention::<bf16>::new(runtime, AttentionConfig { sink: Sink::OffByOne, ..config }))?;
    for (step, [offset, keys]) in parts.into_iter().enumerate() {
        let attention = if sink == Some(step) { &with_sink } else { &attention };
        let array = |values: [u32; 2]| text(Buffer::from_slice(&stream, &values));
        let arrays = [array([0, rows as u32])?, array([0, keys])?, array([offset, offset + keys])?];
        let sequences = Sequences { cu_seqlens_kv_padded: Some(arrays[2].view()), ..Sequences::new(arrays[0].view(), arrays[1].view()) };
        let inputs = Inputs { sequences: Some(sequences), ..Inputs::new(tensors[0].view(), tensors[1].view(), tensors[2].view()) };
        text(attention.forward(&stream, inputs, Outputs::merged(out.view_mut(), log_sum_exp.view_mut())))?;
    }
    let head = Head {
        rows: [rows, 209],
        sizes: [size; 2],
        top_left: false,
        window: [None; 2],
        scale: (size as f64).powf(-0.5),
        cap: None,
        sink: sink.map(|_| 0.0),
    };
    let of = |tensor: &[f32], i: usize, l: usize| f64::from(tensor[i * size + l]);
    let expected = head.attend(|i, l| of(&q, i, l), |i, l| of(&k, i, l), |i, l| of(&v, i, l));
    let found = text(out.to_vec(&stream))?;
    for (i, (&found, &value)) in found.iter().zip(&expected.out).enumerate() {
        if !agrees(f64::from(found), value, (bf16::HALF_UNIT + 2e-4) * expected.magnitudes[i]) {
            return Err(format!("out[{i}] is {found}, expected {value}"));
        }
    }
    for (i, (&found, &value)) in text(log_sum_exp.to_vec(&stream))?.iter().zip(&expected.log_sum_exp).enumerate() {
        if !agrees(f64::from(found), value, 1e-5 * value.abs().max(1.0)) {
            return Err(format!("log_sum_exp[{i}] is {found}, expected {value}"));
        }
    }
    Ok(())
}
