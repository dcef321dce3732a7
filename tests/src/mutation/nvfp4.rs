//! Mutants of the NVFP4 cast and dequantization.

use oxtile_emulator::mutation::Outcome;
use oxtile_kernels::nvfp4::{Nvfp4CastRows, Nvfp4CastRowsArgs, Nvfp4DequantizeRows, Nvfp4DequantizeRowsArgs};
use oxtile_tile::num::bf16;

use super::Job;
use super::device::{Device, words};

pub const JOBS: &[Job] = &[
    Job { name: "nvfp4_cast_rows", run: nvfp4_cast_rows, equivalents: &[] },
    Job { name: "nvfp4_dequantize_rows", run: nvfp4_dequantize_rows, equivalents: &[] },
];

/// Two CUDA blocks, the second with four blocks of elements.
fn nvfp4_cast_rows(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (input, amax) = (device.upload::<bf16>("input", &words(260 * 8)), device.upload("amax", &[3f32.to_bits()]));
    let (mut data, mut scales) = (device.upload("data", &[0; 260 * 2]), device.upload("scales", &[0; 65]));
    device.launch::<Nvfp4CastRows<bf16>>(Nvfp4CastRowsArgs {
        input: input.view(),
        amax: amax.view(),
        data: data.view_mut(),
        scales: scales.view_mut(),
    })?;
    Ok([device.download(&data), device.download(&scales)].concat())
}

fn nvfp4_dequantize_rows(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (data, scales) = (device.upload("data", &words(520)), device.upload("scales", &words(65)));
    let (amax, mut output) = (device.upload("amax", &[3f32.to_bits()]), device.upload("output", &[0; 2080]));
    device.launch::<Nvfp4DequantizeRows<bf16>>(Nvfp4DequantizeRowsArgs {
        data: data.view(),
        scales: scales.view(),
        amax: amax.view(),
        output: output.view_mut(),
    })?;
    Ok(device.download(&output))
}
