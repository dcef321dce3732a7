//! The update of delayed scaling against the oracle, bit for bit.

use oxtile::{Buffer, Runtime};
use oxtile_kernels::fp8::*;
use oxtile_tests::inputs::Random;
use oxtile_tests::oracle::fp8::Delayed;

use crate::case::{Case, Outcome, Size, equal, stream, text};

/// Tensors and length of the history: around warps of tensors and steps of rows, and nothing.
const SIZES: [(usize, usize); 8] = [(1, 1), (3, 2), (33, 16), (32, 64), (2, 65), (1, 129), (70, 3), (0, 16)];
const LARGE: (usize, usize) = (700, 1024);

pub fn cases() -> Vec<Case> {
    let sizes = SIZES.map(|s| (s, Size::Small)).into_iter().chain([(LARGE, Size::Large)]);
    let case = |((tensors, length), size), most_recent: bool, reduced: bool| {
        let algorithm = if most_recent { "most_recent" } else { "max" };
        let title = format!("fp8::update_scales::{algorithm}::{tensors}x{length}{}", if reduced { "::agreed" } else { "" });
        Case::new(title, size, move |r: &Runtime| update(r, tensors, length, most_recent, reduced))
    };
    sizes.flat_map(|s| [case(s, false, false), case(s, true, false), case(s, false, true), case(s, true, true)]).collect()
}

/// Three steps, in each of which some tensors have no amax, a tiny one, Inf or NaN.
fn update(r: &Runtime, tensors: usize, length: usize, most_recent: bool, reduced: bool) -> Outcome {
    let stream = stream(r)?;
    let mut random = Random::new((tensors * length) as u64);
    let mut expected: Vec<Delayed> = (0..tensors)
        .map(|i| Delayed {
            history: (0..length).map(|_| if i % 7 == 3 { 1e-42 } else { 8.0 * random.unit() }).collect(),
            scale: 1.0 + random.unit(),
        })
        .collect();
    let rows = |tensors: &[Delayed]| -> Vec<f32> { (0..length).flat_map(|row| tensors.iter().map(move |t| t.history[row])).collect() };
    let scales: Vec<f32> = expected.iter().map(|t| t.scale).collect();
    let mut history = text(Buffer::from_slice(&stream, &rows(&expected)))?;
    let mut scales = text(Buffer::from_slice(&stream, &scales))?;
    let mut scale_inverses = text(Buffer::from_slice(&stream, &vec![7.0_f32; tensors]))?;
    let kernel = text(r.load::<Fp8UpdateScales>())?;
    for step in 0..3 {
        let agreed: Vec<f32> = (0..tensors)
            .map(|i| match (i + step) % 5 {
                0 => 0.0,
                1 if step == 1 => f32::INFINITY,
                2 if step == 1 => f32::NAN,
                _ => 9.0 * random.unit(),
            })
            .collect();
        if !reduced {
            // What casts raised since the last step.
            expected.iter_mut().zip(&agreed).for_each(|(tensor, amax)| tensor.history[0] = *amax);
            text(history.copy_from_slice(&stream, &rows(&expected)))?;
        }
        let given = text(Buffer::from_slice(&stream, &agreed))?;
        let args = Fp8UpdateScalesArgs {
            history: history.view_mut(),
            agreed: reduced.then(|| given.view()),
            scales: scales.view_mut(),
            scale_inverses: scale_inverses.view_mut(),
            length: length as u64,
            scaled_largest: 224.0,
            most_recent,
        };
        text(kernel.launch(&stream, args))?;
        expected.iter_mut().zip(&agreed).for_each(|(tensor, amax)| tensor.update(if reduced { *amax } else { 0.0 }, 224.0, most_recent));
        let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        equal("scales", &text(scales.to_vec(&stream))?, &expected.iter().map(|t| t.scale).collect::<Vec<_>>())?;
        let inverses: Vec<f32> = expected.iter().map(|t| 1.0 / t.scale).collect();
        equal("inverses", &text(scale_inverses.to_vec(&stream))?, &inverses)?;
        equal("history", &bits(text(history.to_vec(&stream))?), &bits(rows(&expected)))?;
    }
    Ok(())
}
