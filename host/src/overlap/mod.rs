//! Products that overlap with the communication which they need. Copy engines move chunks of an operand. A kernel waits for the flag of a chunk before it
//! first reads the chunk. A stream tells the other ranks when the operand has been read.
//!
//! [`AllGatherGemm`] gathers an operand from all members of a team while it multiplies. Which [`Method`] it takes is
//! [chosen](AllGatherConfig::choose) by a model of copies and tiles; `oxtile overlap --plan M,N,K --ranks 4` prints it.
//!
//! | file | what it holds |
//! |---|---|
//! | `sizes` | sizes over all ranks, and of one rank |
//! | `config` | what is computed, and how it overlaps |
//! | `choice`, `model` | which method is taken, and why; the times of each |
//! | `schedule` | which chunk travels when, which tile is computed when |
//! | `memory` | where operands are gathered, and the flags of their chunks |
//! | `table` | the kernels that wait, and matrices bound to them |
//! | `gathered` | all-gather and product: made, and bound |
//! | `call` | one call of it |

mod call;
mod choice;
mod config;
mod gathered;
mod memory;
mod model;
mod schedule;
mod sizes;
mod table;

pub use call::GatheredProduct;
pub use choice::{HostTimes, OverlapChoice, Predicted, Rates};
pub use config::{AllGatherConfig, Cut, Gathers, Method, OverlapConfig};
pub use gathered::AllGatherGemm;
pub use memory::OverlapMemory;
pub use sizes::{Global, Local, Split};
pub use table::GatherOperands;
