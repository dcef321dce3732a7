//! The device of a job: Oxtile's kernels on a GPU or on the emulator.
//!
//! | file | what it holds |
//! |---|---|
//! | `casts` | the kernels for one number type, and the casts on them |
//! | `number` | the number types that every format takes |
//! | `nvfp4` | the NVFP4 casts of a recipe |
//! | `restore` | codes and scales back to numbers |
//! | `scales` | interleaved scales, and back |

mod casts;
mod number;
mod nvfp4;
mod restore;
mod scales;

use oxtile::{
    Buffer, HostElement, Kind, Result, Runtime, Stream,
    num::{bf16, f16},
    quantize::HadamardAmax,
};
use oxtile_tile::num::Pod;

use casts::Kernels;
use scales::Interleaving;

pub use restore::QuantizedPiece;

use super::{DeviceError, Elements, Piece, QuantizeDevice, Quantized, Recipe, Side, report::DeviceChoice};
use crate::{Error, arguments, safetensors::Dtype};

/// The first device of a runtime, with the kernels of the job, each loaded when it is first needed.
#[derive(Debug)]
pub struct RuntimeDevice {
    runtime: Runtime,
    stream: Stream,
    name: String,
    f32: Kernels<f32>,
    f16: Kernels<f16>,
    bf16: Kernels<bf16>,
    hadamard_amax: Option<HadamardAmax>,
    interleaving: Interleaving,
}

impl RuntimeDevice {
    /// The runtime's first device.
    ///
    /// # Errors
    /// If there is none.
    pub fn new(runtime: &Runtime) -> Result<Self> {
        let device = runtime.device(0)?;
        Ok(Self {
            runtime: runtime.clone(),
            stream: device.stream()?,
            name: device.name().into(),
            f32: Kernels::default(),
            f16: Kernels::default(),
            bf16: Kernels::default(),
            hadamard_amax: None,
            interleaving: Interleaving::default(),
        })
    }

    /// Restores a piece; little-endian bytes of `dtype`: F32, F16 or BF16, row-major.
    ///
    /// # Errors
    /// Whatever the device reports; another type.
    pub fn dequantize(&mut self, piece: &QuantizedPiece<'_>, dtype: Dtype) -> std::result::Result<Vec<u8>, DeviceError> {
        let (runtime, stream) = (&self.runtime, &self.stream);
        let wide = match dtype {
            // The inverse of the transform is in f32.
            _ if piece.hadamard => self.f32.restore_transformed(runtime, stream, piece, dtype),
            Dtype::F32 => self.f32.dequantize::<f32>(runtime, stream, piece),
            Dtype::F16 => self.f16.dequantize::<half::f16>(runtime, stream, piece),
            Dtype::Bf16 => self.bf16.dequantize::<half::bf16>(runtime, stream, piece),
            other => return Err(DeviceError::new(format!("nothing is dequantized to {other}"))),
        };
        wide.map_err(DeviceError::new)
    }

    /// Interleaved scales of a direction of a matrix, compact again.
    ///
    /// # Errors
    /// Whatever the device reports.
    pub fn compact(&mut self, side: &Side, interleaved: &[u8]) -> std::result::Result<Vec<u8>, DeviceError> {
        self.interleaving.compact(&self.runtime, &self.stream, side, interleaved).map_err(DeviceError::new)
    }
}

/// Opens the device that a request names. Returns how it was chosen too.
///
/// # Errors
/// [`Error::Device`] with what to run, if there is no such device or its kernels are not those of this program.
pub fn open(requested: arguments::Device) -> std::result::Result<(RuntimeDevice, DeviceChoice), Error> {
    let failed = |error| Error::Device { requested: requested.name(), error };
    let (runtime, reason) = match requested {
        arguments::Device::Auto => Runtime::auto().map(|choice| (choice.runtime, choice.reason)),
        arguments::Device::Cuda => Runtime::cuda().map(|runtime| (runtime, "as asked for".into())),
        arguments::Device::Emulated => Runtime::emulated_fast(1).map(|runtime| (runtime, "as asked for".into())),
    }
    .map_err(failed)?;
    let mut device = RuntimeDevice::new(&runtime).map_err(failed)?;
    // One kernel tells whether they are there, before the output is begun.
    device.f32.amax(&runtime).map_err(failed)?;
    let name = match runtime.kind() {
        Kind::Cuda => device.name.clone(),
        Kind::Emulated => "CPU emulator".into(),
    };
    Ok((device, DeviceChoice { requested: requested.name(), name, reason }))
}

impl QuantizeDevice for RuntimeDevice {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn amax(&mut self, recipe: &Recipe, shape: [u64; 2], input: Elements<'_>) -> std::result::Result<[f32; 2], DeviceError> {
        let (runtime, stream) = (&self.runtime, &self.stream);
        let amax = match input {
            Elements::Bf16(input) if recipe.hadamard => {
                let kernel = loaded(&mut self.hadamard_amax, || HadamardAmax::new(runtime));
                kernel.and_then(|kernel| transformed_amax(kernel, stream, input, shape))
            }
            Elements::F32(input) => self.f32.amax_of(runtime, stream, input).map(|amax| [amax; 2]),
            Elements::F16(input) => self.f16.amax_of(runtime, stream, input).map(|amax| [amax; 2]),
            Elements::Bf16(input) => self.bf16.amax_of(runtime, stream, input).map(|amax| [amax; 2]),
        };
        amax.map_err(DeviceError::new)
    }

    fn quantize(&mut self, recipe: &Recipe, piece: &Piece, input: Elements<'_>) -> std::result::Result<Quantized, DeviceError> {
        let (runtime, stream) = (&self.runtime, &self.stream);
        let output = match input {
            Elements::F32(input) => self.f32.quantize(runtime, stream, recipe, piece, input),
            Elements::F16(input) => self.f16.quantize(runtime, stream, recipe, piece, input),
            Elements::Bf16(input) => self.bf16.quantize(runtime, stream, recipe, piece, input),
        };
        output.map_err(DeviceError::new)
    }

    fn interleave(&mut self, side: &Side, compact: &[u8]) -> std::result::Result<Vec<u8>, DeviceError> {
        self.interleaving.interleave(&self.runtime, &self.stream, side, compact).map_err(DeviceError::new)
    }
}

fn transformed_amax(kernel: &HadamardAmax, stream: &Stream, input: &[half::bf16], shape: [u64; 2]) -> Result<[f32; 2]> {
    let (mut amax, mut transformed) = (Buffer::uninitialised(stream, 1)?, Buffer::uninitialised(stream, 1)?);
    let input = Buffer::<bf16>::from_slice(stream, input)?;
    kernel.run(stream, input.view(), shape, &mut amax, &mut transformed)?;
    Ok([amax.to_vec(stream)?[0], transformed.to_vec(stream)?[0]])
}

/// What is in the slot, loaded the first time.
fn loaded<T>(slot: &mut Option<T>, load: impl FnOnce() -> Result<T>) -> Result<&T> {
    if slot.is_none() {
        *slot = Some(load()?);
    }
    Ok(slot.as_ref().expect("just filled"))
}

/// The elements of a buffer as bytes.
fn bytes<T: HostElement<Device = T> + Pod>(stream: &Stream, buffer: &Buffer<T>, to_bits: fn(T) -> u8) -> Result<Vec<u8>> {
    Ok(buffer.to_vec(stream)?.into_iter().map(to_bits).collect())
}

/// A buffer of bytes as elements.
fn from_bytes<T: HostElement<Device = T> + Pod>(stream: &Stream, bytes: &[u8], from_bits: fn(u8) -> T) -> Result<Buffer<T>> {
    Buffer::from_slice(stream, &bytes.iter().copied().map(from_bits).collect::<Vec<_>>())
}
