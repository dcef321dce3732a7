//! Products of quantized matrices, `D = alpha A B^T + beta D`, by the fastest path that the GPU has.
//!
//! | operands | sm_80 | sm_89 | sm_90 | sm_100 and newer |
//! |---|---|---|---|---|
//! | FP8, one scale | in `bf16` | cuBLASLt | cuBLASLt; `wgmma` | cuBLASLt |
//! | FP8, blocks of 1x128 | in `bf16` | in `bf16` | cuBLASLt | in `bf16` |
//! | FP8, blocks of 1x128 times squares | in `bf16` | in `bf16` | cuBLASLt; `wgmma` | in `bf16` |
//! | MXFP8, NVFP4 | in `bf16` | in `bf16` | in `bf16` | cuBLASLt, assembled but not run yet |
//!
//! In `bf16` means: both are dequantized to `bf16` first, and multiplied by cuBLASLt or on `wgmma`; where a GPU has
//! neither, on `mma.sync`. [`QuantizedGemmConfig::choose`] returns which path a
//! shape takes on a device and why; [`QuantizedGemmConfig::path`] pins one. A library that is not there is a reason, not an error.
//!
//! | file | what it holds |
//! |---|---|
//! | `choice` | which path a product takes, and why |
//! | `matrix` | operands, and the steps before their product |
//! | `call` | the call of cuBLASLt |
//! | `scratch` | memory beside the operands: workspaces |
//!
//! ```
//! use oxtile::num::bf16;
//! use oxtile::quantize::gemm::{OperandFormat, Path, QuantizedGemm, QuantizedGemmConfig};
//! use oxtile::quantize::{Direction, Mxfp8};
//! use oxtile::{Buffer, Result, Runtime};
//!
//! # fn main() -> Result<()> {
//! let runtime = Runtime::checked(1)?; // or Runtime::cuda()
//! let device = runtime.device(0)?;
//! let stream = device.stream()?;
//! let halves = Buffer::from_slice(&stream, &vec![half::bf16::from_f32(0.5); 16 * 64])?;
//! let casts = Mxfp8::<bf16>::new(&runtime)?;
//! let (a, b) = (halves.view().slice(0, 8 * 64), halves.view());
//! let a = casts.quantize(&stream, a, [8, 64], Direction::Rows)?;
//! let b = casts.quantize(&stream, b, [16, 64], Direction::Rows)?;
//!
//! let config = QuantizedGemmConfig::new(OperandFormat::Mxfp8(Direction::Rows), [8, 16, 64]);
//! let choice = config.choose::<f32>(&device)?;
//! assert_eq!(choice.decision, Path::Dequantize);
//! assert!(choice.refused[0].1.contains("emulated devices have none"));
//!
//! let mut d = Buffer::<f32>::uninitialised(&stream, 8 * 16)?;
//! QuantizedGemm::new(&device, config)?.run(&stream, (&a).into(), (&b).into(), d.view_mut())?;
//! assert_eq!(d.to_vec(&stream)?, [16.0; 8 * 16]);
//! # Ok(()) }
//! ```

mod call;
mod choice;
mod matrix;
mod scratch;

use std::fmt;

use oxtile_tile::launch::{BufferAccess, DeviceViewMut};
use oxtile_tile::num::{Element, Pod, bf16, e4m3};

pub use choice::{OperandFormat, Path, QuantizedGemmConfig};
pub use matrix::QuantizedMatrix;
pub use scratch::Scratch;

use crate::choice::Choice;
use crate::gemm::{Gemm, GemmElement};
use crate::runtime::matmul::{Matmul, MatmulFactors, MatmulMemory};
use crate::runtime::{Bound, Device, Error, Result, Runtime, Stream, module};
use crate::tensor::shape::numel;
use matrix::{dequantize, interleave, product_factors};
use scratch::Pads;

/// Multiplies quantized matrices into one of `O`, `bf16` or `f32`, on one device.
pub struct QuantizedGemm<O: 'static>
where
    bf16: GemmElement<O>,
    e4m3: GemmElement<O>,
{
    device: Device,
    config: QuantizedGemmConfig,
    choice: Choice<Path>,
    product: Product<O>,
}

/// The product of a path.
enum Product<O: 'static>
where
    bf16: GemmElement<O>,
    e4m3: GemmElement<O>,
{
    Codes(Gemm<e4m3, O>),
    Wide(Gemm<bf16, O>),
    Library(Matmul),
}

/// An operand as the library takes it, after its step.
struct Prepared<'a> {
    step: Option<Bound<'a>>,
    data: BufferAccess<'a>,
    scale: Option<BufferAccess<'a>>,
}

impl<O: Pod + Element> QuantizedGemm<O>
where
    bf16: GemmElement<O>,
    e4m3: GemmElement<O>,
{
    /// Chooses the path and loads what it needs.
    ///
    /// # Errors
    /// As [`QuantizedGemmConfig::choose`] and [`Runtime::load`].
    pub fn new(device: &Device, config: QuantizedGemmConfig) -> Result<Self> {
        let (choice, runtime) = (config.choose::<O>(device)?, Runtime(device.runtime.clone()));
        let product = match config.matmul::<O>(choice.decision) {
            Some(matmul) => Product::Library(matmul),
            None if choice.decision == Path::Wgmma && config.is_in_blocks() => {
                Product::Codes(Gemm::blocks(&runtime, config.narrow_product())?)
            }
            None if choice.decision == Path::Wgmma => Product::Codes(Gemm::new(&runtime, config.narrow_product())?),
            None if choice.decision == Path::DequantizePortable => Product::Wide(Gemm::portable(&runtime, config.wide_product())?),
            None => Product::Wide(Gemm::new(&runtime, config.wide_product())?),
        };
        Ok(Self { device: device.clone(), config, choice, product })
    }

    /// The path, and why.
    pub fn choice(&self) -> &Choice<Path> {
        &self.choice
    }

    /// The memory that the path needs beside the operands.
    ///
    /// # Errors
    /// As [`Buffer::uninitialised`](crate::Buffer::uninitialised).
    pub fn scratch(&self, stream: &Stream) -> Result<Scratch> {
        Scratch::new(stream, &self.config, self.choice.decision)
    }

    /// Binds matrices; on some paths waits for tensor maps to be on the device.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a matrix of another format; [`Error::Length`] for one of another size, and for scratch memory of another
    /// configuration; as [`Gemm::bind`]; an error of the library.
    pub fn bind<'a>(
        &'a self,
        stream: &Stream,
        a: QuantizedMatrix<'a>,
        b: QuantizedMatrix<'a>,
        d: DeviceViewMut<'a, O>,
        scratch: &'a mut Scratch,
    ) -> Result<Bound<'a>> {
        let QuantizedGemmConfig { m, n, k, .. } = self.config;
        a.check("QuantizedGemm, a", self.config.a, [m, k])?;
        b.check("QuantizedGemm, b", self.config.b, [n, k])?;
        Error::check_length("QuantizedGemm, d", numel(&[m, n])?, d.len())?;
        let pads = scratch.pads(&self.config, self.choice.decision)?;
        let runtime = Runtime(self.device.runtime.clone());
        let steps = match (&self.product, a, b) {
            (
                Product::Codes(gemm),
                QuantizedMatrix::Fp8 { data: a, scale_inverse: a_scale },
                QuantizedMatrix::Fp8 { data: b, scale_inverse: b_scale },
            ) => {
                vec![gemm.bind_scaled(stream, (a, b), [a_scale, b_scale], None, d)?]
            }
            (Product::Codes(gemm), QuantizedMatrix::Fp8Block(a), QuantizedMatrix::Fp8Block(b)) => {
                let (codes, scales) = ((a.data.view(), b.data.view()), [a.scales.view(), b.scales.view()]);
                vec![gemm.bind_scaled(stream, codes, scales, None, d)?]
            }
            (Product::Codes(_), ..) => return Err(invalid("only FP8 with one scale or in blocks goes this way".to_owned())),
            (Product::Wide(gemm), ..) => {
                let product = gemm.bind(stream, pads.wide[0].view(), pads.wide[1].view(), None, d)?;
                vec![dequantize(&runtime, a, pads.wide[0])?, dequantize(&runtime, b, pads.wide[1])?, product]
            }
            (Product::Library(matmul), ..) => self.bind_library(&runtime, matmul, [a, b], d, &pads)?,
        };
        Ok(Bound::in_turn(steps))
    }

    /// The steps before the library's call, and the call. Its A is our `B`.
    fn bind_library<'a>(
        &self,
        runtime: &Runtime,
        matmul: &Matmul,
        [a, b]: [QuantizedMatrix<'a>; 2],
        d: DeviceViewMut<'a, O>,
        pads: &Pads<'a>,
    ) -> Result<Vec<Bound<'a>>> {
        let (left, right) = (self.prepare(runtime, a, pads, 0)?, self.prepare(runtime, b, pads, 1)?);
        let (d, workspace) = (d.access("d"), pads.workspace.view_mut().access("workspace"));
        let mut memory = MatmulMemory {
            a: right.data.address,
            b: left.data.address,
            d: d.address,
            a_scale: right.scale.map_or(0, |scale| scale.address),
            b_scale: left.scale.map_or(0, |scale| scale.address),
            factors: 0,
            workspace: workspace.address,
        };
        let mut accesses: Vec<_> = [left.data, right.data, d, workspace].into_iter().chain(left.scale).chain(right.scale).collect();
        let mut steps: Vec<_> = left.step.into_iter().chain(right.step).collect();
        if let (QuantizedMatrix::Nvfp4(a), QuantizedMatrix::Nvfp4(b), MatmulFactors::Device) = (a, b, matmul.factors) {
            steps.push(product_factors(runtime, [a, b], [self.config.alpha, self.config.beta], pads.factors)?);
            accesses.push(pads.factors.view().access("factors"));
            memory.factors = pads.factors.view().address();
        }
        let backend = self.device.runtime.backend.clone();
        let plan = backend.plan_matmul(self.device.index(), matmul, &memory)?;
        let plan = plan.ok_or_else(|| invalid("cuBLASLt has no algorithm for matrices at these addresses: pin another path".to_owned()))?;
        let planned = self.device.index();
        steps.push(Bound::new(move |stream| {
            check_device(planned, stream)?;
            module::enqueue(stream, "cublasLtMatmul", &accesses, |id| backend.matmul(id, &*plan))
        }));
        Ok(steps)
    }

    /// Operand number `at` as the library takes it.
    fn prepare<'a>(&self, runtime: &Runtime, matrix: QuantizedMatrix<'a>, pads: &Pads<'a>, at: usize) -> Result<Prepared<'a>> {
        if self.choice.decision == Path::DequantizeCublasLt {
            let (step, data) = (dequantize(runtime, matrix, pads.wide[at])?, pads.wide[at].view().access("wide"));
            return Ok(Prepared { step: Some(step), data, scale: None });
        }
        Ok(match interleave(runtime, matrix, pads, at)? {
            Some((step, scale)) => Prepared { step: Some(step), data: matrix.data(), scale: Some(scale) },
            None => Prepared { step: None, data: matrix.data(), scale: Some(matrix.scale()) },
        })
    }

    /// Binds matrices with scratch memory of its own and multiplies them once.
    ///
    /// # Errors
    /// As [`scratch`](Self::scratch), [`bind`](Self::bind) and [`Bound::run`].
    pub fn run(&self, stream: &Stream, a: QuantizedMatrix<'_>, b: QuantizedMatrix<'_>, d: DeviceViewMut<'_, O>) -> Result<()> {
        let mut scratch = self.scratch(stream)?;
        self.bind(stream, a, b, d, &mut scratch)?.run(stream)
    }
}

/// The library's handle and its plan are of one device.
fn check_device(planned: u32, stream: &Stream) -> Result<()> {
    let found = stream.device().index();
    if found == planned {
        return Ok(());
    }
    Err(invalid(format!("it is of device {planned}, the stream of device {found}: make one for each device")))
}

fn invalid(why: String) -> Error {
    Error::Invalid { what: "QuantizedGemm", why }
}

impl<O> fmt::Debug for QuantizedGemm<O>
where
    bf16: GemmElement<O>,
    e4m3: GemmElement<O>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QuantizedGemm").field("config", &self.config).field("choice", &self.choice).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_is_enqueued_on_its_device_alone() {
        let runtime = Runtime::emulated(2).unwrap();
        let stream = |device| runtime.device(device).unwrap().stream().unwrap();
        check_device(1, &stream(1)).unwrap();
        let error = check_device(1, &stream(0)).unwrap_err().to_string();
        assert_eq!(error, "QuantizedGemm: it is of device 1, the stream of device 0: make one for each device");
    }
}
