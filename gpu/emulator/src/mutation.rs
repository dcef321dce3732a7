//! Mutants of a kernel: one synchronisation site skipped, or its count shifted by one.

/// One change to one synchronisation site.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mutation {
    /// The site's source file.
    pub file: String,
    /// Its line.
    pub line: u32,
    /// Its column.
    pub column: u32,
    /// The operation, as reports name it.
    pub operation: String,
    /// What is changed.
    pub change: Change,
}

/// What a mutant does at its site.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Change {
    /// The operation is not done.
    Skip,
    /// The count is one too high.
    CountUp,
    /// The count is one too low.
    CountDown,
}
