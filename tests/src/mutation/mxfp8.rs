//! Mutants of the MXFP8 casts and dequantizations.

use oxtile_emulator::mutation::Outcome;
use oxtile_kernels::codes::CodesArgument;
use oxtile_kernels::matrix::MatrixArgument;
use oxtile_kernels::mxfp8::*;
use oxtile_tile::num::{bf16, e4m3, ue8m0};

use super::Job;
use super::device::{Device, Elements, words};

pub const JOBS: &[Job] = &[
    Job { name: "mxfp8_cast_rows", run: mxfp8_cast_rows, equivalents: &[] },
    Job { name: "mxfp8_cast_both", run: mxfp8_cast_both, equivalents: &[] },
    Job { name: "mxfp8_dequantize_rows", run: mxfp8_dequantize_rows, equivalents: &[] },
    Job { name: "mxfp8_columns", run: mxfp8_columns, equivalents: &[] },
    Job { name: "mxfp8_ragged_rows", run: mxfp8_ragged_rows, equivalents: &[] },
    Job { name: "mxfp8_ragged_columns", run: mxfp8_ragged_columns, equivalents: &[] },
];

fn mxfp8_cast_rows(device: &Device) -> Result<Vec<u32>, Outcome> {
    let input: Elements<bf16> = device.upload("input", &words(1200));
    let (mut data, mut scales) = (device.upload("data", &[0; 600]), device.upload("scales", &[0; 19]));
    let mut trimmed = Elements::<ue8m0> { address: scales.address, length: 75, element: std::marker::PhantomData };
    device.launch::<Mxfp8CastRows<bf16, e4m3>>(Mxfp8CastRowsArgs {
        input: input.view(),
        data: data.view_mut(),
        scales: trimmed.view_mut(),
    })?;
    scales = Elements::<ue8m0> { length: 76, ..scales };
    Ok([device.download(&data), device.download(&scales)].concat())
}

/// 40 rows of 128: whole tiles, and tiles at an edge.
fn mxfp8_cast_both(device: &Device) -> Result<Vec<u32>, Outcome> {
    let input: Elements<bf16> = device.upload("input", &words(2560));
    let (mut row_data, mut row_scales) = (device.upload("row_data", &[0; 1280]), device.upload("row_scales", &[0; 40]));
    let (mut column_data, mut column_scales) = (device.upload("column_data", &[0; 1280]), device.upload("column_scales", &[0; 64]));
    device.launch::<Mxfp8CastBoth<bf16, e4m3>>(Mxfp8CastBothArgs {
        input: MatrixArgument::new(input.view(), [40, 128]),
        rows: CodesArgument { data: row_data.view_mut(), scales: row_scales.view_mut() },
        columns: CodesArgument { data: column_data.view_mut(), scales: column_scales.view_mut() },
    })?;
    Ok([device.download(&row_data), device.download(&row_scales), device.download(&column_data), device.download(&column_scales)].concat())
}

fn mxfp8_dequantize_rows(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (data, scales) = (device.upload("data", &words(600)), device.upload("scales", &words(19)));
    let trimmed = Elements::<ue8m0> { length: 75, ..scales };
    let mut output = device.upload("output", &[0; 1200]);
    device.launch::<Mxfp8DequantizeRows<e4m3, bf16>>(Mxfp8DequantizeRowsArgs {
        data: data.view(),
        scales: trimmed.view(),
        output: output.view_mut(),
    })?;
    Ok(device.download(&output))
}

/// 40 rows of 128: whole tiles, and tiles at an edge.
fn mxfp8_columns(device: &Device) -> Result<Vec<u32>, Outcome> {
    let input: Elements<bf16> = device.upload("input", &words(2560));
    let (mut data, mut scales, mut back) =
        (device.upload("data", &[0; 1280]), device.upload("scales", &[0; 64]), device.upload("back", &[0; 2560]));
    let columns = 128;
    device.launch::<Mxfp8CastColumns<bf16, e4m3>>(Mxfp8CastColumnsArgs {
        input: input.view(),
        data: data.view_mut(),
        scales: scales.view_mut(),
        columns,
    })?;
    device.launch::<Mxfp8DequantizeColumns<e4m3, bf16>>(Mxfp8DequantizeColumnsArgs {
        data: data.view(),
        scales: scales.view(),
        output: back.view_mut(),
        columns,
    })?;
    Ok([device.download(&data), device.download(&scales), device.download(&back)].concat())
}

/// 40 rows of 50, two blocks a row.
fn mxfp8_ragged_rows(device: &Device) -> Result<Vec<u32>, Outcome> {
    let input: Elements<bf16> = device.upload("input", &words(1000));
    let (mut data, mut scales, mut back) =
        (device.upload("data", &[0; 500]), device.upload("scales", &[0; 20]), device.upload("back", &[0; 1000]));
    let columns = 50;
    device.launch::<Mxfp8CastRaggedRows<bf16, e4m3>>(Mxfp8CastRaggedRowsArgs {
        input: input.view(),
        data: data.view_mut(),
        scales: scales.view_mut(),
        columns,
    })?;
    device.launch::<Mxfp8DequantizeRaggedRows<e4m3, bf16>>(Mxfp8DequantizeRaggedRowsArgs {
        data: data.view(),
        scales: scales.view(),
        output: back.view_mut(),
        columns,
    })?;
    Ok([device.download(&data), device.download(&scales), device.download(&back)].concat())
}

/// 40 rows of 50, two blocks a column.
fn mxfp8_ragged_columns(device: &Device) -> Result<Vec<u32>, Outcome> {
    let input: Elements<bf16> = device.upload("input", &words(1000));
    let (mut data, mut scales, mut back) =
        (device.upload("data", &[0; 500]), device.upload("scales", &[0; 25]), device.upload("back", &[0; 1000]));
    let columns = 50;
    device.launch::<Mxfp8CastRaggedColumns<bf16, e4m3>>(Mxfp8CastRaggedColumnsArgs {
        input: input.view(),
        data: data.view_mut(),
        scales: scales.view_mut(),
        columns,
    })?;
    device.launch::<Mxfp8DequantizeRaggedColumns<e4m3, bf16>>(Mxfp8DequantizeRaggedColumnsArgs {
        data: data.view(),
        scales: scales.view(),
        output: back.view_mut(),
        columns,
    })?;
    Ok([device.download(&data), device.download(&scales), device.download(&back)].concat())
}
