//! Matrix multiplication: `D = alpha A B + beta D`, then a bias and GELU if asked for.
//!
//! `A` is `[m, k]`, `B` is `[k, n]`, `D` is `[m, n]`, all row-major without gaps; an operand may be stored as its
//! transpose instead. Products are summed in `f32`. Any shape is right; [`GemmConfig::choose`] says which is fast.
//!
//! ```
//! use oxtile::gemm::{Gemm, GemmConfig};
//! use oxtile::num::bf16;
//! use oxtile::{Buffer, Result, Runtime};
//!
//! # fn main() -> Result<()> {
//! let runtime = Runtime::checked(1)?; // or Runtime::cuda()
//! let stream = runtime.device(0)?.stream()?;
//! let config = GemmConfig { m: 16, n: 24, k: 8, ..GemmConfig::default() };
//!
//! let (a, b) = (vec![half::bf16::from_f32(0.5); 16 * 8], vec![half::bf16::from_f32(3.0); 8 * 24]);
//! let (a, b) = (Buffer::from_slice(&stream, &a)?, Buffer::from_slice(&stream, &b)?);
//! let mut d = Buffer::<f32>::zeros(&stream, 16 * 24)?;
//! Gemm::<bf16, f32>::new(&runtime, config)?.run(&stream, a.view(), b.view(), None, d.view_mut())?;
//!
//! assert_eq!(d.to_vec(&stream)?[0], 12.0);
//! # Ok(()) }
//! ```

use std::fmt;

use oxtile_kernels::gemm::{self, FusionArgument, GemmAny, GemmAnyArgs, GemmArgs, OperandArgument};
use oxtile_tile::arch::MatrixElement;
use oxtile_tile::launch::{DeviceView, DeviceViewMut, Kernel};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::num::{Float, Pod, bf16, e4m3};
use oxtile_tile::register_tile::StoredElement;

use crate::choice::{Choice, Entry, Table};
use crate::runtime::{Bound, Device, Error, HOPPER, Loaded, Result, Runtime, Stream};
use crate::tensor::shape::numel;
use crate::tensor::{Strided, TensorMap, TensorMapMut, Uploads};

/// What is computed. Made complete by `..GemmConfig::default()`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GemmConfig {
    /// Rows of `A` and `D`.
    pub m: u64,
    /// Columns of `B` and `D`.
    pub n: u64,
    /// Columns of `A`, rows of `B`.
    pub k: u64,
    /// Whether `A` is stored as its transpose, `[k, m]`.
    pub transpose_a: bool,
    /// Whether `B` is stored as its transpose, `[n, k]`.
    pub transpose_b: bool,
    /// Factor of the product.
    pub alpha: f32,
    /// Factor of `D` as it was; 0 leaves it unread.
    pub beta: f32,
    /// What comes last.
    pub activation: Activation,
}

/// A function of every element.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activation {
    /// None.
    #[default]
    Identity,
    /// `x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`.
    Gelu,
}

impl Default for GemmConfig {
    fn default() -> Self {
        Self { m: 0, n: 0, k: 0, transpose_a: false, transpose_b: false, alpha: 1.0, beta: 0.0, activation: Activation::Identity }
    }
}

/// Multiplies matrices of `T` into one of `O`: `bf16` or `e4m3` into `bf16` or `f32`.
pub struct Gemm<T, O> {
    config: GemmConfig,
    choice: Choice<GemmKernel>,
    instance: Option<Box<dyn Instance<T, O>>>,
}

/// A kernel of matrix multiplication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GemmKernel {
    /// On wgmma.
    Wgmma {
        /// Whether rows of `A` lie along `m`, and not along `k`.
        m_major: bool,
        /// Whether rows of `B` lie along `n`, and not along `k`.
        n_major: bool,
    },
    /// Without tensor cores: any shape, on any GPU.
    Any,
}

impl GemmConfig {
    /// The kernel for elements of `T` into `O` on a device: the tensor cores' on Hopper, elsewhere a slow one that takes any shape.
    ///
    /// # Errors
    /// As [`choose`](Self::choose).
    pub fn choose_on<T: GemmElement<O>, O: 'static>(&self, device: &Device) -> Result<Choice<GemmKernel>> {
        self.choose_by::<T, O>(wgmma_of(device.capability()))
    }

    /// The kernel for elements of `T` into `O` on Hopper: the tensor cores', or where rows are no multiples of 16 bytes or 8-bit operands
    /// do not lie along `k`, a slow one that takes any shape.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a size beyond 2^31 - 1: the field is named.
    pub fn choose<T: GemmElement<O>, O: 'static>(&self) -> Result<Choice<GemmKernel>> {
        self.choose_by::<T, O>(Ok(()))
    }

    /// The choice of [`Gemm::portable`].
    pub(crate) fn choose_portable<T: GemmElement<O>, O: 'static>(&self) -> Result<Choice<GemmKernel>> {
        self.choose_by::<T, O>(Err("the kernel of any shape is asked for".to_owned()))
    }

    /// The choice where the kernels on wgmma can be taken, or cannot, whatever is multiplied.
    fn choose_by<T: GemmElement<O>, O: 'static>(&self, wgmma: Result<(), String>) -> Result<Choice<GemmKernel>> {
        let refuse = |why: String| Err(Error::Invalid { what: "GemmConfig", why });
        if let Some((field, size)) =
            [("m", self.m), ("n", self.n), ("k", self.k)].into_iter().find(|(_, size)| i32::try_from(*size).is_err())
        {
            return refuse(format!("{field} is {size}: at most {}", i32::MAX));
        }
        let any = GemmKernel::Any;
        if self.m == 0 || self.n == 0 {
            return Ok(Choice { decision: any, kernel: None, why: "the result is empty".to_owned(), refused: Vec::new() });
        }
        let [m_major, n_major] = self.majors();
        let decision = GemmKernel::Wgmma { m_major, n_major };
        Ok(match self.find_wgmma::<T, O>(&decision).and_then(|entry| wgmma.map(|()| entry)) {
            Ok(Entry { name, tile: [rows, columns], .. }) => {
                let why = format!("{rows} by {columns} tiles on wgmma, {}", Self::layout(m_major, n_major));
                Choice { decision, kernel: Some(name), why, refused: Vec::new() }
            }
            Err(why) => {
                let kernel = Some(Entry::find(T::KERNELS, &any)?.name);
                Choice { decision: any, kernel, why: why.clone(), refused: vec![(decision, why)] }
            }
        })
    }

    /// The kernel on wgmma, or why there is none for this configuration.
    fn find_wgmma<T: GemmElement<O>, O: 'static>(&self, decision: &GemmKernel) -> Result<&'static GemmEntry<T, O>, String> {
        if self.k == 0 {
            return Err("k is 0: nothing is multiplied".to_owned());
        }
        let [m_major, n_major] = self.majors();
        let rows = [
            if m_major { ("m", "transpose_a", self.m, T::BYTES) } else { ("k", "no transpose_a", self.k, T::BYTES) },
            if n_major { ("n", "no transpose_b", self.n, T::BYTES) } else { ("k", "transpose_b", self.k, T::BYTES) },
            ("n", "the result's rows", self.n, size_of::<O>() as u64),
        ];
        if let Some((field, of, size, bytes)) = rows.into_iter().find(|(_, _, size, bytes)| !(size * bytes).is_multiple_of(16)) {
            return Err(format!("{field} is {size}, no multiple of {} with {of}: TMA takes rows of a multiple of 16 bytes", 16 / bytes));
        }
        let entry = Entry::find(T::KERNELS, decision);
        entry.map_err(|_| "8-bit operands on the tensor cores lie along k: transpose_a false, transpose_b true".to_owned())
    }

    /// The sizes as kernels take them; [`choose`](Self::choose) refuses larger ones.
    fn shape(&self) -> gemm::Shape {
        let [m, n, k] = [self.m, self.n, self.k].map(|size| size as u32);
        gemm::Shape { m, n, k }
    }

    /// What follows the product, with its factors and bias in device memory.
    fn fusion<'a, O: Pod>(&self, scales: Option<[DeviceView<'a, f32>; 2]>, bias: Option<DeviceView<'a, O>>) -> FusionArgument<'a, O> {
        let [a_scale, b_scale] = scales.map_or([None; 2], |scales| scales.map(Some));
        FusionArgument { bias, a_scale, b_scale, alpha: self.alpha, beta: self.beta, gelu: self.activation == Activation::Gelu }
    }

    /// Whether the operands' rows lie along `m` and `n` and not along `k`.
    fn majors(&self) -> [bool; 2] {
        [self.transpose_a, !self.transpose_b]
    }

    fn layout(m_major: bool, n_major: bool) -> &'static str {
        match (m_major, n_major) {
            (false, false) => "both operands along k",
            (true, false) => "A along m",
            (false, true) => "B along n",
            (true, true) => "A along m, B along n",
        }
    }
}

/// Whether a device of a capability has the kernels on wgmma.
fn wgmma_of(capability: (u32, u32)) -> Result<(), String> {
    let (major, minor) = capability;
    if capability == HOPPER { Ok(()) } else { Err(format!("the tensor cores' kernels need sm_90, this is sm_{major}{minor}")) }
}

impl<T: GemmElement<O>, O: Pod> Gemm<T, O> {
    /// Checks the configuration and loads its kernel.
    ///
    /// # Errors
    /// As [`GemmConfig::choose_on`] for the first device, and [`Runtime::load`].
    pub fn new(runtime: &Runtime, config: GemmConfig) -> Result<Self> {
        Self::chosen(runtime, config, config.choose_on::<T, O>(&runtime.device(0)?)?)
    }

    /// As [`new`](Self::new), with the kernel of any shape on any GPU, which leaves the tensor cores idle.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn portable(runtime: &Runtime, config: GemmConfig) -> Result<Self> {
        Self::chosen(runtime, config, config.choose_portable::<T, O>()?)
    }

    fn chosen(runtime: &Runtime, config: GemmConfig, choice: Choice<GemmKernel>) -> Result<Self> {
        let instance = choice.load(T::KERNELS, runtime)?;
        Ok(Self { config, choice, instance })
    }

    /// The kernel, and why.
    pub fn choice(&self) -> &Choice<GemmKernel> {
        &self.choice
    }

    /// Binds matrices; encodes their tensor maps on the device and waits for those to be there.
    ///
    /// `bias` has one value a column.
    ///
    /// # Errors
    /// [`Error::Length`] if a view does not have the configuration's size; as [`TensorMap::new`].
    pub fn bind<'a>(
        &'a self,
        stream: &Stream,
        a: DeviceView<'a, T>,
        b: DeviceView<'a, T>,
        bias: Option<DeviceView<'a, O>>,
        d: DeviceViewMut<'a, O>,
    ) -> Result<Bound<'a>> {
        self.bind_matrices(stream, Matrices { a, b, scales: None, bias, d })
    }

    /// As [`bind`](Self::bind), with a factor of each operand in device memory, one element each: the product is multiplied by both.
    ///
    /// # Errors
    /// As [`bind`](Self::bind); [`Bound::run`] fails for scales of other than one element.
    pub fn bind_scaled<'a>(
        &'a self,
        stream: &Stream,
        [a, b]: [DeviceView<'a, T>; 2],
        scales: [DeviceView<'a, f32>; 2],
        bias: Option<DeviceView<'a, O>>,
        d: DeviceViewMut<'a, O>,
    ) -> Result<Bound<'a>> {
        self.bind_matrices(stream, Matrices { a, b, scales: Some(scales), bias, d })
    }

    fn bind_matrices<'a>(&'a self, stream: &Stream, matrices: Matrices<'a, T, O>) -> Result<Bound<'a>> {
        let GemmConfig { m, n, k, .. } = self.config;
        let Matrices { a, b, bias, d, .. } = &matrices;
        let sizes = [("Gemm, a", [m, k], a.len()), ("Gemm, b", [k, n], b.len()), ("Gemm, d", [m, n], d.len())];
        for (what, shape, found) in sizes {
            Error::check_length(what, numel(&shape)?, found)?;
        }
        if let Some(bias) = bias {
            Error::check_length("Gemm, bias", n, bias.len())?;
        }
        match &self.instance {
            Some(instance) => instance.bind(stream, self.config, matrices),
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
        a: DeviceView<'_, T>,
        b: DeviceView<'_, T>,
        bias: Option<DeviceView<'_, O>>,
        d: DeviceViewMut<'_, O>,
    ) -> Result<()> {
        self.bind(stream, a, b, bias, d)?.run(stream)
    }
}

/// An element of operands whose product is an `O`.
pub trait GemmElement<O: 'static>: Pod {
    /// Bytes of an element.
    const BYTES: u64 = size_of::<Self>() as u64;

    /// The kernels.
    #[doc(hidden)]
    const KERNELS: Table<GemmKernel, Box<dyn Instance<Self, O>>>;
}

type GemmEntry<T, O> = Entry<GemmKernel, Box<dyn Instance<T, O>>>;

/// What is multiplied.
#[doc(hidden)]
pub struct Matrices<'a, T, O> {
    a: DeviceView<'a, T>,
    b: DeviceView<'a, T>,
    /// Factors of the product in device memory.
    scales: Option<[DeviceView<'a, f32>; 2]>,
    bias: Option<DeviceView<'a, O>>,
    d: DeviceViewMut<'a, O>,
}

/// A loaded kernel of any layout.
#[doc(hidden)]
pub trait Instance<T, O>: Send + Sync {
    fn bind<'a>(&'a self, stream: &Stream, config: GemmConfig, matrices: Matrices<'a, T, O>) -> Result<Bound<'a>>;
}

impl<T, const DEPTH: usize, O, const WIDTH: usize, const M_MAJOR: bool, const N_MAJOR: bool> Instance<T, O>
    for Loaded<gemm::Gemm<T, DEPTH, O, WIDTH, M_MAJOR, N_MAJOR>>
where
    T: MatrixElement,
    O: StoredElement,
    gemm::Gemm<T, DEPTH, O, WIDTH, M_MAJOR, N_MAJOR>: Kernel,
{
    fn bind<'a>(&'a self, stream: &Stream, config: GemmConfig, matrices: Matrices<'a, T, O>) -> Result<Bound<'a>> {
        let (GemmConfig { m, n, k, .. }, Matrices { a, b, scales, bias, d }) = (config, matrices);
        let (of_a, of_b) = (if M_MAJOR { [k, m] } else { [m, k] }, if N_MAJOR { [k, n] } else { [n, k] });
        let (mut uploads, memory, length) = (Uploads::default(), d.access("old"), d.len());
        let a = TensorMap::<_, 64, DEPTH, Swizzle128>::with(&mut uploads, stream, a, Strided::dense(of_a))?;
        let b = TensorMap::<_, 64, DEPTH, Swizzle128>::with(&mut uploads, stream, b, Strided::dense(of_b))?;
        let mut d = TensorMapMut::<_, 64, WIDTH, Swizzle128>::with(&mut uploads, stream, d, Strided::dense([m, n]))?;
        uploads.copy(stream)?;
        Ok(Bound::new(move |stream| {
            // SAFETY: the map `d` holds the only view of this memory, for as long as the closure lives. The kernel reads an
            // element of the matrix as it was before it stores that element, in the same warpgroup.
            let old = unsafe { DeviceViewMut::from_raw(memory.address, length, memory.owner) };
            let (a, b, d) = (a.view(), b.view(), d.view_mut());
            self.launch(stream, GemmArgs { a, b, d, old, shape: config.shape(), fusion: config.fusion(scales, bias) })
        }))
    }
}

impl<T: Float + Pod, O: Float + Pod> Instance<T, O> for Loaded<GemmAny<T, O>>
where
    GemmAny<T, O>: Kernel,
{
    fn bind<'a>(&'a self, _: &Stream, config: GemmConfig, matrices: Matrices<'a, T, O>) -> Result<Bound<'a>> {
        let (Matrices { a, b, scales, bias, d }, shape @ gemm::Shape { m, n, k }) = (matrices, config.shape());
        let a_strides = if config.transpose_a { [1, m] } else { [k, 1] };
        let b_strides = if config.transpose_b { [k, 1] } else { [1, n] };
        let operand = |values, [stride, step]: [u32; 2]| OperandArgument { values, stride, step };
        let (memory, length) = (d.access("d"), d.len());
        Ok(Bound::new(move |stream| {
            // SAFETY: the closure holds the only view of this memory, lent by `d`, for as long as it lives.
            let d = unsafe { DeviceViewMut::from_raw(memory.address, length, memory.owner) };
            let (a, b, fusion) = (operand(a, a_strides), operand(b, b_strides), config.fusion(scales, bias));
            self.launch(stream, GemmAnyArgs { a, b, d, shape, fusion })
        }))
    }
}

/// Each row: the operands' element and columns of a step, the result's element and columns of a store, and the layouts.
macro_rules! elements {
    ($($t:ident $depth:literal, $o:ident $width:literal: $([$m_major:literal $n_major:literal])*;)*) => { $(
        impl GemmElement<$o> for $t {
            const KERNELS: Table<GemmKernel, Box<dyn Instance<Self, $o>>> = &[&[
                $(Entry {
                    decision: GemmKernel::Wgmma { m_major: $m_major, n_major: $n_major },
                    name: <gemm::Gemm<$t, $depth, $o, $width, $m_major, $n_major> as Kernel>::INFO.name,
                    tile: [gemm::ROWS as u64, gemm::COLUMNS as u64],
                    load: |runtime| Ok(Box::new(runtime.load::<gemm::Gemm<$t, $depth, $o, $width, $m_major, $n_major>>()?)),
                },)*
                Entry {
                    decision: GemmKernel::Any,
                    name: <GemmAny<$t, $o> as Kernel>::INFO.name,
                    tile: [1, 1],
                    load: |runtime| Ok(Box::new(runtime.load::<GemmAny<$t, $o>>()?)),
                },
            ]];
        }
    )* };
}

elements! {
    bf16 64, bf16 64: [false false] [false true] [true false] [true true];
    bf16 64, f32 32: [false false] [false true] [true false] [true true];
    e4m3 128, bf16 64: [false false];
    e4m3 128, f32 32: [false false];
}

impl<T, O> fmt::Debug for Gemm<T, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gemm").field("config", &self.config).field("choice", &self.choice).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_devices_take_the_kernel_of_any_shape() {
        let config = GemmConfig { m: 16, n: 16, k: 16, ..GemmConfig::default() };
        let choose = |config: GemmConfig, capability| config.choose_by::<bf16, f32>(wgmma_of(capability)).unwrap();
        let wgmma = GemmKernel::Wgmma { m_major: false, n_major: true };
        assert_eq!(choose(config, HOPPER).decision, wgmma);
        for capability in [(8, 0), (8, 9), (10, 0), (12, 0)] {
            let choice = choose(config, capability);
            assert_eq!((choice.decision, choice.kernel), (GemmKernel::Any, Some(<GemmAny<bf16, f32> as Kernel>::INFO.name)));
            assert_eq!(choose(GemmConfig { m: 0, ..config }, capability).kernel, None);
        }
        let choice = choose(config, (8, 9));
        assert!(choice.why.contains("need sm_90, this is sm_89"));
        assert_eq!(choice.refused, [(wgmma, choice.why)]);
    }
}
