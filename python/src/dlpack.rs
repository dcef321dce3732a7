//! DLPack: the structs of its C header (version 1.0), and taking a tensor out of the capsule of `__dlpack__`.
//!
//! By hand, since that is all of it: four structs and the rule that the taker of a capsule renames it and calls the deleter once.

use std::ffi::{CStr, c_void};
use std::ptr::{self, NonNull};

use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::wrong_type;

/// `DLDevice`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Device {
    pub kind: i32,
    pub index: i32,
}

/// `kDLCPU`.
pub const CPU: i32 = 1;
/// `kDLCUDA`.
pub const CUDA: i32 = 2;
/// `kDLCUDAHost`: page-locked memory of the host.
pub const CUDA_HOST: i32 = 3;

/// `DLDataType`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct DataType {
    pub code: u8,
    pub bits: u8,
    pub lanes: u16,
}

/// `DLTensor`.
#[repr(C)]
pub struct Tensor {
    pub data: *mut c_void,
    pub device: Device,
    pub dimensions: i32,
    pub data_type: DataType,
    pub shape: *const i64,
    /// In elements; null for a tensor without gaps.
    pub strides: *const i64,
    pub byte_offset: u64,
}

/// `DLManagedTensor`, of libraries older than version 1.
#[repr(C)]
pub struct Managed {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
pub struct Versioned {
    version: [u32; 2],
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
    flags: u64,
    tensor: Tensor,
}

/// `DLPACK_FLAG_BITMASK_READ_ONLY`.
const READ_ONLY: u64 = 1;

/// A tensor that was taken out of a capsule; dropping it gives it back to its library.
pub enum Taken {
    Old(Owned<Managed>),
    New(Owned<Versioned>),
}

/// What a capsule held, which is this value's alone.
pub struct Owned<T: Manager>(NonNull<T>);

// SAFETY: a deleter may be called on any thread (DLPack, "Python Specification": those that touch Python take its lock themselves), and nothing else changes.
unsafe impl<T: Manager> Send for Owned<T> {}
// SAFETY: as above.
unsafe impl<T: Manager> Sync for Owned<T> {}

/// One of the two managed structs.
pub trait Manager {
    /// Gives the tensor back.
    ///
    /// # Safety
    /// Once, of a live struct.
    unsafe fn delete(this: *mut Self);
}

impl Manager for Managed {
    unsafe fn delete(this: *mut Self) {
        // SAFETY: the caller vouches for it.
        if let Some(deleter) = unsafe { (*this).deleter } {
            // SAFETY: as above.
            unsafe { deleter(this) }
        }
    }
}

impl Manager for Versioned {
    unsafe fn delete(this: *mut Self) {
        // SAFETY: the caller vouches for it.
        if let Some(deleter) = unsafe { (*this).deleter } {
            // SAFETY: as above.
            unsafe { deleter(this) }
        }
    }
}

impl<T: Manager> Drop for Owned<T> {
    fn drop(&mut self) {
        // SAFETY: `take` got it out of a capsule, which it renamed so that nothing else gives it back.
        unsafe { T::delete(self.0.as_ptr()) }
    }
}

impl Taken {
    /// The tensor of an object, whose library makes `stream` wait for its work on it where one is given: -1 is none.
    pub fn of(name: &str, object: &Bound<'_, PyAny>, stream: Option<i64>) -> PyResult<Self> {
        let py = object.py();
        let refuse =
            |why: String| wrong_type(format!("{name} is a {}, {why}: pass an array of NumPy, PyTorch, CuPy or JAX", type_of(object)));
        let export = object.getattr("__dlpack__").map_err(|_| refuse("which has no __dlpack__".to_owned()))?;
        let arguments = PyDict::new(py);
        stream.map_or(Ok(()), |stream| arguments.set_item("stream", stream))?;
        arguments.set_item("max_version", (1, 0))?;
        let exported = export.call((), Some(&arguments)).or_else(|error| {
            // A library older than version 1 knows no `max_version`.
            if !error.is_instance_of::<PyTypeError>(py) {
                return Err(error);
            }
            arguments.del_item("max_version")?;
            export.call((), Some(&arguments))
        });
        let capsule = exported.map_err(|error| match error.is_instance_of::<PyBufferError>(py) {
            true => wrong_type(format!(
                "{name} is a {}, which its library does not lend ({}): convert it to another type, or to a tensor of another library",
                type_of(object),
                error.value(py)
            )),
            false => error,
        })?;
        const NEW: [&CStr; 2] = [c"dltensor_versioned", c"used_dltensor_versioned"];
        const OLD: [&CStr; 2] = [c"dltensor", c"used_dltensor"];
        if let Some(found) = take::<Versioned>(&capsule, NEW)? {
            // SAFETY: a live struct, whose first member is the version in every version.
            let [major, minor] = unsafe { found.0.as_ref() }.version;
            if major != 1 {
                return Err(refuse(format!("which speaks DLPack {major}.{minor}, not 1")));
            }
            return Ok(Self::New(found));
        }
        take::<Managed>(&capsule, OLD)?.map(Self::Old).ok_or_else(|| refuse("whose __dlpack__ returns no fresh DLPack capsule".to_owned()))
    }

    /// The tensor.
    pub fn tensor(&self) -> &Tensor {
        match self {
            // SAFETY: live until this is dropped.
            Self::Old(managed) => unsafe { &managed.0.as_ref().tensor },
            // SAFETY: as above.
            Self::New(managed) => unsafe { &managed.0.as_ref().tensor },
        }
    }

    /// Whether its library lets nothing write it.
    pub fn is_read_only(&self) -> bool {
        // SAFETY: as above.
        matches!(self, Self::New(managed) if unsafe { managed.0.as_ref() }.flags & READ_ONLY != 0)
    }
}

/// The struct of a capsule of the first name, which gets the second; none if it has another name.
fn take<T: Manager>(capsule: &Bound<'_, PyAny>, [fresh, used]: [&CStr; 2]) -> PyResult<Option<Owned<T>>> {
    // SAFETY: an object and a name; it may be no capsule.
    if unsafe { ffi::PyCapsule_IsValid(capsule.as_ptr(), fresh.as_ptr()) } == 0 {
        return Ok(None);
    }
    // SAFETY: a capsule of this name, as was just asked.
    let pointer = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), fresh.as_ptr()) };
    let Some(found) = NonNull::new(pointer.cast::<T>()) else { return Err(PyErr::fetch(capsule.py())) };
    // SAFETY: a capsule, and a name that lives as long as the program. From now on the capsule's own destructor leaves the tensor alone.
    match unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), used.as_ptr()) } {
        0 => Ok(Some(Owned(found))),
        _ => Err(PyErr::fetch(capsule.py())),
    }
}

/// The name of an object's type.
fn type_of(object: &Bound<'_, PyAny>) -> String {
    object.get_type().name().map_or_else(|_| "value".to_owned(), |name| name.to_string())
}

/// Numbers of a tensor, one for each dimension; none for a null pointer.
///
/// # Safety
/// The pointer is null or to as many numbers.
pub unsafe fn numbers<'a>(pointer: *const i64, dimensions: i32) -> Option<&'a [i64]> {
    let pointer = if dimensions == 0 { ptr::dangling() } else { pointer };
    // SAFETY: the caller vouches for it.
    (!pointer.is_null()).then(|| unsafe { std::slice::from_raw_parts(pointer, dimensions.max(0) as usize) })
}
