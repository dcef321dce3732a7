//! Mutants of the products of groups.

use std::marker::PhantomData;

use oxtile_emulator::mutation::Outcome;
use oxtile_emulator::tensor_map::{self, Swizzle, TensorMap};
use oxtile_kernels::gemm::*;
use oxtile_tile::launch::{DeviceTensorMap, DeviceTensorMapMut, DeviceViewMut, Kernel};
use oxtile_tile::num::{Pod, bf16};
use oxtile_tile::register_tile::StoredElement;
use oxtile_tile::tensor_map::MAP_ROWS;

use super::Job;
use super::device::{Device, Elements, OWNER};
use super::gemm::{EQUIVALENTS, values};

pub const JOBS: &[Job] = &[
    Job { name: "gemm_grouped", run: by_rows, equivalents: EQUIVALENTS },
    Job { name: "gemm_grouped_by_sum", run: by_sum, equivalents: EQUIVALENTS },
];

/// Groups of a tile that is half empty, and of two, an empty one between them, and rows of none.
fn by_rows(device: &Device) -> Result<Vec<u32>, Outcome> {
    multiply::<bf16, 64, false>(device, [168, 264, 336], &[30, 0, 130])
}

/// Groups of more steps than there are stages and of few, and an empty one.
fn by_sum(device: &Device) -> Result<Vec<u32>, Outcome> {
    multiply::<f32, 32, true>(device, [72, 264, 440], &[330, 0, 100])
}

/// A map of the rows of groups, in boxes of 64 rows of 128 bytes.
fn map<T: Pod>(device: &Device, matrix: &Elements<T>, width: u64) -> Elements<u64> {
    const UNBOUNDED: u64 = 0x7fff_0000;
    let element_bytes = size_of::<T>() as u64;
    let map = TensorMap {
        address: matrix.address,
        element_bytes: element_bytes as u32,
        dimensions: vec![width, MAP_ROWS.into(), UNBOUNDED, UNBOUNDED],
        strides: [width, width, (1 << 34) - width].map(|stride| stride * element_bytes).to_vec(),
        box_dimensions: vec![128 / element_bytes as u32, 64, 1, 1],
        swizzle: Swizzle::Bytes128,
    };
    let bytes = tensor_map::encode(&map).expect("a map within the limits");
    let words: Vec<u32> = bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
    device.upload("map", &words)
}

fn multiply<O: StoredElement, const WIDTH: usize, const MAJOR: bool>(
    device: &Device,
    [m, n, k]: [u64; 3],
    sizes: &[u32],
) -> Result<Vec<u32>, Outcome>
where
    GemmGrouped<bf16, bf16, 64, O, WIDTH, Tile128x128, MAJOR, MAJOR, MAJOR>: Kernel,
{
    let groups = sizes.len() as u64;
    let [of_b, of_d] = if MAJOR { [1, groups] } else { [groups, 1] };
    let (a, b) = (device.upload::<bf16>("a", &values(m * k)), device.upload::<bf16>("b", &values(of_b * n * k)));
    let d = device.upload::<O>("d", &values(of_d * m * n * size_of::<O>() as u64 / 2));
    let sizes = device.upload::<u32>("sizes", sizes);
    let [a_width, b_width] = if MAJOR { [m, n] } else { [k, k] };
    let (a_map, b_map, d_map) = (map(device, &a, a_width), map(device, &b, b_width), map(device, &d, n));
    // SAFETY: the maps were encoded for these matrices and boxes; the kernel reads the result as it was before it stores it.
    let args = unsafe {
        GemmGroupedArgs::<bf16, bf16, 64, O, WIDTH, Tile128x128, MAJOR, MAJOR, MAJOR> {
            a: DeviceTensorMap::from_raw(a_map.view().access("map"), a.view().access("matrix")),
            b: DeviceTensorMap::from_raw(b_map.view().access("map"), b.view().access("matrix")),
            d: DeviceTensorMapMut::from_raw(d_map.view().access("map"), d.view().access("matrix")),
            old: DeviceViewMut::from_raw(d.address, d.length, &OWNER),
            shape: Shape { m: m as u32, n: n as u32, k: k as u32 },
            fusion: FusionArgument { bias: None, a_scale: None, b_scale: None, alpha: 1.0, beta: 1.0, gelu: false },
            sizes: sizes.view(),
            marker: PhantomData,
        }
    };
    device.launch::<GemmGrouped<bf16, bf16, 64, O, WIDTH, Tile128x128, MAJOR, MAJOR, MAJOR>>(args)?;
    Ok(device.download(&d))
}
