//! The device behind the seam: Oxtile's kernels on a GPU or on the emulator.

use oxtile::{
    Buffer, HostElement, Kind, Result, Runtime, Stream, kernels,
    num::{bf16, e2m1x2, e4m3, f16, ue8m0},
    quantize::{
        Amax, Direction, Mxfp8, Mxfp8Tensor, Nvfp4, Nvfp4Tensor,
        mxfp8::Mxfp8Number,
        nvfp4::{self, Nvfp4Number},
    },
};
use oxtile_tile::launch::Kernel;

use super::{DeviceError, Elements, QuantizeDevice, QuantizedRows, Scheme, report::DeviceChoice};
use crate::{Error, arguments, safetensors::Dtype};

/// The first device of a runtime, with the kernels of the job.
#[derive(Debug)]
pub struct RuntimeDevice {
    stream: Stream,
    name: String,
    f32: Kernels<f32>,
    f16: Kernels<f16>,
    bf16: Kernels<bf16>,
}

/// The kernels for one input type.
#[derive(Debug)]
struct Kernels<T: Number> {
    amax: Amax<T>,
    mxfp8: Mxfp8<T>,
    nvfp4: Nvfp4<T>,
}

impl RuntimeDevice {
    /// Loads the kernels for the runtime's first device.
    ///
    /// # Errors
    /// If the kernels are not there or are not those of this program.
    pub fn new(runtime: &Runtime) -> Result<Self> {
        let device = runtime.device(0)?;
        Ok(Self {
            stream: device.stream()?,
            name: device.name().into(),
            f32: Kernels::load(runtime)?,
            f16: Kernels::load(runtime)?,
            bf16: Kernels::load(runtime)?,
        })
    }
}

impl RuntimeDevice {
    /// Restores rows of whole blocks from their codes and scales; little-endian bytes of `dtype`: F32, F16 or BF16.
    ///
    /// # Errors
    /// Whatever the device reports; another type.
    pub fn dequantize(
        &mut self,
        scheme: Scheme,
        shape: [u64; 2],
        codes: &[u8],
        scales: &[u8],
        dtype: Dtype,
    ) -> std::result::Result<Vec<u8>, DeviceError> {
        let rows = QuantizedWindow { scheme, shape, codes, scales };
        let wide = match dtype {
            Dtype::F32 => self.f32.dequantize::<f32>(&self.stream, rows),
            Dtype::F16 => self.f16.dequantize::<half::f16>(&self.stream, rows),
            Dtype::Bf16 => self.bf16.dequantize::<half::bf16>(&self.stream, rows),
            other => return Err(DeviceError::new(format!("nothing is dequantized to {other}"))),
        };
        wide.map_err(DeviceError::new)
    }
}

/// Rows of a quantized file.
#[derive(Clone, Copy)]
struct QuantizedWindow<'a> {
    scheme: Scheme,
    shape: [u64; 2],
    codes: &'a [u8],
    scales: &'a [u8],
}

/// Opens the device that a request names, and says how it was chosen.
///
/// # Errors
/// [`Error::Device`] with what to run, if there is no such device.
pub fn open(requested: arguments::Device) -> std::result::Result<(RuntimeDevice, DeviceChoice), Error> {
    let (runtime, reason) = match requested {
        arguments::Device::Auto => Runtime::auto().map(|choice| (choice.runtime, choice.reason)),
        arguments::Device::Cuda => Runtime::cuda().map(|runtime| (runtime, "as asked for".into())),
        arguments::Device::Emulated => Runtime::emulated(1).map(|runtime| (runtime, "as asked for".into())),
    }
    .map_err(|error| Error::Device { requested: requested.name(), error })?;
    let device = RuntimeDevice::new(&runtime).map_err(|error| Error::Device { requested: requested.name(), error })?;
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

    fn amax(&mut self, input: Elements<'_>) -> std::result::Result<f32, DeviceError> {
        let amax = match input {
            Elements::F32(input) => self.f32.amax(&self.stream, input),
            Elements::F16(input) => self.f16.amax(&self.stream, input),
            Elements::Bf16(input) => self.bf16.amax(&self.stream, input),
        };
        amax.map_err(DeviceError::new)
    }

    fn quantize(
        &mut self,
        scheme: Scheme,
        rows: usize,
        columns: usize,
        input: Elements<'_>,
    ) -> std::result::Result<QuantizedRows, DeviceError> {
        let shape = [rows as u64, columns as u64];
        let output = match input {
            Elements::F32(input) => self.f32.quantize(&self.stream, scheme, input, shape),
            Elements::F16(input) => self.f16.quantize(&self.stream, scheme, input, shape),
            Elements::Bf16(input) => self.bf16.quantize(&self.stream, scheme, input, shape),
        };
        output.map_err(DeviceError::new)
    }
}

impl<T: Number> Kernels<T>
where
    kernels::amax::Amax<T>: for<'a> Kernel<Args<'a> = kernels::amax::AmaxArgs<'a, T>>,
{
    fn load(runtime: &Runtime) -> Result<Self> {
        Ok(Self { amax: Amax::new(runtime)?, mxfp8: Mxfp8::new(runtime)?, nvfp4: Nvfp4::new(runtime)? })
    }

    fn amax<H: HostElement<Device = T>>(&self, stream: &Stream, input: &[H]) -> Result<f32> {
        let (input, mut amax) = (Buffer::<T>::from_slice(stream, input)?, Buffer::uninitialised(stream, 1)?);
        self.amax.run(stream, input.view(), &mut amax)?;
        Ok(amax.to_vec(stream)?[0])
    }

    fn quantize<H: HostElement<Device = T>>(&self, stream: &Stream, scheme: Scheme, input: &[H], shape: [u64; 2]) -> Result<QuantizedRows> {
        let input = Buffer::<T>::from_slice(stream, input)?;
        match scheme {
            Scheme::Mxfp8 => self.mxfp8(stream, &input, shape),
            Scheme::Nvfp4 { amax } => self.nvfp4(stream, &input, shape, amax),
        }
    }

    fn dequantize<H: HostElement<Device = T> + bytemuck::Pod>(&self, stream: &Stream, rows: QuantizedWindow<'_>) -> Result<Vec<u8>> {
        let QuantizedWindow { scheme, shape, codes, scales } = rows;
        let mut wide = Buffer::<T>::uninitialised(stream, shape[0] * shape[1])?;
        match scheme {
            Scheme::Mxfp8 => {
                let mut tensor = Mxfp8Tensor::uninitialised(stream, shape, Direction::Rows)?;
                tensor.data.copy_from_slice(stream, &codes.iter().copied().map(e4m3::from_bits).collect::<Vec<_>>())?;
                tensor.scales.copy_from_slice(stream, &scales.iter().copied().map(ue8m0::from_bits).collect::<Vec<_>>())?;
                self.mxfp8.dequantize(stream, &tensor, wide.view_mut())?;
            }
            Scheme::Nvfp4 { amax } => {
                let tensor = Nvfp4Tensor {
                    data: Buffer::from_slice(stream, &codes.iter().copied().map(e2m1x2::from_bits).collect::<Vec<_>>())?,
                    scales: Buffer::from_slice(stream, &scales.iter().copied().map(e4m3::from_bits).collect::<Vec<_>>())?,
                    amax: Buffer::from_slice(stream, &[amax])?,
                    shape,
                    direction: Direction::Rows,
                };
                self.nvfp4.dequantize(stream, &tensor, wide.view_mut())?;
            }
        }
        Ok(bytemuck::cast_slice(&wide.to_vec_as::<H>(stream)?).to_vec())
    }

    fn mxfp8(&self, stream: &Stream, input: &Buffer<T>, shape: [u64; 2]) -> Result<QuantizedRows> {
        let mut amax = Buffer::uninitialised(stream, 1)?;
        self.amax.run(stream, input.view(), &mut amax)?;
        let quantized = self.mxfp8.quantize(stream, input.view(), shape, Direction::Rows)?;
        Ok(QuantizedRows {
            data: quantized.data.to_vec(stream)?.into_iter().map(e4m3::to_bits).collect(),
            scales: quantized.scales.to_vec(stream)?.into_iter().map(ue8m0::to_bits).collect(),
            amax: amax.to_vec(stream)?[0],
        })
    }

    fn nvfp4(&self, stream: &Stream, input: &Buffer<T>, shape: [u64; 2], amax: f32) -> Result<QuantizedRows> {
        let tensor_amax = Buffer::from_slice(stream, &[amax])?;
        let mut data = Buffer::uninitialised(stream, input.len() / 2)?;
        let mut scales = Buffer::uninitialised(stream, nvfp4::scale_count(shape)?)?;
        self.nvfp4.quantize_rows(stream, input.view(), shape, tensor_amax.view(), data.view_mut(), scales.view_mut())?;
        Ok(QuantizedRows {
            data: data.to_vec(stream)?.into_iter().map(e2m1x2::to_bits).collect(),
            scales: scales.to_vec(stream)?.into_iter().map(e4m3::to_bits).collect(),
            amax,
        })
    }
}

/// A number type that every format takes.
trait Number: Mxfp8Number<e4m3> + Nvfp4Number {}

impl<T: Mxfp8Number<e4m3> + Nvfp4Number> Number for T {}
