//! Mutants of the FP8 kernels.

use oxtile_emulator::mutation::Outcome;
use oxtile_kernels::codes::CodesArgument;
use oxtile_kernels::fp8::*;
use oxtile_kernels::matrix::MatrixArgument;
use oxtile_tile::num::{bf16, e4m3};

use super::Job;
use super::device::{Device, Elements, words};

pub const JOBS: &[Job] = &[
    Job { name: "fp8_cast", run: fp8_cast, equivalents: &[] },
    Job { name: "fp8_cast_delayed", run: fp8_cast_delayed, equivalents: &[] },
    Job { name: "fp8_cast_transpose", run: fp8_cast_transpose, equivalents: &[] },
    Job { name: "fp8_cast_transpose_delayed", run: fp8_cast_transpose_delayed, equivalents: &[] },
    Job { name: "fp8_transpose", run: fp8_transpose, equivalents: &[] },
    Job { name: "fp8_cast_squares", run: fp8_cast_squares, equivalents: &[] },
    Job { name: "fp8_cast_row_blocks", run: fp8_cast_row_blocks, equivalents: &[] },
    Job { name: "fp8_cast_row_blocks_alone", run: fp8_cast_row_blocks_alone, equivalents: &[] },
    Job { name: "fp8_dequantize_blocks", run: fp8_dequantize_blocks, equivalents: &[] },
    Job { name: "fp8_partial_amax", run: fp8_partial_amax, equivalents: &[] },
    Job { name: "fp8_partial_cast", run: fp8_partial_cast, equivalents: &[] },
    Job { name: "fp8_update_scales", run: fp8_update_scales, equivalents: &[] },
    Job { name: "fp8_dequantize", run: fp8_dequantize, equivalents: &[] },
];

/// Two CUDA blocks, the second with an incomplete vector.
fn fp8_cast(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (input, amax) = (device.upload::<bf16>("input", &words(4610)), device.upload("amax", &[3f32.to_bits()]));
    let (mut data, mut scale_inverse) = (device.upload("data", &[0; 2305]), device.upload("scale_inverse", &[0]));
    device.launch::<Fp8Cast<bf16, e4m3>>(Fp8CastArgs {
        input: input.view(),
        amax: amax.view(),
        data: data.view_mut(),
        scale_inverse: scale_inverse.view_mut(),
        options: ScaleOptions::default(),
    })?;
    Ok([device.download(&data), device.download(&scale_inverse)].concat())
}

fn fp8_cast_delayed(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (input, scale) = (device.upload::<bf16>("input", &words(4610)), device.upload("scale", &[3f32.to_bits()]));
    let (mut data, mut amax) = (device.upload("data", &[0; 2305]), device.upload("amax", &[0]));
    let mut scale_inverse = device.upload("scale_inverse", &[0]);
    device.launch::<Fp8CastDelayed<bf16, e4m3>>(Fp8CastDelayedArgs {
        input: input.view(),
        scale: scale.view(),
        data: data.view_mut(),
        scale_inverse: scale_inverse.view_mut(),
        amax: amax.view_mut(),
    })?;
    Ok([device.download(&data), device.download(&amax)].concat())
}

/// 160 rows of 144: four tiles, three of them at an edge.
fn fp8_cast_transpose(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (input, amax) = (device.upload::<bf16>("input", &words(160 * 72)), device.upload("amax", &[3f32.to_bits()]));
    let (mut data, mut transposed) = (device.upload("data", &[0; 40 * 144]), device.upload("transposed", &[0; 40 * 144]));
    let mut scale_inverse = device.upload("scale_inverse", &[0]);
    device.launch::<Fp8CastTranspose<bf16, e4m3>>(Fp8CastTransposeArgs {
        input: MatrixArgument::new(input.view(), [160, 144]),
        amax: amax.view(),
        data: data.view_mut(),
        transposed: transposed.view_mut(),
        scale_inverse: scale_inverse.view_mut(),
        options: ScaleOptions::default(),
    })?;
    Ok([device.download(&data), device.download(&transposed)].concat())
}

fn fp8_cast_transpose_delayed(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (input, scale) = (device.upload::<bf16>("input", &words(160 * 72)), device.upload("scale", &[3f32.to_bits()]));
    let (mut data, mut transposed) = (device.upload("data", &[0; 40 * 144]), device.upload("transposed", &[0; 40 * 144]));
    let (mut scale_inverse, mut amax) = (device.upload("scale_inverse", &[0]), device.upload("amax", &[0]));
    device.launch::<Fp8CastTransposeDelayed<bf16, e4m3>>(Fp8CastTransposeDelayedArgs {
        input: MatrixArgument::new(input.view(), [160, 144]),
        scale: scale.view(),
        data: data.view_mut(),
        transposed: transposed.view_mut(),
        scale_inverse: scale_inverse.view_mut(),
        amax: amax.view_mut(),
    })?;
    Ok([device.download(&data), device.download(&transposed), device.download(&amax)].concat())
}

fn fp8_transpose(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (data, mut transposed) = (device.upload::<e4m3>("data", &words(40 * 144)), device.upload("transposed", &[0; 40 * 144]));
    device.launch::<Fp8Transpose<e4m3>>(Fp8TransposeArgs {
        input: MatrixArgument::new(data.view(), [160, 144]),
        transposed: transposed.view_mut(),
    })?;
    Ok(device.download(&transposed))
}

/// A matrix of 160 rows of 144, four tiles, cast to blocks or squares.
macro_rules! fp8_cast_blocks {
    ($($function:ident: $kernel:ident, $args:ident, $codes:expr;)*) => { $(
        fn $function(device: &Device) -> Result<Vec<u32>, Outcome> {
            let input = device.upload::<bf16>("input", &words(160 * 72));
            let (mut data, mut transposed) = (device.upload("data", &[0; 40 * 144]), device.upload("transposed", &[0; 40 * 144]));
            let (mut of_rows, mut of_columns) = (device.upload("scale_inverses", &[0; 320]), device.upload("transposed_scale_inverses", &[0; 288]));
            let squares = stringify!($kernel) == "Fp8CastSquares";
            (of_rows.length, of_columns.length) = if squares { (8, 8) } else { (320, 288) };
            device.launch::<$kernel<bf16, e4m3>>($args {
                input: MatrixArgument::new(input.view(), [160, 144]),
                codes: $codes(CodesArgument { data: data.view_mut(), scales: of_rows.view_mut() }),
                transposed: Some(CodesArgument { data: transposed.view_mut(), scales: of_columns.view_mut() }),
                options: ScaleOptions::default(),
            })?;
            Ok([device.download(&data), device.download(&transposed), device.download(&of_rows), device.download(&of_columns)].concat())
        }
    )* };
}

fp8_cast_blocks! {
    fp8_cast_squares: Fp8CastSquares, Fp8CastSquaresArgs, core::convert::identity;
    fp8_cast_row_blocks: Fp8CastRowBlocks, Fp8CastRowBlocksArgs, Some;
}

/// 36 rows of 144: warps inside, at the lower edge, at the right one and at both.
fn fp8_cast_row_blocks_alone(device: &Device) -> Result<Vec<u32>, Outcome> {
    let input = device.upload::<bf16>("input", &words(36 * 72));
    let (mut data, mut scale_inverses) = (device.upload("data", &[0; 9 * 144]), device.upload("scale_inverses", &[0; 72]));
    device.launch::<Fp8CastRowBlocksAlone<bf16, e4m3>>(Fp8CastRowBlocksAloneArgs {
        input: MatrixArgument::new(input.view(), [36, 144]),
        data: data.view_mut(),
        scale_inverses: scale_inverses.view_mut(),
        options: ScaleOptions::default(),
    })?;
    Ok([device.download(&data), device.download(&scale_inverses)].concat())
}

fn fp8_dequantize_blocks(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (data, scale_inverses) = (device.upload("data", &words(40 * 144)), device.upload("scale_inverses", &words(8)));
    let mut output = device.upload("output", &[0; 80 * 144]);
    device.launch::<Fp8DequantizeBlocks<e4m3, bf16>>(Fp8DequantizeBlocksArgs {
        input: MatrixArgument::new(data.view(), [160, 144]),
        scales: BlockScalesArgument { inverses: scale_inverses.view(), row_shift: 7, row_stride: 4, block_stride: 1 },
        output: output.view_mut(),
    })?;
    Ok(device.download(&output))
}

/// From the middle of a row to the middle of another of 160 rows of 144.
fn middle(shard: &Elements<bf16>) -> ShardArgument<'_, bf16> {
    ShardArgument { values: shard.view(), start: 1001, rows: 160, columns: 144 }
}

fn fp8_partial_amax(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (shard, mut amaxes) = (device.upload::<bf16>("shard", &words(8000)), device.upload("amaxes", &[0; 4]));
    device.launch::<Fp8PartialAmax<bf16>>(Fp8PartialAmaxArgs { shard: middle(&shard), amaxes: amaxes.view_mut() })?;
    Ok(device.download(&amaxes))
}

fn fp8_partial_cast(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (shard, amaxes) = (device.upload::<bf16>("shard", &words(8000)), device.upload("amaxes", &words(4)));
    let (mut data, mut scale_inverses) = (device.upload("data", &[0; 4000]), device.upload("scale_inverses", &[0; 8]));
    device.launch::<Fp8PartialCast<bf16, e4m3>>(Fp8PartialCastArgs {
        shard: middle(&shard),
        amaxes: amaxes.view(),
        data: data.view_mut(),
        scale_inverses: scale_inverses.view_mut(),
        options: ScaleOptions::default(),
    })?;
    Ok([device.download(&data), device.download(&scale_inverses)].concat())
}

/// Histories of 70 steps, so that a warp meets rows that another one rolls, of 3 tensors.
fn fp8_update_scales(device: &Device) -> Result<Vec<u32>, Outcome> {
    let entries: Vec<u32> = (1..=210).map(|i| (i as f32).to_bits()).collect();
    let mut history = device.upload("history", &entries);
    let (mut scales, mut scale_inverses) = (device.upload("scales", &[0; 3]), device.upload("scale_inverses", &[0; 3]));
    device.launch::<Fp8UpdateScales>(Fp8UpdateScalesArgs {
        history: history.view_mut(),
        agreed: None,
        scales: scales.view_mut(),
        scale_inverses: scale_inverses.view_mut(),
        length: 70,
        scaled_largest: 448.0,
        most_recent: false,
    })?;
    Ok([device.download(&history), device.download(&scales), device.download(&scale_inverses)].concat())
}

fn fp8_dequantize(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (data, scale_inverse) = (device.upload("data", &words(1201)), device.upload("scale_inverse", &[3f32.to_bits()]));
    let mut output = device.upload("output", &[0; 2402]);
    device.launch::<Fp8Dequantize<e4m3, bf16>>(Fp8DequantizeArgs {
        data: data.view(),
        scale_inverse: scale_inverse.view(),
        output: output.view_mut(),
    })?;
    Ok(device.download(&output))
}
