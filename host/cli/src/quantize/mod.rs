//! `oxtile quantize`: a checkpoint in, the same checkpoint in a low-precision format out.
//!
//! [`plan`] decides what happens to each tensor by a [`recipe`], [`side`] how it lies in the output, [`job`] streams the tensors
//! through a [`device`] (in earnest the one of [`runtime`]) and into the output, [`metadata`] is what the output says about itself,
//! [`fidelity`] measures on the host what the quantization cost, [`report`] says it as a table or as JSON.

pub mod device;
pub mod fidelity;
pub mod format;
pub mod job;
pub mod matrix;
pub mod metadata;
pub mod plan;
pub mod recipe;
pub mod report;
pub mod runtime;
pub mod side;

pub use oxtile::quantize::Direction;

pub use device::{Codes, DeviceError, Elements, Piece, QuantizeDevice, Quantized};
pub use fidelity::Fidelity;
pub use format::Format;
pub use job::{Outcome, run};
pub use plan::{Plan, PlanError};
pub use recipe::{Directions, Recipe, direction_name};
pub use side::{Names, Side};
