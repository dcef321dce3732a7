//! A product that is loaded, and matrices bound to it.

use std::fmt;

use oxtile_tile::launch::{DeviceView, DeviceViewMut};
use oxtile_tile::num::Pod;

use super::choice::GemmKernel;
use super::config::{Activation, GemmConfig};
use super::epilogue::{Epilogue, Unfinished};
use super::plan::GemmPlan;
use super::table::{AnyInstance, GemmOperands};
use crate::choice::{Choice, Entry};
use crate::runtime::{Bound, Error, Result, Runtime, Stream};
use crate::tensor::shape::numel;

/// Multiplies matrices of `T` into one of `O`: `bf16` or `e4m3` into `bf16` or `f32`, `f16` into `f16` or `f32`; `(e4m3, e5m2)` or `(e5m2, e4m3)`, which are
/// the elements of `A` and of `B`, into `bf16` or `f32`. What is bound may be run many times: operands are read, and transposed where they must be, at each run.
pub struct Gemm<T: GemmOperands<O>, O: 'static> {
    config: GemmConfig,
    choice: Choice<GemmKernel>,
    plan: GemmPlan,
    instance: Option<AnyInstance<T, O>>,
}

/// What is multiplied.
#[doc(hidden)]
pub struct Matrices<'a, A, B, O> {
    pub(crate) a: DeviceView<'a, A>,
    pub(crate) b: DeviceView<'a, B>,
    /// Factors of the product in device memory: one element each, or those of all blocks.
    pub(crate) scales: Option<[DeviceView<'a, f32>; 2]>,
    pub(crate) bias: Option<DeviceView<'a, O>>,
    pub(crate) d: DeviceViewMut<'a, O>,
}

impl<T: GemmOperands<O>, O: Pod> Gemm<T, O> {
    /// Checks the configuration and loads its kernel.
    ///
    /// # Errors
    /// As [`GemmConfig::choose_on`] for the first device, and [`Runtime::load`].
    pub fn new(runtime: &Runtime, config: GemmConfig) -> Result<Self> {
        Self::chosen(runtime, config, config.plan_on::<T, O>(&runtime.device(0)?)?)
    }

    /// As [`new`](Self::new), with a kernel that any GPU has: on `mma.sync`, or of 8-bit operands without tensor cores.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn portable(runtime: &Runtime, config: GemmConfig) -> Result<Self> {
        Self::chosen(runtime, config, config.plan_portable::<T, O>()?)
    }

    /// As [`new`](Self::new), of codes with a scale for every block: 128 neighbours along `k` of `A`, and a square of 128x128 of `B`.
    ///
    /// # Errors
    /// As [`GemmConfig::choose_blocks`] for the first device, and [`Runtime::load`].
    pub(crate) fn blocks(runtime: &Runtime, config: GemmConfig) -> Result<Self> {
        let multiprocessors = runtime.device(0)?.limits().multiprocessors;
        let (choice, plan) = config.choose_blocks::<T, O>(multiprocessors).map_err(|why| Error::Invalid { what: "GemmConfig", why })?;
        let instance = choice.load(T::BLOCKS, runtime)?;
        Ok(Self { config, choice, plan, instance })
    }

    /// As [`new`](Self::new), by a given plan on the tensor cores, such as one of [`GemmConfig::plans`].
    ///
    /// # Errors
    /// [`Error::Invalid`] for a plan that does not fit the configuration; as [`new`](Self::new).
    pub fn planned(runtime: &Runtime, config: GemmConfig, plan: GemmPlan) -> Result<Self> {
        config.check_plan::<T, O>(&plan).map_err(|why| Error::Invalid { what: "GemmPlan", why })?;
        let kernel = Entry::find(T::KERNELS, &plan.kernel)?.name;
        let why = format!("{plan}, as asked for");
        Self::chosen(runtime, config, (Choice { decision: plan.kernel, kernel: Some(kernel), why, refused: Vec::new() }, plan))
    }

    fn chosen(runtime: &Runtime, config: GemmConfig, (choice, plan): (Choice<GemmKernel>, GemmPlan)) -> Result<Self> {
        let instance = choice.load(T::KERNELS, runtime)?;
        Ok(Self { config, choice, plan, instance })
    }

    /// The kernel, and why.
    pub fn choice(&self) -> &Choice<GemmKernel> {
        &self.choice
    }

    /// How the product is divided among the multiprocessors.
    pub fn plan(&self) -> GemmPlan {
        self.plan
    }

    /// The bytes of operands that are transposed before they are multiplied ([`GemmKernel::WgmmaTransposed`]), which each binding allocates, in stream order; 0 where none are.
    pub fn transposed_bytes(&self) -> u64 {
        let GemmKernel::WgmmaTransposed { a, b, .. } = self.choice.decision else { return 0 };
        let GemmConfig { m, n, k, .. } = self.config;
        T::BYTES * k * (u64::from(a) * m + u64::from(b) * n)
    }

    /// Binds matrices; encodes their tensor maps and copies those to the device, in stream order: the host does not wait.
    ///
    /// `bias` has one value a column.
    ///
    /// # Errors
    /// [`Error::Length`] if a view does not have the configuration's size; as [`TensorMap::new`](crate::tensor::TensorMap::new).
    pub fn bind<'a>(
        &'a self,
        stream: &Stream,
        a: DeviceView<'a, T::A>,
        b: DeviceView<'a, T::B>,
        bias: Option<DeviceView<'a, O>>,
        d: DeviceViewMut<'a, O>,
    ) -> Result<Bound<'a>> {
        self.bind_epilogue(stream, (a, b), None, Epilogue::of_bias(bias), d)
    }

    /// As [`bind`](Self::bind), with a factor of each operand in device memory, one element each: the product is multiplied by both.
    ///
    /// # Errors
    /// As [`bind`](Self::bind); [`Bound::run`] fails for scales of other than one element.
    pub fn bind_scaled<'a>(
        &'a self,
        stream: &Stream,
        (a, b): (DeviceView<'a, T::A>, DeviceView<'a, T::B>),
        scales: [DeviceView<'a, f32>; 2],
        bias: Option<DeviceView<'a, O>>,
        d: DeviceViewMut<'a, O>,
    ) -> Result<Bound<'a>> {
        self.bind_epilogue(stream, (a, b), Some(scales), Epilogue::of_bias(bias), d)
    }

    /// As [`bind`](Self::bind), with an [`Epilogue`], and with factors as [`bind_scaled`](Self::bind_scaled) has them if there are any. What is kept or read of the epilogue, and the gradient of a bias, are launches after the
    /// product.
    ///
    /// # Errors
    /// As [`bind_scaled`](Self::bind_scaled); [`Error::Invalid`] for an epilogue that does not fit the configuration, with what to do.
    pub fn bind_epilogue<'a>(
        &'a self,
        stream: &Stream,
        (a, b): (DeviceView<'a, T::A>, DeviceView<'a, T::B>),
        scales: Option<[DeviceView<'a, f32>; 2]>,
        epilogue: Epilogue<'a, O>,
        d: DeviceViewMut<'a, O>,
    ) -> Result<Bound<'a>> {
        epilogue.check("Gemm", &self.config)?;
        Error::check_length("Gemm, d", numel(&[self.config.m, self.config.n])?, d.len())?;
        // SAFETY: the two are one operation, of which the product comes first.
        let Unfinished { config, bias, d, following } = unsafe { epilogue.part::<T>(stream, self.config, d) }?;
        let product = self.bind_as(stream, config, Matrices { a, b, scales, bias, d })?;
        Ok(match following {
            Some(following) => Bound::in_turn(vec![product, following]),
            None => product,
        })
    }

    pub(crate) fn bind_matrices<'a>(&'a self, stream: &Stream, matrices: Matrices<'a, T::A, T::B, O>) -> Result<Bound<'a>> {
        self.bind_as(stream, self.config, matrices)
    }

    /// Binds matrices to the product with another activation.
    pub(crate) fn bind_activated<'a>(
        &'a self,
        stream: &Stream,
        activation: Activation,
        matrices: Matrices<'a, T::A, T::B, O>,
    ) -> Result<Bound<'a>> {
        self.bind_as(stream, GemmConfig { activation, ..self.config }, matrices)
    }

    fn bind_as<'a>(&'a self, stream: &Stream, config: GemmConfig, matrices: Matrices<'a, T::A, T::B, O>) -> Result<Bound<'a>> {
        let GemmConfig { m, n, k, .. } = config;
        let Matrices { a, b, bias, d, .. } = &matrices;
        let sizes = [("Gemm, a", [m, k], a.len()), ("Gemm, b", [k, n], b.len()), ("Gemm, d", [m, n], d.len())];
        for (what, shape, found) in sizes {
            Error::check_length(what, numel(&shape)?, found)?;
        }
        if let Some(bias) = bias {
            Error::check_length("Gemm, bias", n, bias.len())?;
        }
        match &self.instance {
            Some(instance) => instance.bind(stream, config, self.plan, matrices),
            None => Ok(Bound::in_turn(Vec::new())),
        }
    }

    /// Binds matrices and multiplies them once.
    ///
    /// # Errors
    /// As [`bind`](Self::bind) and [`Bound::run`].
    pub fn run(
        &self,
        stream: &Stream,
        a: DeviceView<'_, T::A>,
        b: DeviceView<'_, T::B>,
        bias: Option<DeviceView<'_, O>>,
        d: DeviceViewMut<'_, O>,
    ) -> Result<()> {
        self.bind(stream, a, b, bias, d)?.run(stream)
    }
}

impl<T: GemmOperands<O>, O> fmt::Debug for Gemm<T, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gemm").field("config", &self.config).field("choice", &self.choice).finish_non_exhaustive()
    }
}
