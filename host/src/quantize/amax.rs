//! The largest magnitude of a tensor.

use std::fmt;

use oxtile_kernels::amax::{self as kernel, AmaxArgs, MultiAmaxArgs};
use oxtile_kernels::magnitude::Magnitude;
use oxtile_tile::launch::{DeviceView, DeviceViewMut, Kernel, Signature};
use oxtile_tile::num::{bf16, f16};

use super::split_phase::LocalAmax;
use crate::runtime::{Buffer, Error, Loaded, Result, Runtime, Stream};

/// A number type whose largest magnitudes are found: `bf16`, `f16` and `f32`.
pub trait AmaxNumber: Magnitude {
    /// The kernel for one tensor.
    type Amax: Kernel + for<'a> Signature<Args<'a> = AmaxArgs<'a, Self>>;
    /// The kernel for many.
    type MultiAmax: Kernel + for<'a> Signature<Args<'a> = MultiAmaxArgs<'a, Self>>;
}

macro_rules! numbers {
    ($($t:ty)*) => { $(
        impl AmaxNumber for $t {
            type Amax = kernel::Amax<$t>;
            type MultiAmax = kernel::MultiAmax<$t>;
        }
    )* };
}
numbers! { bf16 f16 f32 }

/// The largest magnitude of a tensor of `bf16`, `f16` or `f32`. A NaN is dropped, an empty tensor has 0, Inf gives Inf.
pub struct Amax<T: AmaxNumber>(Loaded<T::Amax>);

impl<T: AmaxNumber> Amax<T> {
    /// Loads the kernel.
    ///
    /// # Errors
    /// As [`Runtime::load`].
    pub fn new(runtime: &Runtime) -> Result<Self> {
        runtime.load().map(Self)
    }

    /// Sets `output`, of one element, to the largest magnitude in `input`.
    ///
    /// # Errors
    /// [`Error::Length`] unless `output` has one element; as [`Loaded::launch`]. The output is then as it was.
    pub fn run(&self, stream: &Stream, input: DeviceView<'_, T>, output: &mut Buffer<f32>) -> Result<()> {
        Error::check_length("Amax::run, output", 1, output.len())?;
        let args = AmaxArgs { input, output: output.view_mut() };
        let raised = args.output.access("output");
        self.0.launch_on_zeros(stream, args, &[raised])
    }

    /// Raises `amax`, of one element, 0 before, to the largest magnitude in `input`.
    pub(super) fn raise(&self, stream: &Stream, input: DeviceView<'_, T>, amax: &mut Buffer<f32>) -> Result<()> {
        self.raise_at(stream, input, amax.view_mut())
    }

    /// The same of a view of one element.
    pub(crate) fn raise_at(&self, stream: &Stream, input: DeviceView<'_, T>, output: DeviceViewMut<'_, f32>) -> Result<()> {
        self.0.launch(stream, AmaxArgs { input, output })
    }

    /// The amax of this rank's part of a tensor that ranks share: the first phase, in which nothing is cast.
    ///
    /// # Errors
    /// As [`Buffer::zeros`] and [`Loaded::launch`].
    pub fn local_amax(&self, stream: &Stream, input: DeviceView<'_, T>) -> Result<LocalAmax> {
        let mut slots = Buffer::zeros(stream, 1)?;
        self.raise(stream, input, &mut slots)?;
        Ok(LocalAmax::new(slots))
    }
}

impl<T: AmaxNumber> fmt::Debug for Amax<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Amax").field(&self.0).finish()
    }
}
