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

/// The largest difference, as a part of the largest magnitude that is expected.
fn error(found: &Tensor, expected: &Tensor) -> Result<f32> {
    assert_eq!(found.dims(), expected.dims());
    let [found, expected] = [found, expected].map(|tensor| tensor.to_dtype(candle_core::DType::F32)?.flatten_all());
    let (found, expected) = (found?, expected?);
    let largest = |x: Tensor| x.abs()?.max_all()?.to_scalar::<f32>();
    Ok(largest((found - &expected)?)? / largest(expected)?)
}
