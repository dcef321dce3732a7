//! Mutants of attention's general kernel.

use oxtile_emulator::mutation::Outcome;
use oxtile_emulator::tensor_map::{self, Swizzle, TensorMap};
use oxtile_kernels::attention::{AttentionForwardGeneral, AttentionForwardGeneralArgs, MAP_ROWS, Pair, Wide, Workspace};
use oxtile_tile::launch::{DeviceTensorMap, DeviceTensorMapMut, Signature};
use oxtile_tile::num::bf16;

use super::Job;
use super::attention::EQUIVALENTS;
use super::device::{Device, Elements, words};

pub const JOBS: &[Job] = &[
    Job { name: "attention_forward_general", run: in_registers, equivalents: EQUIVALENTS },
    Job { name: "attention_forward_general, in place", run: in_place, equivalents: EQUIVALENTS },
];

/// Rows of the tensors of queries and of keys.
const ROWS: [u64; 2] = [210, 300];

/// A map of the sequences of a tensor of one head.
pub(super) fn map(device: &Device, tensor: &Elements<bf16>, size: u64, box_rows: u32) -> Elements<u64> {
    let row = 2 * size;
    let map = TensorMap {
        address: tensor.address,
        element_bytes: 2,
        dimensions: vec![size, u64::from(MAP_ROWS), 1, 0x7fff_0000, 0x7fff_0000],
        strides: vec![row, row, row, (1 << 35) - row],
        box_dimensions: vec![64, box_rows, 1, 1, 1],
        swizzle: Swizzle::Bytes128,
    };
    let bytes = tensor_map::encode(&map).expect("a map within the limits");
    let words: Vec<u32> = bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
    device.upload("map", &words)
}

macro_rules! attend {
    ($device:ident, $size:literal, $team:ty, $merged:literal) => {{
        let device = $device;
        let small = |rows: u64| words((rows * $size) as usize / 2).into_iter().map(|word| word & 0x3e7f_3e7f).collect::<Vec<_>>();
        let [q, out] = ["q", "out"].map(|name| device.upload::<bf16>(name, &small(ROWS[0])));
        let [k, v] = ["k", "v"].map(|name| device.upload::<bf16>(name, &small(ROWS[1])));
        let running = vec![0; if $merged { (ROWS[0] * $size) as usize } else { 0 }];
        let mut running = device.upload::<f32>("running", &running);
        let mut log_sum_exp = device.upload::<f32>("log_sum_exp", &vec![0xff80_0000; ROWS[0] as usize]);
        let mut max_logit = device.upload::<f32>("max_logit", &[0]);
        let sink = device.upload::<f32>("sink", &[0]);
        // Two sequences, of which the first has more blocks of keys than there are stages, and padding behind each.
        let arrays = [[0, 140, 150], [0, 290, 296], [0, 141, 200], [0, 292, 300]].map(|array| device.upload::<u32>("sequences", &array));
        let mut workspace = device.upload::<u32>("workspace", &vec![0; Workspace::words(1) as usize]);
        let maps = [(&q, 64), (&k, 128), (&v, 128), (&out, 64)].map(|(tensor, rows)| map(device, tensor, $size, rows));
        let [q_map, k_map, v_map, out_map] = maps.each_ref().map(|map| map.view().access("map"));
        type Attend = AttentionForwardGeneral<bf16, $size, $size, 128, $team>;
        // SAFETY: the maps were encoded for these tensors and boxes.
        let args: <Attend as Signature>::Args<'_> = unsafe {
            AttentionForwardGeneralArgs {
                q: DeviceTensorMap::from_raw(q_map, q.view().access("tensor")),
                k: DeviceTensorMap::from_raw(k_map, k.view().access("tensor")),
                v: DeviceTensorMap::from_raw(v_map, v.view().access("tensor")),
                out: DeviceTensorMapMut::from_raw(out_map, out.view().access("tensor")),
                running: running.view_mut(),
                log_sum_exp: log_sum_exp.view_mut(),
                max_logit: max_logit.view_mut(),
                sink: sink.view(),
                query_ends: arrays[0].view(),
                key_ends: arrays[1].view(),
                query_offsets: arrays[2].view(),
                key_offsets: arrays[3].view(),
                workspace: workspace.view_mut(),
                batches: 2,
                heads: 1,
                group: 1,
                sequence_heads: 0,
                query_rows: ROWS[0] as u32,
                key_rows: ROWS[1] as u32,
                section_keys: 1000,
                row_stride: $size,
                value_size: $size,
                statistics_batch: 0,
                statistics_head: ROWS[0],
                packed: 1,
                padded: 1,
                left: 200,
                right: 0,
                top_left: 0,
                scale: 0.18,
                cap_limit: 0.0,
                cap_factor: 0.0,
                marker: std::marker::PhantomData,
            }
        };
        device.launch::<Attend>(args)?;
        let statistics = [device.download(&log_sum_exp), device.download(&max_logit), device.download(&workspace)].concat();
        Ok([device.download(&out), device.download(&running), statistics].concat())
    }};
}

fn in_registers(device: &Device) -> Result<Vec<u32>, Outcome> {
    let rounded: Result<Vec<u32>, Outcome> = attend!(device, 64, Pair, false);
    let merged: Result<Vec<u32>, Outcome> = attend!(device, 64, Pair, true);
    Ok([rounded?, merged?].concat())
}

fn in_place(device: &Device) -> Result<Vec<u32>, Outcome> {
    attend!(device, 128, Wide, false)
}
