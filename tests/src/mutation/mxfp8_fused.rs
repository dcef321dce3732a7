//! Mutants of the fused MXFP8 cast, of the sums beside it and of activations alone.

use std::marker::PhantomData;

use oxtile_emulator::mutation::Outcome;
use oxtile_kernels::activation::{Activate, ActivateArgs, Forward, Identity, Relu};
use oxtile_kernels::codes::CodesArgument;
use oxtile_kernels::column_sums::{ColumnSums, ColumnSumsArgs};
use oxtile_kernels::mxfp8::{
    FusedOperandsArgument, INTERLEAVED_SCALES, Mxfp8CastFused, Mxfp8CastFusedArgs, Mxfp8CastFusedColumns, Mxfp8CastFusedColumnsArgs,
    Mxfp8CastFusedRows, Mxfp8CastFusedRowsArgs,
};
use oxtile_tile::num::{bf16, e4m3};

use super::Job;
use super::conformance::STRICTER_WAIT;
use super::device::{Device, Elements, words};

pub const JOBS: &[Job] = &[
    Job { name: "mxfp8_cast_fused", run: cast_fused, equivalents: &[STRICTER_WAIT] },
    Job { name: "mxfp8_cast_fused_columns", run: cast_fused_columns, equivalents: &[STRICTER_WAIT] },
    Job { name: "mxfp8_cast_fused_rows", run: cast_fused_rows, equivalents: &[] },
    Job { name: "column_sums", run: column_sums, equivalents: &[] },
    Job { name: "activate", run: activate, equivalents: &[] },
];

/// Two rows that end within a CUDA block.
fn activate(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (input, mut output) = (device.upload::<bf16>("input", &words(80)), device.upload("output", &[0; 80]));
    device.launch::<Activate<Forward<Relu>, bf16>>(ActivateArgs {
        input: input.view(),
        gradient: None,
        output: output.view_mut(),
        columns: 80,
        marker: PhantomData,
    })?;
    Ok(device.download(&output))
}

/// More rows than warps, and columns that end within a warp.
fn column_sums(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (matrix, mut output) = (device.upload::<f32>("matrix", &words(70 * 40)), device.upload("output", &[0; 40]));
    device.launch::<ColumnSums<f32>>(ColumnSumsArgs { matrix: matrix.view(), output: output.view_mut() })?;
    Ok(device.download(&output))
}

fn operands(input: &Elements<bf16>, [rows, columns]: [usize; 2]) -> FusedOperandsArgument<'_, bf16> {
    FusedOperandsArgument { input: input.view(), gradient: None, rows: rows as u64, columns: columns as u64 }
}

/// Twice, since either barrier orders the other's accesses too: with row scales, and with columns and the amax.
fn cast_fused(device: &Device) -> Result<Vec<u32>, Outcome> {
    let [rows, columns] = [20, 128];
    let input = device.upload::<bf16>("input", &words(rows * columns / 2));
    let mut outputs = Vec::new();
    for by_rows in [true, false] {
        let words_of = |is_wanted: bool, count| vec![0; if is_wanted { count } else { 0 }];
        let mut row_data = device.upload("row_data", &words_of(by_rows, rows * columns / 4));
        let mut row_scales = device.upload("row_scales", &words_of(by_rows, 128));
        let mut column_data = device.upload("column_data", &words_of(!by_rows, rows * columns / 4));
        let mut column_scales = device.upload("column_scales", &words_of(!by_rows, 128));
        let mut amax = device.upload("amax", &words_of(!by_rows, 1));
        let mut partial_sums = device.upload("partial_sums", &words_of(!by_rows, columns));
        device.launch::<Mxfp8CastFused<Identity, bf16, e4m3>>(Mxfp8CastFusedArgs {
            operands: operands(&input, [rows, columns]),
            rows: CodesArgument { data: row_data.view_mut(), scales: row_scales.view_mut() },
            columns: CodesArgument { data: column_data.view_mut(), scales: column_scales.view_mut() },
            partial_sums: partial_sums.view_mut(),
            amax: (!by_rows).then(|| amax.view_mut()),
            skip: None,
            options: INTERLEAVED_SCALES,
            marker: PhantomData,
        })?;
        outputs.extend([device.download(&row_data), device.download(&row_scales), device.download(&column_data)]);
        outputs.extend([device.download(&column_scales), device.download(&amax), device.download(&partial_sums)]);
    }
    Ok(outputs.concat())
}

/// Whole tiles and one at the edge, with sums and the amax of more than one warp.
fn cast_fused_columns(device: &Device) -> Result<Vec<u32>, Outcome> {
    let [rows, columns] = [40, 128];
    let input = device.upload::<bf16>("input", &words(rows * columns / 2));
    let mut data = device.upload("data", &vec![0; rows * columns / 4]);
    let (mut scales, mut amax) = (device.upload("scales", &[0; 128]), device.upload("amax", &[0]));
    let mut partial_sums = device.upload("partial_sums", &vec![0; 2 * columns]);
    device.launch::<Mxfp8CastFusedColumns<Identity, bf16, e4m3>>(Mxfp8CastFusedColumnsArgs {
        operands: operands(&input, [rows, columns]),
        data: data.view_mut(),
        scales: scales.view_mut(),
        partial_sums: partial_sums.view_mut(),
        amax: Some(amax.view_mut()),
        skip: None,
        options: INTERLEAVED_SCALES,
        marker: PhantomData,
    })?;
    Ok([device.download(&data), device.download(&scales), device.download(&amax), device.download(&partial_sums)].concat())
}

/// More than one warp, for the amax.
fn cast_fused_rows(device: &Device) -> Result<Vec<u32>, Outcome> {
    let [rows, columns] = [20, 128];
    let input = device.upload::<bf16>("input", &words(rows * columns / 2));
    let mut data = device.upload("data", &vec![0; rows * columns / 4]);
    let (mut scales, mut amax) = (device.upload("scales", &[0; 128]), device.upload("amax", &[0]));
    device.launch::<Mxfp8CastFusedRows<Identity, bf16, e4m3>>(Mxfp8CastFusedRowsArgs {
        operands: operands(&input, [rows, columns]),
        data: data.view_mut(),
        scales: scales.view_mut(),
        amax: Some(amax.view_mut()),
        skip: None,
        options: INTERLEAVED_SCALES,
        marker: PhantomData,
    })?;
    Ok([device.download(&data), device.download(&scales), device.download(&amax)].concat())
}
