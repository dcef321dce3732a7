//! What a run counted.

/// What a run counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Resumptions of emulated threads on the calling OS thread.
    pub steps: u64,
}
