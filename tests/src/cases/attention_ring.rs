//! Steps of a ring: keys that come in parts, merged in place, are as keys at once, of which a row may be no number.

use oxtile::attention::{Attention, AttentionConfig, Inputs, Kernels, Layout, Output, Outputs, Sequences, Sink};
use oxtile::{Buffer, Runtime};
use oxtile_tests::inputs::Random;
use oxtile_tests::oracle::attention_head::Head;
use oxtile_tests::oracle::formats::BF16;
use oxtile_tile::num::bf16;

use super::attention::Operand;
use super::attention_general::encode;
use super::attention_problem::Row;
use crate::case::{Case, Outcome, Size, agrees, equal, stream, text};

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for kernels in [Kernels::Fastest, Kernels::Portable] {
        // A query, and a key of the second part.
        for (name, nan) in [("numbers", None), ("nan query", Some(Row::Query(5))), ("nan key", Some(Row::Key(60)))] {
            let size = if kernels == Kernels::Fastest && nan.is_none() { Size::Small } else { Size::Large };
            cases.push(Case::new(format!("attention_ring::{kernels:?}::{name}"), size, move |runtime| ring(runtime, kernels, nan, None)));
        }
        let name = format!("attention_ring::{kernels:?}::memory that is not zeroed");
        cases.push(Case::new(name, Size::Small, move |runtime| merge_into_nan(runtime, kernels)));
        for step in [0, 2] {
            let name = format!("attention_ring::{kernels:?}::sink of step {step}");
            cases.push(Case::new(name, Size::Large, move |runtime| ring(runtime, kernels, None, Some(step))));
        }
    }
    cases
}

/// What the memory holds counts for nothing where its log-sum-exp is -inf, and stays NaN where that is a number, or NaN.
fn merge_into_nan(runtime: &Runtime, kernels: Kernels) -> Outcome {
    let stream = stream(runtime)?;
    let (rows, keys, size) = (3_usize, 9_usize, 72_usize);
    let config = AttentionConfig {
        queries: rows as u64,
        keys: keys as u64,
        head_size: size as u64,
        output: Output::Merged,
        kernels,
        ..AttentionConfig::default()
    };
    let mut random = Random::new(5);
    let mut tensor = |count: usize| {
        let values = (0..count).map(|_| bf16::from_bits(encode(&BF16, random.normal() as f32))).collect::<Vec<_>>();
        text(Buffer::from_slice(&stream, &values))
    };
    let (q, k, v) = (tensor(rows * size)?, tensor(keys * size)?, tensor(keys * size)?);
    let attend = |before: f32, sums: [f32; 3]| {
        let mut out = text(Buffer::from_slice(&stream, &vec![before; rows * size]))?;
        let mut log_sum_exp = text(Buffer::from_slice(&stream, &sums))?;
        let attention = text(Attention::<bf16>::new(runtime, config))?;
        let inputs = Inputs::new(q.view(), k.view(), v.view());
        text(attention.forward(&stream, inputs, Outputs::merged(out.view_mut(), log_sum_exp.view_mut())))?;
        Ok::<_, String>((text(out.to_vec(&stream))?, text(log_sum_exp.to_vec(&stream))?))
    };
    let (zeroed, sums) = attend(0.0, [f32::NEG_INFINITY; 3])?;
    let (found, found_sums) = attend(f32::NAN, [f32::NEG_INFINITY, 0.5, f32::NAN])?;
    let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    equal("the row of which nothing was seen", &bits(&found[..size]), &bits(&zeroed[..size]))?;
    equal("its log-sum-exp", &bits(&found_sums[..1]), &bits(&sums[..1]))?;
    match found[size..].iter().position(|x| !x.is_nan()) {
        Some(at) => Err(format!("element {at} of the rows that were NaN is {}", found[size + at])),
        None if found_sums[1].is_finite() && found_sums[2].is_nan() => Ok(()),
        None => Err(format!("their log-sum-exp is {:?}", &found_sums[1..])),
    }
}

/// One step has the sink, if any.
fn ring(runtime: &Runtime, kernels: Kernels, nan: Option<Row>, sink: Option<usize>) -> Outcome {
    let stream = stream(runtime)?;
    let (rows, size, parts) = (70_usize, 64_usize, [[0_u32, 50], [50, 150], [200, 9]]);
    let mut random = Random::new(9);
    let mut values = |count: usize| (0..count).map(|_| BF16.round(f64::from(random.normal())) as f32).collect::<Vec<_>>();
    let (mut q, mut k, v) = (values(rows * size), values(209 * size), values(209 * size));
    match nan {
        Some(Row::Query(row)) => q[row * size] = f32::NAN,
        Some(Row::Key(row)) => k[row * size] = f32::NAN,
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
    let mut out = text(Buffer::<f32>::zeros(&stream, (rows * size) as u64))?;
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
