//! What is refused, and in which words.

use candle_core::{DType, Device, Result, Tensor};
use oxtile_candle::{AttentionOptions, Direction, Quantization, attention, attention_packed, quantize};

fn tensor(shape: &[usize], dtype: DType) -> Tensor {
    Tensor::zeros(shape, dtype, &Device::Cpu).unwrap()
}

/// Fails unless the result is an error that has all of the words.
fn refused<T>(result: Result<T>, words: &[&str]) {
    let text = result.err().expect("it should be refused").to_string();
    assert!(words.iter().all(|word| text.contains(word)), "{text}: {words:?}");
}

#[test]
fn types_and_shapes_of_attention() {
    let options = AttentionOptions::default();
    let good = tensor(&[1, 8, 2, 64], DType::BF16);
    let call = |q: &Tensor, k: &Tensor, v: &Tensor| attention(q, k, v, &options);
    let single = tensor(&[1, 8, 2, 64], DType::F32);
    refused(call(&single, &single, &single), &["q is F32: attention takes BF16, F16"]);
    refused(call(&good, &tensor(&[1, 8, 2, 64], DType::F16), &good), &["k is F16, q is BF16: convert one"]);
    refused(call(&good, &good, &good.transpose(1, 2).unwrap()), &["v is not contiguous", "contiguous()"]);
    refused(call(&good, &tensor(&[1, 8, 2, 32], DType::BF16), &good), &["k has shape [1, 8, 2, 32], not [1, 8, 2, 64]"]);
    refused(call(&good, &good, &tensor(&[1, 9, 2, 64], DType::BF16)), &["v has shape [1, 9, 2, 64]"]);
    refused(call(&tensor(&[8, 2, 64], DType::BF16), &good, &good), &["q has shape [8, 2, 64]", "attention_packed"]);
}

#[test]
fn the_librarys_own_words() {
    let uneven = tensor(&[1, 8, 2, 20], DType::BF16);
    refused(attention(&uneven, &uneven, &uneven, &AttentionOptions::default()), &["head_size is 20: a multiple of 8 up to 256"]);
    let (q, k) = (tensor(&[1, 8, 3, 64], DType::F16), tensor(&[1, 8, 2, 64], DType::F16));
    refused(attention(&q, &k, &k, &AttentionOptions::default()), &["key_heads is 2: a divisor of heads, which is 3"]);
    refused(attention(&k, &k, &k, &AttentionOptions { scale: Some(-1.0), ..AttentionOptions::default() }), &["scale is -1: from 1e-20"]);
}

#[test]
fn ends_of_sequences() {
    let options = AttentionOptions::default();
    let x = tensor(&[8, 2, 64], DType::BF16);
    let ends = Tensor::new(&[0_u32, 8], &Device::Cpu).unwrap();
    let call = |queries: &Tensor, keys: &Tensor| attention_packed(&x, &x, &x, [queries, keys], &options);
    assert!(call(&ends, &ends).is_ok());
    refused(call(&ends.to_dtype(DType::I64).unwrap(), &ends), &["the ends of queries is I64", "U32"]);
    refused(call(&ends, &tensor(&[3], DType::U32)), &["the ends of keys has shape [3], not [2]"]);
    refused(call(&tensor(&[], DType::U32), &ends), &["the ends of queries have shape [], not [sequences + 1]"]);
    let dense = tensor(&[1, 8, 2, 64], DType::BF16);
    refused(attention_packed(&dense, &x, &x, [&ends, &ends], &options), &["q has shape [1, 8, 2, 64]", "go to attention"]);
}

#[test]
fn second_derivatives_are_none() -> Result<()> {
    let x = candle_core::Var::from_tensor(&tensor(&[1, 8, 2, 64], DType::BF16))?;
    let gradients = attention(&x, &x, &x, &AttentionOptions::default())?.sum_all()?.backward()?;
    assert!(gradients.get(&x).unwrap().sum_all()?.backward()?.get(&x).is_none());
    Ok(())
}

#[test]
fn matrices() -> Result<()> {
    let call = |x: &Tensor| quantize(x, Quantization::Nvfp4, Direction::Rows);
    refused(call(&tensor(&[16, 32], DType::F64)), &["the matrix is F64: quantization takes BF16, F16, F32"]);
    refused(call(&tensor(&[16], DType::F32)), &["the matrix has shape [16], not [rows, columns]"]);
    refused(call(&tensor(&[16, 20], DType::F32)), &["NVFP4"]);
    refused(call(&tensor(&[16, 32], DType::F32).t()?), &["the matrix is not contiguous"]);
    let good = call(&tensor(&[16, 32], DType::F32))?;
    refused(good.dequantize(DType::U8), &["not as U8"]);
    let mut wrong = good.clone();
    wrong.amax = None;
    refused(wrong.dequantize(DType::F32), &["Nvfp4 needs an amax"]);
    let mut wrong = good.clone();
    wrong.shape = (16, 64);
    refused(wrong.dequantize(DType::F32), &["codes has shape [16, 16], not [16, 32]", "a matrix [16, 64] in Nvfp4 by Rows"]);
    let mut wrong = good.clone();
    wrong.scales = wrong.scales.to_dtype(DType::F32)?;
    refused(wrong.dequantize(DType::F32), &["scales is F32: scales are U8"]);
    Ok(())
}
