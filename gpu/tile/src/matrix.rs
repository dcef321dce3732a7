//! Matrix multiplication by a warpgroup: `D = A B`, `D += A B` with `A` of 64 rows.
//!
//! `A` lies in shared memory or in registers, `B` in shared memory, `D` in registers. All 128 threads of the
//! warpgroup call each function together, at one place.
//!
//! | step | what it waits for | what is then allowed |
//! |---|---|---|
//! | [`multiply`], [`RegisterTile::multiply_add`] | nothing: it is issued | more multiplications |
//! | [`InFlight::wait_earlier`] | all multiplications before the last | the tiles that those read may be overwritten |
//! | [`InFlight::wait`] | all of them | the result may be used |
//!
//! What is in flight owns its registers, so reading them early does not compile. Tiles in shared memory were written by
//! TMA and waited for, or by threads before a [`fence_proxy_async`](crate::sync::fence_proxy_async) and a
//! barrier. They are not written until a wait.
//!
//! Products are exact and accumulated in `f32` with the tensor core's own rounding, which is not specified: the
//! emulator sums the products of an instruction in `f64` and rounds once, so the last bits differ between the two.
//!
//! Source: PTX ISA 9.7.15, asynchronous warpgroup level matrix instructions; sm_90a.

use core::marker::PhantomData;
use core::mem::MaybeUninit;

use crate::arch::{Columns, Descriptor, MatrixColumns, MatrixElement, Target, Ticket, Wgmma};
use crate::layout::{Swizzle, SwizzleMode, TileLayout};
use crate::register_tile::{OperandTile, RegisterTile};
use crate::shared::{SharedTile, Tiles};

/// An operand in shared memory, `MN` by `K`: K is the direction that is summed over. Its rows lie along K, or along the
/// other direction if `MN_MAJOR`.
pub struct Operand<T, const MN: usize, const K: usize, const MN_MAJOR: bool> {
    descriptor: u64,
    layout: TileLayout,
    element: PhantomData<fn() -> T>,
}

impl<T, const MN: usize, const K: usize, const MN_MAJOR: bool> Clone for Operand<T, MN, K, MN_MAJOR> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<T, const MN: usize, const K: usize, const MN_MAJOR: bool> Copy for Operand<T, MN, K, MN_MAJOR> {}

impl<T: MatrixElement, const MN: usize, const K: usize, const MN_MAJOR: bool> Operand<T, MN, K, MN_MAJOR> {
    /// The operand that a tile holds: `[MN, K]`, or `[K, MN]` if `MN_MAJOR`.
    #[inline(always)]
    pub fn of<const ROWS: usize, const COLUMNS: usize, S: Swizzle>(tile: SharedTile<T, ROWS, COLUMNS, S>) -> Self {
        const {
            assert!(if MN_MAJOR { ROWS == K && COLUMNS == MN } else { ROWS == MN && COLUMNS == K }, "the tile has the operand's shape");
        }
        Self::new(tile.address(), SharedTile::<T, ROWS, COLUMNS, S>::LAYOUT)
    }

    /// The operand that tiles one panel wide hold together, stacked in the direction that is not summed over: its first rows, if it has fewer.
    #[inline(always)]
    pub fn stacked<const ROWS: usize, const COLUMNS: usize, const COUNT: usize, S: Swizzle>(
        tiles: Tiles<SharedTile<T, ROWS, COLUMNS, S>, COUNT>,
    ) -> Self {
        let layout = const {
            let one = SharedTile::<T, ROWS, COLUMNS, S>::LAYOUT;
            assert!(one.panels() == 1, "stacked tiles are one panel wide");
            assert!(
                if MN_MAJOR { ROWS == K && COLUMNS * COUNT >= MN } else { ROWS * COUNT >= MN && COLUMNS == K },
                "the tiles have the operand's shape together"
            );
            match MN_MAJOR {
                true => TileLayout { row_bytes: one.row_bytes * COUNT as u32, ..one },
                false => TileLayout { rows: one.rows * COUNT as u32, ..one },
            }
        };
        Self::new(tiles.address(), layout)
    }

    #[inline(always)]
    fn new(address: u32, layout: TileLayout) -> Self {
        const {
            assert!(!MN_MAJOR || size_of::<T>() == 2, "8-bit operands are K-major: the tensor core transposes 16 bits only");
            assert!(K.is_multiple_of(T::STEP), "K is a multiple of 32 bytes");
        }
        Self { descriptor: layout.descriptor(address, MN_MAJOR), layout, element: PhantomData }
    }

    /// The descriptor of the part that instruction `step` takes.
    #[inline(always)]
    fn part(self, step: usize) -> Descriptor {
        let offset = self.layout.step(step as u32, T::STEP as u32, MN_MAJOR) as u32;
        Descriptor { low: self.descriptor as u32, offset, high: (self.descriptor >> 32) as u32 }
    }
}

impl<T: MatrixElement, const ROWS: usize, const COLUMNS: usize, S: Swizzle> SharedTile<T, ROWS, COLUMNS, S> {
    const SWIZZLED: () = assert!(!matches!(S::MODE, SwizzleMode::None), "operands are swizzled");

    /// The tile as it stands: rows along K, for an operand on the left, `[M, K]`, or the transpose of one on the right.
    #[inline(always)]
    pub fn k_major(self) -> Operand<T, ROWS, COLUMNS, false> {
        let () = Self::SWIZZLED;
        Operand::of(self)
    }

    /// As [`k_major`](Self::k_major), of the `PART` rows from `first` on, a multiple of 8.
    #[inline(always)]
    #[track_caller]
    pub fn k_major_rows<const PART: usize>(self, first: u32) -> Operand<T, PART, COLUMNS, false> {
        let () = Self::SWIZZLED;
        const { assert!(PART <= ROWS && PART.is_multiple_of(8), "rows are taken by atoms") };
        Operand::new(self.address() + first * Self::LAYOUT.panel_row(), Self::LAYOUT)
    }

    /// As [`mn_major`](Self::mn_major), of the `PART` columns of panel `index`: those from `index * PART` on.
    #[inline(always)]
    #[track_caller]
    pub fn mn_major_panel<const PART: usize>(self, index: u32) -> Operand<T, PART, ROWS, true> {
        let () = Self::SWIZZLED;
        const { assert!(PART * size_of::<T>() == S::MODE.span() as usize, "a panel is as wide as the swizzle's span") };
        Operand::new(self.address() + index * Self::LAYOUT.panel(), Self::LAYOUT)
    }

    /// The tile with its columns along K: an operand on the right, `[K, N]`, or the transpose of one on the left.
    #[inline(always)]
    pub fn mn_major(self) -> Operand<T, COLUMNS, ROWS, true> {
        let () = Self::SWIZZLED;
        Operand::of(self)
    }
}

/// A left operand of 64 rows, beside a right one of `T`: in shared memory, or in registers. In shared memory it may be of the other format
/// of 8 bits.
pub trait Left<T: MatrixElement, const K: usize>: Copy {
    /// Issues instruction `step`.
    ///
    /// # Safety
    /// As [`MatrixColumns::multiply`].
    #[doc(hidden)]
    unsafe fn issue<const N: usize, const B_MN: bool, const FRESH: bool>(self, step: usize, flight: &mut InFlight<N>, b: Descriptor)
    where
        Columns<N>: MatrixColumns;
}

impl<A: MatrixElement, T: MatrixElement, const K: usize, const A_MN: bool> Left<T, K> for Operand<A, 64, K, A_MN> {
    #[inline(always)]
    #[track_caller]
    unsafe fn issue<const N: usize, const B_MN: bool, const FRESH: bool>(self, step: usize, flight: &mut InFlight<N>, b: Descriptor)
    where
        Columns<N>: MatrixColumns,
    {
        // SAFETY: passed on to the caller.
        unsafe { Columns::<N>::multiply::<A, T, A_MN, B_MN, FRESH>(&mut flight.registers, flight.ticket, self.part(step), b) }
    }
}

impl<T: MatrixElement, const K: usize> Left<T, K> for OperandTile<T, K>
where
    Columns<K>: MatrixColumns,
{
    #[inline(always)]
    #[track_caller]
    unsafe fn issue<const N: usize, const B_MN: bool, const FRESH: bool>(self, step: usize, flight: &mut InFlight<N>, b: Descriptor)
    where
        Columns<N>: MatrixColumns,
    {
        // SAFETY: passed on to the caller.
        unsafe { Columns::<N>::multiply_registers::<T, B_MN, FRESH>(&mut flight.registers, flight.ticket, self.step(step), b) }
    }
}

/// A 64 by `N` result that multiplications are still writing.
#[must_use = "a multiplication that is not waited for has no result"]
pub struct InFlight<const N: usize>
where
    Columns<N>: MatrixColumns,
{
    registers: MaybeUninit<<Columns<N> as MatrixColumns>::Registers>,
    ticket: Ticket,
}

/// Starts `A B`.
#[inline(always)]
#[track_caller]
pub fn multiply<T: MatrixElement, const N: usize, const K: usize, const B_MN: bool>(
    a: impl Left<T, K>,
    b: Operand<T, N, K, B_MN>,
) -> InFlight<N>
where
    Columns<N>: MatrixColumns,
{
    InFlight { registers: MaybeUninit::uninit(), ticket: Target::ticket() }.group::<T, K, B_MN, true>(a, b)
}

impl<const N: usize> RegisterTile<N>
where
    Columns<N>: MatrixColumns,
{
    /// Starts to add `A B`.
    #[inline(always)]
    #[track_caller]
    pub fn multiply_add<T: MatrixElement, const K: usize, const B_MN: bool>(
        self,
        a: impl Left<T, K>,
        b: Operand<T, N, K, B_MN>,
    ) -> InFlight<N> {
        InFlight { registers: MaybeUninit::new(self.registers), ticket: Target::ticket() }.group::<T, K, B_MN, false>(a, b)
    }
}

impl<const N: usize> InFlight<N>
where
    Columns<N>: MatrixColumns,
{
    /// Starts to add another `A B`, after what is in flight.
    #[inline(always)]
    #[track_caller]
    pub fn multiply_add<T: MatrixElement, const K: usize, const B_MN: bool>(self, a: impl Left<T, K>, b: Operand<T, N, K, B_MN>) -> Self {
        self.group::<T, K, B_MN, false>(a, b)
    }

    /// One group of instructions.
    #[inline(always)]
    #[track_caller]
    fn group<T: MatrixElement, const K: usize, const B_MN: bool, const FRESH: bool>(
        mut self,
        a: impl Left<T, K>,
        b: Operand<T, N, K, B_MN>,
    ) -> Self {
        <Target as Wgmma>::fence();
        // SAFETY: operands describe tiles of the arena, which the caller of this module leaves alone until a wait (the
        // emulator checks it); the fence is above; the registers are written unless this starts afresh.
        unsafe {
            a.issue::<N, B_MN, FRESH>(0, &mut self, b.part(0));
            let mut step = 1;
            while step < K / T::STEP {
                a.issue::<N, B_MN, false>(step, &mut self, b.part(step));
                step += 1;
            }
        }
        <Target as Wgmma>::commit();
        self
    }

    /// Waits for everything that the warpgroup has in flight.
    #[inline(always)]
    #[track_caller]
    pub fn wait(self) -> RegisterTile<N> {
        self.wait_leaving::<0>()
    }

    /// Waits for all but the newest `PENDING` multiplications of the warpgroup, which are others' than this.
    #[inline(always)]
    #[track_caller]
    pub fn wait_leaving<const PENDING: u32>(self) -> RegisterTile<N> {
        <Target as Wgmma>::wait::<PENDING>();
        self.waited()
    }

    /// The result of multiplications that a wait for newer ones has covered.
    #[inline(always)]
    #[track_caller]
    pub fn waited(mut self) -> RegisterTile<N> {
        // SAFETY: the ticket came with the registers; the multiplications that were waited for have written them all (that they
        // were waited for is what the emulator checks).
        let registers = unsafe {
            Columns::<N>::publish(&mut self.registers, self.ticket);
            self.registers.assume_init()
        };
        RegisterTile { registers }
    }

    /// Waits for all multiplications of the warpgroup but the newest: what the earlier ones read may be overwritten.
    #[inline(always)]
    #[track_caller]
    pub fn wait_earlier(&self) {
        <Target as Wgmma>::wait::<1>();
    }
}
