//! The device and stream of a call, and the tensors on it: lent on a GPU, copied to and from the emulator on the CPU.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use oxtile::runtime::{CudaOptions, KernelLibrary};
use oxtile::{Buffer, HostElement, Runtime, Stream};
use oxtile_tile::num::Pod;
use pyo3::prelude::*;

use crate::array::{Array, Place};
use crate::error::{raise, wrong_value};

/// The folders with compiled kernels: the package's own, after those of `OXTILE_KERNELS`.
static FOLDERS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Names the folder with the compiled kernels of the package. The variable `OXTILE_KERNELS` goes before it.
#[pyfunction]
pub fn kernels_are_in(folder: PathBuf) {
    *FOLDERS.lock().unwrap_or_else(PoisonError::into_inner) = vec![folder];
}

fn folders() -> Vec<PathBuf> {
    let named = std::env::var_os("OXTILE_KERNELS").unwrap_or_default();
    let named = std::env::split_paths(&named).filter(|path| !path.as_os_str().is_empty());
    named.chain(FOLDERS.lock().unwrap_or_else(PoisonError::into_inner).clone()).collect()
}

/// The number of kernels that are found for a GPU of this compute capability; all of one version: `(9, 0)` for an H100 or H200.
#[pyfunction]
pub fn kernels(capability: (u32, u32)) -> usize {
    let library = KernelLibrary::new(folders());
    oxtile::kernels::KERNELS.iter().flat_map(|family| family.instances).filter(|info| library.find(info, capability).is_ok()).count()
}

/// The device and stream of a call.
pub struct Session {
    pub runtime: Runtime,
    pub stream: Stream,
    place: Place,
}

impl Session {
    /// The GPU's stream `raw`, or a new emulator for tensors on the CPU.
    pub fn open(place: Place, raw: u64) -> PyResult<Self> {
        let Place::Cuda(index) = place else {
            let runtime = Runtime::emulated_fast(1).map_err(raise)?;
            let stream = runtime.device(0).and_then(|device| device.stream()).map_err(raise)?;
            return Ok(Self { runtime, stream, place });
        };
        let runtime = cuda()?;
        let device = runtime.device(index).map_err(raise)?;
        // SAFETY: the caller's library says that this is its current stream on this device, which it keeps while it is; the session and its buffers end with the call.
        let stream = unsafe { Stream::borrow_raw(&device, raw) }.map_err(raise)?;
        Ok(Self { runtime, stream, place })
    }

    /// A tensor that is read, or read and written.
    pub fn read<T: HostElement<Device = T> + Pod>(&self, array: &Array) -> PyResult<Buffer<T>> {
        match self.place {
            Place::Cuda(_) => self.lent(array),
            Place::Cpu => Buffer::from_slice(&self.stream, elements::<T>(array)?).map_err(raise),
        }
    }

    /// A tensor that is written whole, of which nothing is read.
    pub fn target<T: HostElement<Device = T> + Pod>(&self, array: &Array) -> PyResult<Buffer<T>> {
        match self.place {
            Place::Cuda(_) => self.lent(array),
            Place::Cpu => Buffer::uninitialised(&self.stream, count::<T>(array)?).map_err(raise),
        }
    }

    /// Ends the work of the call: on the emulator it is done now, on a GPU it is enqueued and stays so.
    pub fn finish(&self) -> oxtile::Result<()> {
        if self.place == Place::Cpu { self.stream.synchronize() } else { Ok(()) }
    }

    /// Gives a result to its tensor, which on a GPU has it already.
    pub fn give<T: HostElement<Device = T> + Pod>(&self, array: &Array, result: &Buffer<T>) -> PyResult<()> {
        if self.place != Place::Cpu {
            return Ok(());
        }
        let count = count::<T>(array)? as usize;
        let elements = match count {
            0 => &mut [],
            // SAFETY: memory of the host that its library lends to be written, of so many elements of which every bit pattern is a value; Python's lock is held, so that
            // no other Python code touches them now.
            _ => unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut::<T>(array.address() as usize), count) },
        };
        result.copy_to_slice(&self.stream, elements).map_err(raise)
    }

    fn lent<T: Pod>(&self, array: &Array) -> PyResult<Buffer<T>> {
        let (len, owner) = (count::<T>(array)?, Arc::clone(&array.taken));
        // SAFETY: DLPack: the tensor's memory is there until it is given back, which dropping `owner` does; its library frees in the order of the stream that it was allocated on, the
        // one of this call, on which it did its earlier work. `count` has checked length and alignment.
        unsafe { Buffer::lent(&self.stream.device(), array.address(), len, owner) }.map_err(raise)
    }
}

/// The machine's GPUs.
fn cuda() -> PyResult<Runtime> {
    static CUDA: OnceLock<Runtime> = OnceLock::new();
    if let Some(runtime) = CUDA.get() {
        return Ok(runtime.clone());
    }
    let runtime = Runtime::cuda_with(CudaOptions { kernels: folders(), ..CudaOptions::default() }).map_err(raise)?;
    Ok(CUDA.get_or_init(|| runtime).clone())
}

/// The elements of a tensor of the host.
fn elements<T: Pod>(array: &Array) -> PyResult<&[T]> {
    let count = count::<T>(array)? as usize;
    if count == 0 {
        return Ok(&[]);
    }
    // SAFETY: memory of the host that its library lends, of so many elements of which every bit pattern is a value; Python's lock is held, so that no other Python code
    // changes them now.
    Ok(unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance::<T>(array.address() as usize), count) })
}

/// How many elements of `T` a tensor has, which its address is aligned for.
fn count<T>(array: &Array) -> PyResult<u64> {
    let size = size_of::<T>() as u64;
    if !array.bytes().is_multiple_of(size) || (array.len() > 0 && !array.address().is_multiple_of(align_of::<T>() as u64)) {
        return Err(wrong_value(format!(
            "{} has {} bytes at {:#x}: they are no elements of {size} bytes",
            array.name,
            array.bytes(),
            array.address()
        )));
    }
    Ok(array.bytes() / size)
}
