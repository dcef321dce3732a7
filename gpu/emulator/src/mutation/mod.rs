//! Mutants of a kernel: one synchronisation site skipped, or its count shifted by one. A good kernel has no
//! site that can be broken unnoticed; a good emulator notices, whether the output shows it or not.

mod change;
mod score;

pub use change::{Change, Mutation};
pub use score::{BaselineFailure, Equivalent, Mutant, Outcome, Score, Seeds, Verdict, score};
