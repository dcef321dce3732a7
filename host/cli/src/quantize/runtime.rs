//! The device behind the seam: Oxtile's kernels on a GPU or on the emulator.

use oxtile::{
    kernels::{
        amax::{Amax, AmaxArgs},
        magnitude::Magnitude,
        mxfp8::{Mxfp8CastRows, Mxfp8CastRowsArgs},
    },
    num::{bf16, e4m3, f16, ue8m0},
    runtime::{Buffer, HostElement, Kind, Loaded, Result, Runtime, Stream},
};

use oxtile_tile::launch::Kernel;

use super::{BLOCK, DeviceError, Elements, Mxfp8Device, Mxfp8Output, report::DeviceChoice};
use crate::{Error, arguments};

/// The first device of a runtime, with the kernels of the job.
#[derive(Debug)]
pub struct RuntimeDevice {
    stream: Stream,
    name: String,
    f32: Kernels<f32>,
    f16: Kernels<f16>,
    bf16: Kernels<bf16>,
}

/// The two kernels for one input type.
#[derive(Debug)]
struct Kernels<T: Magnitude> {
    amax: Loaded<Amax<T>>,
    cast: Loaded<Mxfp8CastRows<T, e4m3>>,
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

impl Mxfp8Device for RuntimeDevice {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn quantize(&mut self, _rows: usize, _columns: usize, input: Elements<'_>) -> std::result::Result<Mxfp8Output, DeviceError> {
        // Rows are whole blocks and follow each other without a seam: the kernels see one run of blocks.
        let output = match input {
            Elements::F32(input) => self.f32.run(&self.stream, input),
            Elements::F16(input) => self.f16.run(&self.stream, input),
            Elements::Bf16(input) => self.bf16.run(&self.stream, input),
        };
        output.map_err(DeviceError::new)
    }
}

impl<T: Magnitude> Kernels<T>
where
    Amax<T>: for<'a> Kernel<Args<'a> = AmaxArgs<'a, T>>,
    Mxfp8CastRows<T, e4m3>: for<'a> Kernel<Args<'a> = Mxfp8CastRowsArgs<'a, T, e4m3>>,
{
    fn load(runtime: &Runtime) -> Result<Self> {
        Ok(Self { amax: runtime.load()?, cast: runtime.load()? })
    }

    fn run<H: HostElement<Device = T>>(&self, stream: &Stream, input: &[H]) -> Result<Mxfp8Output> {
        let input = Buffer::<T>::from_slice(stream, input)?;
        let mut amax = Buffer::<f32>::zeros(stream, 1)?;
        let mut data = Buffer::<e4m3>::uninitialised(stream, input.len())?;
        let mut scales = Buffer::<ue8m0>::uninitialised(stream, input.len() / BLOCK)?;
        self.amax.launch(stream, AmaxArgs { input: input.view(), output: amax.view_mut() })?;
        let cast = Mxfp8CastRowsArgs { input: input.view(), data: data.view_mut(), scales: scales.view_mut() };
        self.cast.launch(stream, cast)?;
        Ok(Mxfp8Output {
            data: data.to_vec(stream)?.into_iter().map(e4m3::to_bits).collect(),
            scales: scales.to_vec(stream)?.into_iter().map(ue8m0::to_bits).collect(),
            amax: amax.to_vec(stream)?[0],
        })
    }
}
