//! Tensor maps: how the copy engine cuts boxes out of a matrix (TMA).
//!
//! A kernel holds the device address of an encoded map (docs/adr/0004-tensor-maps-by-pointer.md). The box is
//! part of the type, so a copy into a tile of another shape does not compile. One thread starts a copy;
//! elements beyond the matrix are zero when loaded and left out when stored. Needs sm_90.
//!
//! Rows of the matrix are multiples of 16 bytes, and so are rows of the box, of at most 256 elements each way.

use core::marker::PhantomData;

use crate::arch::{BulkCopy, Target};
use crate::num::Pod;
use crate::pipeline::Mbarrier;
use crate::shared::SharedTile;

/// Boxes of `ROWS` by `COLUMNS` of a row-major matrix that nobody writes while the kernel runs.
pub struct TensorMap<T, const ROWS: usize, const COLUMNS: usize> {
    address: u64,
    element: PhantomData<fn() -> T>,
}

/// Boxes of `ROWS` by `COLUMNS` of a row-major matrix that the kernel writes.
pub struct TensorMapMut<T, const ROWS: usize, const COLUMNS: usize> {
    address: u64,
    element: PhantomData<fn() -> T>,
}

macro_rules! maps {
    ($($map:ident)*) => { $(
        impl<T, const ROWS: usize, const COLUMNS: usize> Clone for $map<T, ROWS, COLUMNS> {
            #[inline(always)]
            fn clone(&self) -> Self {
                *self
            }
        }

        impl<T, const ROWS: usize, const COLUMNS: usize> Copy for $map<T, ROWS, COLUMNS> {}

        impl<T: Pod, const ROWS: usize, const COLUMNS: usize> $map<T, ROWS, COLUMNS> {
            /// Bytes of a box: what an mbarrier is told to expect.
            pub const BYTES: u32 = box_bytes(ROWS, COLUMNS, size_of::<T>());

            /// The map encoded at `address`.
            ///
            /// # Safety
            /// 128 bytes at a multiple of 64 hold a map of such boxes of a matrix of `T`, as long as the kernel runs.
            #[inline(always)]
            pub const unsafe fn from_raw(address: u64) -> Self {
                Self { address, element: PhantomData }
            }
        }
    )* };
}

maps!(TensorMap TensorMapMut);

/// Bytes of a box that the copy engine can move without swizzle: then its rows have no span to stay within.
/// CUDA driver API, `cuTensorMapEncodeTiled`, `boxDim`.
const fn box_bytes(rows: usize, columns: usize, element_bytes: usize) -> u32 {
    assert!(rows >= 1 && rows <= 256 && columns >= 1 && columns <= 256, "a box has 1 to 256 elements in each direction");
    assert!((columns * element_bytes).is_multiple_of(16), "the rows of a box are multiples of 16 bytes");
    (rows * columns * element_bytes) as u32
}

impl<T: Pod, const ROWS: usize, const COLUMNS: usize> TensorMap<T, ROWS, COLUMNS> {
    /// Starts to load the box whose first element is at `row`, `column`; completes [`BYTES`](Self::BYTES) on
    /// `mbarrier`, boxes over the edge too.
    #[inline(always)]
    #[track_caller]
    pub fn load(&self, target: SharedTile<T, ROWS, COLUMNS>, [row, column]: [u32; 2], mbarrier: Mbarrier) {
        const { assert!(Self::BYTES > 0) };
        // SAFETY: the maker vouched for the map; the tile has the box's shape by its type.
        unsafe { Target::load_tensor_2d(target.address(), self.address, [column, row], mbarrier.address()) };
    }
}

impl<T: Pod, const ROWS: usize, const COLUMNS: usize> TensorMapMut<T, ROWS, COLUMNS> {
    /// Starts to store the box whose first element is at `row`, `column`, in this thread's bulk group. The tile
    /// was written before a [`fence_proxy_async`](crate::sync::fence_proxy_async) and a barrier.
    #[inline(always)]
    #[track_caller]
    pub fn store(&self, [row, column]: [u32; 2], source: SharedTile<T, ROWS, COLUMNS>) {
        const { assert!(Self::BYTES > 0) };
        // SAFETY: as `TensorMap::load`.
        unsafe { Target::store_tensor_2d(self.address, [column, row], source.address()) };
    }
}
