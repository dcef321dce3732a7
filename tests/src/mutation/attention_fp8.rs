//! Mutants of 8-bit attention.

use oxtile_emulator::mutation::{Change, Equivalent, Outcome};
use oxtile_emulator::tensor_map::{self, Swizzle, TensorMap};
use oxtile_kernels::attention::{
    AttentionForwardFp8, AttentionForwardFp8Args, FP8_KEYS, Fp8InputsArgument, Fp8ResultsArgument, Fp8ScalesArgument, Shape,
    TileOrderArgument,
};
use oxtile_tile::launch::{DeviceTensorMap, DeviceTensorMapMut, Kernel};
use oxtile_tile::layout::Swizzle64;
use oxtile_tile::num::{Pod, bf16, e4m3};

use super::Job;
use super::device::{Device, Elements, words};

pub const JOBS: &[Job] = &[Job { name: "attention_forward_fp8", run: attention_forward_fp8, equivalents: EQUIVALENTS }];

const EQUIVALENTS: &[Equivalent<'static>] = &[
    Equivalent {
        matches: |mutation| mutation.site.operation == "fence_mbarrier_init",
        reason: "of the four rings' fences, one thread's, the last covers the barriers of all; skipping that one is reported",
    },
    Equivalent {
        matches: |mutation| mutation.site.operation == "wgmma_wait" && mutation.change == Change::CountDown,
        reason: "one fewer may be in flight: scores are waited for together with the values' product, which is waited for next",
    },
];

/// Rows of queries and of keys: two tiles for one block, of more blocks of keys than there are stages; then three tiles that the mask
/// cuts, to nothing too.
const CAUSAL: [[u64; 2]; 2] = [[200, 290], [400, 112]];
/// The same without a mask: the second of two tiles is of warpgroups after the last query too, over blocks enough to lap one of them, the last of 64
/// keys; and a last block of 32.
const FULL: [[u64; 2]; 2] = [[200, 640], [40, 416]];
const SIZE: u64 = 64;

/// A map of boxes of `box_rows` rows of one head of one batch.
fn map<T: Pod>(device: &Device, tensor: &Elements<T>, rows: u64, box_rows: u32) -> Elements<u64> {
    let bytes = size_of::<T>() as u64;
    let map = TensorMap {
        address: tensor.address,
        element_bytes: bytes as u32,
        dimensions: vec![SIZE, rows, 1, 1],
        strides: vec![bytes * SIZE, bytes * SIZE * rows, bytes * SIZE * rows],
        box_dimensions: vec![SIZE as u32, box_rows, 1, 1],
        swizzle: if bytes == 1 { Swizzle::Bytes64 } else { Swizzle::Bytes128 },
    };
    let bytes = tensor_map::encode(&map).expect("a map within the limits");
    let words: Vec<u32> = bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
    device.upload("map", &words)
}

fn attention_forward_fp8(device: &Device) -> Result<Vec<u32>, Outcome> {
    let [masked, full] = [CAUSAL.map(|shape| attend::<true>(device, shape)), FULL.map(|shape| attend::<false>(device, shape))];
    Ok(masked.into_iter().chain(full).collect::<Result<Vec<_>, _>>()?.concat())
}

fn attend<const CAUSAL: bool>(device: &Device, [queries, keys]: [u64; 2]) -> Result<Vec<u32>, Outcome>
where
    AttentionForwardFp8<64, Swizzle64, CAUSAL>: Kernel,
{
    // At most 2, so that every weight counts.
    let small = |rows: u64| words((rows * SIZE) as usize / 4).into_iter().map(|word| word & 0xbfbf_bfbf).collect::<Vec<_>>();
    let q = device.upload::<e4m3>("q", &small(queries));
    let [k, v] = ["k", "v"].map(|name| device.upload::<e4m3>(name, &small(keys)));
    let out = device.upload::<bf16>("out", &vec![0; (queries * SIZE / 2) as usize]);
    let scale = device.upload::<f32>("scale", &[1_f32.to_bits()]);
    let (mut log_sum_exp, mut counter) = (device.upload::<f32>("log_sum_exp", &vec![0; queries as usize]), device.upload("counter", &[0]));
    let maps = [
        map(device, &q, queries, 64),
        map(device, &k, keys, FP8_KEYS as u32),
        map(device, &v, keys, FP8_KEYS as u32),
        map(device, &out, queries, 64),
    ];
    let [q_map, k_map, v_map, out_map] = maps.each_ref().map(|map| map.view().access("map"));
    // SAFETY: the maps were encoded for these tensors and boxes.
    let args = unsafe {
        AttentionForwardFp8Args::<64, Swizzle64, CAUSAL> {
            inputs: Fp8InputsArgument {
                q: DeviceTensorMap::from_raw(q_map, q.view().access("tensor")),
                k: DeviceTensorMap::from_raw(k_map, k.view().access("tensor")),
                v: DeviceTensorMap::from_raw(v_map, v.view().access("tensor")),
            },
            scales: Fp8ScalesArgument { q: scale.view(), k: scale.view(), v: scale.view() },
            results: Fp8ResultsArgument {
                out: DeviceTensorMapMut::from_raw(out_map, out.view().access("tensor")),
                log_sum_exp: log_sum_exp.view_mut(),
            },
            shape: Shape { batches: 1, heads: 1, group: 1, queries: queries as u32, keys: keys as u32 },
            order: TileOrderArgument { counter: counter.view_mut(), section: 1 },
            diagonal: keys as i32 - queries as i32,
            scale: 0.18,
        }
    };
    device.launch::<AttentionForwardFp8<64, Swizzle64, CAUSAL>>(args)?;
    Ok([device.download(&out), device.download(&log_sum_exp), device.download(&counter)].concat())
}
