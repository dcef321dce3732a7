//! Mutants of attention.

use oxtile_emulator::mutation::{Equivalent, Outcome};
use oxtile_emulator::tensor_map::{self, Swizzle, TensorMap};
use oxtile_kernels::attention::{AttentionForward, AttentionForwardArgs, Narrow};
use oxtile_tile::launch::{DeviceTensorMap, DeviceTensorMapMut};
use oxtile_tile::num::bf16;

use super::Job;
use super::device::{Device, Elements, words};

pub const JOBS: &[Job] = &[Job { name: "attention_forward", run: attention_forward, equivalents: EQUIVALENTS }];

pub const EQUIVALENTS: &[Equivalent<'static>] = &[Equivalent {
    matches: |mutation| mutation.site.operation == "fence_mbarrier_init",
    reason: "of the three rings' fences, one thread's, the last covers the barriers of all; skipping that one is reported",
}];

/// Rows of queries and of keys: two tiles for one block, of more blocks of keys than there are stages; then tiles of two blocks
/// of keys, which stages hold without waiting for the consumers, of one that the mask cuts, and of none.
const SHAPES: [[u64; 2]; 2] = [[136, 300], [300, 160]];
pub(super) const SIZE: u64 = 64;

/// A map of boxes of `rows` rows of one head of one batch.
pub(super) fn map(device: &Device, tensor: &Elements<bf16>, rows: u64, box_rows: u32) -> Elements<u64> {
    let map = TensorMap {
        address: tensor.address,
        element_bytes: 2,
        dimensions: vec![SIZE, rows, 1, 1],
        strides: vec![2 * SIZE, 2 * SIZE * rows, 2 * SIZE * rows],
        box_dimensions: vec![SIZE as u32, box_rows, 1, 1],
        swizzle: Swizzle::Bytes128,
    };
    let bytes = tensor_map::encode(&map).expect("a map within the limits");
    let words: Vec<u32> = bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
    device.upload("map", &words)
}

fn attention_forward(device: &Device) -> Result<Vec<u32>, Outcome> {
    Ok([attend(device, SHAPES[0])?, attend(device, SHAPES[1])?].concat())
}

/// Rows of numbers below 1, so that every weight counts.
pub(super) fn small(rows: u64) -> Vec<u32> {
    words((rows * SIZE) as usize / 2).into_iter().map(|word| word & 0x3e7f_3e7f).collect()
}

fn attend(device: &Device, [queries, keys]: [u64; 2]) -> Result<Vec<u32>, Outcome> {
    let [q, out] = ["q", "out"].map(|name| device.upload::<bf16>(name, &small(queries)));
    let [k, v] = ["k", "v"].map(|name| device.upload::<bf16>(name, &small(keys)));
    let (mut log_sum_exp, mut counter) = (device.upload::<f32>("log_sum_exp", &vec![0; queries as usize]), device.upload("counter", &[0]));
    let maps = [map(device, &q, queries, 64), map(device, &k, keys, 128), map(device, &v, keys, 128), map(device, &out, queries, 64)];
    let [q_map, k_map, v_map, out_map] = maps.each_ref().map(|map| map.view().access("map"));
    // SAFETY: the maps were encoded for these tensors and boxes.
    let args = unsafe {
        AttentionForwardArgs::<bf16, 64, 64, 128, Narrow, true> {
            q: DeviceTensorMap::from_raw(q_map, q.view().access("tensor")),
            k: DeviceTensorMap::from_raw(k_map, k.view().access("tensor")),
            v: DeviceTensorMap::from_raw(v_map, v.view().access("tensor")),
            out: DeviceTensorMapMut::from_raw(out_map, out.view().access("tensor")),
            log_sum_exp: log_sum_exp.view_mut(),
            counter: counter.view_mut(),
            batches: 1,
            heads: 1,
            group: 1,
            rows: queries as u32,
            keys: keys as u32,
            diagonal: keys as i32 - queries as i32,
            section: 1,
            scale: 0.18,
            marker: std::marker::PhantomData,
        }
    };
    device.launch::<AttentionForward<bf16, 64, 64, 128, Narrow, true>>(args)?;
    Ok([device.download(&out), device.download(&log_sum_exp), device.download(&counter)].concat())
}
