//! Which kernel is taken, and why: what an operation says before it launches anything.

/// Which kernel a configuration takes, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The kernel's entry; empty where nothing is launched.
    pub kernel: &'static str,
    /// Why this one.
    pub why: String,
}
