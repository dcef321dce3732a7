//! The kernels that add other ranks' parts, and matrices bound to them.

use oxtile_kernels::gemm::{self, GemmGathered, Summing, TileShape};
use oxtile_tile::launch::Kernel;
use oxtile_tile::num::{bf16, f16};

use crate::choice::Entry;
use crate::gemm::{GemmElement, GemmTile};
use crate::overlap::table::Instance;

/// Operands whose products may be scattered, of results of `O`.
pub trait ScatterOperands<O: 'static>: GemmElement<O> {
    /// Bytes of an element of the result.
    const RESULT_BYTES: u64 = size_of::<O>() as u64;
    /// The kernels.
    #[doc(hidden)]
    const SUMMING: &'static [&'static [SummingEntry<Self, O>]];

    /// The kernel of a tile and a layout.
    #[doc(hidden)]
    fn kernel(tile: GemmTile, n_major: bool) -> Option<&'static SummingEntry<Self, O>> {
        Self::SUMMING.iter().copied().flatten().find(|entry| entry.decision == SummingKernel { tile, n_major })
    }
}

/// A kernel, and what loads it.
#[doc(hidden)]
pub type SummingEntry<T, O> = Entry<SummingKernel, Box<dyn Instance<T, O>>>;

/// A kernel that adds parts.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SummingKernel {
    /// The tile of a block.
    pub tile: GemmTile,
    /// Whether rows of `B` lie along `n`, and not along `k`.
    pub n_major: bool,
}

macro_rules! summing {
    ($t:ident: $($tile:ident $n_major:literal),*) => {
        impl ScatterOperands<$t> for $t {
            const SUMMING: &'static [&'static [SummingEntry<Self, $t>]] = &[&[$(Entry {
                decision: SummingKernel { tile: GemmTile::$tile, n_major: $n_major },
                name: <GemmGathered<$t, $t, 64, $t, 64, gemm::$tile, Summing, false, $n_major> as Kernel>::INFO.name,
                tile: [<gemm::$tile as TileShape>::ROWS as u64, <gemm::$tile as TileShape>::COLUMNS as u64],
                load: |runtime| {
                    type This = GemmGathered<$t, $t, 64, $t, 64, gemm::$tile, Summing, false, $n_major>;
                    Ok(Box::new(runtime.load::<This>()?))
                },
            },)*]];
        }
    };
}

summing!(bf16: Tile128x256 false, Tile128x256 true, Tile128x128 false, Tile128x128 true);
summing!(f16: Tile128x256 false, Tile128x256 true);
