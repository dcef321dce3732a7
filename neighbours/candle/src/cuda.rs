//! Tensors on a GPU: candle's own memory, on the stream of its device.

use std::sync::OnceLock;

use candle_core::backend::BackendStorage;
use candle_core::{CudaDevice, CudaStorage, Error, Layout, Result, Storage, bail};
use cudarc::driver::CudaSlice;
use oxtile::{Buffer, Runtime, Stream};
use oxtile_cudarc::{Loan, On};

use crate::element::Element;
use crate::place::{Place, failed};

/// The stream of a candle device for one call.
pub struct Cuda<'a> {
    runtime: &'a Runtime,
    on: &'a On,
    device: &'a CudaDevice,
}

/// An error that passes through both crates.
enum Failure {
    Candle(Error),
    Lend(oxtile_cudarc::Error),
}

impl From<oxtile_cudarc::Error> for Failure {
    fn from(error: oxtile_cudarc::Error) -> Self {
        Self::Lend(error)
    }
}

/// Does something on the stream of a device.
pub fn on<T>(device: &CudaDevice, body: impl FnOnce(&Cuda<'_>) -> Result<T>) -> Result<T> {
    let runtime = gpus()?;
    let result = oxtile_cudarc::on(runtime, &device.cuda_stream(), |on| body(&Cuda { runtime, on, device }).map_err(Failure::Candle));
    result.map_err(|failure| match failure {
        Failure::Candle(error) => error,
        Failure::Lend(error) => lent(error),
    })
}

/// The machine's GPUs.
fn gpus() -> Result<&'static Runtime> {
    static GPUS: OnceLock<Runtime> = OnceLock::new();
    if let Some(runtime) = GPUS.get() {
        return Ok(runtime);
    }
    let runtime = Runtime::cuda().map_err(failed)?;
    Ok(GPUS.get_or_init(|| runtime))
}

fn lent(error: oxtile_cudarc::Error) -> Error {
    Error::wrap(error)
}

/// A result's memory, of one element where there are none: the driver allocates no empty memory.
pub struct Memory<T: Element> {
    slice: CudaSlice<T::Host>,
    len: usize,
}

impl Place for Cuda<'_> {
    type Storage = CudaStorage;
    type Memory<T: Element> = Memory<T>;
    type Loan<'a>
        = Loan<'a>
    where
        Self: 'a;

    fn runtime(&self) -> &Runtime {
        self.runtime
    }

    fn stream(&self) -> &Stream {
        self.on.stream()
    }

    fn storage<'a>(&self, storage: &'a Storage) -> Result<&'a CudaStorage> {
        match storage {
            Storage::Cuda(storage) if storage.device().id() == self.device.id() => Ok(storage),
            _ => bail!("oxtile: a tensor is not on the GPU where the call's others are: move it"),
        }
    }

    fn read<'a, T: Element>(&'a self, storage: &'a CudaStorage, layout: &Layout) -> Result<(Buffer<T>, Loan<'a>)> {
        let Some((start, end)) = layout.contiguous_offsets() else { bail!("oxtile: a tensor is not contiguous: call contiguous()") };
        let all = storage.as_cuda_slice::<T::Host>()?;
        let read = self.on.read_as::<T::Host, T>(all.slice(start..end)).map_err(lent)?;
        // SAFETY: what reads it keeps the loan for as long (`Place::read`), and writes nothing.
        Ok(unsafe { read.into_parts() })
    }

    fn allocate<T: Element>(&self, len: u64) -> Result<Memory<T>> {
        let len = usize::try_from(len).map_err(Error::wrap)?;
        // SAFETY: a result is written whole before candle has it in a tensor (`Place::write`); what packed sequences leave out is cleared (`Call::clear`).
        let slice = unsafe { self.device.alloc(len.max(1))? };
        Ok(Memory { slice, len })
    }

    fn write<'a, T: Element>(&'a self, memory: &'a mut Memory<T>) -> Result<(Buffer<T>, Loan<'a>)> {
        let write = self.on.write_as::<T::Host, T>(memory.slice.slice_mut(0..memory.len)).map_err(lent)?;
        // SAFETY: what writes it keeps the loan for as long (`Place::write`).
        Ok(unsafe { write.into_parts() })
    }

    fn give<T: Element>(&self, memory: Memory<T>, _written: Buffer<T>) -> Result<CudaStorage> {
        Ok(CudaStorage::wrap_cuda_slice(memory.slice, self.device.clone()))
    }

    fn wrap(storage: CudaStorage) -> Storage {
        Storage::Cuda(storage)
    }
}
