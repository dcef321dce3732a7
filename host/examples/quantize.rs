//! Quantizes a random matrix to MXFP8 and back, on a GPU or on the emulator: `cargo run -p oxtile --example quantize`.

use half::bf16;
use oxtile::quantize::{Amax, Direction, Mxfp8};
use oxtile::{Buffer, Result, Runtime, num};

const SHAPE: [u64; 2] = [512, 1024];

fn main() -> Result<()> {
    let choice = Runtime::auto()?;
    println!("running on {}", choice.reason);
    let runtime = choice.runtime;
    let stream = runtime.device(0)?.stream()?;

    // Kernels are loaded once and launched any number of times.
    let amax_of = Amax::<num::bf16>::new(&runtime)?;
    let mxfp8 = Mxfp8::<num::bf16>::new(&runtime)?;

    // Everything below is only enqueued, until `to_vec` waits for its buffer.
    let weights = random_weights(SHAPE[0] * SHAPE[1]);
    let input = Buffer::from_slice(&stream, &weights)?;
    let mut amax = Buffer::uninitialised(&stream, 1)?;
    amax_of.run(&stream, input.view(), &mut amax)?;
    let quantized = mxfp8.quantize(&stream, input.view(), SHAPE, Direction::Rows)?;
    let mut restored = Buffer::uninitialised(&stream, input.len())?;
    mxfp8.dequantize(&stream, &quantized, restored.view_mut())?;

    let restored: Vec<bf16> = restored.to_vec_as(&stream)?;
    println!("largest magnitude {}", amax.to_vec(&stream)?[0]);
    println!("{} bytes became {}", 2 * input.len(), quantized.data.len() + quantized.scales.len());
    println!("signal-to-noise ratio {:.1} dB", decibels(&weights, &restored));
    Ok(())
}

/// Numbers of about normal distribution from a fixed seed: sums of four uniform ones.
fn random_weights(count: u64) -> Vec<bf16> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut uniform = || {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..count).map(|_| bf16::from_f32((0..4).map(|_| uniform()).sum())).collect()
}

fn decibels(exact: &[bf16], found: &[bf16]) -> f64 {
    let square = |x: f32| f64::from(x) * f64::from(x);
    let signal: f64 = exact.iter().map(|x| square(x.to_f32())).sum();
    let noise: f64 = exact.iter().zip(found).map(|(x, y)| square(x.to_f32() - y.to_f32())).sum();
    10.0 * (signal / noise).log10()
}
