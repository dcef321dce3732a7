//! Tensors on the CPU: copied to an emulator, and results back.

use candle_core::{CpuStorage, Layout, Result, Storage, WithDType, bail};
use oxtile::{Buffer, Runtime, Stream};

use crate::element::{Element, of_candle, of_candle_mut};
use crate::place::{Place, failed};

/// A new emulator.
pub struct Cpu {
    runtime: Runtime,
    stream: Stream,
}

impl Cpu {
    /// An emulator for one call.
    pub fn open() -> Result<Self> {
        let runtime = Runtime::emulated_fast(1).map_err(failed)?;
        let stream = runtime.device(0).and_then(|device| device.stream()).map_err(failed)?;
        Ok(Self { runtime, stream })
    }
}

impl Place for Cpu {
    type Storage = CpuStorage;
    /// How many elements.
    type Memory<T: Element> = u64;
    type Loan<'a> = ();

    fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    fn stream(&self) -> &Stream {
        &self.stream
    }

    fn storage<'a>(&self, storage: &'a Storage) -> Result<&'a CpuStorage> {
        match storage {
            Storage::Cpu(storage) => Ok(storage),
            _ => bail!("oxtile: a tensor is not on the CPU, where the call's others are: move it"),
        }
    }

    fn read<'a, T: Element>(&'a self, storage: &'a CpuStorage, layout: &Layout) -> Result<(Buffer<T>, ())> {
        let all = T::Host::cpu_storage_as_slice(storage)?;
        let Some((start, end)) = layout.contiguous_offsets() else { bail!("oxtile: a tensor is not contiguous: call contiguous()") };
        Ok((Buffer::from_slice(&self.stream, of_candle::<T>(&all[start..end])).map_err(failed)?, ()))
    }

    fn allocate<T: Element>(&self, len: u64) -> Result<u64> {
        Ok(len)
    }

    fn write<'a, T: Element>(&'a self, len: &'a mut u64) -> Result<(Buffer<T>, ())> {
        Ok((Buffer::uninitialised(&self.stream, *len).map_err(failed)?, ()))
    }

    fn give<T: Element>(&self, len: u64, buffer: Buffer<T>) -> Result<CpuStorage> {
        let mut elements = vec![T::Host::from_f64(0.0); len as usize];
        buffer.copy_to_slice(&self.stream, of_candle_mut::<T>(&mut elements)).map_err(failed)?;
        Ok(T::Host::to_cpu_storage_owned(elements))
    }

    fn wrap(storage: CpuStorage) -> Storage {
        Storage::Cpu(storage)
    }
}
