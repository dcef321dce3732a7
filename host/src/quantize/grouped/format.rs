//! The kernels of a format's groups.

use oxtile_kernels::group::Grouped;
use oxtile_kernels::interleave::*;
use oxtile_kernels::shards::{Byte, JoinShardsGrouped, JoinShardsGroupedArgs};
use oxtile_tile::launch::{Kernel, Signature};
use oxtile_tile::num::{e2m1x2, e4m3, e5m2, ue8m0};

use crate::quantize::Direction;
use crate::quantize::format::{Format, Mxfp8Format, Nvfp4Format};

/// A format whose groups are gathered and laid out: [`Mxfp8Format`] or [`Nvfp4Format`].
pub trait GroupFormat: Format<Code: Byte, Scale: Byte + ScaleCode, Direction = Direction> {
    /// Joins the codes of shards.
    type JoinCodes: Grouped + Kernel + for<'a> Signature<Args<'a> = JoinShardsGroupedArgs<'a, Self::Code>>;
    /// Joins the scales of shards.
    type JoinScales: Grouped + Kernel + for<'a> Signature<Args<'a> = JoinShardsGroupedArgs<'a, Self::Scale>>;
    /// Interleaves scales `[outer, blocks]`.
    type InterleaveRows: Grouped + Kernel + for<'a> Signature<Args<'a> = InterleaveRowsGroupedArgs<'a, Self::Scale>>;
    /// Its inverse.
    type DeinterleaveRows: Grouped + Kernel + for<'a> Signature<Args<'a> = DeinterleaveRowsGroupedArgs<'a, Self::Scale>>;
    /// Interleaves scales `[blocks, outer]`.
    type InterleaveColumns: Grouped + Kernel + for<'a> Signature<Args<'a> = InterleaveColumnsGroupedArgs<'a, Self::Scale>>;
    /// Its inverse.
    type DeinterleaveColumns: Grouped + Kernel + for<'a> Signature<Args<'a> = DeinterleaveColumnsGroupedArgs<'a, Self::Scale>>;
}

macro_rules! formats {
    ($($format:ty: $code:ident $scale:ident;)*) => { $(
        impl GroupFormat for $format {
            type JoinCodes = JoinShardsGrouped<$code>;
            type JoinScales = JoinShardsGrouped<$scale>;
            type InterleaveRows = InterleaveRowsGrouped<$scale>;
            type DeinterleaveRows = DeinterleaveRowsGrouped<$scale>;
            type InterleaveColumns = InterleaveColumnsGrouped<$scale>;
            type DeinterleaveColumns = DeinterleaveColumnsGrouped<$scale>;
        }
    )* };
}
formats! { Mxfp8Format<e4m3>: e4m3 ue8m0; Mxfp8Format<e5m2>: e5m2 ue8m0; Nvfp4Format: e2m1x2 e4m3; }
