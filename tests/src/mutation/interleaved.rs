//! Mutants of the cast that writes interleaved scales and of those that read them.

use oxtile_emulator::mutation::Outcome;
use oxtile_kernels::mxfp8::*;
use oxtile_kernels::nvfp4::*;
use oxtile_tile::num::{bf16, e2m1x2, e4m3, ue8m0};

use super::Job;
use super::device::{Device, words};

pub const JOBS: &[Job] = &[
    Job { name: "mxfp8_cast_rows_interleaved", run: cast_rows, equivalents: &[] },
    Job { name: "mxfp8_dequantize_interleaved", run: mxfp8_dequantize, equivalents: &[] },
    Job { name: "nvfp4_dequantize_interleaved", run: nvfp4_dequantize, equivalents: &[] },
];

/// 3 rows of 1056: whole tiles of warps, and tiles at an edge.
fn cast_rows(device: &Device) -> Result<Vec<u32>, Outcome> {
    let input = device.upload::<bf16>("input", &words(1584));
    let (mut data, mut scales) = (device.upload("data", &[0; 792]), device.upload("scales", &[0; 1152]));
    device.launch::<Mxfp8CastRowsInterleaved<bf16, e4m3>>(Mxfp8CastRowsInterleavedArgs {
        input: input.view(),
        data: data.view_mut(),
        scales: scales.view_mut(),
        rows: 3,
        columns: 1056,
    })?;
    Ok([device.download(&data), device.download(&scales)].concat())
}

fn mxfp8_dequantize(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (rows, columns) = (40, 64);
    let (data, scales) = (device.upload::<e4m3>("data", &words(640)), device.upload::<ue8m0>("scales", &words(128)));
    let (mut by_rows, mut by_columns) = (device.upload("by_rows", &[0; 1280]), device.upload("by_columns", &[0; 1280]));
    device.launch::<Mxfp8DequantizeRowsInterleaved<e4m3, bf16>>(Mxfp8DequantizeRowsInterleavedArgs {
        data: data.view(),
        scales: scales.view(),
        output: by_rows.view_mut(),
        columns,
    })?;
    device.launch::<Mxfp8DequantizeColumnsInterleaved<e4m3, bf16>>(Mxfp8DequantizeColumnsInterleavedArgs {
        data: data.view(),
        scales: scales.view(),
        output: by_columns.view_mut(),
        rows,
        columns,
    })?;
    Ok([device.download(&by_rows), device.download(&by_columns)].concat())
}

fn nvfp4_dequantize(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (rows, columns) = (48, 64);
    let (data, scales) = (device.upload::<e2m1x2>("data", &words(384)), device.upload("scales", &words(128)));
    let amax = device.upload("amax", &[3f32.to_bits()]);
    let (mut by_rows, mut by_columns) = (device.upload("by_rows", &[0; 1536]), device.upload("by_columns", &[0; 1536]));
    device.launch::<Nvfp4DequantizeRowsInterleaved<bf16>>(Nvfp4DequantizeRowsInterleavedArgs {
        data: data.view(),
        scales: scales.view(),
        amax: amax.view(),
        output: by_rows.view_mut(),
        columns,
    })?;
    device.launch::<Nvfp4DequantizeColumnsInterleaved<bf16>>(Nvfp4DequantizeColumnsInterleavedArgs {
        data: data.view(),
        scales: scales.view(),
        amax: amax.view(),
        output: by_columns.view_mut(),
        rows,
        columns,
    })?;
    Ok([device.download(&by_rows), device.download(&by_columns)].concat())
}
