//! Mutants of attention on any GPU.

use oxtile_emulator::mutation::Outcome;
use oxtile_kernels::attention::{
    AttentionForwardPortable, AttentionForwardPortableArgs, AttentionForwardPortableGeneral, AttentionForwardPortableGeneralArgs, FAR,
    Heads, InputsArgument, LogSumExpArgument, MaxLogitArgument, PortableGeneralResultsArgument, PortableResultsArgument, Scores,
    SequencesArgument, SizedInputsArgument, Window, Workspace,
};
use oxtile_tile::num::bf16;

use super::Job;
use super::device::{Device, Elements, words};

pub const JOBS: &[Job] = &[
    Job { name: "attention_forward_portable", run: attention_forward_portable, equivalents: &[] },
    Job { name: "attention_forward_portable_general", run: attention_forward_portable_general, equivalents: &[] },
];

/// Queries and keys of two sequences: three steps, and a mask that cuts some.
const LENGTHS: [[u32; 2]; 2] = [[5, 140], [9, 60]];
const SIZE: u32 = 64;
const ONE_HEAD: Heads = Heads { batches: 2, heads: 1, group: 1, step: 0 };
const CAUSAL: Window = Window { left: FAR, right: 0, top_left: false };

/// The sequences of [`LENGTHS`], one after the other.
fn sequences<'a>(query_ends: &'a Elements<u32>, key_ends: &'a Elements<u32>) -> SequencesArgument<'a> {
    let [query_rows, key_rows] = [0, 1].map(|i| LENGTHS[0][i] + LENGTHS[1][i]);
    let (query_ends, key_ends) = (query_ends.view(), key_ends.view());
    let (query_offsets, key_offsets) = (query_ends, key_ends);
    SequencesArgument { query_ends, key_ends, query_offsets, key_offsets, diagonals: None, query_rows, key_rows, padded: false }
}

fn attention_forward_portable(device: &Device) -> Result<Vec<u32>, Outcome> {
    let [queries, keys] = [0, 1].map(|i| LENGTHS[0][i] + LENGTHS[1][i]);
    // Below 1, so that every weight counts.
    let small = |rows: u32| words((rows * SIZE) as usize / 2).into_iter().map(|word| word & 0x3e7f_3e7f).collect::<Vec<_>>();
    let [q, mut out] = ["q", "out"].map(|name| device.upload::<bf16>(name, &small(queries)));
    let [k, v] = ["k", "v"].map(|name| device.upload::<bf16>(name, &small(keys)));
    let mut log_sum_exp = device.upload::<f32>("log_sum_exp", &vec![0; queries as usize]);
    let [query_ends, key_ends] = [0, 1].map(|i| device.upload::<u32>("ends", &[0, LENGTHS[0][i], LENGTHS[0][i] + LENGTHS[1][i]]));
    device.launch::<AttentionForwardPortable<bf16, 64>>(AttentionForwardPortableArgs {
        inputs: InputsArgument { q: q.view(), k: k.view(), v: v.view() },
        results: PortableResultsArgument {
            out: out.view_mut(),
            log_sum_exp: LogSumExpArgument { values: log_sum_exp.view_mut(), rows: 0 },
        },
        sequences: sequences(&query_ends, &key_ends),
        heads: ONE_HEAD,
        row_tiles: 1,
        window: CAUSAL,
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
        inputs: SizedInputsArgument { q: q.view(), k: k.view(), v: v.view(), size: SIZE, value_size: SIZE, sink: Some(sink.view()) },
        results: PortableGeneralResultsArgument {
            out: (!merged).then(|| out.view_mut()),
            running: merged.then(|| running.view_mut()),
            log_sum_exp: LogSumExpArgument { values: log_sum_exp.view_mut(), rows: 0 },
            max_logit: Some(MaxLogitArgument { values: max_logit.view_mut(), workspace: workspace.view_mut() }),
        },
        sequences: sequences(&query_ends, &key_ends),
        heads: ONE_HEAD,
        row_tiles: 1,
        window: CAUSAL,
        scores: Scores { scale: 0.18, cap_limit: 0.0, cap_factor: 0.0 },
    })?;
    let statistics = [device.download(&log_sum_exp), device.download(&max_logit), device.download(&workspace)].concat();
    Ok([device.download(&out), device.download(&running), statistics].concat())
}
