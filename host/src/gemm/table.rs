//! The kernels of each pair of elements.

use oxtile_kernels::gemm::{self, GemmAny};
use oxtile_tile::launch::Kernel;
use oxtile_tile::num::{Pod, bf16, e4m3};

use super::choice::GemmKernel;
use super::config::GemmConfig;
use super::product::Matrices;
use crate::choice::{Entry, Table};
use crate::runtime::{Bound, Result, Stream};

/// An element of operands whose product is an `O`.
pub trait GemmElement<O: 'static>: Pod {
    /// Bytes of an element.
    const BYTES: u64 = size_of::<Self>() as u64;

    /// The kernels.
    #[doc(hidden)]
    const KERNELS: Table<GemmKernel, Box<dyn Instance<Self, O>>>;
}

pub(super) type GemmEntry<T, O> = Entry<GemmKernel, Box<dyn Instance<T, O>>>;

/// A loaded kernel of any layout.
#[doc(hidden)]
pub trait Instance<T, O>: Send + Sync {
    fn bind<'a>(&'a self, stream: &Stream, config: GemmConfig, matrices: Matrices<'a, T, O>) -> Result<Bound<'a>>;
}

/// Each row: the operands' element and columns of a step, the result's element and columns of a store, and the layouts.
macro_rules! elements {
    ($($t:ident $depth:literal, $o:ident $width:literal: $([$m_major:literal $n_major:literal])*;)*) => { $(
        impl GemmElement<$o> for $t {
            const KERNELS: Table<GemmKernel, Box<dyn Instance<Self, $o>>> = &[&[
                $(Entry {
                    decision: GemmKernel::Wgmma { m_major: $m_major, n_major: $n_major },
                    name: <gemm::Gemm<$t, $depth, $o, $width, $m_major, $n_major> as Kernel>::INFO.name,
                    tile: [gemm::ROWS as u64, gemm::COLUMNS as u64],
                    load: |runtime| Ok(Box::new(runtime.load::<gemm::Gemm<$t, $depth, $o, $width, $m_major, $n_major>>()?)),
                },)*
                Entry {
                    decision: GemmKernel::Any,
                    name: <GemmAny<$t, $o> as Kernel>::INFO.name,
                    tile: [1, 1],
                    load: |runtime| Ok(Box::new(runtime.load::<GemmAny<$t, $o>>()?)),
                },
            ]];
        }
    )* };
}

elements! {
    bf16 64, bf16 64: [false false] [false true] [true false] [true true];
    bf16 64, f32 32: [false false] [false true] [true false] [true true];
    e4m3 128, bf16 64: [false false];
    e4m3 128, f32 32: [false false];
}
