//! Mutants of attention whose keys are divided among blocks.

use oxtile_emulator::mutation::{Change, Equivalent, Mutation, Outcome};
use oxtile_kernels::attention::{
    AttentionCombine, AttentionCombineArgs, AttentionForwardSplit, AttentionForwardSplitArgs, CombinedArgument, FAR, Narrow, PartsArgument,
    PartsMutArgument, Shape, SplitInputsArgument,
};
use oxtile_tile::launch::DeviceTensorMap;
use oxtile_tile::num::bf16;

use super::attention::{SIZE, map, small};
use super::device::Device;
use super::{Job, is_at_line};

pub const JOBS: &[Job] = &[Job { name: "attention_forward_split", run: attend, equivalents: EQUIVALENTS }];

const EQUIVALENTS: &[Equivalent<'static>] = &[
    Equivalent {
        matches: |mutation| mutation.site.operation == "fence_mbarrier_init",
        reason: "of the three rings' fences, one thread's, the last covers the barriers of all; skipping that one is reported",
    },
    Equivalent { matches: waits_for_queries_to_be_free, reason: "a block has one tile of queries: no other had their stage before" },
];

fn waits_for_queries_to_be_free(mutation: &Mutation) -> bool {
    let here = is_at_line(mutation, include_str!("../../../gpu/src/attention/rings.rs"), "self.queries.acquire_with(G::PARTS");
    here && mutation.site.operation == "mbarrier_wait_parity" && mutation.change == Change::Skip
}

/// Two parts of three blocks of keys each, one more than there are stages.
const KEYS: u64 = 700;
const QUERIES: u64 = 70;
const PARTS: u64 = 2;

fn attend(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (q, mut out) = (device.upload::<bf16>("q", &small(QUERIES)), device.upload::<bf16>("out", &small(QUERIES)));
    let [k, v] = ["k", "v"].map(|name| device.upload::<bf16>(name, &small(KEYS)));
    let rows = vec![0; (PARTS * QUERIES) as usize];
    let mut sums = device.upload::<f32>("sums", &rows.repeat(SIZE as usize));
    let (mut logs, mut log_sum_exp) = (device.upload::<f32>("logs", &rows), device.upload::<f32>("log_sum_exp", &rows[..QUERIES as usize]));
    let maps = [map(device, &q, QUERIES, 64), map(device, &k, KEYS, 128), map(device, &v, KEYS, 128)];
    let [q_map, k_map, v_map] = maps.each_ref().map(|map| map.view().access("map"));
    // SAFETY: the maps were encoded for these tensors and boxes.
    let args = unsafe {
        AttentionForwardSplitArgs::<bf16, 64, 64, 128, Narrow> {
            inputs: SplitInputsArgument {
                q: DeviceTensorMap::from_raw(q_map, q.view().access("tensor")),
                k: DeviceTensorMap::from_raw(k_map, k.view().access("tensor")),
                v: DeviceTensorMap::from_raw(v_map, v.view().access("tensor")),
            },
            parts: PartsMutArgument { sums: sums.view_mut(), logs: logs.view_mut(), count: PARTS as u32, size: SIZE as u32 },
            shape: Shape { batches: 1, heads: 1, group: 1, queries: QUERIES as u32, keys: KEYS as u32 },
            diagonal: FAR,
            scale: 0.18,
            marker: std::marker::PhantomData,
        }
    };
    device.launch::<AttentionForwardSplit<bf16, 64, 64, 128, Narrow>>(args)?;
    let args = AttentionCombineArgs {
        parts: PartsArgument { sums: sums.view(), logs: logs.view(), count: PARTS as u32, size: SIZE as u32 },
        result: CombinedArgument {
            out: out.view_mut(),
            log_sum_exp: log_sum_exp.view_mut(),
            heads: 1,
            rows: QUERIES as u32,
            batch_stride: 0,
            head_stride: 0,
            row_stride: SIZE,
        },
    };
    device.launch::<AttentionCombine<bf16>>(args)?;
    Ok([device.download(&out), device.download(&log_sum_exp)].concat())
}
