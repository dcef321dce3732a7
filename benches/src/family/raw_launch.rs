//! A kernel launched by the driver's own `cuLaunchKernel`: what a launch costs without Oxtile.

use std::{
    ffi::{CString, c_void},
    ptr,
};

use anyhow::{Context, Result, ensure};
use cudarc::driver::sys;
use oxtile::runtime::KernelLibrary;
use oxtile_tile::launch::{ArgumentWords, Grid, KernelInfo};

use crate::bench::Gpu;

/// A kernel of the driver, its grid and its arguments, all of it prepared.
pub struct RawLaunch {
    function: sys::CUfunction,
    stream: sys::CUstream,
    grid: Grid,
    info: KernelInfo,
    words: Box<ArgumentWords>,
    parameters: Vec<*mut c_void>,
}

impl RawLaunch {
    /// Loads the kernel a second time, into the primary context that the runtime uses too.
    ///
    /// # Errors
    /// The kernel is not found; a driver error.
    pub fn new(gpu: &Gpu, info: KernelInfo, grid: Grid, words: ArgumentWords) -> Result<Self> {
        let images = KernelLibrary::default().find(&info, gpu.device.capability())?;
        let image = images.first().context("the library found no image")?;
        // PTX is text with a terminating zero; a cubin knows its own length.
        let code = [&*image.bytes()?, &[0]].concat();
        let name = CString::new(info.name).context("the name of the kernel has a NUL")?;
        let (mut context, mut module, mut function) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
        let device = i32::try_from(gpu.device.index()).context("there is no such device")?;
        // SAFETY: the driver is initialised (`gpu` is a CUDA runtime) and every pointer is a live local.
        unsafe {
            check("cuDevicePrimaryCtxRetain", sys::cuDevicePrimaryCtxRetain(&raw mut context, device))?;
            check("cuCtxSetCurrent", sys::cuCtxSetCurrent(context))?;
            check("cuModuleLoadData", sys::cuModuleLoadData(&raw mut module, code.as_ptr().cast()))?;
            check("cuModuleGetFunction", sys::cuModuleGetFunction(&raw mut function, module, name.as_ptr()))?;
        }
        let words = Box::new(words);
        let parameters = words.as_slice().iter().map(|word| ptr::from_ref(word).cast_mut().cast()).collect();
        let stream = ptr::with_exposed_provenance_mut(gpu.stream.raw() as usize);
        Ok(Self { function, stream, grid, info, words, parameters })
    }

    /// Enqueues the kernel.
    ///
    /// # Errors
    /// A driver error.
    pub fn launch(&mut self) -> Result<()> {
        debug_assert_eq!(self.parameters.len(), self.words.as_slice().len());
        let (Grid { x, y, z, .. }, threads, shared) = (self.grid, self.info.threads, self.info.shared_bytes);
        let parameters = self.parameters.as_mut_ptr();
        // SAFETY: the function was loaded in the current context, the stream is of it, and `parameters` point to the
        // boxed words, which were packed for this kernel and live as long as they do.
        let result =
            unsafe { sys::cuLaunchKernel(self.function, x, y, z, threads, 1, 1, shared, self.stream, parameters, ptr::null_mut()) };
        check("cuLaunchKernel", result)
    }
}

fn check(call: &str, result: sys::CUresult) -> Result<()> {
    ensure!(result == sys::CUresult::CUDA_SUCCESS, "{call} failed: {result:?}");
    Ok(())
}
