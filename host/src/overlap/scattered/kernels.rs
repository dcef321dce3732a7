//! The kernels of products whose sum ranks share, and matrices bound to them.

use std::marker::PhantomData;

use oxtile_kernels::gemm::{self, AwayArgument, GatheredArgument, GemmScattered, GemmScatteredArgs, TileLoops, TileShape};
use oxtile_tile::arch::MatrixElement;
use oxtile_tile::arrivals::{SignalsArgument, WaitsArgument};
use oxtile_tile::launch::{DeviceView, DeviceViewMut, Kernel};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::num::{bf16, f16};
use oxtile_tile::register_tile::StoredElement;

use crate::choice::Entry;
use crate::gemm::{GemmConfig, GemmElement, GemmTile, Matrices};
use crate::runtime::{Buffer, Device, Loaded, Result, Stream};
use crate::tensor::{DetachedMap, Strided, TensorMap, TensorMapMut, Uploads};

/// Operands whose products may be scattered, of results of `O`.
pub trait ScatterOperands<O: 'static>: GemmElement<O> {
    /// Bytes of an element of the result.
    const RESULT_BYTES: u64 = size_of::<O>() as u64;
    /// The kernels.
    #[doc(hidden)]
    const SHARING: &'static [&'static [SharingEntry<Self, O>]];

    /// The kernel of a tile and a layout.
    #[doc(hidden)]
    fn kernel(tile: GemmTile, n_major: bool) -> Option<&'static SharingEntry<Self, O>> {
        Self::SHARING.iter().copied().flatten().find(|entry| entry.decision == SharingKernel { tile, n_major })
    }
}

/// A kernel, and what loads it.
#[doc(hidden)]
pub type SharingEntry<T, O> = Entry<SharingKernel, Box<dyn Instance<T, O>>>;

/// A kernel of a product whose sum ranks share.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharingKernel {
    /// The tile of a block.
    pub tile: GemmTile,
    /// Whether rows of `B` lie along `n`, and not along `k`.
    pub n_major: bool,
}

/// A loaded kernel.
#[doc(hidden)]
pub trait Instance<T, O>: Send + Sync {
    /// Loads it on the device.
    fn prepare(&self, device: &Device) -> Result<()>;

    /// Binds matrices: all rows of `A` that have tiles, and of the result so many own ones.
    fn bind<'a>(
        &'a self,
        stream: &Stream,
        config: GemmConfig,
        own: Own<'a, O>,
        matrices: Matrices<'a, T, T, O>,
        away: Option<Places<'a, '_, O>>,
    ) -> Result<Launch<'a, O>>;
}

/// Own rows, and what is added to them.
#[doc(hidden)]
pub struct Own<'a, O> {
    /// How many.
    pub rows: u64,
    /// The parts of so many sources, one after another, if there is any.
    pub parts: (u32, Option<Buffer<O>>),
    /// For each panel and source the number of the flag that the kernel waits for.
    pub flags: DeviceView<'a, u32>,
    /// Rows of a panel.
    pub extent: u32,
    /// Multiprocessors that are left free.
    pub margin: u32,
}

/// Where tiles of the other members' rows go.
#[doc(hidden)]
pub struct Places<'a, 'p, O> {
    /// Where those of each member go, and which flags say that they are there ([`Away`](gemm::Away)).
    pub members: DeviceView<'a, u32>,
    /// The matrices that they go to, and how these lie.
    pub all: DeviceView<'p, O>,
    pub layout: Strided<3>,
    /// Rows and panels of a shard.
    pub shard: u32,
    pub panels: u32,
    /// The number of this member.
    pub me: u32,
}

/// A product that is bound.
#[doc(hidden)]
pub type Launch<'a, O> = Box<dyn FnMut(&Stream, Call<'_, O>) -> Result<()> + Send + 'a>;

/// What a call brings.
#[doc(hidden)]
pub struct Call<'c, O> {
    /// The order of tiles.
    pub tiles: DeviceView<'c, u32>,
    /// Whether any is of own rows: else no part is read.
    pub adds: bool,
    /// What it waits for.
    pub waits: WaitsArgument<'c>,
    /// Where tiles go that leave, and what is set when they are there.
    pub away: Option<Sending<'c, O>>,
}

/// The way to the other members.
#[doc(hidden)]
pub struct Sending<'c, O> {
    /// The matrices that tiles go to, if any leaves.
    pub others: Option<DeviceViewMut<'c, O>>,
    /// This rank's flags at each rank, and the number of flag 0 of the members.
    pub signals: SignalsArgument<'c>,
    pub flag: u32,
}

impl<T, S, const N_MAJOR: bool> Instance<T, T> for Loaded<GemmScattered<T, S, N_MAJOR>>
where
    T: MatrixElement + StoredElement,
    S: TileLoops,
    GemmScattered<T, S, N_MAJOR>: Kernel,
{
    fn prepare(&self, device: &Device) -> Result<()> {
        Loaded::prepare(self, device)
    }

    fn bind<'a>(
        &'a self,
        stream: &Stream,
        config: GemmConfig,
        Own { rows, parts: (sources, parts), flags, extent, margin }: Own<'a, T>,
        Matrices { a, b, scales, bias, d }: Matrices<'a, T, T, T>,
        away: Option<Places<'a, '_, T>>,
    ) -> Result<Launch<'a, T>> {
        let GemmConfig { m, n, k, .. } = config;
        let mut uploads = Uploads::default();
        let a = TensorMap::with(&mut uploads, stream, a, Strided::dense([m, k]))?;
        let b = TensorMap::with(&mut uploads, stream, b, Strided::dense(if N_MAJOR { [k, n] } else { [n, k] }))?;
        let mut d = TensorMapMut::with(&mut uploads, stream, d, Strided::dense([rows, n]))?;
        let of_parts = Strided::dense([sources.into(), rows, n]);
        let with_map = |parts: Buffer<T>, uploads: &mut Uploads| -> Result<_> {
            let map = DetachedMap::<T, 64, 64, Swizzle128, 3>::with(uploads, stream, parts.view(), of_parts)?;
            Ok((map, parts))
        };
        let parts = parts.map(|parts| with_map(parts, &mut uploads)).transpose()?;
        let mut away = match away {
            Some(Places { members, all, layout, shard, panels, me }) => {
                let map = DetachedMap::<T, 64, 64, Swizzle128, 3>::with(&mut uploads, stream, all, layout)?;
                let landed = Buffer::<u32>::zeros(stream, members.len() / gemm::MEMBER * u64::from(panels))?;
                Some(((members, shard, me), map, landed))
            }
            None => None,
        };
        uploads.copy(stream)?;
        Ok(Box::new(move |stream, Call { tiles, adds, waits, away: sending }| {
            let WaitsArgument { lines, first, patience } = waits;
            let waits = WaitsArgument { lines, first, patience };
            let (sources, flags) = if adds { (sources, flags) } else { (0, flags.slice(0, 0)) };
            let gathered = GatheredArgument { tiles, flags, waits, extent, sources, slab: 1, first: 0, margin };
            let (away, others) = match (&mut away, sending) {
                (Some(((members, shard, me), map, landed)), Some(Sending { others, signals, flag })) => {
                    let SignalsArgument { lines, first, stride } = signals;
                    let signals = SignalsArgument { lines, first, stride };
                    let landed = landed.view_mut();
                    (
                        Some(AwayArgument { members: *members, landed, signals, flag, shard: *shard, me: *me }),
                        others.map(|others| map.of_mut(others)),
                    )
                }
                _ => (None, None),
            };
            self.launch(
                stream,
                GemmScatteredArgs {
                    a: a.view(),
                    b: b.view(),
                    d: d.view_mut(),
                    parts: parts.as_ref().filter(|_| adds).map(|(map, parts)| map.of(parts.view())),
                    others,
                    shape: config.shape(),
                    fusion: config.fusion(scales, bias),
                    gathered,
                    away,
                    marker: PhantomData,
                },
            )
        }))
    }
}

macro_rules! sharing {
    ($t:ident: $($tile:ident $n_major:literal),*) => {
        impl ScatterOperands<$t> for $t {
            const SHARING: &'static [&'static [SharingEntry<Self, $t>]] = &[&[$(Entry {
                decision: SharingKernel { tile: GemmTile::$tile, n_major: $n_major },
                name: <GemmScattered<$t, gemm::$tile, $n_major> as Kernel>::INFO.name,
                tile: [<gemm::$tile as TileShape>::ROWS as u64, <gemm::$tile as TileShape>::COLUMNS as u64],
                load: |runtime| Ok(Box::new(runtime.load::<GemmScattered<$t, gemm::$tile, $n_major>>()?)),
            },)*]];
        }
    };
}

sharing!(bf16: Tile128x256 false, Tile128x256 true, Tile128x128 false, Tile128x128 true);
sharing!(f16: Tile128x256 false, Tile128x256 true);
