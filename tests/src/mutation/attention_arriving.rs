//! Mutants of attention to keys that arrive, and lists that name the wrong flags.

use std::marker::PhantomData;

use oxtile_emulator::Options;
use oxtile_emulator::mutation::Outcome;
use oxtile_emulator::tensor_map::{Swizzle, TensorMap};
use oxtile_kernels::attention::{
    ArrivingArgument, ArrivingCausal, ArrivingKeysArgument, ArrivingOptioned, ArrivingOptionsArgument, ArrivingRowsArgument,
    AttentionBackwardArriving, AttentionBackwardArrivingArgs, AttentionForward, AttentionForwardArgs, BackwardTensorsArgument, FAR,
    KeyHeads, KeyMapsArgument, KeyOrderArgument, Mask, Missing, Narrow, PRESENT, Pair, QuerySumsArgument, RoundedArgument, Scores, Shape,
    SlotsArgument, TileOrderArgument, VisitedArgument, Window, partial_elements,
};
use oxtile_tile::arrivals::{LINE, WaitsArgument};
use oxtile_tile::launch::{DeviceFlags, DeviceTensorMap, DeviceTensorMapMut};
use oxtile_tile::num::bf16;

use super::attention::{EQUIVALENTS, SIZE, upload};
use super::attention_backward::OF_THE_WALK;
use super::device::{Chunk, Device, Elements, words};
use super::{Job, TABLE_SEEDS};

pub const JOBS: &[Job] = &[
    Job { name: "attention_arriving", run: |device| attend(device, Listed::Right), equivalents: EQUIVALENTS },
    Job { name: "attention_arriving_options", run: with_options, equivalents: EQUIVALENTS },
    Job { name: "attention_backward_arriving", run: |device| differentiate(device, Listed::Right), equivalents: OF_THE_WALK },
];

/// Which flags the table names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Listed {
    Right,
    /// None of the second section: it is taken to be there.
    NoWait,
    /// That of the section before: off by one.
    OtherSection,
    /// That of the next chunk.
    OtherChunk,
}

/// Tables of wrong flags, each of which is reported under every seed.
pub fn wrong_flags() -> Result<(), String> {
    for seed in 1..=TABLE_SEEDS {
        for listed in [Listed::NoWait, Listed::OtherSection, Listed::OtherChunk] {
            let device = || Device::new(&Options::check(seed));
            for (what, outcome) in [("forward", attend(&device(), listed)), ("backward", differentiate(&device(), listed))] {
                match outcome {
                    Err(Outcome::Faulted(_)) => {}
                    other => return Err(format!("{what}, {listed:?}, seed {seed}: {other:?}")),
                }
            }
        }
    }
    Ok(())
}

/// Rows of a chunk, which is a block of keys; the rank has chunks 0 and 5 of six: a tile of one block of keys comes between such of six.
const CHUNK: u64 = 128;
const CHUNKS: u64 = 6;
const OWN: [u64; 2] = [0, 5];
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

/// A causal mask, and nothing else.
fn attend(device: &Device, listed: Listed) -> Result<Vec<u32>, Outcome> {
    arriving(device, listed, &mut (), |problem: ArrivingArgument<'_, _, 64, 64, 128, true>, (), chunks| {
        let args = AttentionForwardArgs { problem, marker: PhantomData };
        device.launch_beside::<AttentionForward<bf16, 64, 64, 128, Narrow, ArrivingCausal>>(args, chunks)
    })
}

/// A causal window of one chunk and a half, a cap, sinks, and largest scores.
fn with_options(device: &Device) -> Result<Vec<u32>, Outcome> {
    let upload = |name, words: &[u32]| device.upload::<f32>(name, words);
    let sink = upload("sink", &[0.5_f32, -0.25].map(f32::to_bits));
    let mut beside = (sink, upload("max_logit", &[0; HEADS as usize]), device.upload::<u32>("workspace", &[0; HEADS as usize + 2]));
    let found = arriving(device, Listed::Right, &mut beside, |arriving, (sink, max_logit, workspace), chunks| {
        let problem = ArrivingOptionsArgument {
            arriving,
            window: Window { left: 192, right: 0, top_left: false },
            scores: Scores { scale: 1.0, cap_limit: 4.0, cap_factor: 0.09 },
            sink: Some(sink.view()),
            max_logit: Some(max_logit.view_mut()),
            workspace: workspace.view_mut(),
        };
        let args = AttentionForwardArgs { problem, marker: PhantomData };
        device.launch_beside::<AttentionForward<bf16, 64, 64, 128, Pair, ArrivingOptioned>>(args, chunks)
    })?;
    Ok([found, device.download(&beside.1), device.download(&beside.2)].concat())
}

/// Chunks of two other ranks: of the first section they are there, of the second they come while the kernel runs, which `launch` starts with what is `beside` it.
fn arriving<B, const CAUSAL: bool>(
    device: &Device,
    listed: Listed,
    beside: &mut B,
    launch: impl for<'p> FnOnce(ArrivingArgument<'p, bf16, 64, 64, 128, CAUSAL>, &'p mut B, &[Chunk]) -> Result<(), Outcome>,
) -> Result<Vec<u32>, Outcome> {
    let (part, all) = (2 * HEADS * CHUNK * SIZE, HEADS * CHUNKS * CHUNK * SIZE);
    let upload = |name, count| device.upload::<bf16>(name, &small(count));
    let [q, own_k, own_v] = ["q", "own keys", "own values"].map(|name| upload(name, part));
    let [k, v] = ["keys", "values"].map(|name| upload(name, all));
    let out = upload("out", part);
    let mut log_sum_exp = device.upload::<f32>("log_sum_exp", &vec![0; (2 * HEADS * CHUNK) as usize]);
    let mut set = vec![0; 2 * LINE as usize * 9];
    (1..5).for_each(|line| set[2 * LINE as usize * line] = 1);
    let lines = device.upload::<u64>("lines", &set);
    let mut counter = device.upload::<u32>("counter", &[0]);
    let bytes: Vec<u8> = small(all).iter().flat_map(|word| word.to_le_bytes()).collect();
    let place = |chunk: u64| 2 * (CHUNKS + chunk) * CHUNK * SIZE;
    let mut chunks = Vec::new();
    [&k, &v].into_iter().for_each(|tensor| device.discard(tensor.address + place(0), place(0)));
    for chunk in 1..5 {
        let start = place(chunk);
        let piece = bytes[start as usize..(start + 2 * CHUNK * SIZE) as usize].to_vec();
        let rows = [&k, &v].map(|tensor| (tensor.address + start, piece.clone())).into();
        chunks.push(Chunk { rows, flag: lines.address + 8 * LINE * (4 + chunk) });
    }
    let flag = |section: u64, chunk: u64| match listed {
        _ if OWN.contains(&chunk) => PRESENT,
        Listed::NoWait if section == 1 => PRESENT,
        Listed::Right | Listed::NoWait => (4 * section + chunk - 1) as u32,
        Listed::OtherSection => (chunk - 1) as u32,
        Listed::OtherChunk => (4 * section + chunk % 4) as u32,
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
    launch(problem, beside, &chunks)?;
    Ok([device.download(&out), device.download(&log_sum_exp), device.download(&counter)].concat())
}

/// Rows of a rank of two that has chunks 0 and 3 of four; chunk 1 is there, and chunk 2 comes while the kernel runs, each with a flag of its own.
fn differentiate(device: &Device, listed: Listed) -> Result<Vec<u32>, Outcome> {
    const CHUNKS: u64 = 4;
    let (part, all, blocks) = (2 * CHUNK * SIZE, CHUNKS * CHUNK * SIZE, 2);
    // Two query heads share the keys, so that a tile meets more blocks of queries than there are stages.
    let upload = |name, count| device.upload::<bf16>(name, &small(count));
    let [q, grad_out] = ["q", "grad_out"].map(|name| upload(name, HEADS * part));
    let [own_k, own_v] = ["own keys", "own values"].map(|name| upload(name, part));
    let [k, v] = ["keys", "values"].map(|name| upload(name, all));
    let bytes: Vec<u8> = small(all).iter().flat_map(|word| word.to_le_bytes()).collect();
    let mut set = vec![0; 2 * LINE as usize * 3];
    set[2 * LINE as usize] = 1;
    let lines = device.upload::<u64>("lines", &set);
    let (start, end) = (4 * CHUNK * SIZE, 6 * CHUNK * SIZE);
    [&k, &v].into_iter().for_each(|tensor| device.discard(tensor.address + start, 2 * all - start));
    [&k, &v].into_iter().for_each(|tensor| device.discard(tensor.address, 2 * CHUNK * SIZE));
    let piece = bytes[start as usize..end as usize].to_vec();
    let rows = [&k, &v].map(|tensor| (tensor.address + start, piece.clone())).into();
    let chunks = [Chunk { rows, flag: lines.address + 8 * LINE * 2 }];
    let table = match listed {
        Listed::Right => [PRESENT, 0, 1, PRESENT],
        Listed::NoWait => [PRESENT, 0, PRESENT, PRESENT],
        Listed::OtherSection | Listed::OtherChunk => [PRESENT, 0, 0, PRESENT],
    };
    let flags = device.upload::<u32>("flags", &table);
    let rows = (HEADS * blocks * CHUNK) as usize;
    let offsets = device.upload::<f32>("offsets", &vec![(-3_f32).to_bits(); rows]);
    let deltas = device.upload::<f32>("deltas", &vec![0.25_f32.to_bits(); rows]);
    let mut sums = device.upload::<f32>("sums", &vec![f32::NAN.to_bits(); rows * SIZE as usize]);
    let (mut turns, mut counter) =
        (device.upload::<u32>("turns", &vec![0; (HEADS * blocks) as usize]), device.upload::<u32>("counter", &[0]));
    let slot = partial_elements(SIZE) * 2;
    let mut slots = device.upload::<f32>("slots", &vec![f32::NAN.to_bits(); 2 * slot as usize]);
    let maps = [(&own_k, 2), (&own_v, 2), (&k, CHUNKS), (&v, CHUNKS)]
        .map(|(tensor, count)| super::attention::map(device, tensor, count * CHUNK, 128));
    let [own_k_map, own_v_map, k_map, v_map] = maps.each_ref().map(|map| map.view().access("map"));
    let maps = [map(device, &q, [1, 2 * CHUNK], 128), map(device, &grad_out, [1, 2 * CHUNK], 128)];
    let [q_map, grad_map] = maps.each_ref().map(|map| map.view().access("map"));
    let tensors = [&q, &grad_out, &own_k, &own_v, &k, &v];
    let [q, grad_out, own_k, own_v, k, v] = tensors.map(|tensor| tensor.view().access("tensor"));
    // SAFETY: the maps were encoded for these tensors and boxes. Flags alone lie in the lines.
    let problem = unsafe {
        ArrivingRowsArgument::<bf16, 64, 128, true, false> {
            tensors: BackwardTensorsArgument {
                q: DeviceTensorMap::from_raw(q_map, q),
                grad_out: DeviceTensorMap::from_raw(grad_map, grad_out),
                k: DeviceTensorMap::from_raw(k_map, k),
                v: DeviceTensorMap::from_raw(v_map, v),
                offsets: offsets.view(),
                deltas: deltas.view(),
            },
            own_k: DeviceTensorMap::from_raw(own_k_map, own_k),
            own_v: DeviceTensorMap::from_raw(own_v_map, own_v),
            sums: QuerySumsArgument { values: sums.view_mut(), turns: turns.view_mut(), blocks: blocks as u32 },
            slots: SlotsArgument { values: slots.view_mut(), step: slot, ranks: 2 },
            heads: KeyHeads { batches: 1, heads: 1, group: HEADS as u32, splits: 1, step: 0 },
            mask: Mask { queries: (CHUNKS * CHUNK) as u32, keys: (CHUNKS * CHUNK) as u32, first: -FAR, last: 0 },
            missing: Missing { begin: 1, count: 2 },
            visited: VisitedArgument { first: 0, count: CHUNKS as u32, hidden: Missing { begin: u32::MAX, count: 0 } },
            arriving: ArrivingKeysArgument {
                chunk: CHUNK as u32,
                padded: CHUNK as u32,
                first: 0,
                second: 3,
                section: 1,
                flags: flags.view(),
                waits: WaitsArgument { lines: DeviceFlags::new(lines.view()), first: 1, patience: 1 << 40 },
                own_apart: true,
            },
            order: KeyOrderArgument { counter: counter.view_mut(), section: 1, ordered: true },
            scores: Scores { scale: 0.18, cap_limit: 0.0, cap_factor: 0.0 },
            grad_scale: 0.125,
        }
    };
    device
        .launch_beside::<AttentionBackwardArriving<bf16, 64, 128, 64, true, false>>(AttentionBackwardArrivingArgs { problem }, &chunks)?;
    Ok([device.download(&sums), device.download(&slots), device.download(&turns), device.download(&counter)].concat())
}
