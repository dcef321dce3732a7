//! Products that overlap with the communication which they need: copy engines move chunks, a kernel waits for the flag of a chunk before it first reads
//! it, and a stream tells the others when it has been read.
//!
//! [`AllGatherGemm`] gathers an operand from all members of a team while it multiplies. Which [`Method`] it takes is
//! [chosen](AllGatherConfig::choose) by a model of copies and tiles; `oxtile overlap --plan M,N,K --ranks 4` prints it.
//!
//! | file | what it holds |
//! |---|---|
//! | `sizes` | sizes over all ranks, and of one rank |
//! | `config` | what is computed, and how it overlaps |
//! | `choice` | which method is taken, and why: the model |
//! | `schedule` | which chunk travels when, which tile is computed when |
//! | `memory` | where operands are gathered, and the flags of their chunks |
//! | `table` | the kernels that wait, and matrices bound to them |
//! | `gathered` | all-gather and product: made, and bound |
//! | `round` | one call of it |

mod choice;
mod config;
mod gathered;
mod memory;
mod round;
mod schedule;
mod sizes;
mod table;

pub use choice::{OverlapChoice, Predicted, Rates};
pub use config::{AllGatherConfig, Cut, Gathers, Method, OverlapConfig};
pub use gathered::AllGatherGemm;
pub use memory::OverlapMemory;
pub use round::GatheredProduct;
pub use sizes::{Global, Local, Split};
pub use table::GatherOperands;
