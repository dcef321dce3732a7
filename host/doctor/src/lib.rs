//! What a machine offers Oxtile at run time: driver, GPUs, NCCL, NVSHMEM, and the symmetric memory that follows from them.
//!
//! Libraries are looked for as `oxtile` looks for them, without linking it, so that `cargo xtask doctor` answers also where a kernel does
//! not compile; `oxtile doctor` adds what only the library knows.
//!
//! ```
//! for finding in oxtile_doctor::examine() {
//!     println!("{finding}");
//! }
//! ```
//!
//! | file | what it holds |
//! |---|---|
//! | `driver` | NVIDIA's driver and its GPUs |
//! | `library` | a library as the dynamic loader finds it |
//! | `nccl`, `nvshmem` | which NCCL and which NVSHMEM are there |
//! | `symmetric` | which symmetric memory the machine allows |
#![deny(missing_docs)]

mod driver;
mod library;
mod nccl;
mod nvshmem;
mod symmetric;

use std::fmt;

use serde::Serialize;

pub use driver::{Driver, Gpu};
use nccl::Nccl;
use nvshmem::Nvshmem;

/// How it stands with one thing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// It is there and can be used.
    Ok,
    /// It is not there, or not usable as things are set; nothing is wrong with that.
    Absent,
    /// It is there, or was named, and does not work.
    Broken,
}

/// What was found of one thing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The thing, in a word: `driver`, `gpu`, `nccl`, `nvshmem`, `symmetric`.
    pub subject: &'static str,
    /// How it stands with it.
    pub status: Status,
    /// What there is, or what is missing.
    pub found: String,
    /// What to do where it is missing or broken.
    pub mend: Option<String>,
}

impl Finding {
    /// Something that can be used.
    pub fn ok(subject: &'static str, found: impl Into<String>) -> Self {
        Self { subject, status: Status::Ok, found: found.into(), mend: None }
    }

    /// Something that is not there.
    pub fn absent(subject: &'static str, found: impl Into<String>, mend: impl Into<String>) -> Self {
        Self { subject, status: Status::Absent, found: found.into(), mend: Some(mend.into()) }
    }

    /// Something that does not work.
    pub fn broken(subject: &'static str, found: impl Into<String>, mend: impl Into<String>) -> Self {
        Self { status: Status::Broken, ..Self::absent(subject, found, mend) }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ok => "ok",
            Self::Absent => "absent",
            Self::Broken => "BROKEN",
        })
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<7} {:<9} {}", self.status, self.subject, self.found)?;
        self.mend.as_ref().map_or(Ok(()), |mend| write!(f, "; {mend}"))
    }
}

/// Driver, GPUs, NCCL, NVSHMEM, and the back ends of symmetric memory in the order of preference.
pub fn examine() -> Vec<Finding> {
    findings(&Driver::find(), &Nccl::find(), &Nvshmem::find())
}

/// As [`examine`], with the driver that was found.
pub fn examine_with(driver: &Driver) -> Vec<Finding> {
    findings(driver, &Nccl::find(), &Nvshmem::find())
}

fn findings(driver: &Driver, nccl: &Nccl, nvshmem: &Nvshmem) -> Vec<Finding> {
    let mut all = vec![driver.finding()];
    all.extend(driver.gpu_findings());
    all.extend([nccl.finding.clone(), nvshmem.finding.clone()]);
    all.extend(symmetric::findings(driver, nccl, nvshmem, &|name| std::env::var(name).ok()));
    all
}
