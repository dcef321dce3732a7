//! Mutants of attention to packed sequences whose keys arrive, and lists that name the wrong flags.

use std::marker::PhantomData;

use oxtile_emulator::Options;
use oxtile_emulator::mutation::Outcome;
use oxtile_emulator::tensor_map::{Swizzle, TensorMap};
use oxtile_kernels::attention::{
    ArrivingChunksArgument, ArrivingPackedArgument, ArrivingPackedCausal, AttentionBackwardArrivingPacked,
    AttentionBackwardArrivingPackedArgs, AttentionBackwardPadding, AttentionBackwardPaddingArgs, AttentionBackwardReduceChunks,
    AttentionBackwardReduceChunksArgs, AttentionForward, AttentionForwardArgs, BackwardTensorsArgument, Chunks, ChunksArgument, Heads,
    KeyGradientsArgument, KeyHeads, KeyMapsArgument, KeyOrderArgument, MAP_ROWS, Narrow, PRESENT, QueryBlocks, QuerySumsArgument,
    RoundedArgument, SequencesArgument, SlotsArgument, partial_elements,
};
use oxtile_tile::arrivals::{LINE, WaitsArgument};
use oxtile_tile::launch::{DeviceFlags, DeviceTensorMap, DeviceTensorMapMut};
use oxtile_tile::num::bf16;

use super::attention::{EQUIVALENTS, SIZE, upload};
use super::attention_backward::OF_THE_WALK;
use super::device::{Chunk, Device, Elements, words};
use super::{Job, TABLE_SEEDS};

pub const JOBS: &[Job] = &[
    Job { name: "attention_arriving_packed", run: |device| attend(device, Listed::Right), equivalents: EQUIVALENTS },
    Job { name: "attention_backward_arriving_packed", run: |device| differentiate(device, Listed::Right), equivalents: OF_THE_WALK },
    Job { name: "attention_backward_reduce_chunks", run: add_up, equivalents: &[] },
];

/// Which flags the table names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Listed {
    Right,
    /// None of the second section: it is taken to be there.
    NoWait,
    /// That of the section before: off by one.
    OtherSection,
    /// None of that chunk of the owner which is read first.
    OtherChunk,
    /// The right ones, but the rank is taken for the other one: its own chunks are looked for where others' arrive.
    OtherOwner,
}

impl Listed {
    const WRONG: [Self; 4] = [Self::NoWait, Self::OtherSection, Self::OtherChunk, Self::OtherOwner];
}

/// Tables of wrong flags, and a wrong rank, each of which is reported under every seed.
pub fn wrong_flags() -> Result<(), String> {
    for (seed, listed) in (1..=TABLE_SEEDS).flat_map(|seed| Listed::WRONG.map(|listed| (seed, listed))) {
        let device = || Device::new(&Options::check(seed));
        for (what, outcome) in [("forward", attend(&device(), listed)), ("backward", differentiate(&device(), listed))] {
            match outcome {
                Err(Outcome::Faulted(_)) => {}
                other => return Err(format!("{what}, {listed:?}, seed {seed}: {other:?}")),
            }
        }
    }
    Ok(())
}

/// Rows of a rank's tensors: two chunks of 128 rows of the first sequence, and two of 4 of the second. The rank is the first of two.
const ROWS: u64 = 2 * (128 + 4);
/// Each is a section.
const HEADS: u64 = 2;

/// A map of boxes of a tensor of `[heads, rows, SIZE]`.
fn map(device: &Device, tensor: &Elements<bf16>, [heads, rows]: [u64; 2], box_rows: u32) -> Elements<u64> {
    let row = 2 * SIZE;
    let map = TensorMap {
        address: tensor.address,
        element_bytes: 2,
        dimensions: vec![SIZE, u64::from(MAP_ROWS), heads, 0x7fff_0000, 0x7fff_0000],
        strides: vec![row, row * rows, row, (1 << 35) - row],
        box_dimensions: vec![SIZE as u32, box_rows, 1, 1, 1],
        swizzle: Swizzle::Bytes128,
    };
    upload(device, &map)
}

/// Numbers below 1, so that every weight counts.
fn small(count: u64) -> Vec<u32> {
    words(count as usize / 2).into_iter().map(|word| word & 0x3e7f_3e7f).collect()
}

/// Late chunks, early chunks, and where all end: 512 keys of the first sequence, and 13 of the second. Ends of queries and of keys, and their offsets.
const ARRAYS: [[u32; 5]; 4] = [[0, 128, 129, 257, 261], [0, 512, 525, 653, 657], [128, 260, 0, 256, 264], [0, 512, 0, 512, 528]];

/// The chunks of the rank.
fn chunks(arrays: &[Elements<u32>; 4], listed: Listed) -> ChunksArgument<'_> {
    let [query_ends, key_ends, query_offsets, key_offsets] = arrays.each_ref().map(Elements::view);
    let (query_rows, key_rows, diagonals) = (ROWS as u32, ROWS as u32, None);
    let sequences = SequencesArgument { query_ends, key_ends, query_offsets, key_offsets, diagonals, query_rows, key_rows, padded: false };
    ChunksArgument { sequences, batches: 2, world: 2, rank: u32::from(listed == Listed::OtherOwner) }
}

/// The flags of the second section. The forward pass reads the owner's second chunk first, the backward pass the first one.
fn second(listed: Listed, is_backward: bool) -> [u32; 4] {
    match listed {
        Listed::Right | Listed::OtherOwner => [PRESENT, 1, 1, PRESENT],
        Listed::NoWait => [PRESENT; 4],
        Listed::OtherSection => [PRESENT, 0, 0, PRESENT],
        Listed::OtherChunk if is_backward => [PRESENT, PRESENT, 1, PRESENT],
        Listed::OtherChunk => [PRESENT, 1, PRESENT, PRESENT],
    }
}

/// The lines of flags, of which that of the first section is set, and the other rank's keys and values of the second section, which come. Own ones are not read here.
fn arriving(device: &Device, tensors: [&Elements<bf16>; 2]) -> (Elements<u64>, [Chunk; 1]) {
    let mut set = vec![0; 2 * LINE as usize * 3];
    set[2 * LINE as usize] = 1;
    let (lines, block) = (device.upload::<u64>("lines", &set), 2 * ROWS * SIZE);
    let bytes: Vec<u8> = small(2 * HEADS * ROWS * SIZE).iter().flat_map(|word| word.to_le_bytes()).collect();
    for (tensor, of_rank) in tensors.into_iter().flat_map(|tensor| [0, 2, 3].map(|of_rank| (tensor, of_rank))) {
        device.discard(tensor.address + of_rank * block, block);
    }
    let piece = bytes[3 * block as usize..4 * block as usize].to_vec();
    let rows = tensors.map(|tensor| (tensor.address + 3 * block, piece.clone())).into();
    let chunk = Chunk { rows, flag: lines.address + 8 * LINE * 2 };
    (lines, [chunk])
}

/// Keys of the other rank: of the first section they are there, of the second they come while the kernel runs.
fn attend(device: &Device, listed: Listed) -> Result<Vec<u32>, Outcome> {
    let (part, all) = (HEADS * ROWS * SIZE, 2 * HEADS * ROWS * SIZE);
    let upload = |name, count| device.upload::<bf16>(name, &small(count));
    let [q, own_k, own_v] = ["q", "own keys", "own values"].map(|name| upload(name, part));
    let [k, v] = ["keys", "values"].map(|name| upload(name, all));
    let out = upload("out", part);
    let mut log_sum_exp = device.upload::<f32>("log_sum_exp", &vec![0; (HEADS * ROWS) as usize]);
    let (lines, coming) = arriving(device, [&k, &v]);
    let mut counter = device.upload::<u32>("counter", &[0]);
    let flags = device.upload::<u32>("flags", &[[PRESENT, 0, 0, PRESENT], second(listed, false)].concat());
    let arrays = ARRAYS.map(|array| device.upload::<u32>("sequences", &array));
    let maps = [
        map(device, &q, [HEADS, ROWS], 64),
        map(device, &own_k, [HEADS, ROWS], 128),
        map(device, &own_v, [HEADS, ROWS], 128),
        map(device, &k, [HEADS, 2 * ROWS], 128),
        map(device, &v, [HEADS, 2 * ROWS], 128),
        map(device, &out, [HEADS, ROWS], 64),
    ];
    let [q_map, own_k_map, own_v_map, k_map, v_map, out_map] = maps.each_ref().map(|map| map.view().access("map"));
    let tensors = [&q, &own_k, &own_v, &k, &v, &out];
    let [q, own_k, own_v, k, v, of_out] = tensors.map(|tensor| tensor.view().access("tensor"));
    // SAFETY: the maps were encoded for these tensors and boxes. Flags alone lie in the lines.
    let problem = unsafe {
        ArrivingPackedArgument {
            q: DeviceTensorMap::from_raw(q_map, q),
            own: KeyMapsArgument { k: DeviceTensorMap::from_raw(own_k_map, own_k), v: DeviceTensorMap::from_raw(own_v_map, own_v) },
            gathered: KeyMapsArgument { k: DeviceTensorMap::from_raw(k_map, k), v: DeviceTensorMap::from_raw(v_map, v) },
            target: RoundedArgument { out: DeviceTensorMapMut::from_raw(out_map, of_out), log_sum_exp: log_sum_exp.view_mut() },
            chunks: chunks(&arrays, listed),
            heads: Heads { batches: 2, heads: HEADS as u32, group: 1, step: 0 },
            section: 1,
            section_keys: 1000,
            flags: flags.view(),
            waits: WaitsArgument { lines: DeviceFlags::new(lines.view()), first: 1, patience: 1 << 40 },
            counter: counter.view_mut(),
            scale: 0.18,
        }
    };
    device.launch_beside::<AttentionForward<bf16, 64, 64, 128, Narrow, ArrivingPackedCausal>>(
        AttentionForwardArgs { problem, marker: PhantomData },
        &coming,
    )?;
    Ok([device.download(&out), device.download(&log_sum_exp), device.download(&counter)].concat())
}

/// The backward pass of two query heads of each section, whose keys come as in the forward pass. Statistics are those of no query where there is none.
fn differentiate(device: &Device, listed: Listed) -> Result<Vec<u32>, Outcome> {
    // Query heads share the keys, so that a tile meets more blocks of queries than there are stages.
    const QUERY_HEADS: u64 = 2 * HEADS;
    let (part, all) = (HEADS * ROWS * SIZE, 2 * HEADS * ROWS * SIZE);
    let upload = |name, count| device.upload::<bf16>(name, &small(count));
    let [q, grad_out] = ["q", "grad_out"].map(|name| upload(name, QUERY_HEADS * ROWS * SIZE));
    let [own_k, own_v] = ["own keys", "own values"].map(|name| upload(name, part));
    let [k, v] = ["keys", "values"].map(|name| upload(name, all));
    let (lines, coming) = arriving(device, [&k, &v]);
    let flags = device.upload::<u32>("flags", &[[PRESENT, 0, 0, PRESENT], second(listed, true)].concat());
    let arrays = ARRAYS.map(|array| device.upload::<u32>("sequences", &array));
    // Blocks of 128 queries, in which each chunk begins with one of its own.
    let blocks = QueryBlocks::of(ROWS, 4, 128);
    let of_blocks = (QUERY_HEADS * blocks * 128) as usize;
    let mut statistics = vec![f32::NEG_INFINITY.to_bits(); of_blocks];
    for (head, (piece, queries)) in
        (0..QUERY_HEADS).flat_map(|head| [128, 1, 128, 4].into_iter().enumerate().map(move |piece| (head, piece)))
    {
        let first = ((head * blocks + u64::from(ARRAYS[0][piece]) / 128 + piece as u64) * 128) as usize;
        statistics[first..first + queries].fill((-3_f32).to_bits());
    }
    let offsets = device.upload::<f32>("offsets", &statistics);
    let deltas = device.upload::<f32>("deltas", &vec![0.25_f32.to_bits(); of_blocks]);
    let mut sums = device.upload::<f32>("sums", &vec![f32::NAN.to_bits(); of_blocks * SIZE as usize]);
    let (mut turns, mut counter) =
        (device.upload::<u32>("turns", &vec![0; (QUERY_HEADS * blocks) as usize]), device.upload::<u32>("counter", &[0]));
    let slot = HEADS * Chunks::slot_tiles(ROWS, 2) * partial_elements(SIZE);
    let mut slots = device.upload::<f32>("slots", &vec![f32::NAN.to_bits(); 2 * slot as usize]);
    let maps = [
        map(device, &q, [QUERY_HEADS, ROWS], 128),
        map(device, &grad_out, [QUERY_HEADS, ROWS], 128),
        map(device, &own_k, [HEADS, ROWS], 128),
        map(device, &own_v, [HEADS, ROWS], 128),
        map(device, &k, [HEADS, 2 * ROWS], 128),
        map(device, &v, [HEADS, 2 * ROWS], 128),
    ];
    let [q_map, grad_map, own_k_map, own_v_map, k_map, v_map] = maps.each_ref().map(|map| map.view().access("map"));
    let tensors = [&q, &grad_out, &own_k, &own_v, &k, &v];
    let [q, grad_out, own_k, own_v, k, v] = tensors.map(|tensor| tensor.view().access("tensor"));
    // SAFETY: the maps were encoded for these tensors and boxes. Flags alone lie in the lines.
    let problem = unsafe {
        ArrivingChunksArgument::<bf16, 64, 128> {
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
            chunks: chunks(&arrays, listed),
            heads: KeyHeads { batches: 2, heads: HEADS as u32, group: 2, splits: 1, step: 0 },
            is_causal: true,
            section: 1,
            flags: flags.view(),
            waits: WaitsArgument { lines: DeviceFlags::new(lines.view()), first: 1, patience: 1 << 40 },
            order: KeyOrderArgument { counter: counter.view_mut(), section: 1000, ordered: true },
            scale: 0.18,
        }
    };
    device.launch_beside::<AttentionBackwardArrivingPacked<bf16, 64, 128, 64>>(AttentionBackwardArrivingPackedArgs { problem }, &coming)?;
    Ok([device.download(&sums), device.download(&slots), device.download(&turns), device.download(&counter)].concat())
}

/// The sums of both ranks' slots, and zeros of the queries that do not attend.
fn add_up(device: &Device) -> Result<Vec<u32>, Outcome> {
    let part = HEADS * ROWS * SIZE;
    let slot = HEADS * Chunks::slot_tiles(ROWS, 2) * partial_elements(SIZE);
    let numbers: Vec<u32> = words(2 * slot as usize).into_iter().map(|word| word & 0x3fff_ffff).collect();
    let mut slots = device.upload::<f32>("slots", &numbers);
    let tensors = ["grad_q", "grad_k", "grad_v"].map(|name| device.upload::<bf16>(name, &words(part as usize / 2)));
    let arrays = ARRAYS.map(|array| device.upload::<u32>("sequences", &array));
    let maps = tensors.each_ref().map(|tensor| map(device, tensor, [HEADS, ROWS], 64));
    let view = |at: usize| {
        // SAFETY: the maps were encoded for these tensors and boxes.
        unsafe { DeviceTensorMapMut::from_raw(maps[at].view().access("map"), tensors[at].view().access("tensor")) }
    };
    let gradients = KeyGradientsArgument { k: view(1), v: view(2) };
    let (of_chunks, heads) = (chunks(&arrays, Listed::Right), HEADS as u32);
    let args = AttentionBackwardReduceChunksArgs { slots: slots.view_mut(), gradients, chunks: of_chunks, heads, is_causal: true };
    device.launch::<AttentionBackwardReduceChunks<bf16, 64>>(args)?;
    let args = AttentionBackwardPaddingArgs { gradient: view(0), chunks: chunks(&arrays, Listed::Right), heads };
    device.launch::<AttentionBackwardPadding<bf16, 64>>(args)?;
    Ok(tensors.iter().flat_map(|tensor| device.download(tensor)).collect())
}
