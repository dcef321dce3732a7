//! Mutants of the matrix multiplication.

use std::marker::PhantomData;

use oxtile_emulator::mutation::{Change, Equivalent, Outcome};
use oxtile_emulator::tensor_map::{self, Swizzle, TensorMap};
use oxtile_kernels::gemm::*;
use oxtile_tile::launch::{DeviceTensorMap, DeviceTensorMapMut, DeviceViewMut, Kernel, Signature};
use oxtile_tile::num::{Pod, bf16, e4m3};

use super::Job;
use super::device::{Device, Elements, OWNER, words};

pub const JOBS: &[Job] = &[
    Job { name: "gemm", run: gemm, equivalents: EQUIVALENTS },
    Job { name: "gemm_split", run: gemm_split, equivalents: &[EQUIVALENTS[0], MEETING] },
    Job { name: "gemm_in_clusters", run: gemm_in_clusters, equivalents: &[EQUIVALENTS[0], NOTHING_STORED] },
    Job { name: "gemm_few", run: gemm_few, equivalents: &[EQUIVALENTS[0], MEETING] },
    Job { name: "gemm_blocks", run: gemm_blocks, equivalents: &[EQUIVALENTS[0], MEETING] },
    Job { name: "gemm_blocks_of_few_rows", run: gemm_blocks_of_few_rows, equivalents: &[EQUIVALENTS[0], MEETING] },
    Job { name: "gemm_any", run: gemm_any, equivalents: &[] },
    Job { name: "gemm_epilogue", run: gemm_epilogue, equivalents: &[] },
    Job { name: "gemm_portable", run: gemm_portable, equivalents: STRICTER_WAIT },
];

pub(super) const EQUIVALENTS: &[Equivalent<'static>] = &[Equivalent {
    matches: |mutation| matches!(&*mutation.site.operation, "wgmma_wait" | "bulk_wait") && mutation.change == Change::CountDown,
    reason: "waits for one group more than needed: slower, never wrong",
}];

const MEETING: Equivalent<'static> = Equivalent {
    matches: |mutation| mutation.site.operation == "warp_sync" && mutation.site.file.ends_with("gemm/split.rs"),
    reason: "where lanes meet after the sum, for the compiler: each has read its own elements, and the warpgroup meets before it stores them",
};

const NOTHING_STORED: Equivalent<'static> = Equivalent {
    matches: |mutation| mutation.site.operation == "bulk_wait" && mutation.site.file.ends_with("gemm/tile_shape.rs"),
    reason: "blocks of clusters store the result themselves: there is no bulk copy to wait for",
};

const STRICTER_WAIT: &[Equivalent<'static>] = &[Equivalent {
    matches: |mutation| mutation.site.operation == "copy_async_wait" && mutation.change == Change::CountDown,
    reason: "waits for one group more than needed: slower, never wrong",
}];

/// More steps than stages, and two tiles for one block, so that stages and staging tiles are used again.
const SHAPE: [u64; 3] = [72, 264, 336];

/// A map of boxes of 64 rows of 128 bytes.
pub(super) fn map<T: Pod>(device: &Device, matrix: &Elements<T>, [rows, columns]: [u64; 2]) -> Elements<u64> {
    map_of(device, matrix, [rows, columns], ([64, 128 / size_of::<T>() as u32], Swizzle::Bytes128))
}

/// A map of matrices of so many rows and columns, so many elements apart, in boxes of 64 rows of 128 bytes.
pub(super) fn map_of_places(device: &Device, places: &Elements<bf16>, [count, rows, columns]: [u64; 3], apart: u64) -> Elements<u64> {
    let map = TensorMap {
        address: places.address,
        element_bytes: 2,
        dimensions: vec![columns, rows, count],
        strides: vec![2 * columns, 2 * apart],
        box_dimensions: vec![64, 64, 1],
        swizzle: Swizzle::Bytes128,
    };
    uploaded(device, &map)
}

/// A map of boxes of so many rows and columns.
fn map_of<T: Pod>(
    device: &Device,
    matrix: &Elements<T>,
    [rows, columns]: [u64; 2],
    ([box_rows, box_columns], swizzle): ([u32; 2], Swizzle),
) -> Elements<u64> {
    let element_bytes = size_of::<T>() as u32;
    let map = TensorMap {
        address: matrix.address,
        element_bytes,
        dimensions: vec![columns, rows],
        strides: vec![columns * u64::from(element_bytes)],
        box_dimensions: vec![box_columns, box_rows],
        swizzle,
    };
    uploaded(device, &map)
}

fn uploaded(device: &Device, map: &TensorMap) -> Elements<u64> {
    let bytes = tensor_map::encode(map).expect("a map within the limits");
    let words: Vec<u32> = bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
    device.upload("map", &words)
}

fn gemm(device: &Device) -> Result<Vec<u32>, Outcome> {
    product::<Tile128x256>(device, SHAPE, [2, 1])
}

/// Four whole tiles, and two in parts of unequal length.
fn gemm_split(device: &Device) -> Result<Vec<u32>, Outcome> {
    product::<Tile64x128>(device, [72, 264, 336], [4, 3])
}

/// Two tiles in parts of unequal length, more steps than stages, which are the blocks of clusters.
fn gemm_in_clusters(device: &Device) -> Result<Vec<u32>, Outcome> {
    divided::<Tile64x64>(device, [72, 64, 1680], [0, 2], true)
}

/// Eight rows by more steps than stages: four whole tiles and three in two parts.
fn gemm_few(device: &Device) -> Result<Vec<u32>, Outcome> {
    product::<Tile64x64>(device, [8, 392, 848], [4, 2])
}

/// So many bf16 below 1, so that every place of the result counts.
pub(super) fn values(count: impl Into<u64>) -> Vec<u32> {
    words(count.into() as usize / 2).into_iter().map(|word| word & 0x3f7f_3f7f).collect()
}

/// The product of a shape by a tile, so many of them whole and the others in parts.
fn product<S: TileLoops>(device: &Device, shape: [u64; 3], division: [u32; 2]) -> Result<Vec<u32>, Outcome>
where
    Gemm<bf16, bf16, 64, bf16, 64, S, 64, false, false>: Kernel,
{
    divided::<S>(device, shape, division, false)
}

/// The same, or with parts that are the blocks of clusters.
fn divided<S: TileLoops>(device: &Device, [m, n, k]: [u64; 3], [whole, parts]: [u32; 2], in_clusters: bool) -> Result<Vec<u32>, Outcome>
where
    Gemm<bf16, bf16, 64, bf16, 64, S, 64, false, false>: Kernel,
{
    let (a, b) = (device.upload::<bf16>("a", &values(m * k)), device.upload::<bf16>("b", &values(n * k)));
    let d = device.upload::<bf16>("d", &values(m * n));
    let tiles = m.div_ceil(u64::from(S::CLUSTER * S::ROWS)) * n.div_ceil(S::COLUMNS.into());
    let counters = if in_clusters { 0 } else { (tiles - u64::from(whole)) * u64::from(S::CLUSTER * S::WARPGROUPS) };
    let mut sums = device.upload::<f32>("sums", &vec![0; (counters * u64::from(parts * S::PIECE)) as usize]);
    let mut tickets = device.upload::<u32>("tickets", &vec![0; counters as usize]);
    let split = counters > 0;
    let (a_map, b_map, d_map) = (map(device, &a, [m, k]), map(device, &b, [n, k]), map(device, &d, [m, n]));
    let few_map = map_of(device, &a, [m, k], ([FEW as u32, 64], Swizzle::Bytes128));
    // SAFETY: the maps were encoded for these matrices and boxes; the kernel reads the result as it was before it stores it.
    let args = unsafe {
        GemmArgs::<bf16, bf16, 64, bf16, 64, S, 64, false, false> {
            a: DeviceTensorMap::from_raw(a_map.view().access("map"), a.view().access("matrix")),
            few: (S::ROWS == 64 && m <= MOST_FEW.into())
                .then(|| DeviceTensorMap::from_raw(few_map.view().access("map"), a.view().access("matrix"))),
            b: DeviceTensorMap::from_raw(b_map.view().access("map"), b.view().access("matrix")),
            d: DeviceTensorMapMut::from_raw(d_map.view().access("map"), d.view().access("matrix")),
            old: DeviceViewMut::from_raw(d.address, d.length, &OWNER),
            shape: Shape { m: m as u32, n: n as u32, k: k as u32 },
            fusion: FusionArgument { bias: None, a_scale: None, b_scale: None, alpha: 1.0, beta: 1.0, gelu: false },
            split: SplitArgument { whole, parts, sums: split.then(|| sums.view_mut()), tickets: split.then(|| tickets.view_mut()) },
            marker: PhantomData,
        }
    };
    device.launch::<Gemm<bf16, bf16, 64, bf16, 64, S, 64, false, false>>(args)?;
    // All tickets are given back.
    Ok([device.download(&d), device.download(&tickets)].concat())
}

/// In place, with sums of columns of two blocks of rows, the second of which is cut short.
fn gemm_epilogue(device: &Device) -> Result<Vec<u32>, Outcome> {
    const M: u64 = EPILOGUE_ROWS as u64 + 40;
    const N: u64 = 264;
    let (mut result, input) = (device.upload::<bf16>("result", &values(M * N)), device.upload::<bf16>("input", &values(M * N)));
    let mut sums = device.upload::<f32>("sums", &[0; 2 * N as usize]);
    device.launch::<GemmEpilogue<bf16, true>>(GemmEpilogueArgs {
        result: result.view_mut(),
        input: Some(input.view()),
        sums: Some(sums.view_mut()),
        columns: N as u32,
        derives: true,
    })?;
    Ok([device.download(&result), device.download(&sums)].concat())
}

/// A whole tile, and two in parts of two blocks and of one: the stages that each way through the sum's loop gives back are used again.
fn gemm_blocks(device: &Device) -> Result<Vec<u32>, Outcome> {
    blocks_product::<Tile128x128>(device, [72, 264, 528])
}

/// The same by the tile of 64 rows, which has seven stages for fifteen steps.
fn gemm_blocks_of_few_rows(device: &Device) -> Result<Vec<u32>, Outcome> {
    blocks_product::<Tile64x128>(device, [40, 264, 528])
}

fn blocks_product<S: ScaledTile>(device: &Device, [m, n, k]: [u64; 3]) -> Result<Vec<u32>, Outcome>
where
    GemmBlocks<bf16, 64, S>: Kernel,
{
    let [whole, parts] = [1, 3];
    let blocks = k.div_ceil(128);
    let (a, b) = (device.upload::<e4m3>("a", &codes(m * k)), device.upload::<e4m3>("b", &codes(n * k)));
    // Each scale is another number.
    let numbers = |count: u64| (0..count).map(|i| (1.0 + i as f32 / 64.0).to_bits()).collect::<Vec<_>>();
    let a_scales = device.upload::<f32>("a_scales", &numbers(blocks * m));
    let b_scales = device.upload::<f32>("b_scales", &numbers(3 * blocks.next_multiple_of(4)));
    let d = device.upload::<bf16>("d", &values(m * n));
    let counters = 2 * u64::from(S::WARPGROUPS);
    let mut sums = device.upload::<f32>("sums", &vec![0; (counters * u64::from(parts * S::PIECE)) as usize]);
    let mut tickets = device.upload::<u32>("tickets", &vec![0; counters as usize]);
    let (a_map, b_map, d_map) = (map(device, &a, [m, k]), map(device, &b, [n, k]), map(device, &d, [m, n]));
    let a_scales_map = map_of(device, &a_scales, [blocks, m], ([1, 128], Swizzle::None));
    let b_scales_map = map_of(device, &b_scales, [3, blocks.next_multiple_of(4)], ([1, 4], Swizzle::None));
    // SAFETY: as `product`.
    let args = unsafe {
        GemmBlocksArgs::<bf16, 64, S> {
            operands: BlockOperandsArgument {
                a: DeviceTensorMap::from_raw(a_map.view().access("map"), a.view().access("matrix")),
                b: DeviceTensorMap::from_raw(b_map.view().access("map"), b.view().access("matrix")),
                a_scales: DeviceTensorMap::from_raw(a_scales_map.view().access("map"), a_scales.view().access("matrix")),
                b_scales: DeviceTensorMap::from_raw(b_scales_map.view().access("map"), b_scales.view().access("matrix")),
            },
            d: DeviceTensorMapMut::from_raw(d_map.view().access("map"), d.view().access("matrix")),
            old: DeviceViewMut::from_raw(d.address, d.length, &OWNER),
            shape: Shape { m: m as u32, n: n as u32, k: k as u32 },
            fusion: FusionArgument { bias: None, a_scale: None, b_scale: None, alpha: 1.0, beta: 1.0, gelu: false },
            split: SplitArgument { whole, parts, sums: Some(sums.view_mut()), tickets: Some(tickets.view_mut()) },
            marker: PhantomData,
        }
    };
    device.launch::<GemmBlocks<bf16, 64, S>>(args)?;
    Ok([device.download(&d), device.download(&tickets)].concat())
}

/// So many codes below 1, so that every place of the result counts.
fn codes(count: impl Into<u64>) -> Vec<u32> {
    words((count.into() as usize).div_ceil(4)).into_iter().map(|word| word & 0x3737_3737).collect()
}

fn gemm_any(device: &Device) -> Result<Vec<u32>, Outcome> {
    let [m, n, k] = [10, 36, 4];
    let (a, b) = (device.upload::<e4m3>("a", &codes(m * k)), device.upload::<e4m3>("b", &codes(n * k)));
    let (mut d, bias) = (device.upload::<bf16>("d", &values(m * n)), device.upload::<bf16>("bias", &values(n)));
    let scale = device.upload::<f32>("scale", &[0.5_f32.to_bits()]);
    device.launch::<GemmAny<e4m3, bf16>>(GemmAnyArgs {
        a: OperandArgument { values: a.view(), stride: k, step: 1 },
        b: OperandArgument { values: b.view(), stride: 1, step: n },
        d: d.view_mut(),
        shape: Shape { m, n, k },
        fusion: FusionArgument {
            bias: Some(bias.view()),
            a_scale: Some(scale.view()),
            b_scale: Some(scale.view()),
            alpha: 1.0,
            beta: 1.0,
            gelu: true,
        },
    })?;
    Ok(device.download(&d))
}

/// Two tiles of more steps than there are stages, operands in both directions; rows that start anywhere.
fn gemm_portable(device: &Device) -> Result<Vec<u32>, Outcome> {
    let products = [
        multiply_portable::<true>(device, [264, 8, 136], [true, false])?,
        multiply_portable::<true>(device, [16, 136, 40], [false, true])?,
        multiply_portable::<false>(device, [9, 6, 22], [true, false])?,
    ];
    Ok(products.concat())
}

fn multiply_portable<const ALIGNED: bool>(device: &Device, [m, n, k]: [u32; 3], along_k: [bool; 2]) -> Result<Vec<u32>, Outcome>
where
    GemmPortable<bf16, bf16, ALIGNED>: Kernel + for<'a> Signature<Args<'a> = GemmPortableArgs<'a, bf16, bf16, ALIGNED>>,
{
    let (a, b) = (device.upload::<bf16>("a", &values(m * k)), device.upload::<bf16>("b", &values(n * k)));
    let (mut d, bias) = (device.upload::<bf16>("d", &values(m * n)), device.upload::<bf16>("bias", &values(n)));
    let (d_view, scale) = (d.view_mut(), device.upload::<f32>("scale", &[0.5_f32.to_bits()]));
    device.launch::<GemmPortable<bf16, bf16, ALIGNED>>(GemmPortableArgs {
        a: OperandRowsArgument { values: a.view(), along_k: along_k[0] },
        b: OperandRowsArgument { values: b.view(), along_k: along_k[1] },
        d: d_view,
        shape: Shape { m, n, k },
        fusion: FusionArgument {
            bias: Some(bias.view()),
            a_scale: Some(scale.view()),
            b_scale: Some(scale.view()),
            alpha: 1.0,
            beta: 1.0,
            gelu: false,
        },
    })?;
    Ok(device.download(&d))
}
