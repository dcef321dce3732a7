//! Mutants of the general backward pass of attention.

use oxtile_emulator::mutation::Outcome;
use oxtile_kernels::attention::{
    AttentionBackwardBlocks, AttentionBackwardBlocksArgs, AttentionBackwardConvertGeneral, AttentionBackwardConvertGeneralArgs,
    AttentionBackwardGeneral, AttentionBackwardGeneralArgs, BackwardTensorsArgument, BlockStatisticsArgument, FAR, Heads,
    KeyGradientsArgument, KeyHeads, KeyOrderArgument, QueryBlocks, QueryStatisticsArgument, QuerySumsArgument, QueryTargetArgument, Scores,
    SequenceKeysArgument, SequencesArgument, Window,
};
use oxtile_tile::launch::{DeviceTensorMap, DeviceTensorMapMut};
use oxtile_tile::num::bf16;

use super::Job;
use super::attention_backward::OF_THE_WALK;
use super::attention_general::map;
use super::device::{Device, Elements, words};

pub const JOBS: &[Job] = &[Job { name: "attention_backward_general", run: backward, equivalents: OF_THE_WALK }];

const SIZE: u32 = 64;
/// Queries of a block.
const BLOCK: u32 = 96;
/// Rows of the tensors of queries and of keys.
const ROWS: [u32; 2] = [330, 310];

fn sequences(arrays: &[Elements<u32>; 4]) -> SequencesArgument<'_> {
    let [query_ends, key_ends, query_offsets, key_offsets] = arrays.each_ref().map(Elements::view);
    let [query_rows, key_rows] = ROWS;
    SequencesArgument { query_ends, key_ends, query_offsets, key_offsets, diagonals: None, query_rows, key_rows, padded: true }
}

fn backward(device: &Device) -> Result<Vec<u32>, Outcome> {
    // Below 1, so that every weight counts.
    let small = |rows: u32| words((rows * SIZE) as usize / 2).into_iter().map(|word| word & 0x3e7f_3e7f).collect::<Vec<_>>();
    let [q, grad_out, grad_q] = ["q", "grad_out", "grad_q"].map(|name| device.upload::<bf16>(name, &small(ROWS[0])));
    let [k, v, grad_k, grad_v] = ["k", "v", "grad_k", "grad_v"].map(|name| device.upload::<bf16>(name, &small(ROWS[1])));
    // Two sequences with padding: two tiles of keys that share blocks of queries, of which the first has more than there are stages.
    let arrays = [[0, 200, 210], [0, 150, 157], [0, 220, 320], [0, 160, 300]].map(|array| device.upload::<u32>("sequences", &array));
    let blocks = QueryBlocks::of(ROWS[0].into(), 2, BLOCK.into()) as u32;
    let rows = (blocks * BLOCK) as usize;
    let log_sum_exp = device.upload::<f32>("log_sum_exp", &vec![5_f32.to_bits(); ROWS[0] as usize]);
    let deltas = device.upload::<f32>("deltas", &vec![0.5_f32.to_bits(); ROWS[0] as usize]);
    let [mut offsets, mut of_blocks] = ["offsets", "of_blocks"].map(|name| device.upload::<f32>(name, &vec![0; rows]));
    let mut sums = device.upload::<f32>("sums", &vec![f32::NAN.to_bits(); rows * SIZE as usize]);
    let (mut turns, mut counter) = (device.upload::<u32>("turns", &vec![0; blocks as usize]), device.upload::<u32>("counter", &[0]));
    let heads = Heads { batches: 2, heads: 1, group: 1, step: 0 };
    device.launch::<AttentionBackwardBlocks>(AttentionBackwardBlocksArgs {
        queries: QueryStatisticsArgument { log_sum_exp: log_sum_exp.view(), deltas: deltas.view(), rows: 0 },
        statistics: BlockStatisticsArgument {
            offsets: offsets.view_mut(),
            deltas: of_blocks.view_mut(),
            blocks,
            size: BLOCK,
            rows: blocks * BLOCK,
        },
        sequences: sequences(&arrays),
        heads,
    })?;
    let size = u64::from(SIZE);
    let maps = [(&q, BLOCK), (&grad_out, BLOCK), (&k, 128), (&v, 128), (&grad_k, 64), (&grad_v, 64), (&grad_q, BLOCK)];
    let maps = maps.map(|(tensor, rows)| map(device, tensor, size, rows));
    let [q_map, grad_out_map, k_map, v_map, grad_k_map, grad_v_map, grad_q_map] = maps.each_ref().map(|map| map.view().access("map"));
    // SAFETY: the maps were encoded for these tensors and boxes.
    let problem = unsafe {
        SequenceKeysArgument::<bf16, 64, 96, true> {
            tensors: BackwardTensorsArgument {
                q: DeviceTensorMap::from_raw(q_map, q.view().access("tensor")),
                grad_out: DeviceTensorMap::from_raw(grad_out_map, grad_out.view().access("tensor")),
                k: DeviceTensorMap::from_raw(k_map, k.view().access("tensor")),
                v: DeviceTensorMap::from_raw(v_map, v.view().access("tensor")),
                offsets: offsets.view(),
                deltas: of_blocks.view(),
            },
            sums: QuerySumsArgument { values: sums.view_mut(), turns: turns.view_mut(), blocks },
            gradients: Some(KeyGradientsArgument {
                k: DeviceTensorMapMut::from_raw(grad_k_map, grad_k.view().access("tensor")),
                v: DeviceTensorMapMut::from_raw(grad_v_map, grad_v.view().access("tensor")),
            }),
            added: None,
            grad_scale: 0.125,
            sequences: sequences(&arrays),
            heads: KeyHeads { batches: 2, heads: 1, group: 1, splits: 1, step: 0 },
            window: Window { left: FAR, right: 0, top_left: false },
            // Scores are capped at 2.
            scores: Scores { scale: 1.0, cap_limit: 2.885, cap_factor: 0.18 },
            order: KeyOrderArgument { counter: counter.view_mut(), section: 1000, ordered: true },
        }
    };
    device.launch::<AttentionBackwardGeneral<bf16, 64, 96, 48, true>>(AttentionBackwardGeneralArgs { problem })?;
    let args = AttentionBackwardConvertGeneralArgs::<bf16, 64, 96, 48> {
        sums: QuerySumsArgument { values: sums.view_mut(), turns: turns.view_mut(), blocks },
        target: QueryTargetArgument {
            // SAFETY: as above.
            rounded: Some(unsafe { DeviceTensorMapMut::from_raw(grad_q_map, grad_q.view().access("tensor")) }),
            added: None,
            size: SIZE,
            scale: 0.125,
        },
        sequences: sequences(&arrays),
        heads,
    };
    device.launch::<AttentionBackwardConvertGeneral<bf16, 64, 96, 48>>(args)?;
    let gradients = [device.download(&grad_q), device.download(&grad_k), device.download(&grad_v)].concat();
    Ok([gradients, device.download(&turns), device.download(&counter)].concat())
}
