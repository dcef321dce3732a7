//! `oxtile quantize`: a checkpoint in, the same checkpoint in a low-precision format out.
//!
//! [`plan`] decides what happens to each tensor by a [`recipe`], [`side`] how it lies in the output, [`job`] streams the tensors
//! through a [`device`] (in earnest the one of [`runtime`]) and into the output, [`metadata`] is what the output says about itself,
//! [`fidelity`] measures on the host what the quantization cost, [`report`] says it as a table or as JSON.
//!
//! | file | what it holds |
//! |---|---|
//! | `format`, `recipe` | the formats; what tensors are quantized to, and how |
//! | `plan` | what happens to each tensor, from the header alone |
//! | `job` | the job: the device quantizes a piece while the host measures and writes the one before |
//! | `device`, `runtime` | the trait of what computes, and Oxtile's kernels as such |
//! | `matrix` | the transpose and the random Hadamard transform on the host |
//! | `side` | one direction of a quantized matrix: the tensors that it is written as |
//! | `metadata` | what a quantized file states about itself |
//! | `fidelity`, `report` | what a quantization cost, and the outcome as JSON or a table |

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
pub use job::{Outcome, complete, run};
pub use plan::{Plan, PlanError};
pub use recipe::{Directions, Recipe, direction_name};
pub use side::{Names, Side};
