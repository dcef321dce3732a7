//! One scale for 128 neighbours of a row, or for a 128x128 square.

use std::fmt;

use oxtile_kernels::codes::CodesArgument;
use oxtile_kernels::fp8::{
    BlockScalesArgument, Fp8CastRowBlocksAloneArgs, Fp8CastRowBlocksArgs, Fp8CastSquaresArgs, Fp8DequantizeBlocksArgs, SIDE, row_of_scales,
};
use oxtile_kernels::matrix::MatrixArgument;
use oxtile_tile::launch::{DeviceView, DeviceViewMut};
use oxtile_tile::num::{Fp8, e4m3};

use super::{Fp8Number, ScaleOptions};
use crate::quantize::format::ScaleBlock;
use crate::quantize::tensor::Fp8BlockTensor;
use crate::runtime::{Error, Loaded, Result, Runtime, Stream};
use crate::tensor::shape::numel;

/// The casts between `T` and FP8 elements `Q` with one scale a block, in one pass over the input. Scales lie as in
/// TransformerEngine's `Float8BlockQuantizer`; the padding of their lines is 0.
///
/// Rows are whole 16-byte vectors of `T` at 16-byte aligned addresses: multiples of 8 elements, of `f32` of 4.
///
/// ```
/// use oxtile::quantize::{BlockScaling, ScaleBlock, ScaleOptions};
/// use oxtile::{Buffer, Result, Runtime};
///
/// # fn main() -> Result<()> {
/// let runtime = Runtime::checked(1)?; // or Runtime::cuda()
/// let stream = runtime.device(0)?.stream()?;
/// let casts = BlockScaling::<f32>::new(&runtime, ScaleOptions::default())?;
///
/// let activations = Buffer::from_slice(&stream, &[[224.0_f32; 128], [7.0; 128]].concat())?;
/// let [rows, columns] = casts.quantize_both(&stream, activations.view(), [1, 256], ScaleBlock::Row)?;
/// assert_eq!(rows.scales.to_vec(&stream)?, [0.5, 0.0, 0.0, 0.0, 1.0 / 64.0, 0.0, 0.0, 0.0]);
/// // Rows of the transpose have one element each.
/// assert_eq!((columns.shape, columns.scales.len()), ([256, 1], 256));
/// # Ok(()) }
/// ```
pub struct BlockScaling<T: Fp8Number<Q>, Q: Fp8 = e4m3> {
    row_blocks: Loaded<T::CastRowBlocks>,
    row_blocks_alone: Loaded<T::CastRowBlocksAlone>,
    squares: Loaded<T::CastSquares>,
    dequantize: Loaded<T::DequantizeBlocks>,
    options: ScaleOptions,
}

impl<T: Fp8Number<Q>, Q: Fp8> BlockScaling<T, Q> {
    /// Loads the kernels.
    ///
    /// # Errors
    /// As [`Runtime::load`].
    pub fn new(runtime: &Runtime, options: ScaleOptions) -> Result<Self> {
        Ok(Self {
            row_blocks: runtime.load()?,
            row_blocks_alone: runtime.load()?,
            squares: runtime.load()?,
            dequantize: runtime.load()?,
            options,
        })
    }

    /// Quantizes a matrix into new buffers.
    ///
    /// # Errors
    /// As [`Fp8BlockTensor::uninitialised`] and [`quantize_into`](Self::quantize_into).
    pub fn quantize(&self, stream: &Stream, input: DeviceView<'_, T>, shape: [u64; 2], block: ScaleBlock) -> Result<Fp8BlockTensor<Q>> {
        let mut tensor = Fp8BlockTensor::uninitialised(stream, shape, block)?;
        self.quantize_into(stream, input, &mut tensor)?;
        Ok(tensor)
    }

    /// Quantizes a matrix of the tensor's shape, in its blocks, into existing buffers. A graph can hold it.
    ///
    /// # Errors
    /// [`Error::Length`] unless `input` has the shape; as [`Loaded::launch`], also for rows that are not whole vectors.
    pub fn quantize_into(&self, stream: &Stream, input: DeviceView<'_, T>, tensor: &mut Fp8BlockTensor<Q>) -> Result<()> {
        self.cast(stream, input, tensor, None)
    }

    /// Quantizes a matrix, and its transpose, into new buffers by one pass. Of squares both have the same codes and scales; of row
    /// blocks the transpose has its own, for 128 neighbours of a column of the matrix.
    ///
    /// # Errors
    /// As [`quantize`](Self::quantize).
    pub fn quantize_both(
        &self,
        stream: &Stream,
        input: DeviceView<'_, T>,
        [rows, columns]: [u64; 2],
        block: ScaleBlock,
    ) -> Result<[Fp8BlockTensor<Q>; 2]> {
        let tensor = Fp8BlockTensor::uninitialised(stream, [rows, columns], block)?;
        let mut pair = [tensor, Fp8BlockTensor::uninitialised(stream, [columns, rows], block)?];
        self.quantize_both_into(stream, input, &mut pair)?;
        Ok(pair)
    }

    /// As [`quantize_both`](Self::quantize_both), into buffers that are there: a matrix and, of the same blocks, one of the transposed
    /// shape. A graph can hold it.
    ///
    /// # Errors
    /// [`Error::Invalid`] unless the second is of the first's transpose and blocks; as [`quantize_into`](Self::quantize_into).
    pub fn quantize_both_into(
        &self,
        stream: &Stream,
        input: DeviceView<'_, T>,
        [tensor, transpose]: &mut [Fp8BlockTensor<Q>; 2],
    ) -> Result<()> {
        let ([rows, columns], block) = (tensor.shape, tensor.direction);
        if (transpose.shape, transpose.direction) != ([columns, rows], block) {
            let (found, of) = (transpose.shape, transpose.direction);
            let why = format!("it is {found:?} in blocks {of:?} beside a matrix {:?} in blocks {block:?}: make one of both", tensor.shape);
            return Err(Error::Invalid { what: "BlockScaling::quantize_both_into, transpose", why });
        }
        self.cast(stream, input, tensor, Some(transpose))
    }

    fn cast(
        &self,
        stream: &Stream,
        input: DeviceView<'_, T>,
        tensor: &mut Fp8BlockTensor<Q>,
        transpose: Option<&mut Fp8BlockTensor<Q>>,
    ) -> Result<()> {
        Error::check_length("BlockScaling::quantize, input", numel(&tensor.shape)?, input.len())?;
        let (input, options) = (MatrixArgument::new(input, tensor.shape), self.options);
        let codes = CodesArgument { data: tensor.data.view_mut(), scales: tensor.scales.view_mut() };
        let transposed = transpose.map(|transpose| CodesArgument { data: transpose.data.view_mut(), scales: transpose.scales.view_mut() });
        match tensor.direction {
            ScaleBlock::Row if transposed.is_none() => {
                let CodesArgument { data, scales } = codes;
                self.row_blocks_alone.launch(stream, Fp8CastRowBlocksAloneArgs { input, data, scale_inverses: scales, options })
            }
            ScaleBlock::Row => self.row_blocks.launch(stream, Fp8CastRowBlocksArgs { input, codes: Some(codes), transposed, options }),
            ScaleBlock::Square => self.squares.launch(stream, Fp8CastSquaresArgs { input, codes, transposed, options }),
        }
    }

    /// The matrix back in `T`, each element its code times the inverse of its scale, rounded to nearest even; of a transpose, the
    /// transposed matrix.
    ///
    /// # Errors
    /// [`Error::Length`] unless `output` is as long as the matrix; as [`Loaded::launch`], also for rows that are
    /// not whole vectors.
    pub fn dequantize(&self, stream: &Stream, tensor: &Fp8BlockTensor<Q>, output: DeviceViewMut<'_, T>) -> Result<()> {
        let [rows, columns] = tensor.shape;
        Error::check_length("BlockScaling::dequantize, output", numel(&tensor.shape)?, output.len())?;
        let (row_shift, row_stride, block_stride) = match tensor.direction {
            ScaleBlock::Row => (0, 1, row_of_scales(rows)),
            ScaleBlock::Square => (SIDE.trailing_zeros(), row_of_scales(columns.div_ceil(SIDE)), 1),
        };
        let scales = BlockScalesArgument { inverses: tensor.scales.view(), row_shift, row_stride, block_stride };
        let input = MatrixArgument::new(tensor.data.view(), tensor.shape);
        self.dequantize.launch(stream, Fp8DequantizeBlocksArgs { input, scales, output })
    }
}

impl<T: Fp8Number<Q>, Q: Fp8> fmt::Debug for BlockScaling<T, Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockScaling").field("options", &self.options).finish_non_exhaustive()
    }
}
