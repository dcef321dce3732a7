//! Oxtile's operations on candle's tensors, on the CPU by the emulator; with the feature `cuda` and a GPU on both.

mod arguments;
mod attention;
mod packed;
mod quantize;
mod training;

#[path = "../../examples/attention_block.rs"]
#[allow(dead_code, reason = "its main program is not run here")]
mod attention_block;

use candle_core::{Device, Result, Tensor};

/// Where the tests run: on the CPU, and on a GPU if the feature asks for it.
fn devices() -> Result<Vec<Device>> {
    let mut devices = vec![Device::Cpu];
    if cfg!(feature = "cuda") {
        devices.push(Device::new_cuda(0)?);
    }
    Ok(devices)
}

/// The largest difference, as a part of the largest magnitude that is expected; NaN where any number is, which no bound lets pass. Candle's own maximum skips it.
fn error(found: &Tensor, expected: &Tensor) -> Result<f32> {
    assert_eq!(found.dims(), expected.dims());
    let [found, expected] = [found, expected].map(|tensor| tensor.to_dtype(candle_core::DType::F32)?.flatten_all()?.to_vec1::<f32>());
    let (found, expected) = (found?, expected?);
    let differences = found.iter().zip(&expected).map(|(found, expected)| found - expected);
    Ok(largest(differences) / largest(expected.iter().copied()))
}

/// The largest magnitude; NaN where any is.
fn largest(numbers: impl Iterator<Item = f32>) -> f32 {
    numbers.fold(0.0, |largest: f32, x| if largest.is_nan() || x.is_nan() { f32::NAN } else { largest.max(x.abs()) })
}

/// What the other tests hold results against refuses NaN, wherever it is.
#[test]
fn nan_is_no_small_error() -> Result<()> {
    let expected = Tensor::new(&[1.0_f32, -2.0, 0.5], &Device::Cpu)?;
    assert_eq!(error(&Tensor::new(&[1.0_f32, -1.0, 0.5], &Device::Cpu)?, &expected)?, 0.5);
    for at in 0..3 {
        let mut found = [1.0_f32, -2.0, 0.5];
        found[at] = f32::NAN;
        assert!(error(&Tensor::new(&found, &Device::Cpu)?, &expected)?.is_nan(), "{at}");
        assert!(error(&expected, &Tensor::new(&found, &Device::Cpu)?)?.is_nan(), "{at}");
    }
    Ok(())
}
