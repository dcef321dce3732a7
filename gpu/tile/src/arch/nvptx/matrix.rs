//! Matrix instructions of warpgroups and of warps.
//!
//! A multiplication names every register of the tile: `shapes!` writes one function a width. Fence, commit and wait
//! are convergent intrinsics on both sides of the `asm!`, so LLVM copies none of it.

use core::arch::asm;
use core::mem::MaybeUninit;

use super::{Nvptx, intrinsics};
use crate::arch::matrix::{
    Columns, Descriptor, Donation, MatrixColumns, MatrixElement, MatrixFormat, MatrixMove, WarpMatrix, Wgmma, multiplied,
};

// SAFETY (all of this block): the intrinsics touch registers only; that the warpgroup comes together is the kernel's
// contract, which the emulator checks.
impl Wgmma for Nvptx {
    type Ticket = ();

    #[inline(always)]
    fn ticket() {}

    #[inline(always)]
    fn fence() {
        // SAFETY: see above.
        unsafe { intrinsics::wgmma_fence() }
    }

    #[inline(always)]
    fn commit() {
        // SAFETY: see above.
        unsafe { intrinsics::wgmma_commit() }
    }

    #[inline(always)]
    fn wait<const PENDING: u32>() {
        // SAFETY: see above.
        unsafe { intrinsics::wgmma_wait(const { PENDING as u64 }) }
    }
}

impl Donation for Nvptx {
    #[inline(always)]
    fn release<const REGISTERS: u32>() {
        // SAFETY: as for `Wgmma`; the count is checked where the roles are declared.
        unsafe { intrinsics::registers_release(REGISTERS) }
    }

    #[inline(always)]
    fn claim<const REGISTERS: u32>() {
        // SAFETY: as `release`.
        unsafe { intrinsics::registers_claim(REGISTERS) }
    }
}

impl MatrixMove for Nvptx {
    #[inline(always)]
    unsafe fn store_matrices(row: u32, [a, b, c, d]: [u32; 4]) {
        // SAFETY: the caller vouches for the row.
        unsafe {
            asm!("stmatrix.sync.aligned.m8n8.x4.shared.b16 [{0}], {{{1}, {2}, {3}, {4}}};",
                in(reg32) row, in(reg32) a, in(reg32) b, in(reg32) c, in(reg32) d, options(nostack));
        }
    }

    #[inline(always)]
    unsafe fn store_matrices_transposed(row: u32, [a, b, c, d]: [u32; 4]) {
        // SAFETY: the caller vouches for the row.
        unsafe {
            asm!("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{0}], {{{1}, {2}, {3}, {4}}};",
                in(reg32) row, in(reg32) a, in(reg32) b, in(reg32) c, in(reg32) d, options(nostack));
        }
    }

    #[inline(always)]
    unsafe fn load_matrices(row: u32) -> [u32; 4] {
        let (a, b, c, d);
        // SAFETY: the caller vouches for the row.
        unsafe {
            asm!("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{0}, {1}, {2}, {3}}}, [{4}];",
                out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg32) row, options(nostack));
        }
        [a, b, c, d]
    }

    #[inline(always)]
    unsafe fn load_matrices_transposed(row: u32) -> [u32; 4] {
        let (a, b, c, d);
        // SAFETY: the caller vouches for the row.
        unsafe {
            asm!("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{{0}, {1}, {2}, {3}}}, [{4}];",
                out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg32) row, options(nostack));
        }
        [a, b, c, d]
    }
}

/// One `mma.sync` of a shape and format.
macro_rules! multiply_warp {
    ($form:literal, [$s0:ident, $s1:ident, $s2:ident, $s3:ident], $a:ident, $b:ident) => {
        // SAFETY: the instruction reads and writes its operands only. It is not `pure`: the lanes of a warp are together where
        // the source says, and LLVM must not move it.
        unsafe {
            asm!(concat!("mma.sync.aligned.", $form, ".f32 {{{0}, {1}, {2}, {3}}}, {{{4}, {5}, {6}, {7}}}, {{{8}, {9}}}, {{{0}, {1}, {2}, {3}}};"),
                inout(reg32) $s0, inout(reg32) $s1, inout(reg32) $s2, inout(reg32) $s3,
                in(reg32) $a[0], in(reg32) $a[1], in(reg32) $a[2], in(reg32) $a[3], in(reg32) $b[0], in(reg32) $b[1],
                options(nomem, nostack))
        }
    };
}

impl WarpMatrix for Nvptx {
    #[inline(always)]
    fn multiply_warp<T: MatrixElement>([mut s, mut t, mut u, mut v]: [f32; 4], a: [u32; 4], b: [u32; 2]) -> [f32; 4] {
        match T::FORMAT {
            MatrixFormat::Bf16 => multiply_warp!("m16n8k16.row.col.f32.bf16.bf16", [s, t, u, v], a, b),
            MatrixFormat::F16 => multiply_warp!("m16n8k16.row.col.f32.f16.f16", [s, t, u, v], a, b),
            MatrixFormat::E4m3 => multiply_warp!("m16n8k32.row.col.f32.e4m3.e4m3", [s, t, u, v], a, b),
            MatrixFormat::E5m2 => multiply_warp!("m16n8k32.row.col.f32.e5m2.e5m2", [s, t, u, v], a, b),
        }
        [s, t, u, v]
    }
}

/// Puts the descriptor of the right operand together.
macro_rules! right {
    () => {
        ".reg .b32 x; .reg .b64 right; add.u32 x, {b}, {b_offset}; mov.b64 right, {{x, {b_high}}}; "
    };
}

/// The same of the left operand, too.
macro_rules! both {
    () => {
        concat!(right!(), ".reg .b32 y; .reg .b64 left; add.u32 y, {a}, {a_offset}; mov.b64 left, {{y, {a_high}}}; ")
    };
}

/// One `wgmma.mma_async`: direction of the accumulators, shape and types, what puts descriptors together, the operands
/// after the accumulators, their values.
macro_rules! issue {
    ($direction:ident, $registers:ident, $form:expr, $descriptors:expr, $operands:literal, [$($values:tt)*]; $first:literal $($rest:literal)*) => {
        // SAFETY: the caller vouches for the operands; the pointer is to as many registers as are named.
        unsafe {
            asm!(concat!("{{ ", $descriptors, "wgmma.mma_async.sync.aligned.", $form, " {{{", $first, "}", $(", {", $rest, "}",)* "}}, ", $operands, "; }}"),
                $direction(reg32) *$registers.add($first), $($direction(reg32) *$registers.add($rest),)* $($values)* options(nostack))
        }
    };
}

/// Both directions of each pair of formats; the branch is resolved at compile time.
macro_rules! issue_formats {
    ($a:ty, $b:ty, $fresh:expr, $registers:ident, $columns:literal, $descriptors:expr, $halves:literal, $bytes:literal, [$($halves_values:tt)*], [$($values:tt)*]; $($i:literal)*) => {
        match (<$a>::FORMAT, <$b>::FORMAT, $fresh) {
            (MatrixFormat::Bf16, MatrixFormat::Bf16, false) => issue!(inout, $registers, concat!("m64n", $columns, "k16.f32.bf16.bf16"), $descriptors, $halves, [accumulate = const 1, $($halves_values)*]; $($i)*),
            (MatrixFormat::Bf16, MatrixFormat::Bf16, true) => issue!(out, $registers, concat!("m64n", $columns, "k16.f32.bf16.bf16"), $descriptors, $halves, [accumulate = const 0, $($halves_values)*]; $($i)*),
            (MatrixFormat::F16, MatrixFormat::F16, false) => issue!(inout, $registers, concat!("m64n", $columns, "k16.f32.f16.f16"), $descriptors, $halves, [accumulate = const 1, $($halves_values)*]; $($i)*),
            (MatrixFormat::F16, MatrixFormat::F16, true) => issue!(out, $registers, concat!("m64n", $columns, "k16.f32.f16.f16"), $descriptors, $halves, [accumulate = const 0, $($halves_values)*]; $($i)*),
            (MatrixFormat::E4m3, MatrixFormat::E4m3, false) => issue!(inout, $registers, concat!("m64n", $columns, "k32.f32.e4m3.e4m3"), $descriptors, $bytes, [accumulate = const 1, $($values)*]; $($i)*),
            (MatrixFormat::E4m3, MatrixFormat::E4m3, true) => issue!(out, $registers, concat!("m64n", $columns, "k32.f32.e4m3.e4m3"), $descriptors, $bytes, [accumulate = const 0, $($values)*]; $($i)*),
            (MatrixFormat::E5m2, MatrixFormat::E5m2, false) => issue!(inout, $registers, concat!("m64n", $columns, "k32.f32.e5m2.e5m2"), $descriptors, $bytes, [accumulate = const 1, $($values)*]; $($i)*),
            (MatrixFormat::E5m2, MatrixFormat::E5m2, true) => issue!(out, $registers, concat!("m64n", $columns, "k32.f32.e5m2.e5m2"), $descriptors, $bytes, [accumulate = const 0, $($values)*]; $($i)*),
            (MatrixFormat::E4m3, MatrixFormat::E5m2, false) => issue!(inout, $registers, concat!("m64n", $columns, "k32.f32.e4m3.e5m2"), $descriptors, $bytes, [accumulate = const 1, $($values)*]; $($i)*),
            (MatrixFormat::E4m3, MatrixFormat::E5m2, true) => issue!(out, $registers, concat!("m64n", $columns, "k32.f32.e4m3.e5m2"), $descriptors, $bytes, [accumulate = const 0, $($values)*]; $($i)*),
            (MatrixFormat::E5m2, MatrixFormat::E4m3, false) => issue!(inout, $registers, concat!("m64n", $columns, "k32.f32.e5m2.e4m3"), $descriptors, $bytes, [accumulate = const 1, $($values)*]; $($i)*),
            (MatrixFormat::E5m2, MatrixFormat::E4m3, true) => issue!(out, $registers, concat!("m64n", $columns, "k32.f32.e5m2.e4m3"), $descriptors, $bytes, [accumulate = const 0, $($values)*]; $($i)*),
            _ => const { assert!(multiplied::<$a, $b>(), "operands have one format, or two of 8 bits") },
        }
    };
}

macro_rules! shape {
    ($columns:literal; $($i:literal)*) => {
        impl MatrixColumns for Columns<$columns> {
            type Registers = [f32; $columns / 2];
            const ZERO: Self::Registers = [0.0; $columns / 2];
            type Words = [u32; $columns / 4];
            const ZERO_WORDS: Self::Words = [0; $columns / 4];

            #[inline(always)]
            unsafe fn multiply<A: MatrixElement, B: MatrixElement, const A_MN: bool, const B_MN: bool, const FRESH: bool>(
                registers: &mut MaybeUninit<Self::Registers>,
                (): (),
                a: Descriptor,
                b: Descriptor,
            ) {
                let registers: *mut f32 = registers.as_mut_ptr().cast();
                issue_formats!(A, B, FRESH, registers, $columns, both!(),
                    "left, right, {accumulate}, 1, 1, {a_mn}, {b_mn}", "left, right, {accumulate}, 1, 1",
                    [a_mn = const A_MN as i32, b_mn = const B_MN as i32,
                        a = in(reg32) a.low, a_offset = in(reg32) a.offset, a_high = in(reg32) a.high,
                        b = in(reg32) b.low, b_offset = in(reg32) b.offset, b_high = in(reg32) b.high,],
                    [a = in(reg32) a.low, a_offset = in(reg32) a.offset, a_high = in(reg32) a.high,
                        b = in(reg32) b.low, b_offset = in(reg32) b.offset, b_high = in(reg32) b.high,]; $($i)*)
            }

            #[inline(always)]
            unsafe fn multiply_registers<T: MatrixElement, const B_MN: bool, const FRESH: bool>(
                registers: &mut MaybeUninit<Self::Registers>,
                (): (),
                a: [u32; 4],
                b: Descriptor,
            ) {
                let registers: *mut f32 = registers.as_mut_ptr().cast();
                issue_formats!(T, T, FRESH, registers, $columns, right!(),
                    "{{{a0}, {a1}, {a2}, {a3}}}, right, {accumulate}, 1, 1, {b_mn}", "{{{a0}, {a1}, {a2}, {a3}}}, right, {accumulate}, 1, 1",
                    [b_mn = const B_MN as i32, a0 = in(reg32) a[0], a1 = in(reg32) a[1], a2 = in(reg32) a[2], a3 = in(reg32) a[3],
                        b = in(reg32) b.low, b_offset = in(reg32) b.offset, b_high = in(reg32) b.high,],
                    [a0 = in(reg32) a[0], a1 = in(reg32) a[1], a2 = in(reg32) a[2], a3 = in(reg32) a[3],
                        b = in(reg32) b.low, b_offset = in(reg32) b.offset, b_high = in(reg32) b.high,]; $($i)*)
            }

            #[inline(always)]
            unsafe fn publish(registers: &mut MaybeUninit<Self::Registers>, (): ()) {
                let registers: *mut f32 = registers.as_mut_ptr().cast();
                // SAFETY: an empty instruction that uses and defines each register: what reads them later cannot be moved
                // above the wait before it. The multiplications have written all of them.
                unsafe { asm!(concat!("//" $(, " {", $i, "}")*), $(inout(reg32) *registers.add($i),)* options(nostack)) }
            }
        }
    };
}

/// Each line: columns, and the registers that they have more than the line above.
macro_rules! shapes {
    (@ $registers:tt) => {};
    (@ [$($registers:literal)*] $columns:literal: $($more:literal)*; $($rest:tt)*) => {
        shape!($columns; $($registers)* $($more)*);
        shapes!(@ [$($registers)* $($more)*] $($rest)*);
    };
    ($($lines:tt)*) => { shapes!(@ [] $($lines)*); };
}

shapes! {
    16: 0 1 2 3 4 5 6 7;
    32: 8 9 10 11 12 13 14 15;
    48: 16 17 18 19 20 21 22 23;
    64: 24 25 26 27 28 29 30 31;
    80: 32 33 34 35 36 37 38 39;
    96: 40 41 42 43 44 45 46 47;
    112: 48 49 50 51 52 53 54 55;
    128: 56 57 58 59 60 61 62 63;
    144: 64 65 66 67 68 69 70 71;
    160: 72 73 74 75 76 77 78 79;
    176: 80 81 82 83 84 85 86 87;
    192: 88 89 90 91 92 93 94 95;
    208: 96 97 98 99 100 101 102 103;
    224: 104 105 106 107 108 109 110 111;
    240: 112 113 114 115 116 117 118 119;
    256: 120 121 122 123 124 125 126 127;
}
