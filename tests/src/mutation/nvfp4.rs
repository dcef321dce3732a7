//! Mutants of the NVFP4 casts and dequantizations.

use std::marker::PhantomData;

use oxtile_emulator::mutation::Outcome;
use oxtile_kernels::codes::CodesArgument;
use oxtile_kernels::matrix::MatrixArgument;
use oxtile_kernels::nvfp4::*;
use oxtile_tile::num::bf16;

use super::Job;
use super::device::{Device, words};

pub const JOBS: &[Job] = &[
    Job { name: "nvfp4_cast_rows", run: nvfp4_cast_rows, equivalents: &[] },
    Job { name: "nvfp4_cast_rows_stochastic", run: cast_rows_stochastic, equivalents: &[] },
    Job { name: "nvfp4_cast_columns", run: cast_columns, equivalents: &[] },
    Job { name: "nvfp4_cast_both", run: cast_both, equivalents: &[] },
    Job { name: "nvfp4_cast_squares", run: cast_squares, equivalents: &[] },
    Job { name: "nvfp4_cast_rows_4over6", run: cast_rows_4over6, equivalents: &[] },
    Job { name: "nvfp4_cast_rows_interleaved", run: cast_rows_interleaved, equivalents: &[] },
    Job { name: "nvfp4_cast_columns_4over6", run: cast_columns_4over6, equivalents: &[] },
    Job { name: "nvfp4_cast_scaled_rows", run: cast_scaled_rows, equivalents: &[] },
    Job { name: "nvfp4_dequantize_scaled_rows", run: dequantize_scaled_rows, equivalents: &[] },
    Job { name: "nvfp4_hadamard_amax", run: hadamard_amax, equivalents: &[] },
    Job { name: "nvfp4_dequantize_rows", run: nvfp4_dequantize_rows, equivalents: &[] },
    Job { name: "nvfp4_dequantize_columns", run: dequantize_columns, equivalents: &[] },
    Job { name: "nvfp4_gemm_factors", run: nvfp4_gemm_factors, equivalents: &[] },
];

/// More than a tile of 128 rows, and two blocks across.
const ROWS: u64 = 144;
const COLUMNS: u64 = 32;
const WORDS: usize = (ROWS * COLUMNS / 2) as usize;

fn cast_columns(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (input, amax) = (device.upload::<bf16>("input", &words(WORDS)), device.upload("amax", &[3f32.to_bits()]));
    let (mut data, mut scales) = (device.upload("data", &[0; WORDS / 4]), device.upload("scales", &[0; WORDS / 32]));
    let offset = device.upload("offset", &[7, 0]);
    device.launch::<Nvfp4CastColumns<bf16, Stochastic8, false>>(Nvfp4CastColumnsArgs {
        input: MatrixArgument::new(input.view(), [ROWS, COLUMNS]),
        amax: amax.view(),
        data: data.view_mut(),
        scales: scales.view_mut(),
        random: RandomArgument { seed: 5, offset: Some(offset.view()) },
        marker: PhantomData,
    })?;
    Ok([device.download(&data), device.download(&scales)].concat())
}

fn cast_both(device: &Device) -> Result<Vec<u32>, Outcome> {
    let input = device.upload::<bf16>("input", &words(WORDS));
    let (row_amax, column_amax) = (device.upload("row_amax", &[3f32.to_bits()]), device.upload("column_amax", &[4f32.to_bits()]));
    let (mut row_data, mut row_scales) = (device.upload("row_data", &[0; WORDS / 4]), device.upload("row_scales", &[0; WORDS / 32]));
    let (mut data, mut scales) = (device.upload("column_data", &[0; WORDS / 4]), device.upload("column_scales", &[0; WORDS / 32]));
    device.launch::<Nvfp4CastBoth<bf16, Nearest, true>>(Nvfp4CastBothArgs {
        input: MatrixArgument::new(input.view(), [ROWS, COLUMNS]),
        row_amax: row_amax.view(),
        column_amax: column_amax.view(),
        rows: CodesArgument { data: row_data.view_mut(), scales: row_scales.view_mut() },
        columns: CodesArgument { data: data.view_mut(), scales: scales.view_mut() },
        random: RandomArgument::NONE,
        marker: PhantomData,
    })?;
    Ok([device.download(&row_data), device.download(&row_scales), device.download(&data), device.download(&scales)].concat())
}

fn cast_squares(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (input, amax) = (device.upload::<bf16>("input", &words(WORDS)), device.upload("amax", &[3f32.to_bits()]));
    let (mut row_data, mut row_scales) = (device.upload("row_data", &[0; WORDS / 4]), device.upload("row_scales", &[0; WORDS / 32]));
    let (mut data, mut scales) = (device.upload("column_data", &[0; WORDS / 4]), device.upload("column_scales", &[0; WORDS / 32]));
    device.launch::<Nvfp4CastSquares<bf16>>(Nvfp4CastSquaresArgs {
        input: MatrixArgument::new(input.view(), [ROWS, COLUMNS]),
        amax: amax.view(),
        rows: CodesArgument { data: row_data.view_mut(), scales: row_scales.view_mut() },
        columns: CodesArgument { data: data.view_mut(), scales: scales.view_mut() },
    })?;
    Ok([device.download(&row_data), device.download(&row_scales), device.download(&data), device.download(&scales)].concat())
}

fn cast_rows_4over6(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (input, amax) = (device.upload::<bf16>("input", &words(260 * 8)), device.upload("amax", &[3f32.to_bits()]));
    let (mut data, mut scales) = (device.upload("data", &[0; 260 * 2]), device.upload("scales", &[0; 65]));
    device.launch::<Nvfp4CastRows4over6<bf16, FourOverSix>>(Nvfp4CastRows4over6Args {
        input: input.view(),
        amax: amax.view(),
        data: data.view_mut(),
        scales: scales.view_mut(),
        marker: PhantomData,
    })?;
    Ok([device.download(&data), device.download(&scales)].concat())
}

/// A tile and a part of one, both padded.
fn cast_rows_interleaved(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (input, amax) = (device.upload::<bf16>("input", &words(WORDS)), device.upload("amax", &[3f32.to_bits()]));
    let (mut data, mut scales) = (device.upload("data", &[0; WORDS / 4]), device.upload("scales", &[0; 256]));
    device.launch::<Nvfp4CastRowsInterleaved<bf16>>(Nvfp4CastRowsInterleavedArgs {
        input: MatrixArgument::new(input.view(), [ROWS, COLUMNS]),
        amax: amax.view(),
        data: data.view_mut(),
        scales: scales.view_mut(),
    })?;
    Ok([device.download(&data), device.download(&scales)].concat())
}

fn cast_columns_4over6(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (input, amax) = (device.upload::<bf16>("input", &words(WORDS)), device.upload("amax", &[3f32.to_bits()]));
    let (mut data, mut scales) = (device.upload("data", &[0; WORDS / 4]), device.upload("scales", &[0; WORDS / 32]));
    device.launch::<Nvfp4CastColumns4over6<bf16, FourOverSix>>(Nvfp4CastColumns4over6Args {
        input: MatrixArgument::new(input.view(), [ROWS, COLUMNS]),
        amax: amax.view(),
        data: data.view_mut(),
        scales: scales.view_mut(),
        marker: PhantomData,
    })?;
    Ok([device.download(&data), device.download(&scales)].concat())
}

fn cast_scaled_rows(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (input, mut amaxes) = (device.upload::<bf16>("input", &words(WORDS)), device.upload("amaxes", &[0; ROWS as usize]));
    let (mut data, mut scales) = (device.upload("data", &[0; WORDS / 4]), device.upload("scales", &[0; WORDS / 32]));
    device.launch::<Nvfp4CastScaledRows<bf16, ToSix>>(Nvfp4CastScaledRowsArgs {
        input: input.view(),
        amaxes: amaxes.view_mut(),
        data: data.view_mut(),
        scales: scales.view_mut(),
        columns: COLUMNS,
        marker: PhantomData,
    })?;
    Ok([device.download(&amaxes), device.download(&data), device.download(&scales)].concat())
}

fn dequantize_scaled_rows(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (data, scales) = (device.upload("data", &words(WORDS / 4)), device.upload("scales", &words(WORDS / 32)));
    let (amaxes, mut output) = (device.upload("amaxes", &[3f32.to_bits(); ROWS as usize]), device.upload("output", &[0; WORDS]));
    device.launch::<Nvfp4DequantizeScaledRows<bf16>>(Nvfp4DequantizeScaledRowsArgs {
        data: data.view(),
        scales: scales.view(),
        amaxes: amaxes.view(),
        output: output.view_mut(),
        factor: 1.0 / 2688.0,
        rows: ROWS,
        columns: COLUMNS,
    })?;
    Ok(device.download(&output))
}

fn cast_rows_stochastic(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (input, amax) = (device.upload::<bf16>("input", &words(260 * 8)), device.upload("amax", &[3f32.to_bits()]));
    let (mut data, mut scales) = (device.upload("data", &[0; 260 * 2]), device.upload("scales", &[0; 65]));
    let offset = device.upload("offset", &[7, 0]);
    device.launch::<Nvfp4CastRowsStochastic<bf16, Stochastic16>>(Nvfp4CastRowsStochasticArgs {
        input: input.view(),
        amax: amax.view(),
        data: data.view_mut(),
        scales: scales.view_mut(),
        random: RandomArgument { seed: 5, offset: Some(offset.view()) },
        marker: PhantomData,
    })?;
    Ok([device.download(&data), device.download(&scales)].concat())
}

fn hadamard_amax(device: &Device) -> Result<Vec<u32>, Outcome> {
    let input = device.upload::<bf16>("input", &words(WORDS));
    let (mut amax, mut transformed) = (device.upload("amax", &[0]), device.upload("transformed_amax", &[0]));
    device.launch::<Nvfp4HadamardAmax>(Nvfp4HadamardAmaxArgs {
        input: MatrixArgument::new(input.view(), [ROWS, COLUMNS]),
        amax: amax.view_mut(),
        transformed_amax: transformed.view_mut(),
    })?;
    Ok([device.download(&amax), device.download(&transformed)].concat())
}

fn dequantize_columns(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (data, scales) = (device.upload("data", &words(WORDS / 4)), device.upload("scales", &words(WORDS / 32)));
    let (amax, mut output) = (device.upload("amax", &[3f32.to_bits()]), device.upload("output", &[0; WORDS]));
    device.launch::<Nvfp4DequantizeColumns<bf16>>(Nvfp4DequantizeColumnsArgs {
        data: data.view(),
        scales: scales.view(),
        amax: amax.view(),
        output: output.view_mut(),
        rows: ROWS,
        columns: COLUMNS,
    })?;
    Ok(device.download(&output))
}

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

fn nvfp4_gemm_factors(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (a, b) = (device.upload::<f32>("a_amax", &[3.0_f32.to_bits()]), device.upload::<f32>("b_amax", &[5.0_f32.to_bits()]));
    let mut factors = device.upload::<f32>("factors", &[0; 2]);
    device.launch::<Nvfp4GemmFactors>(Nvfp4GemmFactorsArgs {
        a_amax: a.view(),
        b_amax: b.view(),
        factors: factors.view_mut(),
        alpha: 2.0,
        beta: 7.0,
    })?;
    Ok(device.download(&factors))
}
