//! The kernels of each pair of elements.

use oxtile_kernels::gemm::{self, GemmAny, GemmBlocks, GemmGrouped, GemmPortable, TileShape};
use oxtile_tile::launch::Kernel;
use oxtile_tile::num::{Pod, bf16, e4m3, e5m2, f16};

use super::choice::{GemmKernel, GemmTile};
use super::config::GemmConfig;
use super::epilogue::{EpilogueKernel, EpilogueKernels};
use super::grouped::GroupedInstance;
use super::plan::GemmPlan;
use super::product::Matrices;
use super::transposed::Transposed;
use crate::choice::{Entry, Table};
use crate::runtime::{Bound, Result, Runtime, Stream};

/// Operands whose product is of `O`: an element of both, or a pair of those of `A` and of `B`, such as `(e4m3, e5m2)`.
pub trait GemmOperands<O: 'static>: 'static {
    /// The elements of `A`.
    type A: Pod;
    /// The elements of `B`.
    type B: Pod;
    /// Bytes of an element.
    const BYTES: u64 = size_of::<Self::A>() as u64;

    /// The kernels.
    #[doc(hidden)]
    const KERNELS: Table<GemmKernel, AnyInstance<Self, O>>;

    /// The kernels of codes with a scale for every block.
    #[doc(hidden)]
    const BLOCKS: Table<GemmKernel, AnyInstance<Self, O>> = &[];

    /// The kernels of groups.
    #[doc(hidden)]
    const GROUPED: Table<GemmKernel, AnyGrouped<Self, O>> = &[];

    /// Loads the kernel of what follows a product that is stored.
    #[doc(hidden)]
    fn epilogue(runtime: &Runtime) -> Result<Box<dyn EpilogueKernel<O>>>;
}

/// A loaded kernel for operands `T`.
#[doc(hidden)]
pub type AnyInstance<T, O> = Box<dyn Instance<<T as GemmOperands<O>>::A, <T as GemmOperands<O>>::B, O>>;

/// A loaded kernel of groups for operands `T`.
#[doc(hidden)]
pub type AnyGrouped<T, O> = Box<dyn GroupedInstance<<T as GemmOperands<O>>::A, <T as GemmOperands<O>>::B, O>>;

/// An element of both operands whose product is of `O`.
pub trait GemmElement<O: 'static>: Pod + GemmOperands<O, A = Self, B = Self> {}

impl<T: Pod + GemmOperands<O, A = Self, B = Self>, O: 'static> GemmElement<O> for T {}

/// A loaded kernel of any layout.
#[doc(hidden)]
pub trait Instance<A, B, O>: Send + Sync {
    fn bind<'a>(&'a self, stream: &Stream, config: GemmConfig, plan: GemmPlan, matrices: Matrices<'a, A, B, O>) -> Result<Bound<'a>>;
}

/// Entries of the kernels on wgmma: elements, sizes of steps and stores, and for each tile its layouts.
macro_rules! wgmma {
    ($a:ident $b:ident $depth:literal, $o:ident $width:literal: $($tile:ident $([$m_major:literal $n_major:literal])*),*) => {
        &[$($(Entry {
            decision: GemmKernel::Wgmma { tile: GemmTile::$tile, m_major: $m_major, n_major: $n_major },
            name: <gemm::Gemm<$a, $b, $depth, $o, $width, gemm::$tile, { <gemm::$tile as TileShape>::BOX }, $m_major, $n_major> as Kernel>::INFO.name,
            tile: [<gemm::$tile as TileShape>::ROWS as u64, <gemm::$tile as TileShape>::COLUMNS as u64],
            load: |runtime| {
                Ok(Box::new(runtime.load::<gemm::Gemm<$a, $b, $depth, $o, $width, gemm::$tile, { <gemm::$tile as TileShape>::BOX }, $m_major, $n_major>>()?))
            },
        },)*)*]
    };
}

/// Entries of the same kernels of 8-bit operands along `k`, for those that are transposed first.
macro_rules! transposed {
    ($a:ident $b:ident, $o:ident $width:literal: $($tile:ident)*) => {
        &[$(
            transposed!($a $b, $o $width, $tile [true false]),
            transposed!($a $b, $o $width, $tile [false true]),
            transposed!($a $b, $o $width, $tile [true true]),
        )*]
    };
    ($a:ident $b:ident, $o:ident $width:literal, $tile:ident [$of_a:literal $of_b:literal]) => {
        Entry {
            decision: GemmKernel::WgmmaTransposed { tile: GemmTile::$tile, a: $of_a, b: $of_b },
            name: <gemm::Gemm<$a, $b, 128, $o, $width, gemm::$tile, { <gemm::$tile as TileShape>::BOX }, false, false> as Kernel>::INFO.name,
            tile: [<gemm::$tile as TileShape>::ROWS as u64, <gemm::$tile as TileShape>::COLUMNS as u64],
            load: |runtime| {
                let product = runtime.load::<gemm::Gemm<$a, $b, 128, $o, $width, gemm::$tile, { <gemm::$tile as TileShape>::BOX }, false, false>>()?;
                Ok(Box::new(Transposed::<_, $a, $b>::load(runtime, product, [$of_a, $of_b])?))
            },
        }
    };
}

/// Each row: the operands, the elements of each and of the result, the kernels of blocks and of groups if there are any, the tables.
macro_rules! operands {
    ($($operands:ty: $a:ident $b:ident, $o:ident $([$blocks:expr])? $({$grouped:expr})?: $($table:expr),*;)*) => { $(
        impl GemmOperands<$o> for $operands {
            type A = $a;
            type B = $b;
            const KERNELS: Table<GemmKernel, AnyInstance<Self, $o>> = &[$($table),*];
            $(const BLOCKS: Table<GemmKernel, AnyInstance<Self, $o>> = &[$blocks];)?
            $(const GROUPED: Table<GemmKernel, AnyGrouped<Self, $o>> = &[$grouped];)?

            fn epilogue(runtime: &Runtime) -> Result<Box<dyn EpilogueKernel<$o>>> {
                Ok(Box::new(EpilogueKernels::<$o> { vectors: runtime.load()?, elements: runtime.load()? }))
            }
        }
    )* };
}

/// Entries of the kernels on `mma.sync`.
macro_rules! portable {
    ($t:ident, $o:ident) => {
        &[
            Entry {
                decision: GemmKernel::Portable { aligned: true },
                name: <GemmPortable<$t, $o, true> as Kernel>::INFO.name,
                tile: [gemm::PORTABLE_ROWS as u64, gemm::PORTABLE_COLUMNS as u64],
                load: |runtime| {
                    Ok(Box::new((runtime.load::<GemmPortable<$t, $o, true>>()?, runtime.load::<GemmPortable<$t, $o, false>>()?)))
                },
            },
            Entry {
                decision: GemmKernel::Portable { aligned: false },
                name: <GemmPortable<$t, $o, false> as Kernel>::INFO.name,
                tile: [gemm::PORTABLE_ROWS as u64, gemm::PORTABLE_COLUMNS as u64],
                load: |runtime| Ok(Box::new(runtime.load::<GemmPortable<$t, $o, false>>()?)),
            },
        ]
    };
}

/// The entry of the kernel without tensor cores.
macro_rules! any {
    ($t:ident, $o:ident) => {
        &[Entry {
            decision: GemmKernel::Any,
            name: <GemmAny<$t, $o> as Kernel>::INFO.name,
            tile: [1, 1],
            load: |runtime| Ok(Box::new(runtime.load::<GemmAny<$t, $o>>()?)),
        }]
    };
}

/// Entries of the kernels of codes with a scale for every block.
macro_rules! blocks {
    ($o:ident $width:literal: $($tile:ident)*) => {
        &[$(Entry {
            decision: GemmKernel::Wgmma { tile: GemmTile::$tile, m_major: false, n_major: false },
            name: <GemmBlocks<$o, $width, gemm::$tile> as Kernel>::INFO.name,
            tile: [<gemm::$tile as TileShape>::ROWS as u64, <gemm::$tile as TileShape>::COLUMNS as u64],
            load: |runtime| Ok(Box::new(runtime.load::<GemmBlocks<$o, $width, gemm::$tile>>()?)),
        }),*]
    };
}

/// Entries of the kernels of groups: elements, sizes of steps and stores, whether the sum is grouped, and for each tile its layouts of `B`.
macro_rules! grouped {
    ($t:ident $depth:literal, $o:ident $width:literal, $by_sum:literal: $($tile:ident $([$n_major:literal])*),*) => {
        &[$($(Entry {
            decision: GemmKernel::Wgmma { tile: GemmTile::$tile, m_major: $by_sum, n_major: $n_major },
            name: <GemmGrouped<$t, $t, $depth, $o, $width, gemm::$tile, $by_sum, $by_sum, $n_major> as Kernel>::INFO.name,
            tile: [<gemm::$tile as TileShape>::ROWS as u64, <gemm::$tile as TileShape>::COLUMNS as u64],
            load: |runtime| {
                Ok(Box::new(runtime.load::<GemmGrouped<$t, $t, $depth, $o, $width, gemm::$tile, $by_sum, $by_sum, $n_major>>()?))
            },
        },)*)*]
    };
}

/// Every layout of 16-bit operands by these tiles.
macro_rules! every_layout {
    ($t:ident, $o:ident $width:literal: $($tile:ident)*) => {
        wgmma!($t $t 64, $o $width: $($tile [false false] [false true] [true false] [true true]),*)
    };
}

operands! {
    bf16: bf16 bf16, bf16 {grouped!(bf16 64, bf16 64, false: Tile128x128 [false] [true], Tile64x128 [false] [true])}:
        every_layout!(bf16, bf16 64: Tile128x256 Tile128x128),
        wgmma!(bf16 bf16 64, bf16 64: Tile64x64 [false false] [false true] [true false], Tile64x128 [false false] [true true], Tile128x192 [true true]),
        wgmma!(bf16 bf16 64, bf16 64: Tile128x176 [false false], Tile128x112 [false false], Tile128x96 [false false]),
        wgmma!(bf16 bf16 64, bf16 64: Tile64x144 [false false], Tile64x96 [false false]),
        portable!(bf16, bf16);
    bf16: bf16 bf16, f32 {grouped!(bf16 64, f32 32, true: Tile128x256 [true], Tile128x128 [true])}:
        every_layout!(bf16, f32 32: Tile128x256), wgmma!(bf16 bf16 64, f32 32: Tile64x128 [false false] [false true] [true true]),
        portable!(bf16, f32);
    f16: f16 f16, f16:
        every_layout!(f16, f16 64: Tile128x256), wgmma!(f16 f16 64, f16 64: Tile64x128 [false false] [false true]), portable!(f16, f16);
    f16: f16 f16, f32: portable!(f16, f32);
    e4m3: e4m3 e4m3, bf16 [blocks!(bf16 64: Tile128x128 Tile64x128)] {grouped!(e4m3 128, bf16 64, false: Tile128x128 [false], Tile64x128 [false])}:
        wgmma!(e4m3 e4m3 128, bf16 64: Tile128x256 [false false], Tile128x128 [false false], Tile64x128 [false false], Tile64x64 [false false]),
        wgmma!(e4m3 e4m3 128, bf16 64: Tile128x112 [false false], Tile64x96 [false false]),
        transposed!(e4m3 e4m3, bf16 64: Tile128x256 Tile128x128 Tile64x128 Tile64x64), any!(e4m3, bf16);
    e4m3: e4m3 e4m3, f32 [blocks!(f32 32: Tile128x128 Tile64x128)]:
        wgmma!(e4m3 e4m3 128, f32 32: Tile128x256 [false false], Tile64x128 [false false]),
        transposed!(e4m3 e4m3, f32 32: Tile128x256 Tile64x128), any!(e4m3, f32);
    (e4m3, e5m2): e4m3 e5m2, bf16:
        wgmma!(e4m3 e5m2 128, bf16 64: Tile128x256 [false false], Tile64x128 [false false]),
        transposed!(e4m3 e5m2, bf16 64: Tile128x256 Tile64x128);
    (e5m2, e4m3): e5m2 e4m3, bf16:
        wgmma!(e5m2 e4m3 128, bf16 64: Tile128x256 [false false], Tile64x128 [false false]),
        transposed!(e5m2 e4m3, bf16 64: Tile128x256 Tile64x128);
    (e4m3, e5m2): e4m3 e5m2, f32: wgmma!(e4m3 e5m2 128, f32 32: Tile128x256 [false false]), transposed!(e4m3 e5m2, f32 32: Tile128x256);
    (e5m2, e4m3): e5m2 e4m3, f32: wgmma!(e5m2 e4m3 128, f32 32: Tile128x256 [false false]), transposed!(e5m2 e4m3, f32 32: Tile128x256);
}

#[cfg(test)]
mod tests {
    use oxtile_kernels::KERNELS;

    /// What follows a product is a kernel of its own, or a value at run time: a policy of it would double these.
    #[test]
    fn the_kernels_of_products_stay_few() {
        let count = |name| KERNELS.iter().find(|family| family.name == name).map_or(0, |family| family.instances.len());
        let [plain, gathered] = ["gemm", "gemm_gathered"].map(count);
        assert!(plain > 0 && gathered > 0 && plain + gathered <= 64, "{plain} plain kernels and {gathered} that wait");
    }
}
