//! The formats of groups.

use std::fmt;
use std::marker::PhantomData;

use oxtile_kernels::group::Grouped;
use oxtile_kernels::interleave::*;
use oxtile_kernels::shards::{Byte, JoinShardsGrouped, JoinShardsGroupedArgs};
use oxtile_kernels::{mxfp8, nvfp4};
use oxtile_tile::launch::Kernel;
use oxtile_tile::num::{Fp8, e2m1x2, e4m3, e5m2, ue8m0};

use crate::quantize::{Direction, GlobalAmax};

/// A format whose elements share scales in blocks: [`Mxfp8Format`] or [`Nvfp4Format`].
pub trait Format: sealed::Sealed + fmt::Debug + Send + Sync + 'static {
    /// A byte of codes.
    type Code: Byte + fmt::Debug;
    /// A block's scale.
    type Scale: Byte + ScaleCode + fmt::Debug;
    /// What the casts of all members agree on: [`GlobalAmax`], or nothing.
    type Amax: fmt::Debug;
    /// Joins the codes of shards.
    type JoinCodes: Grouped + for<'a> Kernel<Args<'a> = JoinShardsGroupedArgs<'a, Self::Code>>;
    /// Joins the scales of shards.
    type JoinScales: Grouped + for<'a> Kernel<Args<'a> = JoinShardsGroupedArgs<'a, Self::Scale>>;
    /// Interleaves scales `[outer, blocks]`.
    type InterleaveRows: Grouped + for<'a> Kernel<Args<'a> = InterleaveRowsGroupedArgs<'a, Self::Scale>>;
    /// Its inverse.
    type DeinterleaveRows: Grouped + for<'a> Kernel<Args<'a> = DeinterleaveRowsGroupedArgs<'a, Self::Scale>>;
    /// Interleaves scales `[blocks, outer]`.
    type InterleaveColumns: Grouped + for<'a> Kernel<Args<'a> = InterleaveColumnsGroupedArgs<'a, Self::Scale>>;
    /// Its inverse.
    type DeinterleaveColumns: Grouped + for<'a> Kernel<Args<'a> = DeinterleaveColumnsGroupedArgs<'a, Self::Scale>>;

    /// The name in error texts.
    const NAME: &'static str;
    /// Elements that share a scale.
    const BLOCK: u64;
    /// Elements of a [`Code`](Self::Code).
    const ELEMENTS: u64;
    /// Whether what is cast by columns is the transpose.
    const TRANSPOSES: bool;

    /// Rows and columns of the codes of a matrix of this shape.
    fn codes([rows, columns]: [u64; 2], direction: Direction) -> [u64; 2] {
        match direction {
            Direction::Columns if Self::TRANSPOSES => [columns, rows.div_ceil(Self::ELEMENTS)],
            _ => [rows, columns.div_ceil(Self::ELEMENTS)],
        }
    }

    /// Rows and columns of its compact scales.
    fn scales([rows, columns]: [u64; 2], direction: Direction) -> [u64; 2] {
        match direction {
            Direction::Rows => [rows, columns.div_ceil(Self::BLOCK)],
            Direction::Columns if Self::TRANSPOSES => [columns, rows.div_ceil(Self::BLOCK)],
            Direction::Columns => [rows.div_ceil(Self::BLOCK), columns],
        }
    }

    /// Outer indices and blocks of its interleaved scales.
    fn extents([rows, columns]: [u64; 2], direction: Direction) -> [u64; 2] {
        match direction {
            Direction::Rows => [rows, columns.div_ceil(Self::BLOCK)],
            Direction::Columns => [columns, rows.div_ceil(Self::BLOCK)],
        }
    }

    /// Why a matrix of this shape cannot be cast, if so.
    fn refuses(shape: [u64; 2], direction: Direction) -> Option<String>;

    /// Another handle on the same.
    fn share(amax: &Self::Amax) -> Self::Amax;
}

/// MXFP8 with elements `Q`.
#[derive(Debug, Clone, Copy)]
pub struct Mxfp8Format<Q = e4m3>(PhantomData<Q>);

/// NVFP4.
#[derive(Debug, Clone, Copy)]
pub struct Nvfp4Format;

macro_rules! mxfp8 {
    ($($q:ident)*) => { $(
        impl Format for Mxfp8Format<$q> {
            type Code = $q;
            type Scale = ue8m0;
            type Amax = ();
            type JoinCodes = JoinShardsGrouped<$q>;
            type JoinScales = JoinShardsGrouped<ue8m0>;
            type InterleaveRows = InterleaveRowsGrouped<ue8m0>;
            type DeinterleaveRows = DeinterleaveRowsGrouped<ue8m0>;
            type InterleaveColumns = InterleaveColumnsGrouped<ue8m0>;
            type DeinterleaveColumns = DeinterleaveColumnsGrouped<ue8m0>;

            const NAME: &'static str = "MXFP8";
            const BLOCK: u64 = mxfp8::BLOCK;
            const ELEMENTS: u64 = 1;
            const TRANSPOSES: bool = false;

            fn refuses(_: [u64; 2], _: Direction) -> Option<String> {
                None
            }

            fn share((): &()) {}
        }
    )* };
}
mxfp8! { e4m3 e5m2 }

impl Format for Nvfp4Format {
    type Code = e2m1x2;
    type Scale = e4m3;
    type Amax = GlobalAmax;
    type JoinCodes = JoinShardsGrouped<e2m1x2>;
    type JoinScales = JoinShardsGrouped<e4m3>;
    type InterleaveRows = InterleaveRowsGrouped<e4m3>;
    type DeinterleaveRows = DeinterleaveRowsGrouped<e4m3>;
    type InterleaveColumns = InterleaveColumnsGrouped<e4m3>;
    type DeinterleaveColumns = DeinterleaveColumnsGrouped<e4m3>;

    const NAME: &'static str = "NVFP4";
    const BLOCK: u64 = nvfp4::BLOCK;
    const ELEMENTS: u64 = 2;
    const TRANSPOSES: bool = true;

    fn refuses([rows, columns]: [u64; 2], direction: Direction) -> Option<String> {
        let wrong =
            |count: u64, what| (!count.is_multiple_of(Self::BLOCK)).then(|| format!("{count} {what} are not a multiple of 16: pad them"));
        let by_rows = wrong(columns, "columns");
        if direction == Direction::Rows { by_rows } else { by_rows.or_else(|| wrong(rows, "rows")) }
    }

    fn share(amax: &GlobalAmax) -> GlobalAmax {
        amax.clone()
    }
}

mod sealed {
    pub trait Sealed {}
    impl<Q: super::Fp8> Sealed for super::Mxfp8Format<Q> {}
    impl Sealed for super::Nvfp4Format {}
}
