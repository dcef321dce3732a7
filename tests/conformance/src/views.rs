//! What views say of themselves, accesses of several elements, tables, shared addresses.

use oxtile_tile::global::GlobalTable;
use oxtile_tile::num::Pod;
use oxtile_tile::prelude::*;
use oxtile_tile::shared::{self, SharedTile};

use crate::THREADS;

/// Bytes before the first boundary of 16 in the view that [`odd_view`](fn@odd_view) gets.
pub const ODD: u32 = 13;
/// Facts that [`odd_view`](fn@odd_view) writes.
pub const FACTS: u32 = 9;

/// Reads words of a view of bytes that starts [`ODD`] bytes before a boundary, and writes them as words of bytes.
#[kernel(threads = THREADS, grid = odd_grid)]
pub fn odd_view(input: Global<u8>, output: GlobalMut<u8>, facts: GlobalMut<u64>) {
    let t = u64::from(thread::index());
    let word = input.load_word(input.elements_to_boundary() + 4 * t);
    output.store_word(4 * (u64::from(THREADS) - 1 - t), word.rotate_left(8));
    if t == 0 {
        let found = [
            input.len(),
            u64::from(input.is_empty()),
            input.elements_to_boundary(),
            input.address_of(20) - input.address_of(4),
            input.start() % 16,
            output.len(),
            u64::from(output.is_empty()),
            output.address_of(8) - output.address_of(0),
            output.address_of(8) - output.start(),
        ];
        for (i, fact) in found.into_iter().enumerate() {
            facts.store(i as u64, fact);
        }
    }
}

fn odd_grid(args: &OddViewArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("input", u64::from(ODD + 4 * THREADS), args.input.len())?;
    LaunchError::check_length("output", u64::from(4 * THREADS), args.output.len())?;
    LaunchError::check_length("facts", u64::from(FACTS), args.facts.len())?;
    Ok(Grid::x(1))
}

/// Digests the lanes of a vector of each width: four words a thread.
#[kernel(threads = THREADS, grid = lanes_grid)]
pub fn lanes(bytes: Global<u8>, halves: Global<u16>, words: Global<u32>, longs: Global<u64>, output: GlobalMut<u32>) {
    let t = u64::from(thread::index());
    output.store(4 * t, digest(bytes.load_vector(16 * t), u64::from));
    output.store(4 * t + 1, digest(halves.load_vector(8 * t), u64::from));
    output.store(4 * t + 2, digest(words.load_vector(4 * t), u64::from));
    output.store(4 * t + 3, digest(longs.load_vector(2 * t), |lane| lane));
}

/// Depends on the order of the lanes.
#[inline(always)]
fn digest<T: Pod>(vector: Vector<T>, widen: impl Fn(T) -> u64) -> u32 {
    let mut digest = 0u64;
    for lane in 0..Vector::<T>::LANES {
        digest = digest.wrapping_mul(0x1_0001_0003).wrapping_add(widen(vector.lane(lane)));
    }
    (digest ^ digest >> 32) as u32
}

fn lanes_grid(args: &LanesArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("bytes", u64::from(16 * THREADS), args.bytes.len())?;
    LaunchError::check_length("halves", u64::from(8 * THREADS), args.halves.len())?;
    LaunchError::check_length("words", u64::from(4 * THREADS), args.words.len())?;
    LaunchError::check_length("longs", u64::from(2 * THREADS), args.longs.len())?;
    LaunchError::check_length("output", u64::from(4 * THREADS), args.output.len())?;
    Ok(Grid::x(1))
}

/// Words a tensor that [`table_sums`](fn@table_sums) writes.
pub const TABLE_WORDS: u32 = 4;

/// One block a tensor of the table: its sum, its length, whether it is empty, and how many tensors there are.
#[kernel(threads = THREADS, grid = table_grid)]
pub fn table_sums(inputs: GlobalTable<u32>, output: GlobalMut<u32>) {
    let [block, ..] = block::index();
    if inputs.is_empty() || thread::index() != 0 {
        return;
    }
    let tensor = inputs.get(u64::from(block));
    let mut sum = 0u32;
    for i in 0..tensor.len() {
        sum = sum.wrapping_mul(31).wrapping_add(tensor.load(i));
    }
    let words = [sum, tensor.len() as u32, u32::from(tensor.is_empty()), inputs.len() as u32];
    for (i, word) in words.into_iter().enumerate() {
        output.store(u64::from(block * TABLE_WORDS) + i as u64, word);
    }
}

fn table_grid(args: &TableSumsArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("output", args.inputs.len() * u64::from(TABLE_WORDS), args.output.len())?;
    Grid::cover("inputs", args.inputs.len(), 1)
}

/// Words of the part of its views that [`parts`](fn@parts) works in.
pub const PART_WORDS: u32 = THREADS / 2;

/// Turns a part of the input around, into a part of the output that starts elsewhere; an empty part stands at the end of both.
#[kernel(threads = THREADS, grid = parts_grid)]
pub fn parts(input: Global<u32>, output: GlobalMut<u32>) {
    let (from, to) = (input.slice(3, u64::from(PART_WORDS)), output.slice(5, u64::from(PART_WORDS)));
    let t = u64::from(thread::index());
    if t < from.len() {
        to.store(from.len() - 1 - t, from.load(t));
    }
    if t == 0 {
        let none = input.slice(input.len(), 0).len() + output.slice(output.len(), 0).len();
        output.store(0, none as u32);
    }
}

fn parts_grid(args: &PartsArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("input", u64::from(THREADS), args.input.len())?;
    LaunchError::check_length("output", u64::from(THREADS), args.output.len())?;
    Ok(Grid::x(1))
}

#[derive(SharedStorage)]
struct Pieces {
    first: SharedArray<u8, 5>,
    second: SharedArray<u64, 3>,
    tile: SharedTile<u16, 8, 8>,
}

/// Where the derive puts each piece, from the arena's start, and that the arena lies at a multiple of 1024.
#[kernel(threads = THREADS, grid = places_grid, shared = Pieces)]
pub fn places(output: GlobalMut<u32>) {
    let Pieces { first, second, tile } = Pieces::claim();
    let arena = shared::arena();
    let words = [arena % 1024, first.address_of(4) - arena, second.address_of(2) - arena, tile.address() - arena];
    if thread::index() == 0 {
        for (i, word) in words.into_iter().enumerate() {
            output.store(i as u64, word);
        }
    }
}

fn places_grid(args: &PlacesArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("output", 4, args.output.len())?;
    Ok(Grid::x(1))
}
