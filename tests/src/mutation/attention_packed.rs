//! Mutants of attention's kernel of packed sequences.

use oxtile_emulator::mutation::Outcome;
use oxtile_kernels::attention::{AttentionForwardPacked, AttentionForwardPackedArgs, Narrow, Pair};
use oxtile_tile::launch::{DeviceTensorMap, DeviceTensorMapMut, Signature};
use oxtile_tile::num::bf16;

use super::Job;
use super::attention::EQUIVALENTS;
use super::attention_general::map;
use super::device::{Device, words};

pub const JOBS: &[Job] = &[
    Job { name: "attention_forward_packed", run: full, equivalents: EQUIVALENTS },
    Job { name: "attention_forward_packed, sparing", run: causal, equivalents: EQUIVALENTS },
];

/// Rows of the tensors of queries and of keys.
const ROWS: [u64; 2] = [210, 300];

macro_rules! attend {
    ($device:ident, $size:literal, $team:ty, $causal:literal) => {{
        let device = $device;
        let small = |rows: u64| words((rows * $size) as usize / 2).into_iter().map(|word| word & 0x3e7f_3e7f).collect::<Vec<_>>();
        let [q, out] = ["q", "out"].map(|name| device.upload::<bf16>(name, &small(ROWS[0])));
        let [k, v] = ["k", "v"].map(|name| device.upload::<bf16>(name, &small(ROWS[1])));
        let mut log_sum_exp = device.upload::<f32>("log_sum_exp", &vec![0xff80_0000; ROWS[0] as usize]);
        // Three sequences, of which the first has more blocks of keys than there are stages, and padding behind each.
        let arrays = [[0, 140, 150, 153], [0, 290, 296, 298], [0, 141, 200, 210], [0, 292, 298, 300]];
        let arrays = arrays.map(|array| device.upload::<u32>("sequences", &array));
        let mut counter = device.upload::<u32>("counter", &[0]);
        let maps = [(&q, 64), (&k, 128), (&v, 128), (&out, 64)].map(|(tensor, rows)| map(device, tensor, $size, rows));
        let [q_map, k_map, v_map, out_map] = maps.each_ref().map(|map| map.view().access("map"));
        type Attend = AttentionForwardPacked<bf16, $size, $size, 128, $team, $causal>;
        // SAFETY: the maps were encoded for these tensors and boxes.
        let args: <Attend as Signature>::Args<'_> = unsafe {
            AttentionForwardPackedArgs {
                q: DeviceTensorMap::from_raw(q_map, q.view().access("tensor")),
                k: DeviceTensorMap::from_raw(k_map, k.view().access("tensor")),
                v: DeviceTensorMap::from_raw(v_map, v.view().access("tensor")),
                out: DeviceTensorMapMut::from_raw(out_map, out.view().access("tensor")),
                log_sum_exp: log_sum_exp.view_mut(),
                query_ends: arrays[0].view(),
                key_ends: arrays[1].view(),
                query_offsets: arrays[2].view(),
                key_offsets: arrays[3].view(),
                counter: counter.view_mut(),
                batches: 3,
                heads: 1,
                group: 1,
                query_rows: ROWS[0] as u32,
                key_rows: ROWS[1] as u32,
                section_keys: 1000,
                padded: 1,
                top_left: 0,
                scale: 0.18,
                marker: std::marker::PhantomData,
            }
        };
        device.launch::<Attend>(args)?;
        Ok([device.download(&out), device.download(&log_sum_exp), device.download(&counter)].concat())
    }};
}

fn full(device: &Device) -> Result<Vec<u32>, Outcome> {
    attend!(device, 128, Pair, false)
}

fn causal(device: &Device) -> Result<Vec<u32>, Outcome> {
    attend!(device, 64, Narrow, true)
}
