//! Mutants of 8-bit attention.

use oxtile_emulator::mutation::{Change, Equivalent, Outcome};
use oxtile_emulator::tensor_map::{self, Swizzle, TensorMap};
use oxtile_kernels::attention::{
    AttentionForwardFp8, AttentionForwardFp8Args, Causal, FP8_KEYS, Fp8Dense, Fp8DenseArgument, Fp8InputsArgument, Fp8OptionsArgument,
    Fp8PackedArgument, Fp8Policy, Fp8ResultsArgument, Fp8ScalesArgument, Full, Heads, MAP_ROWS, Optioned, PackedCausal, PackedFull, Scores,
    SequencesArgument, Shape, TileOrderArgument, Window,
};
use oxtile_tile::launch::{DeviceTensorMap, DeviceTensorMapMut, DeviceViewMut, Kernel};
use oxtile_tile::layout::Swizzle64;
use oxtile_tile::num::{Pod, bf16, e4m3};

use super::device::{Device, Elements, words};
use super::{Job, is_at_line};

pub const JOBS: &[Job] = &[
    Job { name: "attention_forward_fp8", run: attention_forward_fp8, equivalents: EQUIVALENTS },
    Job { name: "attention_forward_fp8, packed", run: packed, equivalents: EQUIVALENTS },
    Job { name: "attention_forward_fp8, options", run: options, equivalents: EQUIVALENTS },
];

const EQUIVALENTS: &[Equivalent<'static>] = &[
    Equivalent {
        matches: |mutation| {
            let here = is_at_line(mutation, include_str!("../../../gpu/src/attention/forward_fp8.rs"), "warp::sync();");
            here && mutation.site.operation == "warp_sync"
        },
        reason: "it orders nothing: it tells the compiler that the lanes meet",
    },
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

/// Rows of the tensors of queries and of keys of sequences.
const ROWS: [u64; 2] = [335, 550];

/// A map of boxes of `box_rows` rows of one head, of one batch of so many rows or of the sequences of a tensor.
fn map<T: Pod>(device: &Device, tensor: &Elements<T>, rows: Option<u64>, box_rows: u32) -> Elements<u64> {
    let bytes = size_of::<T>() as u64;
    let row = bytes * SIZE;
    let (dimensions, strides) = match rows {
        Some(rows) => (vec![SIZE, rows, 1, 1], vec![row, row * rows, row * rows]),
        None => (vec![SIZE, u64::from(MAP_ROWS), 1, 0x7fff_0000, 0x7fff_0000], vec![row, row, row, (bytes << 34) - row]),
    };
    let mut box_dimensions = vec![1; dimensions.len()];
    box_dimensions[..2].copy_from_slice(&[SIZE as u32, box_rows]);
    let swizzle = if bytes == 1 { Swizzle::Bytes64 } else { Swizzle::Bytes128 };
    let map = TensorMap { address: tensor.address, element_bytes: bytes as u32, dimensions, strides, box_dimensions, swizzle };
    let bytes = tensor_map::encode(&map).expect("a map within the limits");
    let words: Vec<u32> = bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
    device.upload("map", &words)
}

/// Queries, keys and values, the result, what else a launch takes, and maps of them.
struct Tensors {
    elements: [Elements<e4m3>; 3],
    out: Elements<bf16>,
    log_sum_exp: Elements<f32>,
    scale: Elements<f32>,
    counter: Elements<u32>,
    maps: [Elements<u64>; 4],
}

impl Tensors {
    /// Of so many rows; with maps of dense tensors, or of sequences.
    fn new(device: &Device, [queries, keys]: [u64; 2], dense: bool) -> Self {
        // At most 2, so that every weight counts.
        let small = |rows: u64| words((rows * SIZE) as usize / 4).into_iter().map(|word| word & 0xbfbf_bfbf).collect::<Vec<_>>();
        let elements = [("q", queries), ("k", keys), ("v", keys)].map(|(name, rows)| device.upload::<e4m3>(name, &small(rows)));
        let out = device.upload::<bf16>("out", &vec![0; (queries * SIZE / 2) as usize]);
        let [q, k, v] = &elements;
        let [query_rows, key_rows] = [queries, keys].map(|rows| dense.then_some(rows));
        let maps = [
            map(device, q, query_rows, 64),
            map(device, k, key_rows, FP8_KEYS as u32),
            map(device, v, key_rows, FP8_KEYS as u32),
            map(device, &out, query_rows, 64),
        ];
        Self {
            elements,
            out,
            log_sum_exp: device.upload::<f32>("log_sum_exp", &vec![0; queries as usize]),
            scale: device.upload::<f32>("scale", &[1_f32.to_bits()]),
            counter: device.upload("counter", &[0]),
            maps,
        }
    }

    /// The arguments that every problem has, and the counter.
    fn arguments<const RANK: usize>(
        &mut self,
    ) -> (Fp8InputsArgument<'_, 64, Swizzle64, RANK>, Fp8ScalesArgument<'_>, Fp8ResultsArgument<'_, 64, RANK>, DeviceViewMut<'_, u32>) {
        let [q, k, v] = self.elements.each_ref().map(|tensor| tensor.view().access("tensor"));
        let [q_map, k_map, v_map, out_map] = self.maps.each_ref().map(|map| map.view().access("map"));
        // SAFETY: the maps were encoded for these tensors and boxes.
        let (inputs, out) = unsafe {
            (
                Fp8InputsArgument {
                    q: DeviceTensorMap::from_raw(q_map, q),
                    k: DeviceTensorMap::from_raw(k_map, k),
                    v: DeviceTensorMap::from_raw(v_map, v),
                },
                DeviceTensorMapMut::from_raw(out_map, self.out.view().access("tensor")),
            )
        };
        let scale = self.scale.view();
        let scales = Fp8ScalesArgument { q: scale, k: scale, v: scale };
        (inputs, scales, Fp8ResultsArgument { out, log_sum_exp: self.log_sum_exp.view_mut() }, self.counter.view_mut())
    }

    fn download(&self, device: &Device) -> Vec<u32> {
        [device.download(&self.out), device.download(&self.log_sum_exp), device.download(&self.counter)].concat()
    }
}

fn attention_forward_fp8(device: &Device) -> Result<Vec<u32>, Outcome> {
    let masked = CAUSAL.map(|shape| attend::<Causal, true>(device, shape));
    let full = FULL.map(|shape| attend::<Full, false>(device, shape));
    Ok(masked.into_iter().chain(full).collect::<Result<Vec<_>, _>>()?.concat())
}

fn attend<P, const CAUSAL: bool>(device: &Device, [queries, keys]: [u64; 2]) -> Result<Vec<u32>, Outcome>
where
    P: Fp8Policy<Of<64, Swizzle64> = Fp8Dense<64, Swizzle64, CAUSAL>>,
    AttentionForwardFp8<64, Swizzle64, P>: Kernel,
{
    let mut tensors = Tensors::new(device, [queries, keys], true);
    let (inputs, scales, results, counter) = tensors.arguments();
    let problem = Fp8DenseArgument {
        inputs,
        scales,
        results,
        shape: Shape { batches: 1, heads: 1, group: 1, queries: queries as u32, keys: keys as u32 },
        order: TileOrderArgument { counter, section: 1 },
        diagonal: keys as i32 - queries as i32,
        scale: 0.18,
    };
    device.launch::<AttentionForwardFp8<64, Swizzle64, P>>(AttentionForwardFp8Args { problem })?;
    Ok(tensors.download(device))
}

/// Four sequences: two of so few keys, or none, that tiles follow each other at once, of which some warpgroups see no key where it is masked; one of two tiles and
/// more blocks of keys than there are stages; one of as many. Padding is after each.
fn arrays(device: &Device) -> [Elements<u32>; 4] {
    let ends = [[0, 110, 115, 315, 321], [0, 40, 40, 342, 532]];
    let offsets = [[0, 112, 118, 320, 330], [0, 42, 45, 350, 545]];
    [ends[0], ends[1], offsets[0], offsets[1]].map(|array| device.upload::<u32>("sequences", &array))
}

fn sequences(arrays: &[Elements<u32>; 4]) -> SequencesArgument<'_> {
    let [query_ends, key_ends, query_offsets, key_offsets] = arrays.each_ref().map(Elements::view);
    let [query_rows, key_rows] = ROWS.map(|rows| rows as u32);
    SequencesArgument { query_ends, key_ends, query_offsets, key_offsets, diagonals: None, query_rows, key_rows, padded: true }
}

const HEADS: Heads = Heads { batches: 4, heads: 1, group: 1, step: 0 };

macro_rules! attend_packed {
    ($device:ident, $policy:ty, $causal:literal) => {{
        let (mut tensors, arrays) = (Tensors::new($device, ROWS, false), arrays($device));
        let (inputs, scales, results, counter) = tensors.arguments();
        let (sequences, heads) = (sequences(&arrays), HEADS);
        let problem: Fp8PackedArgument<'_, 64, Swizzle64, $causal> =
            Fp8PackedArgument { inputs, scales, results, sequences, heads, counter, section_keys: 1000, top_left: false, scale: 0.18 };
        $device.launch::<AttentionForwardFp8<64, Swizzle64, $policy>>(AttentionForwardFp8Args { problem })?;
        tensors.download($device)
    }};
}

fn packed(device: &Device) -> Result<Vec<u32>, Outcome> {
    let full: Vec<u32> = attend_packed!(device, PackedFull, false);
    let causal: Vec<u32> = attend_packed!(device, PackedCausal, true);
    Ok([full, causal].concat())
}

fn options(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (mut tensors, arrays, sink) = (Tensors::new(device, ROWS, false), arrays(device), device.upload::<f32>("sink", &[0]));
    let (inputs, scales, results, counter) = tensors.arguments();
    let problem = Fp8OptionsArgument {
        inputs,
        scales,
        results,
        sequences: sequences(&arrays),
        heads: HEADS,
        log_rows: 0,
        window: Window { left: 150, right: 0, top_left: false },
        scores: Scores { scale: 0.18, cap_limit: 0.0, cap_factor: 0.0 },
        sink: Some(sink.view()),
        counter,
        section_keys: 1000,
    };
    device.launch::<AttentionForwardFp8<64, Swizzle64, Optioned>>(AttentionForwardFp8Args { problem })?;
    Ok(tensors.download(device))
}
