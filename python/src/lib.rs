//! The Python module `oxtile._oxtile`: attention and quantization on tensors of any library that speaks DLPack.
//!
//! Results go into tensors that the caller made, so that their memory is that of the caller's library. What is here is thin: shapes, defaults and the
//! libraries' own ways are in the Python files of the package.
//!
//! | file | what it holds |
//! |---|---|
//! | `dlpack` | the structs of DLPack, and taking a tensor out of a capsule |
//! | `array` | a tensor of another library: its type, shape and place |
//! | `session` | the device and stream of a call; tensors lent to it, or copied for the emulator |
//! | `attention` | attention and its gradients |
//! | `quantize` | quantization and its inverse |
//! | `error` | errors as Python exceptions |

mod array;
mod attention;
mod dlpack;
mod error;
mod quantize;
mod session;

use pyo3::prelude::*;

#[pymodule]
fn _oxtile(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("Error", module.py().get_type::<error::Error>())?;
    module.add_function(wrap_pyfunction!(session::kernels_are_in, module)?)?;
    module.add_function(wrap_pyfunction!(session::kernels, module)?)?;
    module.add_function(wrap_pyfunction!(attention::attention_forward, module)?)?;
    module.add_function(wrap_pyfunction!(attention::attention_backward, module)?)?;
    module.add_function(wrap_pyfunction!(quantize::quantized_shapes, module)?)?;
    module.add_function(wrap_pyfunction!(quantize::quantize, module)?)?;
    module.add_function(wrap_pyfunction!(quantize::dequantize, module)?)
}
