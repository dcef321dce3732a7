//! Packed sequences (thd) whose rows are shared by the ranks of context parallelism.
//!
//! | file | what it holds |
//! |---|---|
//! | `share` | which rows of a sequence a rank has |
//! | `step_sequences` | the sequences of the attention launches of a pass, made on the device |
//! | `steps` | their rule: what the queries of a chunk see of the keys of a set |
//! | `reorder` | rows from the order of the ranks to that of the tokens, and back; the indices of a rank's rows |
//! | `halves` | halves of sequences, and their valid rows |
//! | `correct` | what a step of a ring adds to log-sum-exps, results and gradients |
//! | `rows`, `step_rows` | rows that a warp moves; where the rows of a step are |

mod correct;
mod halves;
mod reorder;
mod rows;
mod share;
mod step_rows;
mod step_sequences;
mod steps;

pub use correct::*;
pub use halves::*;
pub use reorder::*;
pub use rows::Extent;
pub use share::{Located, MOST_ROWS, MOST_WORLD, Packed, PackedArgument, Rows, Share, Starts, Team};
pub use step_rows::{HeadRows, Part, Place, StepRows, StepRowsArgument};
pub use step_sequences::*;
pub use steps::{Bounds, Half, Sequence, StepKeys, Steps};
