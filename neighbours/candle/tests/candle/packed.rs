//! Packed sequences against each sequence by itself.

use candle_core::{DType, Result, Tensor};
use oxtile_candle::{AttentionOptions, Mask, Window, attention_packed};

use crate::attention::{compare, leaves};
use crate::attention_block::{own_attention, visible};
use crate::devices;

fn check(ends: [&[u32]; 2], heads: [usize; 2], dtype: DType, window: Window) -> Result<()> {
    let [queries, keys] = ends.map(|ends| *ends.last().unwrap() as usize);
    let options = AttentionOptions { mask: Mask::CausalBottomRight, window, ..AttentionOptions::default() };
    for device in devices()? {
        let shapes: [&[usize]; 3] = [&[queries, heads[0], 64], &[keys, heads[1], 64], &[keys, heads[1], 64]];
        let (ours, own) = leaves(shapes, dtype, &device)?;
        let [of_queries, of_keys] = ends.map(|ends| Tensor::new(ends, &device));
        let out = attention_packed(&ours[0], &ours[1], &ours[2], [&of_queries?, &of_keys?], &options)?;
        let mut results = Vec::new();
        for (q, k) in ends[0].windows(2).zip(ends[1].windows(2)) {
            let [rows, columns] = [q, k].map(|pair| (pair[1] - pair[0]) as usize);
            if rows == 0 {
                continue;
            }
            let part = |tensor: &Tensor, start: u32, len| tensor.narrow(0, start as usize, len)?.unsqueeze(0);
            let sees = visible(rows, columns, &device, |i, j| {
                let far = j - (i + columns as i64 - rows as i64);
                far <= 0 && window.left.is_none_or(|left| -far <= left as i64)
            })?;
            let (q, k, v) = (part(&own[0], q[0], rows)?, part(&own[1], k[0], columns)?, part(&own[2], k[0], columns)?);
            results.push(own_attention(&q, &k, &v, &sees)?.squeeze(0)?);
        }
        let expected = Tensor::cat(&results, 0)?;
        compare((&out, &ours), (&expected, &own), dtype, &format!("packed {ends:?} {dtype:?} {window:?}"))?;
    }
    Ok(())
}

#[test]
fn sequences_see_themselves_alone() -> Result<()> {
    check([&[0, 30, 30, 100]; 2], [4, 2], DType::BF16, Window::default())
}

#[test]
fn queries_and_keys_end_in_different_places() -> Result<()> {
    check([&[0, 20, 60], &[0, 40, 90]], [2, 2], DType::F16, Window::default())
}

#[test]
fn windows() -> Result<()> {
    check([&[0, 50, 90]; 2], [2, 1], DType::BF16, Window { left: Some(9), right: None })
}

#[test]
fn rows_of_no_sequence_are_zeros() -> Result<()> {
    for device in devices()? {
        let (ours, _) = leaves([&[10, 2, 64]; 3], DType::BF16, &device)?;
        let ends = Tensor::new(&[0_u32, 5], &device)?;
        let out = attention_packed(&ours[0], &ours[1], &ours[2], [&ends, &ends], &AttentionOptions::default())?;
        let gradients = out.sum_all()?.backward()?;
        let of_inputs = ours.iter().map(|leaf| gradients.get(leaf).expect("a gradient").clone());
        for tensor in std::iter::once(out.clone()).chain(of_inputs) {
            let rest = tensor.narrow(0, 5, 5)?.to_dtype(DType::F32)?.abs()?.sum_all()?.to_scalar::<f32>()?;
            assert_eq!(rest, 0.0);
        }
        let own = out.narrow(0, 0, 5)?.to_dtype(DType::F32)?.abs()?.sum_all()?.to_scalar::<f32>()?;
        assert!(own > 0.0);
    }
    Ok(())
}
