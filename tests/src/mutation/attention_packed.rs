//! Mutants of attention's kernels of packed sequences.

use std::marker::PhantomData;

use oxtile_emulator::mutation::Outcome;
use oxtile_kernels::attention::{
    AttentionForward, AttentionForwardArgs, Heads, MAP_ROWS, Narrow, PackedArgument, PackedCausal, PackedFull, PackedRingFull, Pair,
    RingStep, Rounded, RoundedArgument, SequencesArgument, Target,
};
use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::launch::{DeviceTensorMap, DeviceTensorMapMut};
use oxtile_tile::num::bf16;

use super::Job;
use super::attention::{EQUIVALENTS, SIZE, row_maps, running, step, whole};
use super::attention_general::map;
use super::device::{Device, Elements, words};

pub const JOBS: &[Job] = &[
    Job { name: "attention_forward, packed", run: full, equivalents: EQUIVALENTS },
    Job { name: "attention_forward, packed, sparing", run: causal, equivalents: EQUIVALENTS },
    Job { name: "attention_forward, packed, ring", run: ring, equivalents: EQUIVALENTS },
];

/// Rows of the tensors of queries and of keys.
const ROWS: [u64; 2] = [210, 300];

/// Queries, keys and values of heads of `SIZE` elements, their maps, the arrays of three sequences, and the counter.
struct Tensors<const SIZE: usize> {
    elements: [Elements<bf16>; 3],
    maps: [Elements<u64>; 3],
    arrays: [Elements<u32>; 4],
    counter: Elements<u32>,
}

impl<const SIZE: usize> Tensors<SIZE> {
    fn new(device: &Device) -> Self {
        let elements = [("q", ROWS[0]), ("k", ROWS[1]), ("v", ROWS[1])].map(|(name, rows)| small(device, name, rows, SIZE));
        let [q, k, v] = &elements;
        let maps = [(q, 64), (k, 128), (v, 128)].map(|(tensor, rows)| map(device, tensor, SIZE as u64, rows));
        // Three sequences, of which the first has more blocks of keys than there are stages, and padding after each.
        let arrays = [[0, 140, 150, 153], [0, 290, 296, 298], [0, 141, 200, 210], [0, 292, 298, 300]];
        let arrays = arrays.map(|array| device.upload("sequences", &array));
        Self { elements, maps, arrays, counter: device.upload("counter", &[0]) }
    }

    fn problem<'a, R: Target<bf16, SIZE, 5>, const CAUSAL: bool>(
        &'a mut self,
        target: R::Argument<'a>,
    ) -> PackedArgument<'a, bf16, SIZE, SIZE, 128, R, CAUSAL>
    where
        Columns<SIZE>: MatrixColumns,
    {
        let Self { elements, maps, arrays, counter } = self;
        let [q, k, v] = elements.each_ref().map(|tensor| tensor.view().access("tensor"));
        let [q_map, k_map, v_map] = maps.each_ref().map(|map| map.view().access("map"));
        // SAFETY: the maps were encoded for these tensors and boxes.
        let (q, k, v) =
            unsafe { (DeviceTensorMap::from_raw(q_map, q), DeviceTensorMap::from_raw(k_map, k), DeviceTensorMap::from_raw(v_map, v)) };
        let [query_ends, key_ends, query_offsets, key_offsets] = arrays.each_ref().map(Elements::view);
        let [query_rows, key_rows] = ROWS.map(|rows| rows as u32);
        let diagonals = None;
        let sequences =
            SequencesArgument { query_ends, key_ends, query_offsets, key_offsets, diagonals, query_rows, key_rows, padded: true };
        let (heads, counter) = (Heads { batches: 3, heads: 1, group: 1, step: 0 }, counter.view_mut());
        PackedArgument { q, k, v, target, sequences, heads, counter, section_keys: 1000, top_left: false, scale: 0.18 }
    }
}

/// Rows of numbers below 1, so that every weight counts.
fn small(device: &Device, name: &str, rows: u64, size: usize) -> Elements<bf16> {
    device.upload(name, &words(rows as usize * size / 2).into_iter().map(|word| word & 0x3e7f_3e7f).collect::<Vec<_>>())
}

/// A rounded result.
macro_rules! attend {
    ($device:ident, $size:literal, $team:ty, $policy:ty, $causal:literal) => {{
        let out = small($device, "out", ROWS[0], $size);
        let mut log_sum_exp = $device.upload::<f32>("log_sum_exp", &vec![0xff80_0000; ROWS[0] as usize]);
        let out_map = map($device, &out, $size, 64);
        // SAFETY: the map was encoded for this tensor and this box.
        let out_view = unsafe { DeviceTensorMapMut::from_raw(out_map.view().access("map"), out.view().access("tensor")) };
        let target = RoundedArgument { out: out_view, log_sum_exp: log_sum_exp.view_mut() };
        let mut tensors = Tensors::<$size>::new($device);
        let problem = tensors.problem::<Rounded<bf16, $size, 5>, $causal>(target);
        $device
            .launch::<AttentionForward<bf16, $size, $size, 128, $team, $policy>>(AttentionForwardArgs { problem, marker: PhantomData })?;
        Ok([$device.download(&out), $device.download(&log_sum_exp), $device.download(&tensors.counter)].concat())
    }};
}

fn full(device: &Device) -> Result<Vec<u32>, Outcome> {
    attend!(device, 128, Pair, PackedFull, false)
}

fn causal(device: &Device) -> Result<Vec<u32>, Outcome> {
    attend!(device, 64, Narrow, PackedCausal, true)
}

/// The first step of a ring and the last.
fn ring(device: &Device) -> Result<Vec<u32>, Outcome> {
    let mut sums = device.upload::<f32>("sums", &words((ROWS[0] * SIZE) as usize));
    let mut log_sum_exp = device.upload::<f32>("log_sum_exp", &words(ROWS[0] as usize));
    let mut out = small(device, "out", ROWS[0], SIZE as usize);
    let mut counters = Vec::new();
    let (row, unbounded) = (4 * SIZE, 0x7fff_0000);
    let maps = row_maps(device, &sums, &[SIZE, u64::from(MAP_ROWS), 1, unbounded, unbounded], &[row, row, row, (1 << 36) - row]);
    for begins in [true, false] {
        let rounded = (!begins).then(|| out.view_mut());
        let access = whole(sums.address);
        let target = running::<true>(sums.view_mut(), log_sum_exp.view_mut(), rounded, begins, [0, SIZE, SIZE]);
        let mut tensors = Tensors::<64>::new(device);
        let problem = tensors.problem::<RingStep<bf16, 5>, false>(step(target, access, &maps));
        device
            .launch::<AttentionForward<bf16, 64, 64, 128, Narrow, PackedRingFull>>(AttentionForwardArgs { problem, marker: PhantomData })?;
        counters.extend(device.download(&tensors.counter));
    }
    Ok([device.download(&sums), device.download(&log_sum_exp), device.download(&out), counters].concat())
}
