//! Mutants of the backward pass of attention.

use oxtile_emulator::mutation::{Change, Equivalent, Mutation, Outcome};
use oxtile_kernels::attention::{
    AttentionBackward, AttentionBackwardAddKeys, AttentionBackwardAddKeysArgs, AttentionBackwardAddQueries,
    AttentionBackwardAddQueriesArgs, AttentionBackwardArgs, AttentionBackwardConvert, AttentionBackwardConvertArgs,
    AttentionBackwardPrepare, AttentionBackwardPrepareArgs, AttentionBackwardReduce, AttentionBackwardReduceArgs, BackwardTensorsArgument,
    BlockStatisticsArgument, DenseKeysArgument, DenseRows, FAR, KeyGradientsArgument, KeyHeads, KeyOrderArgument, KeyPartsArgument,
    KeySumsArgument, Mask, QuerySumsArgument, partial_elements,
};
use oxtile_tile::launch::{DeviceTensorMap, DeviceTensorMapMut};
use oxtile_tile::num::bf16;

use super::attention::{SIZE, map, small};
use super::device::Device;
use super::{Job, is_at_line};

pub const JOBS: &[Job] = &[
    Job { name: "attention_backward", run: attention_backward, equivalents: OF_THE_WALK },
    Job { name: "attention_backward_reduce", run: reduce, equivalents: &[] },
    Job { name: "attention_backward_add_queries", run: add_queries, equivalents: &[] },
];

/// What is equivalent in a warpgroup's walk over blocks of queries.
pub(super) const OF_THE_WALK: &[Equivalent<'static>] = &[
    Equivalent {
        matches: |mutation| mutation.site.operation == "wgmma_wait" && mutation.change == Change::CountDown,
        reason: "waits for one group more than needed: slower, never wrong",
    },
    Equivalent {
        matches: |mutation| is_skipped(mutation, "mbarrier_wait_parity", "stage.wait_again()"),
        reason: "waits once more for what has come: for ptxas, which would wait for products instead",
    },
    Equivalent {
        matches: |mutation| is_skipped(mutation, "wgmma_commit", "let dv_sum ="),
        reason: "dV's product joins the group of dQ's, which is waited for before either is used",
    },
];

fn is_skipped(mutation: &Mutation, operation: &str, words: &str) -> bool {
    let here = is_at_line(mutation, include_str!("../../../gpu/src/attention/backward_walk.rs"), words);
    here && mutation.site.operation == operation && mutation.change == Change::Skip
}

const BLOCK: u64 = 128;
/// Three tiles of keys for one CUDA block, of which the mask leaves three, two and one block of queries.
const QUERIES: u64 = 290;
const KEYS: u64 = 300;

fn attention_backward(device: &Device) -> Result<Vec<u32>, Outcome> {
    let [q, out, grad_out] = ["q", "out", "grad_out"].map(|name| device.upload::<bf16>(name, &small(QUERIES)));
    let [k, v] = ["k", "v"].map(|name| device.upload::<bf16>(name, &small(KEYS)));
    let [grad_k, grad_v] = ["grad_k", "grad_v"].map(|name| device.upload::<bf16>(name, &small(KEYS)));
    let grad_q = device.upload::<bf16>("grad_q", &small(QUERIES));
    let blocks = QUERIES.div_ceil(BLOCK);
    let rows = blocks * BLOCK;
    let [mut offsets, mut deltas] = ["offsets", "deltas"].map(|name| device.upload::<f32>(name, &vec![0; rows as usize]));
    let mut sums = device.upload::<f32>("sums", &vec![f32::NAN.to_bits(); (rows * SIZE) as usize]);
    let (mut turns, mut counter) = (device.upload::<u32>("turns", &vec![0; blocks as usize]), device.upload::<u32>("counter", &[0]));
    let log_sum_exp = device.upload::<f32>("log_sum_exp", &vec![3_f32.to_bits(); QUERIES as usize]);
    device.launch::<AttentionBackwardPrepare<bf16, 64>>(AttentionBackwardPrepareArgs {
        out: out.view(),
        grad_out: grad_out.view(),
        log_sum_exp: log_sum_exp.view(),
        statistics: BlockStatisticsArgument {
            offsets: offsets.view_mut(),
            deltas: deltas.view_mut(),
            blocks: blocks as u32,
            size: BLOCK as u32,
            rows: rows as u32,
        },
        heads: 1,
        row_heads: 1,
        rows: QUERIES as u32,
    })?;
    let maps =
        [map(device, &q, QUERIES, 128), map(device, &grad_out, QUERIES, 128), map(device, &k, KEYS, 128), map(device, &v, KEYS, 128)];
    let [q_map, grad_out_map, k_map, v_map] = maps.each_ref().map(|map| map.view().access("map"));
    let maps = [map(device, &grad_k, KEYS, 64), map(device, &grad_v, KEYS, 64), map(device, &grad_q, QUERIES, 128)];
    let [grad_k_map, grad_v_map, grad_q_map] = maps.each_ref().map(|map| map.view().access("map"));
    // SAFETY: the maps were encoded for these tensors and boxes.
    let problem = unsafe {
        DenseKeysArgument::<bf16, 64, 128, true> {
            tensors: BackwardTensorsArgument {
                q: DeviceTensorMap::from_raw(q_map, q.view().access("tensor")),
                grad_out: DeviceTensorMap::from_raw(grad_out_map, grad_out.view().access("tensor")),
                k: DeviceTensorMap::from_raw(k_map, k.view().access("tensor")),
                v: DeviceTensorMap::from_raw(v_map, v.view().access("tensor")),
                offsets: offsets.view(),
                deltas: deltas.view(),
            },
            sums: QuerySumsArgument { values: sums.view_mut(), turns: turns.view_mut(), blocks: blocks as u32 },
            gradients: Some(KeyGradientsArgument {
                k: DeviceTensorMapMut::from_raw(grad_k_map, grad_k.view().access("tensor")),
                v: DeviceTensorMapMut::from_raw(grad_v_map, grad_v.view().access("tensor")),
            }),
            partials: None,
            heads: KeyHeads { batches: 1, heads: 1, group: 1, splits: 1, step: 0 },
            mask: Mask { queries: QUERIES as u32, keys: KEYS as u32, first: -FAR, last: -20 },
            order: KeyOrderArgument { counter: counter.view_mut(), section: 1, ordered: true },
            scale: 0.18,
        }
    };
    device.launch::<AttentionBackward<bf16, 64, 128, 64, true>>(AttentionBackwardArgs { problem })?;
    let args = AttentionBackwardConvertArgs::<bf16, 64, 128, 64> {
        sums: QuerySumsArgument { values: sums.view_mut(), turns: turns.view_mut(), blocks: blocks as u32 },
        // SAFETY: as above.
        grad_q: unsafe { DeviceTensorMapMut::from_raw(grad_q_map, grad_q.view().access("tensor")) },
        heads: 1,
        scale: 0.125,
    };
    device.launch::<AttentionBackwardConvert<bf16, 64, 128, 64>>(args)?;
    Ok([device.download(&grad_q), device.download(&grad_k), device.download(&grad_v), device.download(&turns), device.download(&counter)]
        .concat())
}

/// Three parts of each tile of keys.
fn reduce(device: &Device) -> Result<Vec<u32>, Outcome> {
    const SPLITS: u32 = 3;
    let key_blocks = KEYS.div_ceil(128);
    let parts = u64::from(SPLITS) * key_blocks * partial_elements(SIZE);
    let parts: Vec<u32> = (0..parts).map(|i| (i as f32 * 0.37).sin().to_bits()).collect();
    let mut partials = device.upload::<f32>("partials", &parts);
    let [grad_k, grad_v] = ["grad_k", "grad_v"].map(|name| device.upload::<bf16>(name, &small(KEYS)));
    let maps = [map(device, &grad_k, KEYS, 64), map(device, &grad_v, KEYS, 64)];
    let [grad_k_map, grad_v_map] = maps.each_ref().map(|map| map.view().access("map"));
    // SAFETY: the maps were encoded for these tensors and boxes.
    let gradients = unsafe {
        KeyGradientsArgument {
            k: DeviceTensorMapMut::from_raw(grad_k_map, grad_k.view().access("tensor")),
            v: DeviceTensorMapMut::from_raw(grad_v_map, grad_v.view().access("tensor")),
        }
    };
    let [mut k_sum, mut v_sum] =
        ["k_sum", "v_sum"].map(|name| device.upload::<f32>(name, &vec![0.5_f32.to_bits(); (KEYS * SIZE) as usize]));
    macro_rules! parts {
        () => {
            KeyPartsArgument {
                values: partials.view_mut(),
                splits: SPLITS,
                heads: 1,
                key_blocks: key_blocks as u32,
                split_step: key_blocks as u32,
                head_step: SPLITS * key_blocks as u32,
            }
        };
    }
    device.launch::<AttentionBackwardReduce<bf16, 64>>(AttentionBackwardReduceArgs { parts: parts!(), gradients, heads: 1 })?;
    device.launch::<AttentionBackwardAddKeys<64>>(AttentionBackwardAddKeysArgs {
        parts: parts!(),
        sums: KeySumsArgument { k: k_sum.view_mut(), v: v_sum.view_mut(), size: SIZE as u32, value_size: SIZE as u32 },
        rows: DenseRows { batches: 1, heads: 1, rows: KEYS as u32, batch_heads: KEYS as u32, row_heads: 1 },
    })?;
    Ok([device.download(&grad_k), device.download(&grad_v), device.download(&k_sum), device.download(&v_sum)].concat())
}

/// Blocks of queries to which something was added, and one without; the last is not full.
fn add_queries(device: &Device) -> Result<Vec<u32>, Outcome> {
    let blocks = QUERIES.div_ceil(BLOCK);
    let values: Vec<u32> = (0..blocks * BLOCK * SIZE).map(|i| (i as f32 * 0.37).sin().to_bits()).collect();
    let (mut values, mut turns) = (device.upload::<f32>("sums", &values), device.upload::<u32>("turns", &[2, 0, 1]));
    let mut grad_q = device.upload::<f32>("grad_q", &vec![0.5_f32.to_bits(); (QUERIES * SIZE) as usize]);
    device.launch::<AttentionBackwardAddQueries<64, 128, 64>>(AttentionBackwardAddQueriesArgs {
        sums: QuerySumsArgument { values: values.view_mut(), turns: turns.view_mut(), blocks: blocks as u32 },
        grad_q: grad_q.view_mut(),
        rows: DenseRows { batches: 1, heads: 1, rows: QUERIES as u32, batch_heads: QUERIES as u32, row_heads: 1 },
        scale: 0.125,
    })?;
    Ok([device.download(&grad_q), device.download(&turns)].concat())
}
