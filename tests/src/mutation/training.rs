//! Mutants of cross entropy, rotary embedding, embedding and AdamW.

use std::marker::PhantomData;

use oxtile_emulator::mutation::Outcome;
use oxtile_kernels::adamw::{Adamw, AdamwArgs, Gradient, Step};
use oxtile_kernels::cross_entropy::{CrossEntropy, CrossEntropyArgs, Once, Rule};
use oxtile_kernels::embedding::*;
use oxtile_kernels::rotary::{AnglesArgument, Neighbours, Rotary, RotaryArgs, Sizes, Strides};
use oxtile_kernels::row::ByWarp;
use oxtile_tile::launch::{Kernel, Signature};
use oxtile_tile::num::bf16;

use super::Job;
use super::device::{Device, words};

pub const JOBS: &[Job] = &[
    Job { name: "cross_entropy", run: cross_entropy, equivalents: &[] },
    Job { name: "rotary", run: rotary, equivalents: &[] },
    Job { name: "embedding", run: embedding, equivalents: &[] },
    Job { name: "adamw", run: adamw, equivalents: &[] },
];

/// Words of numbers between 0 and 2, or pairs of such halves.
fn small(count: usize) -> Vec<u32> {
    words(count).into_iter().map(|word| word & 0x3fff_3fff).collect()
}

/// In place, so that the target's logit must be read before it is written over; smoothed, so that there are three reductions.
fn cross_entropy(device: &Device) -> Result<Vec<u32>, Outcome> {
    const WIDTH: usize = 4200;
    let (targets, mut losses) = (device.upload("targets", &[4199, 7]), device.upload("losses", &[0; 2]));
    let mut gradient = device.upload::<bf16>("gradient", &small(WIDTH));
    device.launch::<CrossEntropy<bf16, Once>>(CrossEntropyArgs {
        logits: None,
        gradient: Some(gradient.view_mut()),
        targets: targets.view(),
        losses: losses.view_mut(),
        width: WIDTH as u32,
        rule: Rule { ignored: -100, smoothing: 0.1, scale: 1.0 },
        marker: PhantomData,
    })?;
    Ok([device.download(&gradient), device.download(&losses)].concat())
}

fn rotary(device: &Device) -> Result<Vec<u32>, Outcome> {
    let [rows, heads, size] = [5, 3, 32];
    let elements = (rows * heads * size) as usize;
    let mut output = device.upload::<bf16>("output", &small(elements / 2));
    let table = device.upload("angles", &small((rows * size / 2) as usize));
    let strides = Strides { batch: elements as u64, row: (heads * size).into(), head: size.into() };
    device.launch::<Rotary<bf16, Neighbours>>(RotaryArgs {
        input: None,
        input_strides: strides,
        output: output.view_mut(),
        strides,
        angles: AnglesArgument { cosines: table.view(), sines: table.view() },
        sizes: Sizes { batches: 1, rows, heads, size },
        turn: 1.0,
        marker: PhantomData,
    })?;
    Ok(device.download(&output))
}

/// Forward and backward; no two gradients go to one place, where the order of their sum would show.
fn embedding(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (table, tokens) = (device.upload::<bf16>("table", &small(4 * 20)), device.upload("tokens", &[3, 0, 2]));
    let (mut output, mut sums) = (device.upload::<bf16>("output", &[0; 3 * 20]), device.upload("table_gradient", &[0; 4 * 40]));
    let args = EmbeddingArgs { table: table.view(), tokens: tokens.view(), output: output.view_mut(), width: 40, marker: PhantomData };
    device.launch::<Embedding<bf16, ByWarp<2>>>(args)?;
    let args = EmbeddingBackwardArgs { gradient: output.view(), tokens: tokens.view(), table_gradient: sums.view_mut(), width: 40 };
    device.launch::<EmbeddingBackward<bf16>>(args)?;
    Ok([device.download(&output), device.download(&sums)].concat())
}

fn adamw(device: &Device) -> Result<Vec<u32>, Outcome> {
    Ok([adamw_by::<bf16>(device, 2)?, adamw_by::<f32>(device, 1)?].concat())
}

/// By gradients of which a word has so many.
fn adamw_by<G: Gradient>(device: &Device, a_word: usize) -> Result<Vec<u32>, Outcome>
where
    Adamw<bf16, G>: Kernel + for<'a> Signature<Args<'a> = AdamwArgs<'a, bf16, G>>,
{
    let count = 2052;
    let gradient = device.upload::<G>("gradient", &small(count / a_word));
    let of = |name: &str| device.upload::<f32>(name, &small(count));
    let (mut weights, mut first, mut second) = (of("weights"), of("first"), of("second"));
    let mut rounded = device.upload("rounded", &vec![0; count / 2]);
    let step =
        Step { rate: 0.1, decay: 0.1, beta1: 0.9, beta2: 0.99, epsilon: 1e-8, correction1: 10.0, correction2: 10.0, gradient_scale: 1.0 };
    device.launch::<Adamw<bf16, G>>(AdamwArgs {
        gradient: gradient.view(),
        weights: weights.view_mut(),
        first: first.view_mut(),
        second: second.view_mut(),
        rounded: Some(rounded.view_mut()),
        step,
    })?;
    Ok([device.download(&weights), device.download(&first), device.download(&second), device.download(&rounded)].concat())
}
