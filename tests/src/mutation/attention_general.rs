//! Mutants of attention's kernels with options.

use std::marker::PhantomData;

use oxtile_emulator::mutation::Outcome;
use oxtile_emulator::tensor_map::{self, Swizzle, TensorMap};
use oxtile_kernels::attention::{
    AttentionForward, AttentionForwardArgs, ChosenArgument, Heads, MAP_ROWS, Optioned, OptionsArgument, Pair, RoundedArgument, Scores,
    SequencesArgument, Wide, Window, Workspace,
};
use oxtile_tile::launch::{DeviceTensorMap, DeviceTensorMapMut};
use oxtile_tile::num::bf16;

use super::Job;
use super::attention::{EQUIVALENTS, running};
use super::device::{Device, Elements, words};

pub const JOBS: &[Job] = &[
    Job { name: "attention_forward, options", run: in_registers, equivalents: EQUIVALENTS },
    Job { name: "attention_forward, options, in place", run: in_place, equivalents: EQUIVALENTS },
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

/// So many words of one value.
fn words_of(value: u32, count: u64) -> Vec<u32> {
    vec![value; count as usize]
}

macro_rules! attend {
    ($device:ident, $size:literal, $team:ty, $merged:literal) => {{
        let device = $device;
        let small = |rows: u64| words((rows * $size) as usize / 2).into_iter().map(|word| word & 0x3e7f_3e7f).collect::<Vec<_>>();
        let [q, out] = ["q", "out"].map(|name| device.upload::<bf16>(name, &small(ROWS[0])));
        let [k, v] = ["k", "v"].map(|name| device.upload::<bf16>(name, &small(ROWS[1])));
        let mut sums = device.upload::<f32>("sums", &words_of(0, if $merged { ROWS[0] * $size } else { 0 }));
        let mut log_sum_exp = device.upload::<f32>("log_sum_exp", &words_of(0xff80_0000, ROWS[0]));
        let mut max_logit = device.upload::<f32>("max_logit", &[0]);
        let sink = device.upload::<f32>("sink", &[0]);
        // Two sequences, of which the first has more blocks of keys than there are stages, and padding after each.
        let arrays = [[0, 140, 150], [0, 290, 296], [0, 141, 200], [0, 292, 300]].map(|array| device.upload::<u32>("sequences", &array));
        let [query_ends, key_ends, query_offsets, key_offsets] = arrays.each_ref().map(Elements::view);
        let mut workspace = device.upload::<u32>("workspace", &words_of(0, Workspace::words(1)));
        let maps = [(&q, 64), (&k, 128), (&v, 128), (&out, 64)].map(|(tensor, rows)| map(device, tensor, $size, rows));
        let [q_map, k_map, v_map, out_map] = maps.each_ref().map(|map| map.view().access("map"));
        // SAFETY: the maps were encoded for these tensors and boxes.
        let (q_view, k_view, v_view, out_view) = unsafe {
            (
                DeviceTensorMap::from_raw(q_map, q.view().access("tensor")),
                DeviceTensorMap::from_raw(k_map, k.view().access("tensor")),
                DeviceTensorMap::from_raw(v_map, v.view().access("tensor")),
                DeviceTensorMapMut::from_raw(out_map, out.view().access("tensor")),
            )
        };
        let problem = OptionsArgument {
            q: q_view,
            k: k_view,
            v: v_view,
            target: match $merged {
                true => ChosenArgument {
                    running: Some(running(sums.view_mut(), log_sum_exp.view_mut(), None, false, [0, $size, $size])),
                    rounded: None,
                },
                false => {
                    ChosenArgument { running: None, rounded: Some(RoundedArgument { out: out_view, log_sum_exp: log_sum_exp.view_mut() }) }
                }
            },
            sequences: SequencesArgument {
                query_ends,
                key_ends,
                query_offsets,
                key_offsets,
                diagonals: None,
                query_rows: ROWS[0] as u32,
                key_rows: ROWS[1] as u32,
                padded: true,
            },
            heads: Heads { batches: 2, heads: 1, group: 1, step: 0 },
            log_rows: 0,
            window: Window { left: 200, right: 0, top_left: false },
            scores: Scores { scale: 0.18, cap_limit: 0.0, cap_factor: 0.0 },
            sink: Some(sink.view()),
            max_logit: Some(max_logit.view_mut()),
            workspace: workspace.view_mut(),
            section_keys: 1000,
        };
        device
            .launch::<AttentionForward<bf16, $size, $size, 128, $team, Optioned>>(AttentionForwardArgs { problem, marker: PhantomData })?;
        let statistics = [device.download(&log_sum_exp), device.download(&max_logit), device.download(&workspace)].concat();
        Ok([device.download(&out), device.download(&sums), statistics].concat())
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
