//! The instruction families of matrix kernels: matrix multiplication by warpgroups and by warps, moves of 8x8 matrices,
//! register donation. Storage depends on the shape, so multiplication is implemented for [`Columns`], not for the target.

use core::mem::MaybeUninit;

use super::Target;
use crate::num::{Element, Pod, bf16, e4m3, e5m2, f16};

/// The types that the tensor cores multiply. Accumulation is in f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MatrixFormat {
    /// bfloat16.
    Bf16,
    /// IEEE binary16.
    F16,
    /// 8 bits, K-major operands only.
    E4m3,
    /// 8 bits, K-major operands only.
    E5m2,
}

/// An element of a matrix operand.
pub trait MatrixElement: Pod + Element {
    /// Its format.
    const FORMAT: MatrixFormat;
    /// Elements of the reduced direction that one instruction takes: 32 bytes.
    const STEP: usize = 32 / size_of::<Self>();
}

/// Whether elements of `A` and `B` are multiplied with one another: those of one format, and those of the two formats of 8 bits.
pub const fn multiplied<A: MatrixElement, B: MatrixElement>() -> bool {
    A::FORMAT as u8 == B::FORMAT as u8 || A::STEP == 32 && B::STEP == 32
}

impl MatrixElement for bf16 {
    const FORMAT: MatrixFormat = MatrixFormat::Bf16;
}

impl MatrixElement for f16 {
    const FORMAT: MatrixFormat = MatrixFormat::F16;
}

impl MatrixElement for e4m3 {
    const FORMAT: MatrixFormat = MatrixFormat::E4m3;
}

impl MatrixElement for e5m2 {
    const FORMAT: MatrixFormat = MatrixFormat::E5m2;
}

/// Ordering of warpgroup matrix instructions. PTX ISA 9.7.15, `wgmma`; sm_90a. The 128 threads of a warpgroup call
/// each together.
pub trait Wgmma {
    /// Names an accumulator in flight; nothing on the device.
    type Ticket: Copy;
    /// A new accumulator.
    fn ticket() -> Self::Ticket;
    /// `wgmma.fence.sync.aligned`: accesses of registers before it are done before the multiplications after it.
    fn fence();
    /// `wgmma.commit_group.sync.aligned`
    fn commit();
    /// `wgmma.wait_group.sync.aligned PENDING`: all but the newest `PENDING` groups are done.
    fn wait<const PENDING: u32>();
}

/// The ticket of the target in force.
pub type Ticket = <Target as Wgmma>::Ticket;

/// An operand in shared memory as an instruction reads it: PTX ISA 9.7.15.5.1, matrix-descriptor.
///
/// The parts are joined next to the instruction. Only constants differ from one instruction to the next, so
/// that the compiler keeps one register for an operand, not one for each of its descriptors.
#[derive(Debug, Clone, Copy)]
pub struct Descriptor {
    /// The low word of the operand's first descriptor: where it starts, and the leading stride.
    pub low: u32,
    /// What is added to the low word, a constant.
    pub offset: u32,
    /// The high word, a constant.
    pub high: u32,
}

impl Descriptor {
    /// The 64 bits.
    pub const fn bits(self) -> u64 {
        (self.low + self.offset) as u64 | (self.high as u64) << 32
    }
}

/// `N` columns of a register tile, a multiple of 16 up to 256.
pub struct Columns<const N: usize>;

/// A shape `m64nNk32bytes` of `wgmma.mma_async`. PTX ISA 9.7.15.5.
///
/// Register `i` of a thread holds row `16 * warp + lane / 4 + 8 * (i / 2 % 2)`, column
/// `8 * (i / 4) + 2 * (lane % 4) + i % 2`; warp of the warpgroup.
pub trait MatrixColumns {
    /// A thread's part of the tile: `[f32; N / 2]`.
    type Registers: Copy + AsRef<[f32]> + AsMut<[f32]>;
    /// All zero.
    const ZERO: Self::Registers;
    /// A thread's part of such a tile of 16-bit elements, in pairs: `[u32; N / 4]`.
    type Words: Copy + AsRef<[u32]> + AsMut<[u32]>;
    /// All zero.
    const ZERO_WORDS: Self::Words;

    /// `D = A * B + D`, or `A * B` if `FRESH`, with `A` 64 by 32 bytes and `B` 32 bytes by `N` in shared memory.
    /// An operand is K-major, or if `A_MN` or `B_MN` M- or N-major. The elements are [`multiplied`] with one another. The registers are
    /// in flight until published.
    ///
    /// # Safety
    /// `a` and `b` describe operands in the arena that no thread writes until a wait; a fence came before, and
    /// the registers are written unless `FRESH`.
    unsafe fn multiply<A: MatrixElement, B: MatrixElement, const A_MN: bool, const B_MN: bool, const FRESH: bool>(
        registers: &mut MaybeUninit<Self::Registers>,
        ticket: Ticket,
        a: Descriptor,
        b: Descriptor,
    );

    /// The same with `A` in registers: word `i` of a thread holds row `16 * warp + lane / 4 + 8 * (i % 2)` and the
    /// 4 bytes from `4 * (lane % 4) + 16 * (i / 2)` on.
    ///
    /// # Safety
    /// As [`multiply`](Self::multiply); the words are not written until a wait.
    unsafe fn multiply_registers<T: MatrixElement, const B_MN: bool, const FRESH: bool>(
        registers: &mut MaybeUninit<Self::Registers>,
        ticket: Ticket,
        a: [u32; 4],
        b: Descriptor,
    );

    /// Hands the registers over to ordinary instructions, after the wait for their group.
    ///
    /// # Safety
    /// The registers are those of the ticket's multiplications.
    unsafe fn publish(registers: &mut MaybeUninit<Self::Registers>, ticket: Ticket);
}

/// Moves of four 8x8 matrices of 16-bit elements between registers and shared memory by a warp. Lane `8 i + r` gives
/// the address of row `r` of matrix `i`, 16 bytes; word `i` of a lane holds row `lane / 4`, columns `2 * (lane % 4)` and
/// the next of matrix `i`. PTX ISA 9.7.14.5.
pub trait MatrixMove {
    /// `stmatrix.sync.aligned.m8n8.x4.shared.b16` (sm_90)
    ///
    /// # Safety
    /// `row` is 16-byte aligned with 16 bytes inside the arena.
    unsafe fn store_matrices(row: u32, words: [u32; 4]);
    /// `stmatrix.sync.aligned.m8n8.x4.trans.shared.b16` (sm_90): a lane's words hold column `lane / 4`, rows `2 * (lane % 4)`
    /// and the next.
    ///
    /// # Safety
    /// As [`store_matrices`](Self::store_matrices).
    unsafe fn store_matrices_transposed(row: u32, words: [u32; 4]);
    /// `ldmatrix.sync.aligned.m8n8.x4.shared.b16` (sm_75)
    ///
    /// # Safety
    /// As [`store_matrices`](Self::store_matrices).
    unsafe fn load_matrices(row: u32) -> [u32; 4];
    /// `ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16` (sm_75): word `i` of a lane holds rows `2 * (lane % 4)` and the next,
    /// column `lane / 4` of matrix `i`.
    ///
    /// # Safety
    /// As [`store_matrices`](Self::store_matrices).
    unsafe fn load_matrices_transposed(row: u32) -> [u32; 4];
}

/// Matrix multiplication by a warp, in registers alone. PTX ISA 9.7.14.5.8, `mma`; 16 bits from sm_80, 8 bits from sm_89.
pub trait WarpMatrix {
    /// `mma.sync.aligned.m16n8k16.row.col.f32.T.T.f32`, or `k32` of 8 bits: `A B + sums` for `A` of 16 rows of 32 bytes and `B`
    /// of 8 columns of 32 bytes.
    ///
    /// Word `i` of `a` holds row `lane / 4 + 8 * (i % 2)`, the 4 bytes from `4 * (lane % 4) + 16 * (i / 2)` on; word `i` of `b`
    /// column `lane / 4`, the bytes from `4 * (lane % 4) + 16 * i` on; sum `i` row `lane / 4 + 8 * (i / 2)`, column
    /// `2 * (lane % 4) + i % 2`.
    fn multiply_warp<T: MatrixElement>(sums: [f32; 4], a: [u32; 4], b: [u32; 2]) -> [f32; 4];
}

/// `setmaxnreg`: registers move between warpgroups. PTX ISA 9.7.19.5; sm_90a. All threads of a warpgroup call each
/// together, with a multiple of 8 from 24 to 256.
pub trait Donation {
    /// `setmaxnreg.dec.sync.aligned.u32 REGISTERS`
    fn release<const REGISTERS: u32>();
    /// `setmaxnreg.inc.sync.aligned.u32 REGISTERS`: waits until they are there.
    fn claim<const REGISTERS: u32>();
}
