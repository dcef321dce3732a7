//! The result and the gradients of attention against candle's own operations in F32.

use candle_core::{DType, Device, Result, Tensor, Var};
use oxtile_candle::{AttentionOptions, Mask, Order, Window, attention};

use crate::attention_block::{numbers, own_attention, visible};
use crate::{devices, error};

/// What is compared.
struct Case {
    /// Batches, queries, keys, heads, key heads, size, value size.
    sizes: [usize; 7],
    dtype: DType,
    options: AttentionOptions,
}

/// The largest error of results and gradients in the type, as a part of the largest of them: some roundings of it.
pub fn bound(dtype: DType) -> f32 {
    match dtype {
        DType::BF16 => 4.0 / 256.0,
        DType::F16 => 4.0 / 2048.0,
        other => panic!("{other:?}"),
    }
}

/// Leaves of the type, and leaves of the same values in F32.
pub fn leaves(shapes: [&[usize]; 3], dtype: DType, device: &Device) -> Result<([Var; 3], [Var; 3])> {
    let mut both = (Vec::new(), Vec::new());
    for (seed, shape) in shapes.into_iter().enumerate() {
        let rounded = numbers(seed as u64 + 1, shape, 1.5, device)?.to_dtype(dtype)?;
        both.0.push(Var::from_tensor(&rounded)?);
        both.1.push(Var::from_tensor(&rounded.to_dtype(DType::F32)?)?);
    }
    Ok((both.0.try_into().unwrap(), both.1.try_into().unwrap()))
}

/// Compares results, and gradients of a weighted sum of the results.
pub fn compare(ours: (&Tensor, &[Var; 3]), own: (&Tensor, &[Var; 3]), dtype: DType, what: &str) -> Result<()> {
    let (out, expected) = (ours.0, own.0);
    let weights = numbers(9, out.dims(), 1.0, out.device())?.to_dtype(dtype)?;
    let gradients = (out * &weights)?.sum_all()?.backward()?;
    let of_own = (expected * weights.to_dtype(DType::F32)?)?.sum_all()?.backward()?;
    let mut pairs = vec![("out", out, expected)];
    for (i, name) in ["dq", "dk", "dv"].into_iter().enumerate() {
        pairs.push((name, gradients.get(&ours.1[i]).unwrap(), of_own.get(&own.1[i]).unwrap()));
    }
    for (name, found, expected) in pairs {
        assert_eq!(found.dtype(), dtype);
        let error = error(found, expected)?;
        assert!(error < bound(dtype), "{what}: {name} is off by {error} of the largest");
    }
    Ok(())
}

fn check(case: &Case) -> Result<()> {
    let Case { sizes: [batches, queries, keys, heads, key_heads, size, value_size], dtype, options } = *case;
    for device in devices()? {
        let shapes: [&[usize]; 3] =
            [&[batches, queries, heads, size], &[batches, keys, key_heads, size], &[batches, keys, key_heads, value_size]];
        let (ours, own) = leaves(shapes, dtype, &device)?;
        let out = attention(&ours[0], &ours[1], &ours[2], &options)?;
        let diagonal = keys as i64 - queries as i64;
        let sees = visible(queries, keys, &device, |i, j| {
            let far = j - (i + diagonal);
            (options.mask == Mask::Full || far <= 0)
                && options.window.left.is_none_or(|left| -far <= left as i64)
                && options.window.right.is_none_or(|right| far <= right as i64)
        })?;
        let expected = own_attention(&own[0], &own[1], &own[2], &sees)?;
        compare((&out, &ours), (&expected, &own), dtype, &format!("{:?} {dtype:?} {options:?}", case.sizes))?;
    }
    Ok(())
}

fn options(mask: Mask, window: [Option<u64>; 2]) -> AttentionOptions {
    let [left, right] = window;
    AttentionOptions { mask, window: Window { left, right }, ..AttentionOptions::default() }
}

#[test]
fn full() -> Result<()> {
    check(&Case { sizes: [2, 70, 50, 2, 2, 64, 64], dtype: DType::BF16, options: options(Mask::Full, [None; 2]) })
}

#[test]
fn causal_of_grouped_heads() -> Result<()> {
    check(&Case { sizes: [1, 70, 90, 4, 2, 128, 128], dtype: DType::F16, options: options(Mask::CausalBottomRight, [None; 2]) })
}

#[test]
fn more_queries_than_keys() -> Result<()> {
    check(&Case { sizes: [1, 90, 60, 2, 1, 64, 64], dtype: DType::BF16, options: options(Mask::CausalBottomRight, [None; 2]) })
}

#[test]
fn windows() -> Result<()> {
    check(&Case { sizes: [2, 60, 80, 2, 1, 64, 64], dtype: DType::BF16, options: options(Mask::CausalBottomRight, [Some(20), None]) })?;
    check(&Case { sizes: [1, 80, 80, 2, 2, 64, 64], dtype: DType::F16, options: options(Mask::Full, [Some(7), Some(13)]) })
}

#[test]
fn uncommon_sizes() -> Result<()> {
    check(&Case { sizes: [1, 40, 40, 2, 1, 96, 96], dtype: DType::F16, options: options(Mask::CausalBottomRight, [None; 2]) })?;
    check(&Case { sizes: [1, 40, 40, 1, 1, 192, 128], dtype: DType::BF16, options: options(Mask::Full, [None; 2]) })
}

#[test]
fn a_deterministic_order_gives_the_same_bits() -> Result<()> {
    for device in devices()? {
        let ([q, k, v], _) = leaves([&[1, 70, 2, 64]; 3], DType::BF16, &device)?;
        let options = AttentionOptions { order: Order::Deterministic, ..AttentionOptions::default() };
        let bits = || {
            let gradients = attention(&q, &k, &v, &options)?.sqr()?.sum_all()?.backward()?;
            let of = |leaf: &Var| gradients.get(leaf).unwrap().flatten_all()?.to_vec1::<half::bf16>();
            Ok::<_, candle_core::Error>([of(&q)?, of(&k)?, of(&v)?])
        };
        assert_eq!(bits()?, bits()?);
    }
    Ok(())
}

#[test]
fn one_tensor_may_be_all_three() -> Result<()> {
    for device in devices()? {
        let x = Var::from_tensor(&numbers(1, &[1, 50, 2, 64], 1.0, &device)?.to_dtype(DType::BF16)?)?;
        let own = Var::from_tensor(&x.to_dtype(DType::F32)?)?;
        let gradients = attention(&x, &x, &x, &AttentionOptions::default())?.sum_all()?.backward()?;
        let expected = own_attention(&own, &own, &own, &visible(50, 50, &device, |_, _| true)?)?.sum_all()?.backward()?;
        let error = error(gradients.get(&x).unwrap(), expected.get(&own).unwrap())?;
        // Sums of three gradients, each rounded.
        assert!(error < 3.0 * bound(DType::BF16), "{error}");
    }
    Ok(())
}

#[test]
fn a_part_of_a_tensor_is_taken_where_it_lies() -> Result<()> {
    for device in devices()? {
        let all = numbers(1, &[3, 40, 2, 64], 1.0, &device)?.to_dtype(DType::F16)?;
        let (part, copy) = (all.narrow(0, 1, 1)?, all.narrow(0, 1, 1)?.copy()?);
        let [part, copy] = [part, copy].map(|x| attention(&x, &x, &x, &AttentionOptions::default())?.flatten_all()?.to_vec1::<half::f16>());
        assert_eq!(part?, copy?);
    }
    Ok(())
}

#[test]
fn a_scale_of_ones_own() -> Result<()> {
    for device in devices()? {
        let ([q, k, v], _) = leaves([&[1, 40, 2, 64]; 3], DType::F16, &device)?;
        let scaled = attention(&q, &k, &v, &AttentionOptions { scale: Some(0.25), ..AttentionOptions::default() })?;
        // Twice the usual factor, 1/8.
        let doubled = attention(&(q.as_tensor() * 2.0)?, &k, &v, &AttentionOptions::default())?;
        assert!(error(&scaled, &doubled.to_dtype(DType::F32)?)? < 1e-3);
        assert!(error(&scaled, &attention(&q, &k, &v, &AttentionOptions::default())?)? > 0.05);
    }
    Ok(())
}

#[test]
fn tensors_without_rows() -> Result<()> {
    for device in devices()? {
        let empty = Tensor::zeros((2, 0, 2, 64), DType::BF16, &device)?;
        let some = numbers(1, &[2, 8, 2, 64], 1.0, &device)?.to_dtype(DType::BF16)?;
        assert_eq!(attention(&empty, &some, &some, &AttentionOptions::default())?.dims(), [2, 0, 2, 64]);
        let out = attention(&some, &empty, &empty, &AttentionOptions::default())?;
        assert_eq!(out.to_dtype(DType::F32)?.abs()?.sum_all()?.to_scalar::<f32>()?, 0.0);
    }
    Ok(())
}

/// NaN in a query reaches the result and the gradient of that row alone, in place of numbers that look right.
#[test]
fn nan_in_a_query_stays_in_its_row() -> Result<()> {
    const ROW: usize = 33;
    for device in devices()? {
        let ([q, k, v], _) = leaves([&[1, 70, 2, 64]; 3], DType::BF16, &device)?;
        let sees = visible(70, 1, &device, |i, _| i != ROW as i64)?.reshape((1, 70, 1, 1))?.broadcast_as((1, 70, 2, 64))?;
        let nan = Tensor::full(f32::NAN, (1, 70, 2, 64), &device)?.to_dtype(DType::BF16)?;
        let hurt = Var::from_tensor(&sees.to_dtype(DType::U8)?.where_cond(&q, &nan)?)?;
        let pass = |q: &Var| {
            let out = attention(q, &k, &v, &AttentionOptions::default())?;
            let gradients = out.sum_all()?.backward()?;
            Ok::<_, candle_core::Error>([out, gradients.get(q).unwrap().clone()])
        };
        let (whole, hurt) = (pass(&q)?, pass(&hurt)?);
        for (i, name) in ["out", "dq"].into_iter().enumerate() {
            let [whole, hurt] = [&whole[i], &hurt[i]].map(|x| x.to_dtype(DType::F32)?.reshape((70, 128))?.to_vec2::<f32>());
            for (row, (whole, hurt)) in whole?.iter().zip(&hurt?).enumerate() {
                match row == ROW {
                    true => assert!(hurt.iter().all(|x| x.is_nan()), "{name}: {hurt:?}"),
                    false => assert_eq!(whole, hurt, "{name}: row {row}"),
                }
            }
        }
    }
    Ok(())
}
