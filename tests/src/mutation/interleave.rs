//! Mutants of the layouts of scales and shards.

use oxtile_emulator::mutation::Outcome;
use oxtile_kernels::interleave::*;
use oxtile_kernels::shards::{JoinShards, JoinShardsArgs};
use oxtile_tile::num::ue8m0;

use super::Job;
use super::device::{Device, words};

pub const JOBS: &[Job] = &[
    Job { name: "interleave_rows", run: interleave_rows, equivalents: &[] },
    Job { name: "join_shards", run: join_shards, equivalents: &[] },
    Job { name: "interleave_columns", run: interleave_columns, equivalents: &[] },
];

/// Three shards of two rows, padded.
fn join_shards(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (gathered, mut whole) = (device.upload::<ue8m0>("gathered", &words(24)), device.upload("whole", &[0; 32]));
    let (shards, width, stride) = (3, 16, 64);
    device.launch::<JoinShards<ue8m0>>(JoinShardsArgs { gathered: gathered.view(), whole: whole.view_mut(), shards, width, stride })?;
    Ok(device.download(&whole))
}

/// There and back, one tile and parts of others.
fn interleave_rows(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (outer, blocks) = (130, 6);
    let compact = device.upload::<ue8m0>("compact", &words(195));
    let (mut there, mut back) = (device.upload("interleaved", &[0; 512]), device.upload("back", &[0; 195]));
    device.launch::<InterleaveRows<ue8m0>>(InterleaveRowsArgs { compact: compact.view(), interleaved: there.view_mut(), outer, blocks })?;
    device.launch::<DeinterleaveRows<ue8m0>>(DeinterleaveRowsArgs {
        interleaved: there.view(),
        compact: back.view_mut(),
        outer,
        blocks,
    })?;
    Ok([device.download(&there), device.download(&back)].concat())
}

/// There and back, four tiles below each other and parts of others.
fn interleave_columns(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (outer, blocks) = (528, 6);
    let compact = device.upload::<ue8m0>("compact", &words(792));
    let (mut there, mut back) = (device.upload("interleaved", &[0; 1280]), device.upload("back", &[0; 792]));
    device.launch::<InterleaveColumns<ue8m0>>(InterleaveColumnsArgs {
        compact: compact.view(),
        interleaved: there.view_mut(),
        outer,
        blocks,
    })?;
    device.launch::<DeinterleaveColumns<ue8m0>>(DeinterleaveColumnsArgs {
        interleaved: there.view(),
        compact: back.view_mut(),
        outer,
        blocks,
    })?;
    Ok([device.download(&there), device.download(&back)].concat())
}
