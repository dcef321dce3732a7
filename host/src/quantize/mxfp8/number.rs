//! The kernels that cast a number type.

use oxtile_kernels::group::Grouped;
use oxtile_kernels::magnitude::Magnitude;
use oxtile_kernels::mxfp8::*;
use oxtile_tile::launch::{Kernel, Signature};
use oxtile_tile::num::{Fp8, bf16, e4m3, e5m2, f16};

/// A number type that is cast to and from MXFP8 with elements `Q`: `bf16`, `f16` and `f32`, to `e4m3` and `e5m2`.
pub trait Mxfp8Number<Q: Fp8>: Magnitude + Wide {
    /// The rowwise cast of whole blocks.
    type CastRows: Kernel + for<'a> Signature<Args<'a> = Mxfp8CastRowsArgs<'a, Self, Q>>;
    /// The rowwise cast of any shape.
    type CastRaggedRows: Kernel + for<'a> Signature<Args<'a> = Mxfp8CastRaggedRowsArgs<'a, Self, Q>>;
    /// The columnwise cast of rows of whole vectors.
    type CastColumns: Kernel + for<'a> Signature<Args<'a> = Mxfp8CastColumnsArgs<'a, Self, Q>>;
    /// The columnwise cast of any shape.
    type CastRaggedColumns: Kernel + for<'a> Signature<Args<'a> = Mxfp8CastRaggedColumnsArgs<'a, Self, Q>>;
    /// The cast in both directions of rows of whole vectors.
    type CastBoth: Kernel + for<'a> Signature<Args<'a> = Mxfp8CastBothArgs<'a, Self, Q>>;
    /// The inverse of the rowwise cast for whole blocks.
    type DequantizeRows: Kernel + for<'a> Signature<Args<'a> = Mxfp8DequantizeRowsArgs<'a, Q, Self>>;
    /// The inverse of the rowwise cast for any shape.
    type DequantizeRaggedRows: Kernel + for<'a> Signature<Args<'a> = Mxfp8DequantizeRaggedRowsArgs<'a, Q, Self>>;
    /// The inverse of the columnwise cast for rows of whole vectors.
    type DequantizeColumns: Kernel + for<'a> Signature<Args<'a> = Mxfp8DequantizeColumnsArgs<'a, Q, Self>>;
    /// The inverse of the columnwise cast for any shape.
    type DequantizeRaggedColumns: Kernel + for<'a> Signature<Args<'a> = Mxfp8DequantizeRaggedColumnsArgs<'a, Q, Self>>;
    /// The rowwise cast of whole blocks, for groups.
    type GroupCastRows: Grouped + Kernel + for<'a> Signature<Args<'a> = Mxfp8CastRowsGroupedArgs<'a, Self, Q>>;
    /// The rowwise cast of any shape, for groups.
    type GroupCastRaggedRows: Grouped + Kernel + for<'a> Signature<Args<'a> = Mxfp8CastRaggedRowsGroupedArgs<'a, Self, Q>>;
    /// The columnwise cast of rows of whole vectors, for groups.
    type GroupCastColumns: Grouped + Kernel + for<'a> Signature<Args<'a> = Mxfp8CastColumnsGroupedArgs<'a, Self, Q>>;
    /// The columnwise cast of any shape, for groups.
    type GroupCastRaggedColumns: Grouped + Kernel + for<'a> Signature<Args<'a> = Mxfp8CastRaggedColumnsGroupedArgs<'a, Self, Q>>;
    /// The cast in both directions of rows of whole vectors, for groups.
    type GroupCastBoth: Grouped + Kernel + for<'a> Signature<Args<'a> = Mxfp8CastBothGroupedArgs<'a, Self, Q>>;
    /// The inverse of the rowwise cast for whole blocks, for groups.
    type GroupDequantizeRows: Grouped + Kernel + for<'a> Signature<Args<'a> = Mxfp8DequantizeRowsGroupedArgs<'a, Q, Self>>;
    /// The inverse of the rowwise cast for any shape, for groups.
    type GroupDequantizeRaggedRows: Grouped + Kernel + for<'a> Signature<Args<'a> = Mxfp8DequantizeRaggedRowsGroupedArgs<'a, Q, Self>>;
    /// The inverse of the columnwise cast for rows of whole vectors, for groups.
    type GroupDequantizeColumns: Grouped + Kernel + for<'a> Signature<Args<'a> = Mxfp8DequantizeColumnsGroupedArgs<'a, Q, Self>>;
    /// The inverse of the columnwise cast for any shape, for groups.
    type GroupDequantizeRaggedColumns: Grouped + Kernel + for<'a> Signature<Args<'a> = Mxfp8DequantizeRaggedColumnsGroupedArgs<'a, Q, Self>>;
}

macro_rules! numbers {
    ($($t:ty, $q:ty;)*) => { $(
        impl Mxfp8Number<$q> for $t {
            type CastRows = Mxfp8CastRows<$t, $q>;
            type CastRaggedRows = Mxfp8CastRaggedRows<$t, $q>;
            type CastColumns = Mxfp8CastColumns<$t, $q>;
            type CastRaggedColumns = Mxfp8CastRaggedColumns<$t, $q>;
            type CastBoth = Mxfp8CastBoth<$t, $q>;
            type DequantizeRows = Mxfp8DequantizeRows<$q, $t>;
            type DequantizeRaggedRows = Mxfp8DequantizeRaggedRows<$q, $t>;
            type DequantizeColumns = Mxfp8DequantizeColumns<$q, $t>;
            type DequantizeRaggedColumns = Mxfp8DequantizeRaggedColumns<$q, $t>;
            type GroupCastRows = Mxfp8CastRowsGrouped<$t, $q>;
            type GroupCastRaggedRows = Mxfp8CastRaggedRowsGrouped<$t, $q>;
            type GroupCastColumns = Mxfp8CastColumnsGrouped<$t, $q>;
            type GroupCastRaggedColumns = Mxfp8CastRaggedColumnsGrouped<$t, $q>;
            type GroupCastBoth = Mxfp8CastBothGrouped<$t, $q>;
            type GroupDequantizeRows = Mxfp8DequantizeRowsGrouped<$q, $t>;
            type GroupDequantizeRaggedRows = Mxfp8DequantizeRaggedRowsGrouped<$q, $t>;
            type GroupDequantizeColumns = Mxfp8DequantizeColumnsGrouped<$q, $t>;
            type GroupDequantizeRaggedColumns = Mxfp8DequantizeRaggedColumnsGrouped<$q, $t>;
        }
    )* };
}
numbers! { bf16, e4m3; f16, e4m3; f32, e4m3; bf16, e5m2; f16, e5m2; f32, e5m2; }
