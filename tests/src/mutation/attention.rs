//! Mutants of attention.

use std::marker::PhantomData;

use oxtile_emulator::mutation::{Equivalent, Outcome};
use oxtile_emulator::tensor_map::{self, Swizzle, TensorMap};
use oxtile_kernels::attention::{
    AttentionForward, AttentionForwardArgs, Causal, DenseArgument, LEFT, Narrow, RIGHT, RingCausal, RingStep, RingStepArgument, Rounded,
    RoundedArgument, RowMapsArgument, RunningArgument, Shape, Target, TileOrderArgument, WARP_ROWS,
};
use oxtile_tile::launch::{BufferAccess, DeviceTensorMap, DeviceTensorMapMut, DeviceView, DeviceViewMut};
use oxtile_tile::num::bf16;

use super::Job;
use super::device::{Device, Elements, OWNER, words};

pub const JOBS: &[Job] = &[
    Job { name: "attention_forward", run: attention_forward, equivalents: EQUIVALENTS },
    Job { name: "attention_forward, ring", run: ring, equivalents: EQUIVALENTS },
];

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
    upload(device, &map)
}

pub(super) fn upload(device: &Device, map: &TensorMap) -> Elements<u64> {
    let bytes = tensor_map::encode(map).expect("a map within the limits");
    let words: Vec<u32> = bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
    device.upload("map", &words)
}

type Attend<P> = AttentionForward<bf16, 64, 64, 128, Narrow, P>;

fn attention_forward(device: &Device) -> Result<Vec<u32>, Outcome> {
    Ok([attend(device, SHAPES[0])?, attend(device, SHAPES[1])?].concat())
}

/// Rows of numbers below 1, so that every weight counts.
pub(super) fn small(rows: u64) -> Vec<u32> {
    words((rows * SIZE) as usize / 2).into_iter().map(|word| word & 0x3e7f_3e7f).collect()
}

fn attend(device: &Device, shape: [u64; 2]) -> Result<Vec<u32>, Outcome> {
    let [queries, _] = shape;
    let out = device.upload::<bf16>("out", &small(queries));
    let mut log_sum_exp = device.upload::<f32>("log_sum_exp", &vec![0; queries as usize]);
    let out_map = map(device, &out, queries, 64);
    // SAFETY: the map was encoded for this tensor and this box.
    let out_view = unsafe { DeviceTensorMapMut::from_raw(out_map.view().access("map"), out.view().access("tensor")) };
    let target = RoundedArgument { out: out_view, log_sum_exp: log_sum_exp.view_mut() };
    let mut tensors = Tensors::new(device, shape);
    let problem = tensors.problem::<Rounded<bf16, 64, 4>>(target);
    device.launch::<Attend<Causal>>(AttentionForwardArgs { problem, marker: PhantomData })?;
    Ok([device.download(&out), device.download(&log_sum_exp), device.download(&tensors.counter)].concat())
}

/// The first step of a ring, one in the middle of which half of the queries see keys, and the last.
fn ring(device: &Device) -> Result<Vec<u32>, Outcome> {
    let queries = 136;
    let mut sums = device.upload::<f32>("sums", &words((queries * SIZE) as usize));
    let mut log_sum_exp = device.upload::<f32>("log_sum_exp", &words(queries as usize));
    let mut out = device.upload::<bf16>("out", &small(queries));
    let mut written = Vec::new();
    let maps = row_maps(device, &sums, &[SIZE, queries, 1, 1], &[4 * SIZE, 4 * SIZE * queries, 4 * SIZE * queries]);
    for (keys, begins, ends) in [(300, true, false), (70, false, false), (200, false, true)] {
        let rounded = ends.then(|| out.view_mut());
        let access = whole(sums.address);
        let target = running::<true>(sums.view_mut(), log_sum_exp.view_mut(), rounded, begins, [queries * SIZE, queries * SIZE, SIZE]);
        let mut tensors = Tensors::new(device, [queries, keys]);
        let problem = tensors.problem::<RingStep<bf16, 4>>(step(target, access, &maps));
        device.launch::<Attend<RingCausal>>(AttentionForwardArgs { problem, marker: PhantomData })?;
        written.extend([device.download(&sums), device.download(&log_sum_exp), device.download(&tensors.counter)].concat());
    }
    written.extend(device.download(&out));
    Ok(written)
}

/// The two maps of rows of `f32` of these dimensions, innermost first, and strides in bytes.
pub(super) fn row_maps(device: &Device, sums: &Elements<f32>, dimensions: &[u64], strides: &[u64]) -> [Elements<u64>; 2] {
    [LEFT, RIGHT].map(|columns| {
        let mut box_dimensions = vec![1; dimensions.len()];
        (box_dimensions[0], box_dimensions[1]) = (columns as u32, WARP_ROWS as u32);
        let map = TensorMap {
            address: sums.address,
            element_bytes: 4,
            dimensions: dimensions.to_vec(),
            strides: strides.to_vec(),
            box_dimensions,
            swizzle: Swizzle::None,
        };
        upload(device, &map)
    })
}

/// The memory at an address, lent beside a view of it.
pub(super) fn whole(address: u64) -> BufferAccess<'static> {
    // SAFETY: nothing is read by it; the emulator checks every access.
    unsafe { DeviceView::<f32>::from_raw(address, 1, &OWNER) }.access("tensor")
}

/// A step of a ring, whose rows have these maps.
pub(super) fn step<'a, const RANK: usize>(
    running: RunningArgument<'a, bf16, true>,
    sums: BufferAccess<'a>,
    maps: &'a [Elements<u64>; 2],
) -> RingStepArgument<'a, bf16, RANK> {
    let [left, right] = maps.each_ref().map(|map| map.view().access("map"));
    // SAFETY: the maps were encoded for this tensor and these boxes.
    let rows =
        unsafe { RowMapsArgument { left: DeviceTensorMapMut::from_raw(left, sums), right: DeviceTensorMapMut::from_raw(right, sums) } };
    RingStepArgument { running, rows: Some(rows) }
}

/// A running result of heads of [`SIZE`] elements.
pub(super) fn running<'a, const STEPS: bool>(
    sums: DeviceViewMut<'a, f32>,
    log_sum_exp: DeviceViewMut<'a, f32>,
    rounded: Option<DeviceViewMut<'a, bf16>>,
    begins: bool,
    [batch_stride, head_stride, row_stride]: [u64; 3],
) -> RunningArgument<'a, bf16, STEPS> {
    RunningArgument { sums, log_sum_exp, rounded, begins, size: SIZE as u32, batch_stride, head_stride, row_stride }
}

/// Queries, keys and values, their maps, and the counter.
struct Tensors {
    shape: Shape,
    elements: [Elements<bf16>; 3],
    maps: [Elements<u64>; 3],
    counter: Elements<u32>,
}

impl Tensors {
    fn new(device: &Device, [queries, keys]: [u64; 2]) -> Self {
        let elements = [("q", queries), ("k", keys), ("v", keys)].map(|(name, rows)| device.upload::<bf16>(name, &small(rows)));
        let [q, k, v] = &elements;
        let maps = [map(device, q, queries, 64), map(device, k, keys, 128), map(device, v, keys, 128)];
        let shape = Shape { batches: 1, heads: 1, group: 1, queries: queries as u32, keys: keys as u32 };
        Self { shape, elements, maps, counter: device.upload("counter", &[0]) }
    }

    /// A launch whose last query is aligned with the last key.
    fn problem<'a, R: Target<bf16, 64, 4>>(&'a mut self, target: R::Argument<'a>) -> DenseArgument<'a, bf16, 64, 64, 128, R, true> {
        let Self { shape, elements, maps, counter } = self;
        let [q, k, v] = elements.each_ref().map(|tensor| tensor.view().access("tensor"));
        let [q_map, k_map, v_map] = maps.each_ref().map(|map| map.view().access("map"));
        // SAFETY: the maps were encoded for these tensors and boxes.
        let (q, k, v) =
            unsafe { (DeviceTensorMap::from_raw(q_map, q), DeviceTensorMap::from_raw(k_map, k), DeviceTensorMap::from_raw(v_map, v)) };
        let diagonal = shape.keys as i32 - shape.queries as i32;
        DenseArgument {
            q,
            k,
            v,
            target,
            shape: *shape,
            order: TileOrderArgument { counter: counter.view_mut(), section: 1 },
            diagonal,
            scale: 0.18,
        }
    }
}
