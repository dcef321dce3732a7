//! What a binding adds to a product: its bias, and matrices and sums beside the result.

use std::fmt;

use oxtile_kernels::column_sums::{ColumnSums, ColumnSumsArgs};
use oxtile_kernels::gemm::{EPILOGUE_ROWS, EPILOGUE_VECTOR, GemmEpilogue, GemmEpilogueArgs};
use oxtile_kernels::sum_parts::Summed;
use oxtile_tile::launch::{BufferAccess, DeviceView, DeviceViewMut, Kernel, Signature};
use oxtile_tile::num::Pod;

use super::config::{Activation, GemmConfig};
use super::table::GemmOperands;
use crate::runtime::{Bound, Buffer, Device, Error, Loaded, Result, Stream};
use crate::tensor::shape::numel;

/// Columns that the grid of the kernel after a product has: 65535 times those of a warp.
const MOST_COLUMNS: u64 = u16::MAX as u64 * 32;

/// What a binding adds to a product. Begin with `Epilogue::default()`, which is nothing.
///
/// The result is `activation(alpha * (A B) + beta * D + bias)`, in this order. Bias, factors and [`Activation::Gelu`] are fused with the product. What is
/// kept or read is a launch after it, in the call, and the gradient of a bias one more. [`AllGatherGemm`](crate::overlap::AllGatherGemm) does the same, by every method.
pub struct Epilogue<'a, O> {
    /// One value a column.
    pub bias: Option<DeviceView<'a, O>>,
    /// Where the input of [`Activation::Gelu`] is kept, for its gradient: a matrix of the size of the result. The result is then GELU of what is kept, which is rounded. Without `beta`.
    pub kept: Option<DeviceViewMut<'a, O>>,
    /// The matrix at which [`Activation::GeluGradient`] takes the derivative: what was kept in the forward pass.
    pub input: Option<DeviceView<'a, O>>,
    /// Where the sums of the columns of the result go, as it is stored, summed in `f32` in one order: the gradient of the bias of the layer whose gradient the result is. Where ranks have rows of a result, each sums its own.
    pub bias_gradient: Option<DeviceViewMut<'a, f32>>,
}

impl<O> Default for Epilogue<'_, O> {
    fn default() -> Self {
        Self { bias: None, kept: None, input: None, bias_gradient: None }
    }
}

impl<O> fmt::Debug for Epilogue<'_, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bias, kept, input, bias_gradient } = self;
        let is_there =
            [("bias", bias.is_some()), ("kept", kept.is_some()), ("input", input.is_some()), ("bias_gradient", bias_gradient.is_some())];
        f.debug_set().entries(is_there.iter().filter(|(_, is_there)| *is_there).map(|(name, _)| name)).finish()
    }
}

impl<'a, O> Epilogue<'a, O> {
    /// Of a bias alone.
    pub fn of_bias(bias: Option<DeviceView<'a, O>>) -> Self {
        Self { bias, ..Self::default() }
    }

    /// Fails unless it fits a product of `what`.
    pub(crate) fn check(&self, what: &'static str, config: &GemmConfig) -> Result<()> {
        let GemmConfig { m, n, beta, activation, .. } = *config;
        let len = numel(&[m, n])?;
        if let Some(bias) = &self.bias {
            Error::check_length("Epilogue::bias", n, bias.len())?;
        }
        if let Some(kept) = &self.kept {
            Error::check_length("Epilogue::kept", len, kept.len())?;
        }
        if let Some(input) = &self.input {
            Error::check_length("Epilogue::input", len, input.len())?;
        }
        if let Some(sums) = &self.bias_gradient {
            Error::check_length("Epilogue::bias_gradient", n, sums.len())?;
        }
        let follows = self.kept.is_some() || self.input.is_some() || self.bias_gradient.is_some();
        if follows && n > MOST_COLUMNS {
            let why = format!("n is {n}, and a kernel after the product takes at most {MOST_COLUMNS} columns: cut the product by columns");
            return Err(Error::Invalid { what, why });
        }
        let reads = activation == Activation::GeluGradient;
        let why = if self.kept.is_some() && activation != Activation::Gelu {
            format!("the input of {activation:?} is not kept: take Activation::Gelu, or no Epilogue::kept")
        } else if self.kept.is_some() && beta != 0.0 {
            format!("beta is {beta}: it is 0 where the input of GELU is kept")
        } else if reads && self.input.is_none() {
            "Activation::GeluGradient reads a matrix: bind with an Epilogue that has `input`, what was kept in the forward pass".to_owned()
        } else if !reads && self.input.is_some() {
            format!("{activation:?} reads no matrix: take Activation::GeluGradient, or no Epilogue::input")
        } else {
            return Ok(());
        };
        Err(Error::Invalid { what, why })
    }
}

/// The kernel of what follows, of results of `O`.
#[doc(hidden)]
pub trait EpilogueKernel<O>: Send + Sync {
    /// Loads it on the device.
    fn prepare(&self, device: &Device) -> Result<()>;
    /// Launches it, with an input and whether the result is multiplied by the derivative there.
    fn launch(
        &self,
        stream: &Stream,
        result: DeviceViewMut<'_, O>,
        input: Option<(DeviceView<'_, O>, bool)>,
        sums: Option<DeviceViewMut<'_, f32>>,
        columns: u32,
    ) -> Result<()>;
}

/// The kernels of results of `O`.
pub(super) struct EpilogueKernels<O: Summed>
where
    GemmEpilogue<O, true>: Signature,
    GemmEpilogue<O, false>: Signature,
{
    /// Of matrices whose rows begin at multiples of 16 bytes, and of all others.
    pub vectors: Loaded<GemmEpilogue<O, true>>,
    pub elements: Loaded<GemmEpilogue<O, false>>,
}

impl<O: Summed> EpilogueKernel<O> for EpilogueKernels<O>
where
    GemmEpilogue<O, true>: Kernel,
    GemmEpilogue<O, false>: Kernel,
{
    fn prepare(&self, device: &Device) -> Result<()> {
        self.vectors.prepare(device)?;
        self.elements.prepare(device)
    }

    fn launch(
        &self,
        stream: &Stream,
        result: DeviceViewMut<'_, O>,
        input: Option<(DeviceView<'_, O>, bool)>,
        sums: Option<DeviceViewMut<'_, f32>>,
        columns: u32,
    ) -> Result<()> {
        let (input, derives) = input.unzip();
        let derives = derives.unwrap_or(false);
        let begins = |address: u64| address.is_multiple_of(16);
        if columns.is_multiple_of(EPILOGUE_VECTOR) && begins(result.address()) && input.is_none_or(|input| begins(input.address())) {
            self.vectors.launch(stream, GemmEpilogueArgs { result, input, sums, columns, derives })
        } else {
            self.elements.launch(stream, GemmEpilogueArgs { result, input, sums, columns, derives })
        }
    }
}

/// A product whose result is not yet that of its epilogue.
pub(crate) struct Unfinished<'a, O> {
    /// What the product computes.
    pub config: GemmConfig,
    pub bias: Option<DeviceView<'a, O>>,
    /// Where it goes.
    pub d: DeviceViewMut<'a, O>,
    /// What follows it, if anything does.
    pub following: Option<Bound<'a>>,
}

impl<'a, O: Pod> Epilogue<'a, O> {
    /// Leaves to kernels after a product into `d` what is not fused with it, and loads them.
    ///
    /// # Safety
    /// What follows is enqueued after the product, and nothing else that uses these matrices comes between them: it has views of its own of what the product writes.
    pub(crate) unsafe fn part<T: GemmOperands<O>>(
        self,
        stream: &Stream,
        config: GemmConfig,
        d: DeviceViewMut<'a, O>,
    ) -> Result<Unfinished<'a, O>> {
        let Self { bias, kept, input, bias_gradient } = self;
        let (result, derives) = (d.access("result"), input.is_some());
        // GELU's result is computed from what is kept; a gradient in its own place.
        let (input, first) = match kept {
            Some(kept) => (Some(kept.access("input")), kept),
            None => (input.map(|input| input.access("input")), d),
        };
        let activation = if input.is_some() { Activation::Identity } else { config.activation };
        let following = Following { result, size: [config.m, config.n], input, derives, bias_gradient }.bind::<T, O>(stream)?;
        Ok(Unfinished { config: GemmConfig { activation, ..config }, bias, d: first, following })
    }
}

/// What follows a product in launches of its own.
struct Following<'a> {
    /// The result, `[m, n]`.
    result: BufferAccess<'a>,
    size: [u64; 2],
    /// What the result becomes GELU of, or, if it `derives`, is multiplied by the derivative at.
    input: Option<BufferAccess<'a>>,
    derives: bool,
    bias_gradient: Option<DeviceViewMut<'a, f32>>,
}

impl<'a> Following<'a> {
    /// Loads its kernels; none if nothing follows.
    fn bind<T: GemmOperands<O>, O: Pod>(self, stream: &Stream) -> Result<Option<Bound<'a>>> {
        let Self { result, size: [m, n], input, derives, bias_gradient } = self;
        if input.is_none() && bias_gradient.is_none() {
            return Ok(None);
        }
        let (device, runtime) = (stream.device(), stream.device().runtime());
        let kernel = T::epilogue(&runtime)?;
        kernel.prepare(&device)?;
        let mut sums = match bias_gradient {
            Some(of_columns) => {
                let sum: Loaded<ColumnSums<f32>> = runtime.load()?;
                sum.prepare(&device)?;
                let partial = Buffer::<f32>::named(stream, "partial sums", m.div_ceil(EPILOGUE_ROWS.into()) * n)?;
                Some((sum, partial, of_columns))
            }
            None => None,
        };
        Ok(Some(Bound::new(move |stream| {
            // SAFETY: matrices of this size, which live as long as this operation: views of them were lent for it, and are used by it and by the product before it alone.
            let (input, result) = unsafe {
                let input = input.map(|input| (DeviceView::from_raw(input.address, m * n, input.owner), derives));
                (input, DeviceViewMut::from_raw(result.address, m * n, result.owner))
            };
            let partial = sums.as_mut().map(|(_, partial, _)| partial.view_mut());
            kernel.launch(stream, result, input, partial, n as u32)?;
            sums.iter_mut().try_for_each(|(sum, partial, of_columns)| {
                sum.launch(stream, ColumnSumsArgs { matrix: partial.view(), output: of_columns.reborrow() })
            })
        })))
    }
}
