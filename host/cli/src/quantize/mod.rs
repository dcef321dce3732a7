//! `oxtile quantize`: a checkpoint in, the same checkpoint in a low-precision format out.
//!
//! [`plan`] decides what happens to each tensor, [`job`] streams the tensors through a [`device`] (in
//! earnest the one of [`runtime`]) and into the output,
//! [`fidelity`] measures on the host what the quantization cost, [`report`] says it as a table or as JSON.

pub mod device;
pub mod fidelity;
pub mod format;
pub mod job;
pub mod plan;
pub mod report;
pub mod runtime;

pub use device::{DeviceError, Elements, QuantizeDevice, QuantizedRows, Scheme};
pub use fidelity::Fidelity;
pub use format::Format;
pub use job::{Outcome, run};
pub use plan::{Plan, PlanError};
