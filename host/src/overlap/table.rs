//! The kernels that wait for their operand, and matrices bound to them.

use std::marker::PhantomData;

use oxtile_kernels::gemm::{self, ByRows, BySum, GatheredArgument, Gathering, GemmGathered, GemmGatheredArgs, TileLoops, TileShape};
use oxtile_tile::arch::MatrixElement;
use oxtile_tile::arrivals::WaitsArgument;
use oxtile_tile::launch::{DeviceView, Kernel};
use oxtile_tile::num::{bf16, e4m3, f16};
use oxtile_tile::register_tile::StoredElement;

use crate::choice::{Entry, Table};
use crate::gemm::{GemmConfig, GemmElement, GemmTile, Maps, Matrices};
use crate::runtime::{Device, Loaded, Result, Stream};

/// Operands of which one may be gathered, and whose product is of `O`.
pub trait GatherOperands<O: 'static>: GemmElement<O> {
    /// Elements along the sum that a kernel multiplies at a time: 128 bytes.
    const STEP: u64 = 128 / Self::BYTES;
    /// The kernels.
    #[doc(hidden)]
    const GATHERED: Table<GatheredKernel, Box<dyn Instance<Self, O>>>;
}

/// A kernel that waits for its operand.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatheredKernel {
    /// Whether the operand is gathered along the sum, and not by rows of `A`.
    pub by_sum: bool,
    /// The tile of a block.
    pub tile: GemmTile,
    /// Whether rows of `A` lie along `m`, and not along `k`.
    pub m_major: bool,
    /// Whether rows of `B` lie along `n`, and not along `k`.
    pub n_major: bool,
}

impl GatheredKernel {
    /// What is to be stored how, in the words of the configuration.
    pub(super) fn layout(&self) -> String {
        format!("transpose_a {}, transpose_b {}", self.m_major, !self.n_major)
    }
}

/// A loaded kernel.
#[doc(hidden)]
pub trait Instance<T, O>: Send + Sync {
    /// Loads it on the device.
    fn prepare(&self, device: &Device) -> Result<()>;

    /// Binds matrices.
    fn bind<'a>(&'a self, stream: &Stream, config: GemmConfig, order: Order<'a>, matrices: Matrices<'a, T, T, O>) -> Result<Waiting<'a>>;
}

/// A product that waits for flags.
#[doc(hidden)]
pub type Waiting<'a> = Box<dyn FnMut(&Stream, WaitsArgument<'_>) -> Result<()> + Send + 'a>;

/// What the kernel knows of the gather, but for the flags' place.
#[doc(hidden)]
#[derive(Clone, Copy)]
pub struct Order<'a> {
    pub tiles: DeviceView<'a, u32>,
    pub flags: DeviceView<'a, u32>,
    pub extent: u32,
    pub sources: u32,
    pub slab: u32,
    pub first: u32,
    pub margin: u32,
}

impl<T, const DEPTH: usize, O, const WIDTH: usize, S, G, const M_MAJOR: bool, const N_MAJOR: bool> Instance<T, O>
    for Loaded<GemmGathered<T, T, DEPTH, O, WIDTH, S, G, M_MAJOR, N_MAJOR>>
where
    T: MatrixElement,
    O: StoredElement,
    S: TileLoops,
    G: Gathering,
    GemmGathered<T, T, DEPTH, O, WIDTH, S, G, M_MAJOR, N_MAJOR>: Kernel,
{
    fn prepare(&self, device: &Device) -> Result<()> {
        Loaded::prepare(self, device)
    }

    fn bind<'a>(&'a self, stream: &Stream, config: GemmConfig, order: Order<'a>, matrices: Matrices<'a, T, T, O>) -> Result<Waiting<'a>> {
        let (scales, bias) = (matrices.scales, matrices.bias);
        let mut maps = Maps::<T, T, DEPTH, O, WIDTH>::new(stream, config, matrices)?;
        Ok(Box::new(move |stream, waits| {
            let Order { tiles, flags, extent, sources, slab, first, margin } = order;
            // As fields: the argument itself is of one lifetime.
            let WaitsArgument { lines, first: first_line, patience } = waits;
            let waits = WaitsArgument { lines, first: first_line, patience };
            let gathered = GatheredArgument { tiles, flags, waits, extent, sources, slab, first, margin };
            let ((a, b, d, old), shape, fusion) = (maps.arguments(), config.shape(), config.fusion(scales, bias));
            self.launch(stream, GemmGatheredArgs { a, b, d, old, shape, fusion, gathered, marker: PhantomData })
        }))
    }
}

/// Entries: elements, sizes of steps and stores, and for each kind of gather, by the sum or not, and tile its layouts.
macro_rules! gathered {
    ($t:ident $depth:literal, $o:ident $width:literal: $([$gathering:ty] $by_sum:literal $tile:ident $([$m_major:literal $n_major:literal])*),*) => {
        impl GatherOperands<$o> for $t {
            const GATHERED: Table<GatheredKernel, Box<dyn Instance<Self, $o>>> = &[&[$($(Entry {
                decision: GatheredKernel { by_sum: $by_sum, tile: GemmTile::$tile, m_major: $m_major, n_major: $n_major },
                name: <GemmGathered<$t, $t, $depth, $o, $width, gemm::$tile, $gathering, $m_major, $n_major> as Kernel>::INFO.name,
                tile: [<gemm::$tile as TileShape>::ROWS as u64, <gemm::$tile as TileShape>::COLUMNS as u64],
                load: |runtime| {
                    type This = GemmGathered<$t, $t, $depth, $o, $width, gemm::$tile, $gathering, $m_major, $n_major>;
                    Ok(Box::new(runtime.load::<This>()?))
                },
            },)*)*]];
        }
    };
}

gathered!(bf16 64, bf16 64:
    [ByRows] false Tile128x256 [false false] [false true] [true false] [true true],
    [ByRows] false Tile128x128 [false false] [false true],
    [BySum] true Tile128x256 [false false] [false true] [true true]);
gathered!(bf16 64, f32 32: [BySum] true Tile128x256 [true true]);
gathered!(f16 64, f16 64:
    [ByRows] false Tile128x256 [false false] [false true] [true false] [true true],
    [BySum] true Tile128x256 [true true]);
gathered!(e4m3 128, bf16 64: [ByRows] false Tile128x256 [false false]);
