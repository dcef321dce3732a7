//! Mutants of products whose sum ranks share: parts that streams bring, and two ranks' launches under way together, each of which stores tiles at the other.

use std::marker::PhantomData;

use oxtile_emulator::mutation::{Equivalent, Outcome};
use oxtile_kernels::gemm::*;
use oxtile_tile::arrivals::{LINE, SignalsArgument, WaitsArgument};
use oxtile_tile::launch::{BufferAccess, DeviceFlags, DeviceTable, DeviceTensorMap, DeviceTensorMapMut};
use oxtile_tile::num::bf16;

use super::Job;
use super::device::{Chunk, Device, Elements};
use super::gemm::{EQUIVALENTS, map, map_of_places, values};
use super::gemm_gathered::Listed;

pub const JOBS: &[Job] = &[
    Job { name: "gemm_scattered", run: leaving, equivalents: &[EQUIVALENTS[0], BY_BULK, TWO_PARTS] },
    Job { name: "gemm_scattered_summing", run: |device| summing(device, Listed::Right), equivalents: &[EQUIVALENTS[0]] },
];

const TWO_PARTS: Equivalent<'static> = Equivalent {
    matches: |mutation| mutation.site.operation == "bulk_wait" && mutation.site.file.ends_with("gemm/product.rs"),
    reason: "for wider tiles: of one of two parts the first two staging tiles take both, and the tile before has landed",
};

const BY_BULK: Equivalent<'static> = Equivalent {
    matches: |mutation| mutation.site.operation == "fence_proxy_async" && mutation.site.file.ends_with("gemm/arrival.rs"),
    reason: "for parts that come by other ways: here they are stored and loaded by bulk copies",
};

/// Two parts in two panels are added, which a stream brings; each block of the cluster has rows of one panel.
pub(super) fn summing(device: &Device, listed: Listed) -> Result<Vec<u32>, Outcome> {
    const M: u64 = 200;
    const N: u64 = 264;
    const K: u64 = 208;
    const PANEL: u64 = 128;
    const SOURCES: u64 = 2;
    let (a, b, d) = (
        device.upload::<bf16>("a", &values(M * K)),
        device.upload::<bf16>("b", &values(N * K)),
        device.upload::<bf16>("d", &values(M * N)),
    );
    let words = values(SOURCES * M * N);
    let parts = device.upload::<bf16>("parts", &words);
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let lines = device.upload::<u64>("lines", &vec![0; 2 * LINE as usize * 5]);
    let mut chunks = Vec::new();
    for (panel, source) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        let [start, end] = [panel * PANEL, ((panel + 1) * PANEL).min(M)].map(|row| 2 * (source * M + row) * N);
        device.discard(parts.address + start, end - start);
        let rows = vec![(parts.address + start, bytes[start as usize..end as usize].to_vec())];
        chunks.push(Chunk { rows, flag: lines.address + 8 * LINE * (1 + panel * SOURCES + source) });
    }
    let flags = match listed {
        Listed::Right => [0, 1, 2, 3],
        Listed::NoWait => [0, 1, 2, PRESENT],
        Listed::NextSource => [0, 0, 2, 2],
        Listed::NextSlab => [0, 1, 0, 1],
    };
    let (tiles, flags) = (device.upload::<u32>("tiles", &[0, 1]), device.upload::<u32>("flags", &flags));
    let (a_map, b_map, d_map) = (map(device, &a, [M, K]), map(device, &b, [N, K]), map(device, &d, [M, N]));
    let parts_map = map_of_places(device, &parts, [SOURCES, M, N], M * N);
    // SAFETY: the maps were encoded for these matrices and boxes. Flags alone lie in the lines.
    let args = unsafe {
        GemmScatteredArgs::<bf16, Tile128x256, false> {
            a: DeviceTensorMap::from_raw(a_map.view().access("map"), a.view().access("matrix")),
            b: DeviceTensorMap::from_raw(b_map.view().access("map"), b.view().access("matrix")),
            d: DeviceTensorMapMut::from_raw(d_map.view().access("map"), d.view().access("matrix")),
            parts: Some(DeviceTensorMap::from_raw(parts_map.view().access("map"), parts.view().access("matrix"))),
            others: None,
            shape: Shape { m: M as u32, n: N as u32, k: K as u32 },
            fusion: FusionArgument { bias: None, a_scale: None, b_scale: None, alpha: 1.0, beta: 0.0, gelu: false },
            gathered: GatheredArgument {
                tiles: tiles.view(),
                flags: flags.view(),
                waits: WaitsArgument { lines: DeviceFlags::new(lines.view()), first: 1, patience: 1 << 40 },
                extent: PANEL as u32,
                sources: SOURCES as u32,
                slab: 1,
                first: 0,
                margin: 0,
            },
            away: None,
            marker: PhantomData,
        }
    };
    device.launch_beside::<GemmScattered<bf16, Tile128x256, false>>(args, &chunks)?;
    Ok(device.download(&d))
}

/// What a rank has.
struct Side {
    a: Elements<bf16>,
    b: Elements<bf16>,
    d: Elements<bf16>,
    landed: Elements<u32>,
}

/// Two ranks with a tile of rows each, and three columns of tiles: one leaves while the next is multiplied, and stages that held parts are filled again.
fn leaving(device: &Device) -> Result<Vec<u32>, Outcome> {
    const RANKS: u64 = 2;
    const ROWS: u64 = 128;
    const N: u64 = 264;
    const K: u64 = 72;
    type Leaving = GemmScattered<bf16, Tile128x128, false>;
    let side = |rank: u64| Side {
        a: device.upload("a", &values((1 + rank) * RANKS * ROWS * K)[(rank * RANKS * ROWS * K / 2) as usize..]),
        b: device.upload("b", &values((1 + rank) * N * K)[(rank * N * K / 2) as usize..]),
        d: device.upload("d", &values(ROWS * N)),
        landed: device.upload("landed", &[0; RANKS as usize]),
    };
    let mut sides = [side(0), side(1)];
    // A place at each rank, for the only part that comes.
    let places = device.upload::<bf16>("places", &values(RANKS * ROWS * N));
    device.discard(places.address, 2 * RANKS * ROWS * N);
    let places_map = map_of_places(device, &places, [RANKS, ROWS, N], ROWS * N);
    let part_of = |rank: u64| Elements::<bf16> { address: places.address + 2 * rank * ROWS * N, length: ROWS * N, element: PhantomData };
    let lines = [0, 1].map(|_| device.upload::<u64>("lines", &vec![0; 2 * LINE as usize * 3]));
    // The place of each rank, from its first row on, and its flags from number 0 on.
    let members = device.upload::<u32>("members", &[0, 0, 0, 0, 1, 0, 1, 0]);
    let entries: Vec<u32> =
        lines.iter().flat_map(|of| [of.address, of.length]).flat_map(|word| [word as u32, (word >> 32) as u32]).collect();
    let all_lines = device.upload::<u64>("all lines", &entries);
    // SAFETY: flags alone lie in the lines.
    let flags: [BufferAccess<'_>; 2] = unsafe { lines.each_ref().map(|lines| DeviceFlags::new(lines.view()).access("lines")) };
    // The other's rows, a whole tile last, then the own ones.
    let lists =
        [[0x1_0002, 0x1_0000, 0x1_0001, 0, 1, 2], [2, 0, 1, 0x1_0000, 0x1_0001, 0x1_0002]].map(|list| device.upload::<u32>("tiles", &list));
    let maps =
        sides.each_ref().map(|of| [map(device, &of.a, [RANKS * ROWS, K]), map(device, &of.b, [N, K]), map(device, &of.d, [ROWS, N])]);
    let parts = [part_of(0), part_of(1)];
    let part_maps = parts.each_ref().map(|part| map_of_places(device, part, [1, ROWS, N], ROWS * N));
    // The part of the other rank has its flag.
    let listed = [device.upload::<u32>("flags", &[1]), device.upload::<u32>("flags", &[0])];
    let mut args = sides.iter_mut().zip(0..).map(|(Side { a, b, d, landed }, me)| {
        let ([a_map, b_map, d_map], at) = (&maps[me as usize], me as usize);
        // SAFETY: the maps were encoded for these matrices and boxes; each entry of the table is the lines of a rank, which the accesses cover, and in which flags alone lie.
        unsafe {
            GemmScatteredArgs::<bf16, Tile128x128, false> {
                a: DeviceTensorMap::from_raw(a_map.view().access("map"), a.view().access("matrix")),
                b: DeviceTensorMap::from_raw(b_map.view().access("map"), b.view().access("matrix")),
                d: DeviceTensorMapMut::from_raw(d_map.view().access("map"), d.view().access("matrix")),
                parts: Some(DeviceTensorMap::from_raw(part_maps[at].view().access("map"), parts[at].view().access("matrix"))),
                others: Some(DeviceTensorMapMut::from_raw(places_map.view().access("map"), places.view().access("matrix"))),
                shape: Shape { m: (RANKS * ROWS) as u32, n: N as u32, k: K as u32 },
                fusion: FusionArgument { bias: None, a_scale: None, b_scale: None, alpha: 1.0, beta: 0.0, gelu: false },
                gathered: GatheredArgument {
                    tiles: lists[at].view(),
                    flags: listed[at].view(),
                    waits: WaitsArgument { lines: DeviceFlags::new(lines[at].view()), first: 1, patience: 1 << 40 },
                    extent: ROWS as u32,
                    sources: 1,
                    slab: 1,
                    first: 0,
                    margin: 0,
                },
                away: Some(AwayArgument {
                    members: members.view(),
                    landed: landed.view_mut(),
                    signals: SignalsArgument {
                        lines: DeviceTable::from_raw(all_lines.view(), &flags),
                        first: 1 + me,
                        stride: RANKS as u32,
                    },
                    flag: 0,
                    shard: ROWS as u32,
                    me,
                }),
                marker: PhantomData,
            }
        }
    });
    let both = [args.next().expect("there are two"), args.next().expect("there are two")];
    drop(args);
    device.launch_together::<Leaving>(both)?;
    let found = sides.iter().flat_map(|side| [device.download(&side.d), device.download(&side.landed)]);
    Ok(found.flatten().collect())
}
