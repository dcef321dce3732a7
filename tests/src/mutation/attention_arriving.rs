//! Mutants of attention to keys that arrive, and lists that name the wrong flags.

use std::marker::PhantomData;

use oxtile_emulator::Options;
use oxtile_emulator::mutation::Outcome;
use oxtile_emulator::tensor_map::{Swizzle, TensorMap};
use oxtile_kernels::attention::{
    ArrivingArgument, ArrivingCausal, ArrivingKeysArgument, AttentionForward, AttentionForwardArgs, KeyMapsArgument, Narrow, PRESENT,
    RoundedArgument, Shape, TileOrderArgument,
};
use oxtile_tile::arrivals::{LINE, WaitsArgument};
use oxtile_tile::launch::{DeviceFlags, DeviceTensorMap, DeviceTensorMapMut};
use oxtile_tile::num::bf16;

use super::attention::{EQUIVALENTS, SIZE, upload};
use super::device::{Chunk, Device, Elements, words};
use super::{Job, SEEDS};

pub const JOBS: &[Job] = &[Job { name: "attention_arriving", run: |device| attend(device, Listed::Right), equivalents: EQUIVALENTS }];

/// Which flags the table names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Listed {
    Right,
    /// None of the second section: it is taken to be there.
    NoWait,
    /// That of the section before: off by one.
    OtherSection,
    /// That of the next chunk's owner.
    OtherOwner,
}

/// Tables of wrong flags, each of which is reported under every seed.
pub fn wrong_flags() -> Result<(), String> {
    for seed in 1..=SEEDS {
        for listed in [Listed::NoWait, Listed::OtherSection, Listed::OtherOwner] {
            match attend(&Device::new(&Options::check(seed)), listed) {
                Err(Outcome::Faulted(_)) => {}
                other => return Err(format!("{listed:?}, seed {seed}: {other:?}")),
            }
        }
    }
    Ok(())
}

/// Rows of a chunk, which is a block of keys; the rank has chunks 2 and 3 of six.
const CHUNK: u64 = 128;
const CHUNKS: u64 = 6;
const OWN: [u64; 2] = [2, 3];
/// Each is a section.
const HEADS: u64 = 2;

/// A map of boxes of a tensor of `[batches, HEADS, rows, SIZE]`.
fn map(device: &Device, tensor: &Elements<bf16>, [batches, rows]: [u64; 2], box_rows: u32) -> Elements<u64> {
    let (head, batch) = (2 * SIZE * rows, 2 * SIZE * rows * HEADS);
    let map = TensorMap {
        address: tensor.address,
        element_bytes: 2,
        dimensions: vec![SIZE, rows, HEADS, batches],
        strides: vec![2 * SIZE, head, batch],
        box_dimensions: vec![SIZE as u32, box_rows, 1, 1],
        swizzle: Swizzle::Bytes128,
    };
    upload(device, &map)
}

/// Numbers below 1, so that every weight counts.
fn small(count: u64) -> Vec<u32> {
    words(count as usize / 2).into_iter().map(|word| word & 0x3e7f_3e7f).collect()
}

/// Chunks 0 and 1, of two other ranks: of the first section they are there, of the second they come while the kernel runs. Chunks 4 and 5 are hidden, and never there.
fn attend(device: &Device, listed: Listed) -> Result<Vec<u32>, Outcome> {
    let (part, all) = (2 * HEADS * CHUNK * SIZE, HEADS * CHUNKS * CHUNK * SIZE);
    let upload = |name, count| device.upload::<bf16>(name, &small(count));
    let [q, own_k, own_v] = ["q", "own keys", "own values"].map(|name| upload(name, part));
    let [k, v] = ["keys", "values"].map(|name| upload(name, all));
    let out = upload("out", part);
    let mut log_sum_exp = device.upload::<f32>("log_sum_exp", &vec![0; (2 * HEADS * CHUNK) as usize]);
    let mut counter = device.upload::<u32>("counter", &[0]);
    let mut set = vec![0; 2 * LINE as usize * 5];
    [1, 2].into_iter().for_each(|line| set[2 * LINE as usize * line] = 1);
    let lines = device.upload::<u64>("lines", &set);
    let bytes: Vec<u8> = small(all).iter().flat_map(|word| word.to_le_bytes()).collect();
    let mut chunks = Vec::new();
    let place = |head: u64, chunk: u64| 2 * (head * CHUNKS + chunk) * CHUNK * SIZE;
    for tensor in [&k, &v] {
        device.discard(tensor.address + place(0, 2), place(1, 0) - place(0, 2));
        device.discard(tensor.address + place(1, 0), place(1, 0));
    }
    for (head, chunk) in [(1, 0), (1, 1)] {
        let start = place(head, chunk);
        let piece = bytes[start as usize..(start + 2 * CHUNK * SIZE) as usize].to_vec();
        let rows = [&k, &v].map(|tensor| (tensor.address + start, piece.clone())).into();
        chunks.push(Chunk { rows, flag: lines.address + 8 * LINE * (1 + 2 * head + chunk) });
    }
    let flag = |section: u64, chunk: u64| match listed {
        _ if chunk >= 2 => PRESENT,
        Listed::Right => (2 * section + chunk) as u32,
        Listed::NoWait if section == 1 => PRESENT,
        Listed::NoWait => chunk as u32,
        Listed::OtherSection => chunk as u32,
        Listed::OtherOwner => (2 * section) as u32,
    };
    let table: Vec<u32> = (0..HEADS).flat_map(|section| (0..CHUNKS).map(move |chunk| (section, chunk))).map(|(s, c)| flag(s, c)).collect();
    let flags = device.upload::<u32>("flags", &table);
    let maps = [
        map(device, &q, [2, CHUNK], 64),
        map(device, &own_k, [2, CHUNK], 128),
        map(device, &own_v, [2, CHUNK], 128),
        map(device, &k, [1, CHUNKS * CHUNK], 128),
        map(device, &v, [1, CHUNKS * CHUNK], 128),
        map(device, &out, [2, CHUNK], 64),
    ];
    let [q_map, own_k_map, own_v_map, k_map, v_map, out_map] = maps.each_ref().map(|map| map.view().access("map"));
    let tensors = [&q, &own_k, &own_v, &k, &v, &out];
    let [q, own_k, own_v, k, v, of_out] = tensors.map(|tensor| tensor.view().access("tensor"));
    // SAFETY: the maps were encoded for these tensors and boxes. Flags alone lie in the lines.
    let problem = unsafe {
        ArrivingArgument {
            q: DeviceTensorMap::from_raw(q_map, q),
            own: KeyMapsArgument { k: DeviceTensorMap::from_raw(own_k_map, own_k), v: DeviceTensorMap::from_raw(own_v_map, own_v) },
            gathered: KeyMapsArgument { k: DeviceTensorMap::from_raw(k_map, k), v: DeviceTensorMap::from_raw(v_map, v) },
            target: RoundedArgument { out: DeviceTensorMapMut::from_raw(out_map, of_out), log_sum_exp: log_sum_exp.view_mut() },
            shape: Shape { batches: 1, heads: HEADS as u32, group: 1, queries: 2 * CHUNK as u32, keys: (CHUNKS * CHUNK) as u32 },
            arriving: ArrivingKeysArgument {
                chunk: CHUNK as u32,
                padded: CHUNK as u32,
                first: OWN[0] as u32,
                second: OWN[1] as u32,
                section: 1,
                flags: flags.view(),
                waits: WaitsArgument { lines: DeviceFlags::new(lines.view()), first: 1, patience: 1 << 40 },
                own_apart: true,
            },
            order: TileOrderArgument { counter: counter.view_mut(), section: 1 },
            scale: 0.18,
        }
    };
    device.launch_beside::<AttentionForward<bf16, 64, 64, 128, Narrow, ArrivingCausal>>(
        AttentionForwardArgs { problem, marker: PhantomData },
        &chunks,
    )?;
    Ok([device.download(&out), device.download(&log_sum_exp), device.download(&counter)].concat())
}
