//! Mutants of the matrix multiplication of an operand that arrives, and lists that name the wrong flags.

use std::marker::PhantomData;

use oxtile_emulator::Options;
use oxtile_emulator::mutation::Outcome;
use oxtile_kernels::gemm::*;
use oxtile_tile::arrivals::{LINE, WaitsArgument};
use oxtile_tile::launch::{DeviceFlags, DeviceTensorMap, DeviceTensorMapMut, DeviceViewMut, Kernel};
use oxtile_tile::num::bf16;

use super::device::{Chunk, Device, OWNER};
use super::gemm::{EQUIVALENTS, map, values};
use super::{Job, SEEDS, gemm_scattered};

pub const JOBS: &[Job] = &[
    Job { name: "gemm_gathered", run: |device| by_rows(device, Listed::Right), equivalents: EQUIVALENTS },
    Job { name: "gemm_gathered_by_sum", run: |device| by_sum(device, Listed::Right), equivalents: EQUIVALENTS },
];

/// Which flags the list names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Listed {
    Right,
    /// None of the last chunk: it is taken to be there.
    NoWait,
    /// That of the next source.
    NextSource,
    /// That of the next slab.
    NextSlab,
}

/// Lists of wrong flags, each of which is reported under every seed.
pub fn wrong_flags() -> Result<(), String> {
    for seed in 1..=SEEDS {
        let device = || Device::new(&Options::check(seed));
        let by_rows = [Listed::NoWait, Listed::NextSource, Listed::NextSlab].map(|listed| ("rows", listed, by_rows(&device(), listed)));
        let by_sum = [Listed::NoWait, Listed::NextSource].map(|listed| ("sum", listed, by_sum(&device(), listed)));
        let parts = [Listed::NoWait, Listed::NextSource, Listed::NextSlab]
            .map(|listed| ("parts", listed, gemm_scattered::summing(&device(), listed)));
        for (what, listed, outcome) in by_rows.into_iter().chain(by_sum).chain(parts) {
            match outcome {
                Err(Outcome::Faulted(_)) => {}
                other => return Err(format!("by {what}, {listed:?}, seed {seed}: {other:?}")),
            }
        }
    }
    Ok(())
}

/// Each block of the cluster has the rows of another source, in two slabs; two tiles of more steps than there are stages.
fn by_rows(device: &Device, listed: Listed) -> Result<Vec<u32>, Outcome> {
    const M: u64 = 200;
    const K: u64 = 208;
    let parts = [[0..128, 0..128], [128..M, 0..128], [0..128, 128..K], [128..M, 128..K]];
    let lengths = Lengths { extent: 128, slab: 2, first: 0 };
    multiply::<ByRows, false>(device, [M, 264, K], [M, K], &parts, lengths, listed)
}

/// The second and the third of four steps have elements of two sources; the sum begins with the second.
fn by_sum(device: &Device, listed: Listed) -> Result<Vec<u32>, Outcome> {
    const M: u64 = 72;
    const K: u64 = 208;
    let parts = [[0..80, 0..M], [80..160, 0..M], [160..K, 0..M]];
    multiply::<BySum, true>(device, [M, 264, K], [K, M], &parts, Lengths { extent: 80, slab: 1, first: 1 }, listed)
}

struct Lengths {
    extent: u32,
    slab: u32,
    first: u32,
}

/// The product while a stream brings the parts of `A`, which is stored as `[rows, columns]`.
fn multiply<G: Gathering, const MAJOR: bool>(
    device: &Device,
    [m, n, k]: [u64; 3],
    [rows, columns]: [u64; 2],
    parts: &[[std::ops::Range<u64>; 2]],
    Lengths { extent, slab, first }: Lengths,
    listed: Listed,
) -> Result<Vec<u32>, Outcome>
where
    GemmGathered<bf16, bf16, 64, bf16, 64, Tile128x256, G, MAJOR, MAJOR>: Kernel,
{
    let a_words = values(m * k);
    let (a, b) = (device.upload::<bf16>("a", &a_words), device.upload::<bf16>("b", &values(n * k)));
    let d = device.upload::<bf16>("d", &values(m * n));
    let count = parts.len() as u32;
    let lines = device.upload::<u64>("lines", &vec![0; 2 * LINE as usize * (1 + parts.len())]);
    let bytes: Vec<u8> = a_words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let mut chunks = Vec::new();
    for (part, number) in parts.iter().zip(1_u64..) {
        let [of_rows, of_columns] = part.clone();
        let row = |row: u64| {
            let (start, end) = (2 * (row * columns + of_columns.start), 2 * (row * columns + of_columns.end));
            device.discard(a.address + start, end - start);
            (a.address + start, bytes[start as usize..end as usize].to_vec())
        };
        chunks.push(Chunk { rows: of_rows.map(row).collect(), flag: lines.address + 8 * LINE * number });
    }
    let sources = if MAJOR { count } else { 2 };
    let flags: Vec<u32> = (0..count)
        .map(|place| match listed {
            Listed::NoWait if place + 1 == count => PRESENT,
            Listed::Right | Listed::NoWait => place,
            Listed::NextSource => place / sources * sources + (place + 1) % sources,
            Listed::NextSlab => (place + sources) % count,
        })
        .collect();
    let (tiles, flags) = (device.upload::<u32>("tiles", &[1, 0]), device.upload::<u32>("flags", &flags));
    let along = |size: u64| if MAJOR { [k, size] } else { [size, k] };
    let (a_map, b_map, d_map) = (map(device, &a, [rows, columns]), map(device, &b, along(n)), map(device, &d, [m, n]));
    // SAFETY: the maps were encoded for these matrices and boxes; the kernel reads the result as it was before it stores it. Flags alone lie in the lines.
    let args = unsafe {
        GemmGatheredArgs::<bf16, bf16, 64, bf16, 64, Tile128x256, G, MAJOR, MAJOR> {
            a: DeviceTensorMap::from_raw(a_map.view().access("map"), a.view().access("matrix")),
            b: DeviceTensorMap::from_raw(b_map.view().access("map"), b.view().access("matrix")),
            d: DeviceTensorMapMut::from_raw(d_map.view().access("map"), d.view().access("matrix")),
            old: DeviceViewMut::from_raw(d.address, d.length, &OWNER),
            shape: Shape { m: m as u32, n: n as u32, k: k as u32 },
            fusion: FusionArgument { bias: None, a_scale: None, b_scale: None, alpha: 1.0, beta: 1.0, gelu: false },
            gathered: GatheredArgument {
                tiles: tiles.view(),
                flags: flags.view(),
                waits: WaitsArgument { lines: DeviceFlags::new(lines.view()), first: 1, patience: 1 << 40 },
                extent,
                sources,
                slab,
                first,
                margin: 0,
            },
            marker: PhantomData,
        }
    };
    device.launch_beside::<GemmGathered<bf16, bf16, 64, bf16, 64, Tile128x256, G, MAJOR, MAJOR>>(args, &chunks)?;
    Ok(device.download(&d))
}
