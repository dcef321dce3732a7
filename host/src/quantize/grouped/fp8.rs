//! FP8 of groups, with one scale a tensor.

use std::fmt;

use oxtile_kernels::fp8::{Fp8CastGroupedArgs, Fp8DequantizeGroupedArgs};
use oxtile_tile::num::{Fp8, e4m3};

use super::mxfp8::check_shapes;
use super::quantized::Quantized;
use super::table::Purpose;
use super::tensors::{Matrices, TensorGroup};
use crate::quantize::format::{Direction, Fp8Format};
use crate::quantize::fp8::Fp8Number;
use crate::quantize::{GlobalAmax, ScaleOptions};
use crate::runtime::{Loaded, Result, Runtime, Stream};

/// The casts of groups between `T` and FP8 elements `Q`, each one launch for all members, of any shapes at any addresses: current scaling,
/// for all of a step's weights or activations.
///
/// ```
/// use oxtile::comm::SingleRank;
/// use oxtile::quantize::{MultiAmax, ScaleOptions};
/// use oxtile::quantize::grouped::{GroupedFp8, TensorGroup};
/// use oxtile::{Buffer, Result, Runtime};
///
/// # fn main() -> Result<()> {
/// let runtime = Runtime::checked(1)?; // or Runtime::cuda()
/// let (device, stream) = (runtime.device(0)?, runtime.device(0)?.stream()?);
/// let casts = GroupedFp8::<f32>::new(&runtime, ScaleOptions::default())?;
/// let experts = [Buffer::from_slice(&stream, &[224.0_f32; 15])?, Buffer::from_slice(&stream, &[-7.0_f32; 64])?];
///
/// let group = TensorGroup::new(&stream, &[(experts[0].view(), [3, 5]), (experts[1].view(), [2, 32])])?;
/// let amax = MultiAmax::new(&runtime)?.local_amax(&stream, &group)?.reduce(&SingleRank::new(&device), &stream)?;
/// let quantized = casts.quantize(&stream, &group, &amax)?;
/// assert_eq!(quantized.all_scales().to_vec(&stream)?, [0.5, 1.0 / 64.0]);
/// assert_eq!(casts.dequantize(&stream, &quantized)?.to_vec(&stream, 1)?, experts[1].to_vec(&stream)?);
/// # Ok(()) }
/// ```
pub struct GroupedFp8<T: Fp8Number<Q>, Q: Fp8 = e4m3> {
    cast: Loaded<T::GroupCast>,
    dequantize: Loaded<T::GroupDequantize>,
    options: ScaleOptions,
}

impl<T: Fp8Number<Q>, Q: Fp8> GroupedFp8<T, Q> {
    /// Loads the kernels.
    ///
    /// # Errors
    /// As [`Runtime::load`].
    pub fn new(runtime: &Runtime, options: ScaleOptions) -> Result<Self> {
        Ok(Self { cast: runtime.load()?, dequantize: runtime.load()?, options })
    }

    /// Quantizes a group, or this rank's parts of one, into new buffers: the second phase.
    ///
    /// # Errors
    /// As [`Quantized::uninitialised`] and [`quantize_into`](Self::quantize_into).
    pub fn quantize(&self, stream: &Stream, group: &TensorGroup<'_, T>, amax: &GlobalAmax) -> Result<Quantized<Fp8Format<Q>>> {
        let mut output = Quantized::uninitialised(stream, &group.shapes, Direction::Rows, ())?;
        self.quantize_into(stream, group, amax, &mut output)?;
        Ok(output)
    }

    /// Quantizes a group. A member without elements gets a scale too. Captured in a graph after it ran once.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) unless the output is rowwise and has the group's shapes; [`Error::Length`](crate::Error::Length) unless there
    /// is an amax for each member; as [`Loaded::launch`].
    pub fn quantize_into(
        &self,
        stream: &Stream,
        group: &TensorGroup<'_, T>,
        amax: &GlobalAmax,
        output: &mut Quantized<Fp8Format<Q>>,
    ) -> Result<()> {
        const WHAT: &str = "GroupedFp8::quantize_into";
        check_shapes(WHAT, &group.shapes, &output.shapes)?;
        amax.check(WHAT, group.len() as u64)?;
        output.direction.check(WHAT, Direction::Rows)?;
        let table = group.tables.of::<T::GroupCast>(stream, Purpose::One, output.records())?;
        let args = Fp8CastGroupedArgs {
            inputs: group.table.view(),
            table: table.lend(),
            amaxes: amax.slots().view(),
            data: output.data.view_mut(),
            scale_inverses: output.scales.view_mut(),
            options: self.options,
        };
        self.cast.launch(stream, args)
    }

    /// A group back in `T`, rounded to nearest even, in one new buffer.
    ///
    /// # Errors
    /// As [`Matrices::uninitialised`] and [`dequantize_into`](Self::dequantize_into).
    pub fn dequantize(&self, stream: &Stream, group: &Quantized<Fp8Format<Q>>) -> Result<Matrices<T>> {
        let mut output = Matrices::uninitialised(stream, &group.shapes)?;
        self.dequantize_into(stream, group, &mut output)?;
        Ok(output)
    }

    /// A group back in `T`, rounded to nearest even. Captured in a graph after it ran once.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) unless the group is rowwise and the output has its shapes; as [`Loaded::launch`].
    pub fn dequantize_into(&self, stream: &Stream, group: &Quantized<Fp8Format<Q>>, output: &mut Matrices<T>) -> Result<()> {
        const WHAT: &str = "GroupedFp8::dequantize_into";
        check_shapes(WHAT, &group.shapes, output.shapes())?;
        group.direction.check(WHAT, Direction::Rows)?;
        let table = group.tables.of::<T::GroupDequantize>(stream, Purpose::One, group.records())?;
        let (data, scale_inverses, output) = (group.data.view(), group.scales.view(), output.values.view_mut());
        self.dequantize.launch(stream, Fp8DequantizeGroupedArgs { data, scale_inverses, table: table.lend(), output })
    }
}

impl<T: Fp8Number<Q>, Q: Fp8> fmt::Debug for GroupedFp8<T, Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GroupedFp8").field("cast", &self.cast).field("options", &self.options).finish_non_exhaustive()
    }
}
