//! Matrix instructions of warpgroups and of warps.

use core::mem::MaybeUninit;

use oxtile_emulator::{
    Format,
    wgmma::{Instruction, Left},
};
use oxtile_emulator::{Group, device};

use super::Emulated;
use crate::arch::matrix::{
    Columns, Descriptor, Donation, MatrixColumns, MatrixElement, MatrixFormat, MatrixMove, WarpMatrix, Wgmma, multiplied,
};
use crate::warp;

impl Wgmma for Emulated {
    type Ticket = u32;

    #[inline(always)]
    #[track_caller]
    fn ticket() -> u32 {
        device::wgmma_ticket()
    }

    #[inline(always)]
    #[track_caller]
    fn fence() {
        device::wgmma_fence();
    }

    #[inline(always)]
    #[track_caller]
    fn commit() {
        device::wgmma_commit();
    }

    #[inline(always)]
    #[track_caller]
    fn wait<const PENDING: u32>() {
        device::wgmma_wait(PENDING);
    }
}

impl Donation for Emulated {
    #[inline(always)]
    fn release<const REGISTERS: u32>() {}

    #[inline(always)]
    fn claim<const REGISTERS: u32>() {}
}

/// What a lane brings to a move of matrices, or takes from it.
struct Part {
    words: [u32; 4],
}

/// Turns words by lane and matrix into rows by lane, and back: the move is its own inverse.
fn exchange(parts: &mut [&mut Part]) {
    let before: [[u32; 4]; 32] = core::array::from_fn(|lane| parts[lane].words);
    for (lane, part) in parts.iter_mut().enumerate() {
        let (matrix, row) = (lane / 8, lane % 8);
        part.words = core::array::from_fn(|word| before[4 * row + word][matrix]);
    }
}

/// As [`exchange`], of the transposed matrices: the halves of words part.
fn exchange_turned(parts: &mut [&mut Part]) {
    let before: [[u32; 4]; 32] = core::array::from_fn(|lane| parts[lane].words);
    for (lane, part) in parts.iter_mut().enumerate() {
        let (matrix, row) = (lane / 8, lane % 8);
        let element = |column: usize| before[4 * column + row / 2][matrix] >> (16 * (row % 2)) & 0xffff;
        part.words = core::array::from_fn(|word| element(2 * word) | element(2 * word + 1) << 16);
    }
}

/// The inverse of [`exchange`].
fn exchange_back(parts: &mut [&mut Part]) {
    let before: [[u32; 4]; 32] = core::array::from_fn(|lane| parts[lane].words);
    for (lane, part) in parts.iter_mut().enumerate() {
        part.words = core::array::from_fn(|matrix| before[8 * matrix + lane / 4][lane % 4]);
    }
}

/// As [`exchange_back`], with each matrix transposed.
fn exchange_transposed(parts: &mut [&mut Part]) {
    let before: [[u32; 4]; 32] = core::array::from_fn(|lane| parts[lane].words);
    for (lane, part) in parts.iter_mut().enumerate() {
        let (column, row) = (lane / 4, 2 * (lane % 4));
        let element = |matrix: usize, row: usize| before[8 * matrix + row][column / 2] >> (column % 2 * 16) & 0xffff;
        part.words = core::array::from_fn(|matrix| element(matrix, row) | element(matrix, row + 1) << 16);
    }
}

/// The 16 bytes at a row, given to `turn` together with those of the other lanes.
#[inline(always)]
#[track_caller]
fn load(row: u32, turn: fn(&mut [&mut Part])) -> [u32; 4] {
    let bytes = device::shared_read::<16>(row);
    let word = |i: usize| u32::from_le_bytes(core::array::from_fn(|byte| bytes[4 * i + byte]));
    let mut part = Part { words: core::array::from_fn(word) };
    device::collective(Group::Warp(warp::ALL), &mut part, turn);
    part.words
}

impl MatrixMove for Emulated {
    #[inline(always)]
    #[track_caller]
    unsafe fn store_matrices(row: u32, words: [u32; 4]) {
        let mut part = Part { words };
        device::collective(Group::Warp(warp::ALL), &mut part, exchange);
        let bytes: [[u8; 4]; 4] = part.words.map(u32::to_le_bytes);
        device::shared_write::<16>(row, core::array::from_fn(|i| bytes[i / 4][i % 4]));
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn store_matrices_transposed(row: u32, words: [u32; 4]) {
        let mut part = Part { words };
        device::collective(Group::Warp(warp::ALL), &mut part, exchange_turned);
        let bytes: [[u8; 4]; 4] = part.words.map(u32::to_le_bytes);
        device::shared_write::<16>(row, core::array::from_fn(|i| bytes[i / 4][i % 4]));
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn load_matrices(row: u32) -> [u32; 4] {
        load(row, exchange_back)
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn load_matrices_transposed(row: u32) -> [u32; 4] {
        load(row, exchange_transposed)
    }
}

impl WarpMatrix for Emulated {
    #[inline(always)]
    #[track_caller]
    fn multiply_warp<T: MatrixElement>(sums: [f32; 4], a: [u32; 4], b: [u32; 2]) -> [f32; 4] {
        device::mma(format(T::FORMAT), sums, a, b)
    }
}

fn format(format: MatrixFormat) -> Format {
    match format {
        MatrixFormat::Bf16 => Format::Bf16,
        MatrixFormat::F16 => Format::F16,
        MatrixFormat::E4m3 => Format::E4m3,
        MatrixFormat::E5m2 => Format::E5m2,
    }
}

/// The values to accumulate on.
///
/// # Safety
/// The registers are written unless `FRESH`.
unsafe fn addends<C: MatrixColumns, const FRESH: bool>(registers: &MaybeUninit<C::Registers>) -> Option<&[f32]> {
    // SAFETY: unless `FRESH`, the caller vouches that the registers are written.
    (!FRESH).then(|| unsafe { registers.assume_init_ref() }.as_ref())
}

macro_rules! shapes {
    ($($columns:literal)*) => { $(
        impl MatrixColumns for Columns<$columns> {
            type Registers = [f32; $columns / 2];
            const ZERO: Self::Registers = [0.0; $columns / 2];
            type Words = [u32; $columns / 4];
            const ZERO_WORDS: Self::Words = [0; $columns / 4];

            #[track_caller]
            unsafe fn multiply<A: MatrixElement, B: MatrixElement, const A_MN: bool, const B_MN: bool, const FRESH: bool>(
                registers: &mut MaybeUninit<Self::Registers>,
                ticket: u32,
                a: Descriptor,
                b: Descriptor,
            ) {
                const { assert!(multiplied::<A, B>(), "operands have one format, or two of 8 bits") };
                let formats = [format(A::FORMAT), format(B::FORMAT)];
                let instruction = Instruction { columns: $columns, formats, left_mn_major: A_MN, right_mn_major: B_MN };
                // SAFETY: passed on to the caller.
                device::wgmma_multiply(&instruction, ticket, Left::Shared(a.bits()), b.bits(), unsafe { addends::<Self, FRESH>(registers) });
            }

            #[track_caller]
            unsafe fn multiply_registers<T: MatrixElement, const B_MN: bool, const FRESH: bool>(
                registers: &mut MaybeUninit<Self::Registers>,
                ticket: u32,
                a: [u32; 4],
                b: Descriptor,
            ) {
                let formats = [format(T::FORMAT); 2];
                let instruction = Instruction { columns: $columns, formats, left_mn_major: false, right_mn_major: B_MN };
                // SAFETY: passed on to the caller.
                device::wgmma_multiply(&instruction, ticket, Left::Registers(a), b.bits(), unsafe { addends::<Self, FRESH>(registers) });
            }

            #[track_caller]
            unsafe fn publish(registers: &mut MaybeUninit<Self::Registers>, ticket: u32) {
                device::wgmma_publish(ticket, registers.write(Self::ZERO));
            }
        }
    )* };
}

shapes! { 16 32 48 64 80 96 112 128 144 160 176 192 208 224 240 256 }
