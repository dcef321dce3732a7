//! Formats of weights: how a weight lies in memory, and the casts that make it.
//!
//! | format | bytes an element, one direction | by columns | a shard's rows |
//! |---|---|---|---|
//! | [`Bf16`] | 2 | the same plane | any |
//! | [`Fp8`] | 1 | codes of the transpose, the same scale | any |
//! | [`Mxfp8`] | 1 + 1/32 | codes as by rows, scales of columns | multiples of 32 |
//! | [`Nvfp4`], [`Nvfp4Squares`] | 1/2 + 1/16 | codes and scales of the transpose | multiples of 16 |

use std::fmt;
use std::sync::Arc;

use oxtile_tile::launch::DeviceView;
use oxtile_tile::num::{Pod, bf16, e2m1x2, e4m3, ue8m0};

use super::plane::Rule;
use crate::quantize::grouped::{Fp8Format, Mxfp8Format, Nvfp4Format};
use crate::quantize::nvfp4_columns::Nearest;
use crate::quantize::{
    CurrentScaling, Direction, Format, Fp8Pair, Nvfp4 as Nvfp4Rows, Nvfp4Columns, Nvfp4Squares as Squares, Pair, QuantizedTensor,
    RandomState, ScaleOptions,
};
use crate::runtime::{Buffer, Result, Runtime, Stream};

/// A format in which ranks keep the shards of a weight, and in which shards travel.
pub trait WeightFormat: sealed::Sealed + fmt::Debug + Send + Sync + Sized + 'static {
    /// The name in errors and plans.
    const NAME: &'static str;
    /// The number of which the rows of a shard are a multiple, so that casts of shards are the cast of the whole.
    const ALIGN: u64;
    /// The number of which the rows of the whole are a multiple, filled up with zeros.
    const PAD: u64;
    /// The number of which the columns are a multiple.
    const COLUMNS: u64;
    /// How codes and scales lie.
    #[doc(hidden)]
    const RULE: Rule;

    /// A weight in one direction, in device memory.
    type Tensor: fmt::Debug + Send + Sync;
    /// A rank's shard in all directions that are used, as casts write it.
    #[doc(hidden)]
    type Shard: Send + Sync;
    /// The casts.
    #[doc(hidden)]
    type Casts: Send + Sync;

    /// Loads the casts.
    #[doc(hidden)]
    fn load(stream: &Stream) -> Result<Self::Casts>;

    /// A tensor in this memory.
    #[doc(hidden)]
    fn tensor(parts: &Parts, shape: [u64; 2], direction: Direction) -> Self::Tensor;

    /// A shard by rows, and by columns if that is used.
    #[doc(hidden)]
    fn shard(rows: Self::Tensor, columns: Option<Self::Tensor>) -> Self::Shard;

    /// Casts the rows of a shard, with the amax of the whole.
    #[doc(hidden)]
    fn cast(
        casts: &Self::Casts,
        stream: &Stream,
        master: DeviceView<'_, bf16>,
        amax: DeviceView<'_, f32>,
        shard: &mut Self::Shard,
    ) -> Result<()>;
}

/// The memory of a tensor: bytes of codes and of scales, and numbers that all directions and ranks have alike.
#[doc(hidden)]
#[derive(Debug)]
pub struct Parts {
    pub(super) codes: Buffer<u8>,
    pub(super) scales: Buffer<u8>,
    /// One number: the amax that scales follow from, or the inverse of the one scale.
    pub(super) number: Buffer<f32>,
}

/// Weights in bf16: the shard is what the optimizer writes, nothing is cast, and one plane serves both directions.
#[derive(Debug)]
pub struct Bf16;

/// FP8 (E4M3) with one scale, which follows from the amax of the whole weight.
#[derive(Debug)]
pub struct Fp8;

/// MXFP8 (E4M3): a scale for 32 neighbours.
///
/// What travels are compact scales, of this format as of all: rows of shards are rows of the whole then. Scales in the order of a kernel are made from a whole weight.
///
/// ```compile_fail,E0308
/// use oxtile::quantize::{Interleaved, Mxfp8Format, QuantizedTensor};
/// use oxtile::sharded::{Gathered, Mxfp8};
///
/// fn interleaved<'a>(weight: &Gathered<'a, Mxfp8>) -> &'a QuantizedTensor<Mxfp8Format, Interleaved> {
///     weight.tensor()
/// }
/// ```
#[derive(Debug)]
pub struct Mxfp8;

/// NVFP4: a scale for 16 neighbours, beside one that follows from the amax of the whole weight.
#[derive(Debug)]
pub struct Nvfp4;

/// NVFP4 with a scale for each square of 16x16, the same in both directions: TransformerEngine's rule for weights.
#[derive(Debug)]
pub struct Nvfp4Squares;

/// A weight in bf16, `[rows, columns]`.
#[derive(Debug)]
pub struct WideTensor {
    /// The elements, row by row.
    pub data: Buffer<bf16>,
    /// Rows and columns.
    pub shape: [u64; 2],
}

impl WeightFormat for Bf16 {
    const NAME: &'static str = "bf16";
    const ALIGN: u64 = 1;
    const PAD: u64 = 1;
    const COLUMNS: u64 = 1;
    const RULE: Rule = Rule::wide(2);
    type Tensor = WideTensor;
    type Shard = ();
    type Casts = ();

    fn load(_: &Stream) -> Result<()> {
        Ok(())
    }

    fn tensor(Parts { codes, .. }: &Parts, shape: [u64; 2], _: Direction) -> WideTensor {
        WideTensor { data: elements(codes), shape }
    }

    fn shard(_: WideTensor, _: Option<WideTensor>) {}

    fn cast((): &(), _: &Stream, _: DeviceView<'_, bf16>, _: DeviceView<'_, f32>, (): &mut ()) -> Result<()> {
        Ok(())
    }
}

/// A shard in one direction or in both.
#[doc(hidden)]
#[derive(Debug)]
pub enum Directions<F: Format<Direction = Direction>> {
    Rows(QuantizedTensor<F>),
    Both(Pair<F>),
}

impl<F: Format<Direction = Direction>> Directions<F> {
    fn new(rows: QuantizedTensor<F>, columns: Option<QuantizedTensor<F>>) -> Self {
        match columns {
            Some(columns) => Self::Both(Pair { rows, columns }),
            None => Self::Rows(rows),
        }
    }
}

impl WeightFormat for Mxfp8 {
    const NAME: &'static str = "MXFP8";
    const ALIGN: u64 = 32;
    const PAD: u64 = 1;
    const COLUMNS: u64 = 1;
    const RULE: Rule = Rule::quantized(<Mxfp8Format as Format>::SHAPES, 1, false);
    type Tensor = QuantizedTensor<Mxfp8Format>;
    type Shard = Directions<Mxfp8Format>;
    type Casts = crate::quantize::Mxfp8<bf16>;

    fn load(stream: &Stream) -> Result<Self::Casts> {
        crate::quantize::Mxfp8::new(&runtime(stream))
    }

    fn tensor(Parts { codes, scales, .. }: &Parts, shape: [u64; 2], direction: Direction) -> Self::Tensor {
        QuantizedTensor { data: elements::<e4m3>(codes), scales: elements::<ue8m0>(scales), amax: (), shape, direction }
    }

    fn shard(rows: Self::Tensor, columns: Option<Self::Tensor>) -> Self::Shard {
        Directions::new(rows, columns)
    }

    fn cast(
        casts: &Self::Casts,
        stream: &Stream,
        master: DeviceView<'_, bf16>,
        _: DeviceView<'_, f32>,
        shard: &mut Self::Shard,
    ) -> Result<()> {
        match shard {
            Directions::Rows(rows) => casts.quantize_rows(stream, master, rows.shape, rows.data.view_mut(), rows.scales.view_mut()),
            Directions::Both(pair) => casts.quantize_both_into(stream, master, pair),
        }
    }
}

/// The casts of 16 neighbours to NVFP4, to the nearest code.
#[doc(hidden)]
#[derive(Debug)]
pub struct Nvfp4Casts {
    rows: Nvfp4Rows<bf16>,
    both: Nvfp4Columns<bf16, Nearest, false>,
    random: RandomState,
}

fn nvfp4_tensor(Parts { codes, scales, number }: &Parts, shape: [u64; 2], direction: Direction) -> QuantizedTensor<Nvfp4Format> {
    QuantizedTensor { data: elements::<e2m1x2>(codes), scales: elements::<e4m3>(scales), amax: elements(number), shape, direction }
}

impl WeightFormat for Nvfp4 {
    const NAME: &'static str = "NVFP4";
    const ALIGN: u64 = 16;
    const PAD: u64 = 16;
    const COLUMNS: u64 = 16;
    const RULE: Rule = Rule::quantized(<Nvfp4Format as Format>::SHAPES, 1, true);
    type Tensor = QuantizedTensor<Nvfp4Format>;
    type Shard = Directions<Nvfp4Format>;
    type Casts = Nvfp4Casts;

    fn load(stream: &Stream) -> Result<Self::Casts> {
        let runtime = runtime(stream);
        Ok(Nvfp4Casts { rows: Nvfp4Rows::new(&runtime)?, both: Nvfp4Columns::new(&runtime)?, random: RandomState::none(stream)? })
    }

    fn tensor(parts: &Parts, shape: [u64; 2], direction: Direction) -> Self::Tensor {
        nvfp4_tensor(parts, shape, direction)
    }

    fn shard(rows: Self::Tensor, columns: Option<Self::Tensor>) -> Self::Shard {
        Directions::new(rows, columns)
    }

    fn cast(
        casts: &Self::Casts,
        stream: &Stream,
        master: DeviceView<'_, bf16>,
        amax: DeviceView<'_, f32>,
        shard: &mut Self::Shard,
    ) -> Result<()> {
        match shard {
            Directions::Rows(rows) => {
                casts.rows.quantize_rows(stream, master, rows.shape, amax, rows.data.view_mut(), rows.scales.view_mut())
            }
            Directions::Both(pair) => casts.both.cast_both(stream, master, &casts.random, pair),
        }
    }
}

impl WeightFormat for Nvfp4Squares {
    const NAME: &'static str = "NVFP4 in squares";
    const ALIGN: u64 = 16;
    const PAD: u64 = 16;
    const COLUMNS: u64 = 16;
    /// Both planes are made where one is used: the kernel writes both.
    const RULE: Rule = Rule::quantized(<Nvfp4Format as Format>::SHAPES, 1, true).always_both();
    type Tensor = QuantizedTensor<Nvfp4Format>;
    type Shard = Directions<Nvfp4Format>;
    type Casts = Squares<bf16>;

    fn load(stream: &Stream) -> Result<Self::Casts> {
        Squares::new(&runtime(stream))
    }

    fn tensor(parts: &Parts, shape: [u64; 2], direction: Direction) -> Self::Tensor {
        nvfp4_tensor(parts, shape, direction)
    }

    fn shard(rows: Self::Tensor, columns: Option<Self::Tensor>) -> Self::Shard {
        Directions::new(rows, columns)
    }

    fn cast(
        casts: &Self::Casts,
        stream: &Stream,
        master: DeviceView<'_, bf16>,
        _: DeviceView<'_, f32>,
        shard: &mut Self::Shard,
    ) -> Result<()> {
        match shard {
            Directions::Rows(_) => unreachable!("`always_both` has the planes of both directions"),
            Directions::Both(pair) => casts.cast(stream, master, pair),
        }
    }
}

/// A shard in FP8.
#[doc(hidden)]
#[derive(Debug)]
pub enum Fp8Shard {
    Rows(QuantizedTensor<Fp8Format>),
    Both(Fp8Pair),
}

impl WeightFormat for Fp8 {
    const NAME: &'static str = "FP8";
    const ALIGN: u64 = 1;
    const PAD: u64 = 1;
    const COLUMNS: u64 = 1;
    const RULE: Rule = Rule::quantized(<Fp8Format as Format>::SHAPES, 4, true);
    type Tensor = QuantizedTensor<Fp8Format>;
    type Shard = Fp8Shard;
    type Casts = CurrentScaling<bf16>;

    fn load(stream: &Stream) -> Result<Self::Casts> {
        CurrentScaling::new(&runtime(stream), ScaleOptions::default())
    }

    fn tensor(Parts { codes, number, .. }: &Parts, shape: [u64; 2], direction: Direction) -> Self::Tensor {
        QuantizedTensor { data: elements::<e4m3>(codes), scales: elements(number), amax: (), shape, direction }
    }

    fn shard(rows: Self::Tensor, columns: Option<Self::Tensor>) -> Self::Shard {
        match columns {
            Some(columns) => Fp8Shard::Both(Fp8Pair { tensor: rows, transposed: columns.data }),
            None => Fp8Shard::Rows(rows),
        }
    }

    fn cast(
        casts: &Self::Casts,
        stream: &Stream,
        master: DeviceView<'_, bf16>,
        amax: DeviceView<'_, f32>,
        shard: &mut Self::Shard,
    ) -> Result<()> {
        match shard {
            Fp8Shard::Rows(rows) => casts.cast(stream, master, amax, rows.data.view_mut(), rows.scales.view_mut()),
            Fp8Shard::Both(pair) => casts.cast_both(stream, master, pair.tensor.shape, amax, pair),
        }
    }
}

fn runtime(stream: &Stream) -> Runtime {
    stream.device().runtime()
}

/// The same bytes as elements `U`.
fn elements<U: Pod>(bytes: &Buffer<impl Pod>) -> Buffer<U> {
    let all = bytes.memory().bytes;
    // SAFETY: elements of any bits. Those of codes and scales have 1 or 2 bytes, and begin at even addresses where they have 2; numbers are aligned to 4. `Parts` of one
    // tensor do not overlap, and the tensors that share memory are used one after another, as `Chain` and `ShardSet` say.
    unsafe { Buffer::of(Arc::clone(bytes.memory()), all / size_of::<U>() as u64) }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Bf16 {}
    impl Sealed for super::Fp8 {}
    impl Sealed for super::Mxfp8 {}
    impl Sealed for super::Nvfp4 {}
    impl Sealed for super::Nvfp4Squares {}
}
