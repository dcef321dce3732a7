//! Mutants of RMS norm, forward and backward.

use std::marker::PhantomData;

use oxtile_emulator::mutation::Outcome;
use oxtile_kernels::rms_norm::*;
use oxtile_kernels::row::ByBlock;
use oxtile_tile::num::bf16;

use super::Job;
use super::device::{Device, words};

type Rows = ByBlock<128, 2>;

pub const JOBS: &[Job] =
    &[Job { name: "rms_norm", run: rms_norm, equivalents: &[] }, Job { name: "rms_norm_backward", run: backward, equivalents: &[] }];

/// Pairs of halves between 0 and 2.
fn halves(count: usize) -> Vec<u32> {
    words(count / 2).into_iter().map(|word| word & 0x3fff_3fff).collect()
}

const ROWS: usize = 6;
const WIDTH: usize = 1040;

fn rms_norm(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (input, weight) = (device.upload::<bf16>("input", &halves(ROWS * WIDTH)), device.upload::<bf16>("weight", &halves(WIDTH)));
    let (mut output, mut inverse) = (device.upload("output", &[0; ROWS * WIDTH / 2]), device.upload("inverse_rms", &[0; ROWS]));
    device.launch::<RmsNorm<bf16, Rows>>(RmsNormArgs {
        input: input.view(),
        weight: weight.view(),
        output: output.view_mut(),
        inverse_rms: Some(inverse.view_mut()),
        width: WIDTH as u32,
        epsilon: 1e-5,
        marker: PhantomData,
    })?;
    Ok([device.download(&output), device.download(&inverse)].concat())
}

/// Three rows a block, so that the storages of the sums come round.
fn backward(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (gradient, input) =
        (device.upload::<bf16>("gradient", &halves(ROWS * WIDTH)), device.upload::<bf16>("input", &halves(ROWS * WIDTH)));
    let (weight, inverse) = (device.upload::<bf16>("weight", &halves(WIDTH)), device.upload("inverse_rms", &[0x3f80_0000; ROWS]));
    let (mut input_gradient, mut partial_sums) =
        (device.upload("input_gradient", &[0; ROWS * WIDTH / 2]), device.upload("partial_sums", &[0; 2 * WIDTH]));
    device.launch::<RmsNormBackward<bf16, Rows>>(RmsNormBackwardArgs {
        gradient: gradient.view(),
        input: input.view(),
        weight: weight.view(),
        inverse_rms: inverse.view(),
        input_gradient: input_gradient.view_mut(),
        partial_sums: partial_sums.view_mut(),
        width: WIDTH as u32,
        marker: PhantomData,
    })?;
    Ok([device.download(&input_gradient), device.download(&partial_sums)].concat())
}
