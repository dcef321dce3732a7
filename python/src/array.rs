//! A tensor of another library.

use std::fmt;
use std::sync::Arc;

use pyo3::prelude::*;

use crate::dlpack::{self, Taken};
use crate::error::{wrong_type, wrong_value};

/// Where a tensor lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Cpu,
    Cuda(u32),
}

/// The type of an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    Bf16,
    F16,
    F32,
    /// Bytes, signed or not: codes.
    Byte,
    /// Bits of a type of 16 bits that its library cannot lend: NumPy has no bfloat16.
    Bits16,
    /// Integers of 32 bits.
    Int,
    Other(u8, u8),
}

/// A tensor without gaps, lent by its library for as long as this is there.
pub struct Array {
    pub taken: Arc<Taken>,
    pub name: &'static str,
    pub place: Place,
    pub element: Type,
    pub shape: Vec<u64>,
    /// Whether a result goes there.
    is_written: bool,
}

impl Array {
    /// A tensor that is read.
    pub fn read(name: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        // The caller's library orders its own work: the stream of the call is the one that it uses now.
        let is_on_gpu = device_of(object).is_some_and(|kind| kind == dlpack::CUDA);
        let taken = Taken::of(name, object, is_on_gpu.then_some(-1))?;
        let tensor = taken.tensor();
        let place = match (tensor.device.kind, u32::try_from(tensor.device.index)) {
            (dlpack::CPU | dlpack::CUDA_HOST, _) => Place::Cpu,
            (dlpack::CUDA, Ok(index)) => Place::Cuda(index),
            (kind, _) => return Err(wrong_type(format!("{name} is on a device of DLPack's kind {kind}: only CPU and CUDA are taken"))),
        };
        let element = match (tensor.data_type.code, tensor.data_type.bits, tensor.data_type.lanes) {
            (4, 16, 1) => Type::Bf16,
            (2, 16, 1) => Type::F16,
            (2, 32, 1) => Type::F32,
            (0 | 1, 8, 1) => Type::Byte,
            (1, 16, 1) => Type::Bits16,
            (0 | 1, 32, 1) => Type::Int,
            (code, bits, lanes) => Type::Other(code, bits.saturating_mul(lanes.min(255) as u8)),
        };
        // SAFETY: DLPack: `shape` has a number for each dimension, and so has `strides` if it is not null.
        let (shape, strides) =
            unsafe { (dlpack::numbers(tensor.shape, tensor.dimensions), dlpack::numbers(tensor.strides, tensor.dimensions)) };
        let shape = shape.unwrap_or_default();
        if strides.is_some_and(|strides| !is_dense(shape, strides)) {
            return Err(wrong_value(format!(
                "{name} has gaps or another order (shape {shape:?}, strides {:?}): copy it",
                strides.unwrap_or_default()
            )));
        }
        let shape = shape.iter().map(|&size| u64::try_from(size).unwrap_or(0)).collect();
        Ok(Self { taken: Arc::new(taken), name, place, element, shape, is_written: false })
    }

    /// A tensor that is written.
    pub fn written(name: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let array = Self::read(name, object)?;
        if array.taken.is_read_only() {
            Err(wrong_value(format!("{name} is read-only, and a result goes there: pass one that can be written")))
        } else {
            Ok(Self { is_written: true, ..array })
        }
    }

    /// How many elements.
    pub fn len(&self) -> u64 {
        self.shape.iter().product()
    }

    /// The bytes of all elements.
    pub fn bytes(&self) -> u64 {
        self.len() * u64::from(self.taken.tensor().data_type.bits).div_ceil(8)
    }

    /// The address of the first element.
    pub fn address(&self) -> u64 {
        let tensor = self.taken.tensor();
        tensor.data.expose_provenance() as u64 + tensor.byte_offset
    }

    /// Fails unless it has this shape.
    pub fn check_shape(&self, expected: &[u64], because: impl fmt::Display) -> PyResult<()> {
        if self.shape == expected {
            return Ok(());
        }
        Err(wrong_value(format!("{} has shape {:?}, not {expected:?}: {because}", self.name, self.shape)))
    }

    /// Whether elements of the type go there.
    pub fn holds(&self, element: Type) -> bool {
        self.element == element || (self.element == Type::Bits16 && matches!(element, Type::Bf16 | Type::F16))
    }

    /// Fails unless it lies where another one does.
    pub fn check_place(&self, other: &Self) -> PyResult<()> {
        if self.place == other.place {
            return Ok(());
        }
        Err(wrong_value(format!("{} is on {}, {} on {}: move one", self.name, self.place, other.name, other.place)))
    }

    /// Fails unless it has the type of another one, or is a result that is to hold its bits.
    pub fn check_type(&self, other: &Self) -> PyResult<()> {
        if self.element == other.element || self.is_written && self.holds(other.element) {
            return Ok(());
        }
        Err(wrong_type(format!("{} is {}, {} is {}: convert one", self.name, self.element, other.name, other.element)))
    }
}

/// The kind of an object's device, if it says.
fn device_of(object: &Bound<'_, PyAny>) -> Option<i32> {
    object.call_method0("__dlpack_device__").ok()?.get_item(0).ok()?.call_method0("__int__").ok()?.extract().ok()
}

/// Whether strides, in elements, are those of a tensor without gaps.
fn is_dense(shape: &[i64], strides: &[i64]) -> bool {
    if shape.contains(&0) {
        return true;
    }
    let mut expected = 1;
    shape.iter().zip(strides).rev().all(|(&size, &stride)| {
        let fits = size == 1 || stride == expected;
        expected *= size;
        fits
    })
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("the CPU"),
            Self::Cuda(index) => write!(f, "GPU {index}"),
        }
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bf16 => f.write_str("bfloat16"),
            Self::F16 => f.write_str("float16"),
            Self::F32 => f.write_str("float32"),
            Self::Byte => f.write_str("8-bit integers"),
            Self::Bits16 => f.write_str("uint16"),
            Self::Int => f.write_str("32-bit integers"),
            Self::Other(2, bits) => write!(f, "float{bits}"),
            Self::Other(0, bits) => write!(f, "int{bits}"),
            Self::Other(1, bits) => write!(f, "uint{bits}"),
            Self::Other(code, bits) => write!(f, "a type of {bits} bits (DLPack's kind {code})"),
        }
    }
}
