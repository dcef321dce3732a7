//! Errors of the library as Python exceptions, in its own words.

use pyo3::create_exception;
use pyo3::exceptions::{PyException, PyMemoryError, PyTypeError, PyValueError};
use pyo3::prelude::*;

create_exception!(
    oxtile,
    Error,
    PyException,
    "What went wrong on a device, or in finding one: a missing driver, kernels for another GPU, a fault."
);

/// The exception of an error: of an argument, or of the device.
pub fn raise(error: oxtile::Error) -> PyErr {
    use oxtile::Error as E;
    let words = error.to_string();
    match error {
        E::Invalid { .. } | E::Length { .. } | E::TooLarge { .. } | E::Argument { .. } | E::Limit { .. } => PyValueError::new_err(words),
        // CUDA_ERROR_OUT_OF_MEMORY
        E::Cuda { code: 2, .. } => PyMemoryError::new_err(words),
        _ => Error::new_err(words),
    }
}

/// An argument of a type that is not taken.
pub fn wrong_type(words: impl Into<String>) -> PyErr {
    PyTypeError::new_err(words.into())
}

/// An argument with a value that is not taken.
pub fn wrong_value(words: impl Into<String>) -> PyErr {
    PyValueError::new_err(words.into())
}
