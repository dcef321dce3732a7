//! Mutants of the kernels of groups: the barriers are those of the single kernels, at other addresses.

use oxtile_emulator::mutation::Outcome;
use oxtile_kernels::codes::CodesArgument;
use oxtile_kernels::fp8::*;
use oxtile_kernels::group::{Grouped, MemberTable};
use oxtile_kernels::interleave::*;
use oxtile_kernels::mxfp8::*;
use oxtile_kernels::nvfp4::*;
use oxtile_kernels::shards::{JoinShardsGrouped, JoinShardsGroupedArgs};
use oxtile_tile::launch::{DeviceTable, DeviceView};
use oxtile_tile::num::{Pod, bf16, e2m1x2, e4m3, ue8m0};

use super::Job;
use super::device::{Device, Elements, OWNER, words};

pub const JOBS: &[Job] = &[
    Job { name: "mxfp8_cast_grouped", run: mxfp8_cast, equivalents: &[] },
    Job { name: "mxfp8_cast_both_grouped", run: mxfp8_cast_both, equivalents: &[] },
    Job { name: "mxfp8_dequantize_grouped", run: mxfp8_dequantize, equivalents: &[] },
    Job { name: "fp8_cast_grouped", run: fp8_cast, equivalents: &[] },
    Job { name: "fp8_dequantize_grouped", run: fp8_dequantize, equivalents: &[] },
    Job { name: "nvfp4_cast_rows_grouped", run: nvfp4_cast_rows, equivalents: &[] },
    Job { name: "nvfp4_cast_columns_grouped", run: nvfp4_cast_columns, equivalents: &[] },
    Job { name: "nvfp4_cast_both_grouped", run: nvfp4_cast_both, equivalents: &[] },
    Job { name: "nvfp4_dequantize_grouped", run: nvfp4_dequantize, equivalents: &[] },
    Job { name: "interleave_grouped", run: interleave, equivalents: &[] },
    Job { name: "join_shards_grouped", run: join_shards, equivalents: &[] },
];

/// Two members of 2048 elements.
const SHAPES: [[u64; 2]; 2] = [[32, 64], [16, 128]];
const ELEMENTS: u64 = 2048;
const WORDS: usize = ELEMENTS as usize;

/// What a kernel is told of members of these shapes, each with its starts, as a table.
fn table<G: Grouped>(device: &Device, shapes: [[u64; 2]; 2], starts: [[u64; 3]; 2]) -> MemberTable<'_> {
    let [first, second] = shapes.map(|[rows, columns]| G::blocks(rows, columns));
    let record = |i: usize| [i as u64, shapes[i][0], shapes[i][1], starts[i][0], starts[i][1], starts[i][2]];
    let entries = [&record(0)[..], &record(1), &[0, first]].concat();
    let words = device.upload::<u64>("table", &halves(&entries));
    // SAFETY: the memory lives as long as the job's `Device`; the jobs' buffers hold the members at these starts.
    unsafe { MemberTable::from_raw(DeviceView::from_raw(words.address, words.length, &OWNER), first + second) }
}

fn halves(words: &[u64]) -> Vec<u32> {
    words.iter().flat_map(|word| [*word as u32, (word >> 32) as u32]).collect()
}

/// The members' starts where each has so many scales.
fn starts(scales: u64) -> [[u64; 3]; 2] {
    [[0, 0, 0], [ELEMENTS, scales, scales]]
}

/// Runs `job` with a table of the members' addresses.
fn with_inputs<T: Pod, R>(device: &Device, job: impl FnOnce(DeviceTable<'_, T>) -> R) -> R {
    let input = device.upload::<T>("inputs", &words(WORDS * size_of::<T>() / 2));
    let second = input.address + ELEMENTS * size_of::<T>() as u64;
    let entries: Elements<u64> = device.upload("entries", &halves(&[input.address, ELEMENTS, second, ELEMENTS]));
    // SAFETY: the entries name live memory; nothing tracks owners here.
    job(unsafe { DeviceTable::from_raw(entries.view(), &[]) })
}

macro_rules! mxfp8_cast {
    ($device:ident, $inputs:ident, $kernel:ident, $args:ident) => {{
        let (mut data, mut scales) = ($device.upload("data", &[0; WORDS / 2]), $device.upload("scales", &[0; 48]));
        let table = table::<$kernel<bf16, e4m3>>($device, SHAPES, starts(64));
        $device.launch::<$kernel<bf16, e4m3>>($args { inputs: $inputs, table, data: data.view_mut(), scales: scales.view_mut() })?;
        [$device.download(&data), $device.download(&scales)].concat()
    }};
}

fn mxfp8_cast(device: &Device) -> Result<Vec<u32>, Outcome> {
    with_inputs::<bf16, _>(device, |inputs| {
        let rows = mxfp8_cast!(device, inputs, Mxfp8CastRowsGrouped, Mxfp8CastRowsGroupedArgs);
        let ragged_rows = mxfp8_cast!(device, inputs, Mxfp8CastRaggedRowsGrouped, Mxfp8CastRaggedRowsGroupedArgs);
        let columns = mxfp8_cast!(device, inputs, Mxfp8CastColumnsGrouped, Mxfp8CastColumnsGroupedArgs);
        let ragged_columns = mxfp8_cast!(device, inputs, Mxfp8CastRaggedColumnsGrouped, Mxfp8CastRaggedColumnsGroupedArgs);
        Ok([rows, ragged_rows, columns, ragged_columns].concat())
    })
}

fn mxfp8_cast_both(device: &Device) -> Result<Vec<u32>, Outcome> {
    with_inputs::<bf16, _>(device, |inputs| {
        let (mut row_data, mut row_scales) = (device.upload("row_data", &[0; WORDS / 2]), device.upload("row_scales", &[0; 32]));
        let (mut data, mut scales) = (device.upload("column_data", &[0; WORDS / 2]), device.upload("column_scales", &[0; 48]));
        let table = table::<Mxfp8CastBothGrouped<bf16, e4m3>>(device, SHAPES, starts(64));
        device.launch::<Mxfp8CastBothGrouped<bf16, e4m3>>(Mxfp8CastBothGroupedArgs {
            inputs,
            table,
            rows: CodesArgument { data: row_data.view_mut(), scales: row_scales.view_mut() },
            columns: CodesArgument { data: data.view_mut(), scales: scales.view_mut() },
        })?;
        Ok([device.download(&row_data), device.download(&row_scales), device.download(&data), device.download(&scales)].concat())
    })
}

macro_rules! mxfp8_dequantize {
    ($device:ident, $kernel:ident, $args:ident) => {{
        let (data, scales) = ($device.upload("data", &words(WORDS / 2)), $device.upload("scales", &words(48)));
        let mut output = $device.upload("output", &[0; WORDS]);
        let table = table::<$kernel<e4m3, bf16>>($device, SHAPES, starts(64));
        $device.launch::<$kernel<e4m3, bf16>>($args { data: data.view(), scales: scales.view(), table, output: output.view_mut() })?;
        $device.download(&output)
    }};
}

fn mxfp8_dequantize(device: &Device) -> Result<Vec<u32>, Outcome> {
    let rows = mxfp8_dequantize!(device, Mxfp8DequantizeRowsGrouped, Mxfp8DequantizeRowsGroupedArgs);
    let ragged_rows = mxfp8_dequantize!(device, Mxfp8DequantizeRaggedRowsGrouped, Mxfp8DequantizeRaggedRowsGroupedArgs);
    let columns = mxfp8_dequantize!(device, Mxfp8DequantizeColumnsGrouped, Mxfp8DequantizeColumnsGroupedArgs);
    let ragged_columns = mxfp8_dequantize!(device, Mxfp8DequantizeRaggedColumnsGrouped, Mxfp8DequantizeRaggedColumnsGroupedArgs);
    Ok([rows, ragged_rows, columns, ragged_columns].concat())
}

fn fp8_cast(device: &Device) -> Result<Vec<u32>, Outcome> {
    with_inputs::<bf16, _>(device, |inputs| {
        let amaxes = device.upload("amaxes", &[3f32.to_bits(), 5f32.to_bits()]);
        let (mut data, mut scale_inverses) = (device.upload("data", &[0; WORDS / 2]), device.upload("scale_inverses", &[0; 2]));
        device.launch::<Fp8CastGrouped<bf16, e4m3>>(Fp8CastGroupedArgs {
            inputs,
            table: table::<Fp8CastGrouped<bf16, e4m3>>(device, SHAPES, starts(0)),
            amaxes: amaxes.view(),
            data: data.view_mut(),
            scale_inverses: scale_inverses.view_mut(),
            options: ScaleOptions::default(),
        })?;
        Ok([device.download(&data), device.download(&scale_inverses)].concat())
    })
}

fn fp8_dequantize(device: &Device) -> Result<Vec<u32>, Outcome> {
    let scale_inverses = device.upload("scale_inverses", &[0.5_f32.to_bits(), 0.25_f32.to_bits()]);
    let (data, mut output) = (device.upload("data", &words(WORDS / 2)), device.upload("output", &[0; WORDS]));
    device.launch::<Fp8DequantizeGrouped<e4m3, bf16>>(Fp8DequantizeGroupedArgs {
        data: data.view(),
        scale_inverses: scale_inverses.view(),
        table: table::<Fp8DequantizeGrouped<e4m3, bf16>>(device, SHAPES, starts(0)),
        output: output.view_mut(),
    })?;
    Ok(device.download(&output))
}

macro_rules! nvfp4_cast {
    ($function:ident: $kernel:ident<$t:ty>, $args:ident) => {
        fn $function(device: &Device) -> Result<Vec<u32>, Outcome> {
            with_inputs::<$t, _>(device, |inputs| {
                let amaxes = device.upload("amaxes", &[3f32.to_bits(), 5f32.to_bits()]);
                let (mut data, mut scales) = (device.upload("data", &[0; WORDS / 4]), device.upload("scales", &[0; 64]));
                let table = table::<$kernel<$t>>(device, SHAPES, starts(128));
                device.launch::<$kernel<$t>>($args {
                    inputs,
                    table,
                    amaxes: amaxes.view(),
                    data: data.view_mut(),
                    scales: scales.view_mut(),
                })?;
                Ok([device.download(&data), device.download(&scales)].concat())
            })
        }
    };
}
nvfp4_cast! { nvfp4_cast_rows: Nvfp4CastRowsGrouped<bf16>, Nvfp4CastRowsGroupedArgs }
// The second member has two tiles of f32, which one CUDA block does.
nvfp4_cast! { nvfp4_cast_columns: Nvfp4CastColumnsGrouped<f32>, Nvfp4CastColumnsGroupedArgs }

fn nvfp4_cast_both(device: &Device) -> Result<Vec<u32>, Outcome> {
    with_inputs::<f32, _>(device, |inputs| {
        let amaxes = device.upload("amaxes", &[3f32.to_bits(), 5f32.to_bits()]);
        let (mut row_data, mut row_scales) = (device.upload("row_data", &[0; WORDS / 4]), device.upload("row_scales", &[0; 64]));
        let (mut data, mut scales) = (device.upload("column_data", &[0; WORDS / 4]), device.upload("column_scales", &[0; 64]));
        let table = table::<Nvfp4CastBothGrouped<f32>>(device, SHAPES, starts(128));
        device.launch::<Nvfp4CastBothGrouped<f32>>(Nvfp4CastBothGroupedArgs {
            inputs,
            table,
            amaxes: amaxes.view(),
            rows: CodesArgument { data: row_data.view_mut(), scales: row_scales.view_mut() },
            columns: CodesArgument { data: data.view_mut(), scales: scales.view_mut() },
        })?;
        Ok([device.download(&row_data), device.download(&row_scales), device.download(&data), device.download(&scales)].concat())
    })
}

macro_rules! nvfp4_dequantize {
    ($device:ident, $kernel:ident, $args:ident) => {{
        let amaxes = $device.upload("amaxes", &[3f32.to_bits(), 5f32.to_bits()]);
        let (data, scales) = ($device.upload("data", &words(WORDS / 4)), $device.upload("scales", &words(64)));
        let mut output = $device.upload("output", &[0; WORDS]);
        let table = table::<$kernel<bf16>>($device, SHAPES, starts(128));
        $device.launch::<$kernel<bf16>>($args {
            data: data.view(),
            scales: scales.view(),
            amaxes: amaxes.view(),
            table,
            output: output.view_mut(),
        })?;
        $device.download(&output)
    }};
}

fn nvfp4_dequantize(device: &Device) -> Result<Vec<u32>, Outcome> {
    let rows = nvfp4_dequantize!(device, Nvfp4DequantizeRowsGrouped, Nvfp4DequantizeRowsGroupedArgs);
    Ok([rows, nvfp4_dequantize!(device, Nvfp4DequantizeColumnsGrouped, Nvfp4DequantizeColumnsGroupedArgs)].concat())
}

macro_rules! there_and_back {
    ($device:ident, $there:ident, $there_args:ident, $back:ident, $back_args:ident) => {{
        // 130 by 6 in four tiles, 20 by 4 in one.
        let (shapes, starts) = ([[130, 6], [20, 4]], [[0, 0, 0], [784, 2048, 0]]);
        let compact = $device.upload::<ue8m0>("compact", &words(216));
        let (mut there, mut back) = ($device.upload("interleaved", &[0; 640]), $device.upload("back", &[0; 216]));
        let table_there = table::<$there<ue8m0>>($device, shapes, starts);
        $device.launch::<$there<ue8m0>>($there_args { compact: compact.view(), interleaved: there.view_mut(), table: table_there })?;
        let table_back = table::<$back<ue8m0>>($device, shapes, starts);
        $device.launch::<$back<ue8m0>>($back_args { interleaved: there.view(), compact: back.view_mut(), table: table_back })?;
        [$device.download(&there), $device.download(&back)].concat()
    }};
}

fn interleave(device: &Device) -> Result<Vec<u32>, Outcome> {
    let rows =
        there_and_back!(device, InterleaveRowsGrouped, InterleaveRowsGroupedArgs, DeinterleaveRowsGrouped, DeinterleaveRowsGroupedArgs);
    let columns = there_and_back!(
        device,
        InterleaveColumnsGrouped,
        InterleaveColumnsGroupedArgs,
        DeinterleaveColumnsGrouped,
        DeinterleaveColumnsGroupedArgs
    );
    Ok([rows, columns].concat())
}

/// Three shards of two rows of 16 and one of 20, of which the whole leaves out 4.
fn join_shards(device: &Device) -> Result<Vec<u32>, Outcome> {
    type Joining = JoinShardsGrouped<e2m1x2>;
    let (gathered, mut whole) = (device.upload::<e2m1x2>("gathered", &words(48)), device.upload("whole", &[0; 40]));
    let table = table::<Joining>(device, [[2, 48], [1, 56]], [[0, 0, 16], [32, 96, 20]]);
    let (shards, shard_stride) = (3, 64);
    device.launch::<Joining>(JoinShardsGroupedArgs { gathered: gathered.view(), whole: whole.view_mut(), table, shards, shard_stride })?;
    Ok(device.download(&whole))
}
