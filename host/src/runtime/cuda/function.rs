//! Compiled kernels in the driver.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::mem;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::Mutex;

use cudarc::driver::sys::{self, CUfunction, CUfunction_attribute, CUjit_option, CUmodule, CUstream};
use oxtile_tile::launch::{Grid, KernelInfo};

use super::driver::check;
use crate::runtime::backend::FunctionId;
use crate::runtime::error::{Error, Result};
use crate::runtime::library::KernelImage;
use crate::runtime::runtime::lock;

/// Dynamic shared memory that a kernel gets without asking (CUDA C++ Programming Guide, "Compute Capability 9.x").
const SHARED_WITHOUT_ASKING: u32 = 48 << 10;

/// What was loaded, by device and file. Modules stay for the life of the process, as the context does.
#[derive(Default)]
pub(super) struct Functions(Mutex<HashMap<(u32, PathBuf), FunctionId>>);

impl Functions {
    /// Loads the first image that the driver takes; the device's context is current.
    pub fn load(&self, device: u32, info: &KernelInfo, images: &[KernelImage]) -> Result<FunctionId> {
        let mut loaded = lock(&self.0);
        let mut refused = None;
        for image in images {
            let key = (device, image.path.clone());
            if let Some(function) = loaded.get(&key) {
                return Ok(*function);
            }
            match load(info, image) {
                Ok(function) => {
                    loaded.insert(key, function);
                    return Ok(function);
                }
                // The first refusal is the one that matters: the others are fallbacks.
                Err(error) => refused = refused.or(Some(error)),
            }
        }
        Err(refused.unwrap_or_else(|| Error::NoKernels { package: info.package, kernel: info.name, searched: Vec::new() }))
    }
}

/// Enqueues a kernel in a grid of blocks of so many threads and bytes of shared memory, which may begin early if the kernel waits for the launches before it.
///
/// # Safety
/// The function is of the current context, as the stream is, and takes these parameters, which point to their values. The memory that the kernel uses lives until it has ended.
/// If it may begin early, each of its threads waits for the launches ahead before it uses memory.
pub(super) unsafe fn launch(
    function: CUfunction,
    grid: Grid,
    ([threads, shared], early): ([u32; 2], bool),
    stream: CUstream,
    parameters: &mut [*mut c_void],
) -> Result<()> {
    let Grid { x, y, z, cluster } = grid;
    let (parameters, extra) = (parameters.as_mut_ptr(), ptr::null_mut());
    // SAFETY: the id 0 is that of an attribute that is ignored; the value is a union of numbers and pointers, for which zeros are values.
    let mut attributes: [sys::CUlaunchAttribute; 2] = unsafe { mem::zeroed() };
    let mut count = 0;
    if cluster > 1 {
        attributes[count].id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
        attributes[count].value.clusterDim.x = cluster;
        attributes[count].value.clusterDim.y = 1;
        attributes[count].value.clusterDim.z = 1;
        count += 1;
    }
    if early {
        attributes[count].id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attributes[count].value.programmaticStreamSerializationAllowed = 1;
        count += 1;
    }
    let config = sys::CUlaunchConfig {
        gridDimX: x,
        gridDimY: y,
        gridDimZ: z,
        blockDimX: threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: shared,
        hStream: stream,
        attrs: attributes.as_mut_ptr(),
        numAttrs: count as u32,
    };
    // SAFETY: as above; the configuration and its attributes outlive the call, which keeps neither.
    check("cuLaunchKernelEx", unsafe { sys::cuLaunchKernelEx(&raw const config, function, parameters, extra) })
}

fn load(info: &KernelInfo, image: &KernelImage) -> Result<FunctionId> {
    let file = |why: String| Error::KernelFile { path: image.path.clone(), why };
    let mut bytes = image.bytes()?.into_owned();
    // PTX is text with a terminating zero; a cubin knows its own length.
    bytes.push(0);
    let module = load_module(&image.path, &bytes)?;
    let name = CString::new(info.name).map_err(|error| file(error.to_string()))?;
    let mut function: CUfunction = ptr::null_mut();
    // SAFETY: a valid place for the function, a module just loaded, and a name with a terminating zero.
    check("cuModuleGetFunction", unsafe { sys::cuModuleGetFunction(&raw mut function, module, name.as_ptr()) })
        .map_err(|error| file(format!("it has no entry `{}`: {error}", info.name)))?;
    // The driver brings a kernel to the device when it is first launched, and waits for all work there: which hangs where a stream waits for what comes after that
    // launch, as those of ranks that share a device do.
    // SAFETY: a function of a live module.
    check("cuFuncLoad", unsafe { sys::cuFuncLoad(function) })?;
    if info.shared_bytes > SHARED_WITHOUT_ASKING {
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let bytes = info.shared_bytes.cast_signed();
        // SAFETY: a function just loaded, and no pointers.
        check("cuFuncSetAttribute", unsafe { sys::cuFuncSetAttribute(function, attribute, bytes) })?;
    }
    Ok(FunctionId(function as u64))
}

fn load_module(path: &Path, image: &[u8]) -> Result<CUmodule> {
    let mut log = [0_u8; 4096];
    let mut options = [CUjit_option::CU_JIT_ERROR_LOG_BUFFER, CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
    // The size is passed by value, in the place of a pointer.
    let mut values: [*mut c_void; 2] = [log.as_mut_ptr().cast(), ptr::without_provenance_mut(log.len())];
    let mut module = ptr::null_mut();
    // SAFETY: a valid place for the module; an image that ends with a zero byte; two options and their two values, the
    // first a buffer of the size that the second names. All outlive the call, which keeps none of them.
    let result = unsafe { sys::cuModuleLoadDataEx(&raw mut module, image.as_ptr().cast(), 2, options.as_mut_ptr(), values.as_mut_ptr()) };
    check("cuModuleLoadDataEx", result).map_err(|error| {
        let length = log.iter().position(|&byte| byte == 0).unwrap_or(log.len());
        let log = String::from_utf8_lossy(&log[..length]);
        Error::KernelFile { path: path.to_owned(), why: format!("{error} {}", log.trim()).trim_end().to_owned() }
    })?;
    Ok(module)
}
