//! The MXFP8 cast fused with its neighbours in a model.

use std::any::TypeId;
use std::fmt;
use std::marker::PhantomData;

use oxtile_kernels::activation::{Identity, Operation};
use oxtile_kernels::codes::CodesArgument;
use oxtile_kernels::column_sums::{ColumnSums, ColumnSumsArgs};
use oxtile_kernels::magnitude::Magnitude;
use oxtile_kernels::mxfp8::*;
use oxtile_tile::launch::{DeviceView, DeviceViewMut, Kernel};
use oxtile_tile::num::{Fp8, Pod, bf16, e4m3, ue8m0};

use crate::quantize::format::Direction;
use crate::quantize::layout::{Layout, Scales};
use crate::quantize::tensor::Mxfp8Tensor;
use crate::runtime::{Buffer, Error, Loaded, Result, Runtime, Stream};
use crate::tensor::shape::numel;

/// Casts the result of an operation `O`, such as [`Identity`](oxtile_kernels::activation::Identity) or
/// [`Backward<Gelu>`](oxtile_kernels::activation::Backward), by one pass over its operands. Rows are whole 16-byte vectors.
pub struct FusedMxfp8<O: Operation, T: Magnitude + Wide = bf16, Q: Fp8 = e4m3> {
    cast: Loaded<Mxfp8CastFused<O, T, Q>>,
    cast_rows: Loaded<Mxfp8CastFusedRows<O, T, Q>>,
    cast_columns: Loaded<Mxfp8CastFusedColumns<O, T, Q>>,
    /// The kernel of the identity alone, where only codes and interleaved scales are wanted: it writes whole sectors of scales.
    cast_rows_interleaved: Option<Loaded<Mxfp8CastRowsInterleaved<T, Q>>>,
    sums: Loaded<ColumnSums<T>>,
}

/// The inputs of a fused cast.
#[derive(Clone, Copy)]
pub struct FusedInput<'a, T> {
    /// The input of the activation.
    pub input: DeviceView<'a, T>,
    /// The gradient of its result, in backward operations.
    pub gradient: Option<DeviceView<'a, T>>,
    /// Rows and columns of the result.
    pub shape: [u64; 2],
    /// Whether 32 by 32 elements share a scale, so that both directions have the same codes.
    pub square_blocks: bool,
    /// One element in device memory: where it is 1, nothing is written but an amax of 0.
    pub skip: Option<DeviceView<'a, f32>>,
}

/// The outputs that are wanted of a fused cast. Tensors are of the result's shape, both directions in one layout.
#[derive(Debug)]
pub struct FusedOutput<'a, T, Q: Fp8, L: Layout> {
    /// The cast along rows.
    pub rows: Option<&'a mut Mxfp8Tensor<Q, L>>,
    /// The cast along columns.
    pub columns: Option<&'a mut Mxfp8Tensor<Q, L>>,
    /// The gradient of a bias.
    pub bias_gradient: Option<&'a mut BiasGradient<T>>,
    /// One element: the largest magnitude of the result.
    pub amax: Option<&'a mut Buffer<f32>>,
}

/// The sums of a result's columns, which are the gradient of a bias, and memory for the partial sums that they are made of: made once for a
/// shape, used any number of times. They are sums of the values that are cast.
#[derive(Debug)]
pub struct BiasGradient<T = bf16> {
    /// One sum a column.
    pub sums: Buffer<T>,
    partial_sums: Buffer<f32>,
    shape: [u64; 2],
}

impl<T: Pod> BiasGradient<T> {
    /// For results of so many rows and columns, uninitialised.
    ///
    /// # Errors
    /// As [`numel`] and [`Buffer::uninitialised`].
    pub fn uninitialised(stream: &Stream, shape: [u64; 2]) -> Result<Self> {
        let [rows, columns] = shape;
        let partial_sums = Buffer::named(stream, "partial sums", numel(&[rows.div_ceil(BLOCK), columns])?)?;
        Ok(Self { sums: Buffer::uninitialised(stream, columns)?, partial_sums, shape })
    }

    /// The partial sums of a result of that shape.
    fn partial_sums_of(&mut self, shape: [u64; 2]) -> Result<DeviceViewMut<'_, f32>> {
        if self.shape != shape {
            return Err(invalid(format!("a bias gradient of {:?} where one of {shape:?} goes", self.shape)));
        }
        Error::check_length("FusedMxfp8::run, bias_gradient", shape[1], self.sums.len())?;
        Ok(self.partial_sums.view_mut())
    }
}

impl<T, Q: Fp8, L: Layout> Default for FusedOutput<'_, T, Q, L> {
    fn default() -> Self {
        Self { rows: None, columns: None, bias_gradient: None, amax: None }
    }
}

impl<O: Operation, T: Magnitude + Wide, Q: Fp8> FusedMxfp8<O, T, Q>
where
    Mxfp8CastFused<O, T, Q>: Kernel,
    Mxfp8CastFusedRows<O, T, Q>: Kernel,
    Mxfp8CastFusedColumns<O, T, Q>: Kernel,
    Mxfp8CastRowsInterleaved<T, Q>: Kernel,
    ColumnSums<T>: Kernel,
{
    /// Loads the kernels.
    ///
    /// # Errors
    /// As [`Runtime::load`].
    pub fn new(runtime: &Runtime) -> Result<Self> {
        let is_identity = TypeId::of::<O>() == TypeId::of::<Identity>();
        let cast_rows_interleaved = if is_identity { Some(runtime.load()?) } else { None };
        let (cast, sums) = (runtime.load()?, runtime.load()?);
        Ok(Self { cast, cast_rows: runtime.load()?, cast_columns: runtime.load()?, cast_rows_interleaved, sums })
    }

    /// Enqueues the cast, by kernels of their own where rows alone or columns alone are wanted (rows without squares and bias gradient), and
    /// the addition of the partial sums of a bias gradient. It allocates nothing, so that a graph can hold it.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a tensor or a bias gradient of another shape or direction, and for a bias gradient that might be skipped;
    /// [`Error::Length`] for bias gradient of other than one element a column; as [`Loaded::launch`]. The outputs are then as they were.
    pub fn run<L: Layout>(&self, stream: &Stream, input: FusedInput<'_, T>, output: FusedOutput<'_, T, Q, L>) -> Result<()> {
        let FusedInput { input, gradient, shape: [rows, columns], square_blocks, skip } = input;
        let FusedOutput { rows: by_rows, columns: by_columns, mut bias_gradient, amax } = output;
        let partial_sums = match &mut bias_gradient {
            None => None,
            Some(_) if skip.is_some() => {
                return Err(invalid("a bias gradient cannot be skipped: leave `skip` or `bias_gradient` out".to_owned()));
            }
            Some(bias) => Some(bias.partial_sums_of([rows, columns])?),
        };
        let by_rows = codes(by_rows, [rows, columns], Direction::Rows)?;
        let by_columns = codes(by_columns, [rows, columns], Direction::Columns)?;
        let options = [(square_blocks, SQUARE_BLOCKS), (L::IS_INTERLEAVED, INTERLEAVED_SCALES)];
        let options: u32 = options.iter().filter(|(is_on, _)| *is_on).map(|(_, option)| option).sum();
        let operands = FusedOperandsArgument { input, gradient, rows, columns };
        let amax = amax.map(Buffer::view_mut);
        let raised = amax.as_ref().map(|amax| amax.access("amax"));
        match (by_rows, by_columns) {
            (Some(CodesArgument { data, scales }), None) if partial_sums.is_none() && !square_blocks => {
                let is_plain = L::IS_INTERLEAVED && amax.is_none() && skip.is_none() && columns.is_multiple_of(BLOCK);
                if let (true, Some(cast)) = (is_plain, &self.cast_rows_interleaved) {
                    return cast.launch(stream, Mxfp8CastRowsInterleavedArgs { input, data, scales, rows, columns });
                }
                let args = Mxfp8CastFusedRowsArgs { operands, data, scales, amax, skip, options, marker: PhantomData };
                self.cast_rows.launch_on_zeros(stream, args, raised.as_slice())?;
            }
            (None, Some(CodesArgument { data, scales })) => {
                let partial_sums = partial_sums.unwrap_or_else(nothing);
                let args = Mxfp8CastFusedColumnsArgs { operands, data, scales, partial_sums, amax, skip, options, marker: PhantomData };
                self.cast_columns.launch_on_zeros(stream, args, raised.as_slice())?;
            }
            (by_rows, by_columns) => {
                let options = options | copied_where_many::<O, T>(rows, columns);
                let [rows, columns] =
                    [by_rows, by_columns].map(|codes| codes.unwrap_or_else(|| CodesArgument { data: nothing(), scales: nothing() }));
                let partial_sums = partial_sums.unwrap_or_else(nothing);
                let args = Mxfp8CastFusedArgs { operands, rows, columns, partial_sums, amax, skip, options, marker: PhantomData };
                self.cast.launch_on_zeros(stream, args, raised.as_slice())?;
            }
        }
        match bias_gradient {
            Some(bias) => self.sums.launch(stream, ColumnSumsArgs { matrix: bias.partial_sums.view(), output: bias.sums.view_mut() }),
            None => Ok(()),
        }
    }
}

/// Codes and scales of a tensor of that shape and direction, if there is one.
fn codes<Q: Fp8, L: Layout>(
    tensor: Option<&mut Mxfp8Tensor<Q, L>>,
    shape: [u64; 2],
    direction: Direction,
) -> Result<Option<CodesArgument<'_, Q, ue8m0>>> {
    match tensor {
        None => Ok(None),
        Some(tensor) if tensor.shape == shape && tensor.direction == direction => {
            Ok(Some(CodesArgument { data: tensor.data.view_mut(), scales: tensor.scales.view_mut() }))
        }
        Some(tensor) => Err(invalid(format!(
            "a tensor of {:?} along {:?} where one of {shape:?} along {direction:?} goes",
            tensor.shape, tensor.direction
        ))),
    }
}

/// No elements: what is left out of the casts, which ask for the length (see [`mxfp8_cast_fused`](fn@mxfp8_cast_fused)).
fn nothing<'a, T>() -> DeviceViewMut<'a, T> {
    // SAFETY: there is no element at the address.
    unsafe { DeviceViewMut::from_raw(0, 0, &()) }
}

fn invalid(why: String) -> Error {
    Error::Invalid { what: "FusedMxfp8::run", why }
}

impl<O: Operation, T: Magnitude + Wide, Q: Fp8> fmt::Debug for FusedMxfp8<O, T, Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FusedMxfp8").field("cast", &self.cast).finish_non_exhaustive()
    }
}
