//! Packed sequences (thd) whose rows are shared by the ranks of context parallelism.
//!
//! Nothing here waits for the host, allocates or reads lengths on the host: `cu_seqlens_padded` is that of the whole tensor, in device memory, and all
//! launches may be captured.
//!
//! | file | what it holds |
//! |---|---|
//! | `partition` | which tokens a rank has |
//! | `share` | partitions, and the rank that is meant |
//! | `step_sequences` | the sequences of the attention launches of a pass |
//! | `reorder` | rows from the order of the ranks to that of the tokens, and back; the indices of a rank's rows |
//! | `halves` | halves of sequences, and their valid rows |
//! | `parsed` | tests: what holds for any `cu_seqlens` |
//! | `correct` | what a step of a ring adds to log-sum-exps, results and gradients |

mod correct;
mod halves;
#[cfg(any(test, fuzzing))]
pub mod parsed;
mod partition;
mod reorder;
mod share;
mod step_sequences;

pub use correct::{AddedTo, Corrected, GradientCorrection, GradientElement, GradientHalves, LogSumExps, OutCorrection};
pub use halves::{CopyValid, ReadHalf};
pub use oxtile_kernels::thd::{Half, HeadRows, Part, StepKeys};
pub use reorder::{PartitionIndices, Reorder};
pub use share::{Packed, Partition, Share};
pub use step_sequences::{StepSequences, Steps};
