//! Mutants of the backward pass of attention on any GPU.

use oxtile_emulator::mutation::Outcome;
use oxtile_kernels::attention::{
    AttentionBackwardDeltas, AttentionBackwardDeltasArgs, AttentionBackwardPortable, AttentionBackwardPortableArgs, AttentionBackwardSink,
    AttentionBackwardSinkArgs, FAR, Heads, PortableTargetArgument, PortableTensorsArgument, QueryStatisticsArgument, ResultRowsArgument,
    Scores, SequencesArgument, Window,
};
use oxtile_tile::num::bf16;

use super::Job;
use super::device::{Device, words};

pub const JOBS: &[Job] = &[Job { name: "attention_backward_portable", run: attention_backward_portable, equivalents: &[] }];

/// Heads that share their keys: three steps from the keys' side, and with so many keys three from the queries'.
const HEADS: u32 = 3;
const QUERIES: u32 = 5;
const KEYS: u32 = 140;
const SIZE: u32 = 64;

fn attention_backward_portable(device: &Device) -> Result<Vec<u32>, Outcome> {
    // Below 1, so that every weight counts.
    let small = |rows: u32| words((rows * SIZE) as usize / 2).into_iter().map(|word| word & 0x3e7f_3e7f).collect::<Vec<_>>();
    let [q, out, grad_out, mut grad_q] =
        ["q", "out", "grad_out", "grad_q"].map(|name| device.upload::<bf16>(name, &small(HEADS * QUERIES)));
    let [k, v, mut grad_k, mut grad_v] = ["k", "v", "grad_k", "grad_v"].map(|name| device.upload::<bf16>(name, &small(KEYS)));
    let log_sum_exp = device.upload::<f32>("log_sum_exp", &vec![5_f32.to_bits(); (HEADS * QUERIES) as usize]);
    let mut deltas = device.upload::<f32>("deltas", &vec![0; (HEADS * QUERIES) as usize]);
    let sink = device.upload::<f32>("sink", &[4_f32.to_bits(); HEADS as usize]);
    let mut grad_sink = device.upload::<f32>("grad_sink", &[0; HEADS as usize]);
    let [query_ends, key_ends] = [QUERIES, KEYS].map(|end| device.upload::<u32>("ends", &[0, end]));
    device.launch::<AttentionBackwardDeltas<bf16>>(AttentionBackwardDeltasArgs {
        result: ResultRowsArgument { out: out.view(), grad_out: grad_out.view(), rows: QUERIES, heads: HEADS, size: SIZE, lanes: SIZE / 8 },
        deltas: deltas.view_mut(),
    })?;
    macro_rules! sequences {
        () => {
            SequencesArgument {
                query_ends: query_ends.view(),
                key_ends: key_ends.view(),
                query_offsets: query_ends.view(),
                key_offsets: key_ends.view(),
                diagonals: None,
                query_rows: QUERIES,
                key_rows: KEYS,
                padded: false,
            }
        };
    }
    macro_rules! statistics {
        () => {
            QueryStatisticsArgument { log_sum_exp: log_sum_exp.view(), deltas: deltas.view(), rows: QUERIES }
        };
    }
    macro_rules! arguments {
        ($grad:expr, $grad_v:expr, $rows:expr) => {
            AttentionBackwardPortableArgs {
                tensors: PortableTensorsArgument {
                    q: q.view(),
                    k: k.view(),
                    v: v.view(),
                    grad_out: grad_out.view(),
                    size: SIZE,
                    value_size: SIZE,
                },
                statistics: statistics!(),
                target: PortableTargetArgument {
                    grad: Some($grad.view_mut()),
                    grad_v: $grad_v,
                    grad_sum: None,
                    grad_v_sum: None,
                    scale: 0.125,
                    row_tiles: u32::div_ceil($rows, 64),
                },
                sequences: sequences!(),
                heads: Heads { batches: 1, heads: HEADS, group: HEADS, step: 0 },
                window: Window { left: FAR, right: 0, top_left: false },
                scores: Scores { scale: 0.18, cap_limit: 0.0, cap_factor: 0.0 },
            }
        };
    }
    device.launch::<AttentionBackwardPortable<bf16, 1, 64, 1, true>>(arguments!(grad_k, Some(grad_v.view_mut()), KEYS))?;
    device.launch::<AttentionBackwardPortable<bf16, 1, 64, 1, false>>(arguments!(grad_q, None, QUERIES))?;
    device.launch::<AttentionBackwardSink>(AttentionBackwardSinkArgs {
        sink: sink.view(),
        grad_sink: grad_sink.view_mut(),
        statistics: statistics!(),
        sequences: sequences!(),
        batches: 1,
    })?;
    Ok([device.download(&grad_q), device.download(&grad_k), device.download(&grad_v), device.download(&grad_sink)].concat())
}
