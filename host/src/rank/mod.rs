//! Ranks, reductions and the errors between ranks, as values: the bottom layer of the library, which imports nothing of it. Programs find
//! them in [`comm`](crate::comm), [`bootstrap`](crate::bootstrap) and [`symmetric`](crate::symmetric).
//!
//! | file | what it holds |
//! |---|---|
//! | `world` | a rank, and how many there are |
//! | `launcher` | the rank that a launcher gave this process |
//! | `reduce` | operations and element types of reductions |
//! | `bootstrap_error` | why ranks could not find one another |
//! | `backend_name` | the ways to make symmetric memory |
//! | `symmetric_error` | what can go wrong with symmetric memory |

mod backend_name;
mod bootstrap_error;
pub(crate) mod launcher;
mod reduce;
mod symmetric_error;
mod world;

pub use backend_name::BackendName;
pub use bootstrap_error::BootstrapError;
pub(crate) use bootstrap_error::mend_of_shortage;
pub use reduce::{DType, ReduceOp};
pub use symmetric_error::{FlagName, Step, SymmetricError};
pub use world::{Rank, WorldSize};
