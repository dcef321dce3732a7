//! NVFP4 kernels over all they can meet: every bf16 number under every block scale; and what stochastic rounding gives on average.

use std::cell::RefCell;
use std::marker::PhantomData;

use oxtile::{Buffer, Runtime};
use oxtile_kernels::nvfp4::*;
use oxtile_tests::inputs::{Dtype, Scenario};
use oxtile_tests::oracle::amax::amax;
use oxtile_tests::oracle::formats::{BF16, E2M1, E4M3};
use oxtile_tests::oracle::nvfp4::{Quantized, dequantize, quantize, quantize_by};
use oxtile_tile::launch::Kernel;
use oxtile_tile::num::{bf16, e2m1x2, e4m3};

use super::element::TestElement;
use super::nvfp4_columns::Output;
use crate::backend::long;
use crate::case::{Case, Outcome, Size, equal, stream, text};

/// Numbers from one that is tried to the next where not all are, a prime.
const APART: usize = 61;
const DRAWS: u64 = 50;

pub fn cases() -> Vec<Case> {
    vec![
        Case::new("nvfp4::sweep::bf16", Size::Large, sweep),
        Case::new("nvfp4::stochastic::Stochastic8", Size::Large, |r| mean_of_draws::<Stochastic8>(r, 0.0075)),
        Case::new("nvfp4::stochastic::Stochastic16", Size::Large, |r| mean_of_draws::<Stochastic16>(r, 0.0)),
    ]
}

/// For each scale but 0, blocks whose first element gives that scale, and after it all numbers that are no larger.
fn sweep(r: &Runtime) -> Outcome {
    // The encode scale is 1.
    let tensor_amax = 2688.0;
    let (mut values, mut scales) = (Vec::new(), Vec::new());
    for scale in 1..0x7f_u8 {
        let first = 6.0 * E4M3.decode(scale.into());
        let smaller = (0..BF16.codes()).map(|code| BF16.decode(code)).filter(|x| x.abs() <= first);
        let all: Vec<f32> = smaller.step_by(if long() { 1 } else { APART }).map(|x| x as f32).collect();
        for numbers in all.chunks(15) {
            let end = values.len() + 16;
            values.push(first as f32);
            values.extend(numbers);
            values.resize(end, 0.0);
            scales.push(scale);
        }
    }
    let expected = quantize(&values, tensor_amax);
    equal("the oracle's scales", &expected.scales, &scales)?;
    let stream = stream(r)?;
    let (wide, amax) = (bf16::upload(&stream, &values)?, text(Buffer::from_slice(&stream, &[tensor_amax]))?);
    let mut output = Output::of(&stream, values.len())?;
    let (data, scales) = (output.data.view_mut(), output.scales.view_mut());
    let args = Nvfp4CastRowsArgs { input: wide.view(), amax: amax.view(), data, scales };
    text(text(r.load::<Nvfp4CastRows<bf16>>())?.launch(&stream, args))?;
    output.equals(&stream, "row", &expected)
}

/// Every draw gives one of the two neighbours of a scaled value; the mean of many is nearer to the tensor than the cast to the nearest,
/// and its error is the `bias` that was enumerated, at most, and what chance allows.
fn mean_of_draws<R: Rounding + 'static>(r: &Runtime, bias: f64) -> Outcome
where
    Nvfp4CastRowsStochastic<bf16, R>: Kernel,
{
    let values = Scenario::Normal.generate(Dtype::Bf16, 64 * 64, 3);
    let scaled = RefCell::new(vec![0.0_f32; values.len()]);
    let nearest = quantize_by(&values, amax(&values), |i, x| {
        scaled.borrow_mut()[i] = x;
        E2M1.encode(f64::from(x)) as u8
    });
    let scaled = scaled.into_inner();
    let stream = stream(r)?;
    let (wide, given) = (bf16::upload(&stream, &values)?, text(Buffer::from_slice(&stream, &[nearest.amax]))?);
    let kernel = text(r.load::<Nvfp4CastRowsStochastic<bf16, R>>())?;
    let (mut sums, mut error, mut differing) = (vec![0.0_f64; values.len()], 0.0, 0);
    let mut first: Option<Vec<u8>> = None;
    for draw in 0..DRAWS {
        let offset = text(Buffer::from_slice(&stream, &[draw]))?;
        let mut output = Output::of(&stream, values.len())?;
        let (data, scales) = (output.data.view_mut(), output.scales.view_mut());
        let (input, amax, random) = (wide.view(), given.view(), RandomArgument { seed: 11, offset: Some(offset.view()) });
        text(kernel.launch(&stream, Nvfp4CastRowsStochasticArgs { input, amax, data, scales, random, marker: PhantomData }))?;
        let found = Quantized {
            data: text(output.data.to_vec(&stream))?.into_iter().map(e2m1x2::to_bits).collect(),
            scales: text(output.scales.to_vec(&stream))?.into_iter().map(e4m3::to_bits).collect(),
            amax: nearest.amax,
        };
        equal("scales", &found.scales, &nearest.scales)?;
        let codes = found.data.iter().flat_map(|&pair| [pair & 0xf, pair >> 4]);
        for ((code, &x), i) in codes.zip(&scaled).zip(0..) {
            let (value, magnitude) = (E2M1.decode(code.into()), f64::from(x.abs()).min(6.0));
            let neighbours = neighbours(magnitude);
            if !neighbours.contains(&value.abs()) || (value != 0.0 && value.is_sign_negative() != x.is_sign_negative()) {
                return Err(format!("draw {draw}, element {i}: {x} became {value}, not one of {neighbours:?}"));
            }
            error += value.abs() - magnitude;
        }
        let of_draw = dequantize(&found);
        sums.iter_mut().zip(&of_draw).for_each(|(sum, &value)| *sum += f64::from(value));
        differing += u32::from(first.get_or_insert_with(|| found.data.clone()) != &found.data);
    }
    let squares = |value: &dyn Fn(usize) -> f64| (0..values.len()).map(|i| (value(i) - f64::from(values[i])).powi(2)).sum::<f64>();
    let of_nearest = dequantize(&nearest);
    let (by_chance, by_nearest) = (squares(&|i| sums[i] / DRAWS as f64), squares(&|i| f64::from(of_nearest[i])));
    let mean = error / (DRAWS as usize * values.len()) as f64;
    // A draw's deviation is at most 1, half of the largest step: five of the mean's are 5 / sqrt(204 800).
    if differing != DRAWS as u32 - 1 || by_chance >= by_nearest || mean.abs() > bias + 0.0111 {
        return Err(format!("{differing} draws differ; squares {by_chance} of {DRAWS} draws, {by_nearest} to nearest; mean error {mean}"));
    }
    Ok(())
}

/// The values of E2M1 at and around a magnitude of at most 6.
fn neighbours(magnitude: f64) -> [f64; 2] {
    let values = (0..8).map(|code| E2M1.decode(code));
    let below = values.clone().rfind(|&value| value <= magnitude).expect("0 is below");
    [below, values.clone().find(|&value| value >= magnitude).expect("6 is above")]
}
