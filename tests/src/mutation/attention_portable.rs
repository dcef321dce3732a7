//! Mutants of attention on any GPU.

use oxtile_emulator::mutation::Outcome;
use oxtile_kernels::attention::{
    AttentionForwardPortable, AttentionForwardPortableArgs, AttentionForwardPortableGeneral, AttentionForwardPortableGeneralArgs, FAR,
    Workspace,
};
use oxtile_tile::num::bf16;

use super::Job;
use super::device::{Device, words};

pub const JOBS: &[Job] = &[
    Job { name: "attention_forward_portable", run: attention_forward_portable, equivalents: &[] },
    Job { name: "attention_forward_portable_general", run: attention_forward_portable_general, equivalents: &[] },
];

/// Queries and keys of two sequences: three steps, and a mask that cuts some.
const LENGTHS: [[u32; 2]; 2] = [[5, 140], [9, 60]];
const SIZE: u32 = 64;

fn attention_forward_portable(device: &Device) -> Result<Vec<u32>, Outcome> {
    let [queries, keys] = [0, 1].map(|i| LENGTHS[0][i] + LENGTHS[1][i]);
    // Below 1, so that every weight counts.
    let small = |rows: u32| words((rows * SIZE) as usize / 2).into_iter().map(|word| word & 0x3e7f_3e7f).collect::<Vec<_>>();
    let [q, mut out] = ["q", "out"].map(|name| device.upload::<bf16>(name, &small(queries)));
    let [k, v] = ["k", "v"].map(|name| device.upload::<bf16>(name, &small(keys)));
    let mut log_sum_exp = device.upload::<f32>("log_sum_exp", &vec![0; queries as usize]);
    let [query_ends, key_ends] = [0, 1].map(|i| device.upload::<u32>("ends", &[0, LENGTHS[0][i], LENGTHS[0][i] + LENGTHS[1][i]]));
    device.launch::<AttentionForwardPortable<bf16, 64>>(AttentionForwardPortableArgs {
        q: q.view(),
        k: k.view(),
        v: v.view(),
        out: out.view_mut(),
        log_sum_exp: log_sum_exp.view_mut(),
        query_ends: query_ends.view(),
        key_ends: key_ends.view(),
        query_offsets: query_ends.view(),
        key_offsets: key_ends.view(),
        query_rows: queries,
        key_rows: keys,
        padded: 0,
        batches: 2,
        heads: 1,
        group: 1,
        head_step: 0,
        row_tiles: 1,
        log_rows: 0,
        left: FAR,
        right: 0,
        top_left: 0,
        scale: 0.18,
    })?;
    Ok([device.download(&out), device.download(&log_sum_exp)].concat())
}

/// Heads of a panel and a part of another, whose result is rounded, then merged.
fn attention_forward_portable_general(device: &Device) -> Result<Vec<u32>, Outcome> {
    Ok([attend(device, false)?, attend(device, true)?].concat())
}

fn attend(device: &Device, merged: bool) -> Result<Vec<u32>, Outcome> {
    const SIZE: u32 = 72;
    let [queries, keys] = [0, 1].map(|i| LENGTHS[0][i] + LENGTHS[1][i]);
    let small = |rows: u32| words((rows * SIZE) as usize / 2).into_iter().map(|word| word & 0x3e7f_3e7f).collect::<Vec<_>>();
    let [q, mut out] = ["q", "out"].map(|name| device.upload::<bf16>(name, &small(queries)));
    let [k, v] = ["k", "v"].map(|name| device.upload::<bf16>(name, &small(keys)));
    let mut running = device.upload::<f32>("running", &vec![0; if merged { (queries * SIZE) as usize } else { 0 }]);
    let mut log_sum_exp = device.upload::<f32>("log_sum_exp", &vec![0xff80_0000; queries as usize]);
    let (mut max_logit, sink) = (device.upload::<f32>("max_logit", &[0]), device.upload::<f32>("sink", &[0]));
    let mut workspace = device.upload::<u32>("workspace", &vec![0; Workspace::words(1) as usize]);
    let [query_ends, key_ends] = [0, 1].map(|i| device.upload::<u32>("ends", &[0, LENGTHS[0][i], LENGTHS[0][i] + LENGTHS[1][i]]));
    device.launch::<AttentionForwardPortableGeneral<bf16, 2, 64>>(AttentionForwardPortableGeneralArgs {
        q: q.view(),
        k: k.view(),
        v: v.view(),
        out: out.view_mut(),
        running: running.view_mut(),
        log_sum_exp: log_sum_exp.view_mut(),
        max_logit: max_logit.view_mut(),
        sink: sink.view(),
        query_ends: query_ends.view(),
        key_ends: key_ends.view(),
        query_offsets: query_ends.view(),
        key_offsets: key_ends.view(),
        workspace: workspace.view_mut(),
        query_rows: queries,
        key_rows: keys,
        padded: 0,
        batches: 2,
        heads: 1,
        group: 1,
        head_step: 0,
        row_tiles: 1,
        log_rows: 0,
        size: SIZE,
        value_size: SIZE,
        left: FAR,
        right: 0,
        top_left: 0,
        scale: 0.18,
        cap_limit: 0.0,
        cap_factor: 0.0,
    })?;
    let statistics = [device.download(&log_sum_exp), device.download(&max_logit), device.download(&workspace)].concat();
    Ok([device.download(&out), device.download(&running), statistics].concat())
}
