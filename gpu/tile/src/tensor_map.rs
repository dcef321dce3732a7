//! Tensor maps: how TMA cuts boxes out of a matrix.
//!
//! A kernel holds the device address of an encoded map (docs/adr/0004-tensor-maps-by-pointer.md). The box is
//! part of the type, so a copy into a tile of another shape does not compile. One thread starts a copy;
//! elements beyond the matrix are zero when loaded and left out when stored. Needs sm_90.
//!
//! Rows of the matrix are multiples of 16 bytes, and so are rows of the box, of at most 256 elements each way, and the
//! place in the row where a box begins: a device ends elsewhere with an illegal instruction, which the PTX ISA does not
//! say and the emulator reports. Tiles are aligned by their type. A swizzled tile takes one copy a panel. A tensor of `RANK` dimensions is cut in its last two; the others pick the
//! matrix.

use core::marker::PhantomData;

use crate::arch::{BulkCopy, Cluster, Target};
use crate::layout::{Linear, Swizzle, TileLayout};
use crate::num::Pod;
use crate::pipeline::Mbarrier;
use crate::shared::SharedTile;

/// The rows of a map whose edge a kernel moves to the end of a sequence of rows: one row more than any sequence has.
pub const MAP_ROWS: u32 = 1 << 30;

/// Boxes of `ROWS` by `COLUMNS` of a tensor that nothing writes while the kernel runs, but for chunks that the kernel waits for
/// ([`arrivals`](crate::arrivals)).
pub struct TensorMap<T, const ROWS: usize, const COLUMNS: usize, S = Linear, const RANK: usize = 2> {
    address: u64,
    element: PhantomData<fn() -> (T, S)>,
}

/// Boxes of `ROWS` by `COLUMNS` of a tensor that the kernel writes.
pub struct TensorMapMut<T, const ROWS: usize, const COLUMNS: usize, S = Linear, const RANK: usize = 2> {
    address: u64,
    element: PhantomData<fn() -> (T, S)>,
}

macro_rules! maps {
    ($($map:ident)*) => { $(
        impl<T, const ROWS: usize, const COLUMNS: usize, S, const RANK: usize> Clone for $map<T, ROWS, COLUMNS, S, RANK> {
            #[inline(always)]
            fn clone(&self) -> Self {
                *self
            }
        }

        impl<T, const ROWS: usize, const COLUMNS: usize, S, const RANK: usize> Copy for $map<T, ROWS, COLUMNS, S, RANK> {}

        impl<T: Pod, const ROWS: usize, const COLUMNS: usize, S: Swizzle, const RANK: usize> $map<T, ROWS, COLUMNS, S, RANK> {
            /// Bytes of a tile: what an mbarrier is told to expect.
            pub const BYTES: u32 = {
                assert!(RANK >= 2 && RANK <= 5, "a tensor map has 2 to 5 dimensions");
                Self::LAYOUT.panels() * box_bytes(ROWS, Self::PANEL_COLUMNS, size_of::<T>())
            };

            /// Columns of a panel of the tile, which one copy moves.
            pub const PANEL_COLUMNS: usize = Self::LAYOUT.panel_row() as usize / size_of::<T>();

            const LAYOUT: TileLayout = SharedTile::<T, ROWS, COLUMNS, S>::LAYOUT;

            /// The map encoded at `address`.
            ///
            /// # Safety
            /// 128 bytes at a multiple of 64 hold a map of such boxes of a matrix of `T`, as long as the kernel runs.
            #[inline(always)]
            pub const unsafe fn from_raw(address: u64) -> Self {
                Self { address, element: PhantomData }
            }

            /// Brings the map into the multiprocessor's cache of maps, so that the first copy does not wait for device memory. A hint; one thread calls it.
            #[inline(always)]
            pub fn prefetch(&self) {
                // SAFETY: the maker vouched for the map.
                unsafe { Target::prefetch_map(self.address) };
            }

            /// Starts to load a box, by what each map says of it.
            #[inline(always)]
            #[track_caller]
            fn start_load(&self, target: SharedTile<T, ROWS, COLUMNS, S>, at: [u32; RANK], mbarrier: Mbarrier) {
                const { assert!(Self::BYTES > 0) };
                let mut panel = 0;
                while panel < Self::LAYOUT.panels() {
                    let (shared, columns) = (target.address() + panel * Self::LAYOUT.panel(), panel * Self::PANEL_COLUMNS as u32);
                    // SAFETY: the maker vouched for the map; the tile has the box's shape by its type.
                    unsafe { Target::load_tensor(shared, self.address, coordinates(at, columns), mbarrier.address()) };
                    panel += 1;
                }
            }

            /// The device address of the encoded map.
            #[inline(always)]
            pub(crate) const fn address(&self) -> u64 {
                self.address
            }
        }
    )* };
}

maps!(TensorMap TensorMapMut);

/// Bytes of a box that TMA can move: a panel, whose rows are as wide as its swizzle.
/// CUDA driver API, `cuTensorMapEncodeTiled`, `boxDim`.
const fn box_bytes(rows: usize, columns: usize, element_bytes: usize) -> u32 {
    assert!(rows >= 1 && rows <= 256 && columns >= 1 && columns <= 256, "a box has 1 to 256 elements in each direction");
    assert!((columns * element_bytes).is_multiple_of(16), "the rows of a box are multiples of 16 bytes");
    (rows * columns * element_bytes) as u32
}

/// The hardware's coordinates of a panel: innermost first.
#[inline(always)]
fn coordinates<const RANK: usize>(at: [u32; RANK], columns: u32) -> [u32; RANK] {
    let mut reversed = at;
    reversed.reverse();
    reversed[0] += columns;
    reversed
}

impl<T: Pod, const ROWS: usize, const COLUMNS: usize, S: Swizzle, const RANK: usize> TensorMap<T, ROWS, COLUMNS, S, RANK> {
    /// Starts to load the box whose first element is at `at` (outermost index first: row and column come last);
    /// completes [`BYTES`](Self::BYTES) on `mbarrier`, boxes over the edge too.
    #[inline(always)]
    #[track_caller]
    pub fn load(&self, target: SharedTile<T, ROWS, COLUMNS, S>, at: [u32; RANK], mbarrier: Mbarrier) {
        self.start_load(target, at, mbarrier);
    }

    /// The same into the tile at this place in every block of the cluster that `blocks` has a bit for; each completes the
    /// bytes on its own mbarrier, at the place of this one.
    #[inline(always)]
    #[track_caller]
    pub fn load_multicast(&self, target: SharedTile<T, ROWS, COLUMNS, S>, at: [u32; RANK], mbarrier: Mbarrier, blocks: u16) {
        const { assert!(Self::BYTES > 0) };
        let mut panel = 0;
        while panel < Self::LAYOUT.panels() {
            let (shared, columns) = (target.address() + panel * Self::LAYOUT.panel(), panel * Self::PANEL_COLUMNS as u32);
            // SAFETY: as `load`; blocks of one kernel have one layout of shared memory.
            unsafe { Target::load_tensor_multicast(shared, self.address, coordinates(at, columns), mbarrier.address(), blocks) };
            panel += 1;
        }
    }
}

impl<T: Pod, const ROWS: usize, const COLUMNS: usize, S: Swizzle, const RANK: usize> TensorMapMut<T, ROWS, COLUMNS, S, RANK> {
    /// As [`TensorMap::load`]. What this kernel stored there is loaded once the store has [landed](crate::pipeline::wait_stores).
    #[inline(always)]
    #[track_caller]
    pub fn load(&self, target: SharedTile<T, ROWS, COLUMNS, S>, at: [u32; RANK], mbarrier: Mbarrier) {
        self.start_load(target, at, mbarrier);
    }

    /// Starts to store the box whose first element is at `at`, in this thread's bulk group. The tile was written before
    /// a [`fence_proxy_async`](crate::sync::fence_proxy_async) and a barrier.
    #[inline(always)]
    #[track_caller]
    pub fn store(&self, at: [u32; RANK], source: SharedTile<T, ROWS, COLUMNS, S>) {
        const { assert!(Self::BYTES > 0) };
        let mut panel = 0;
        while panel < Self::LAYOUT.panels() {
            let (shared, columns) = (source.address() + panel * Self::LAYOUT.panel(), panel * Self::PANEL_COLUMNS as u32);
            // SAFETY: as `TensorMap::load`.
            unsafe { Target::store_tensor(self.address, coordinates(at, columns), shared) };
            panel += 1;
        }
    }
}
