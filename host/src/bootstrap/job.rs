//! Which job a process belongs to.

use std::{fmt, fs::File, io, io::Read};

/// A name that only the processes of one job share: a rank of another job that comes to the same port is refused.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct JobId(String);

impl JobId {
    /// The longest in bytes.
    pub const MAX_BYTES: usize = 256;

    /// 128 random bits in hexadecimal digits.
    ///
    /// # Errors
    /// If the system has no random numbers.
    pub fn random() -> io::Result<Self> {
        let mut bits = [0; 16];
        File::open("/dev/urandom")?.read_exact(&mut bits)?;
        Ok(Self(format!("{:032x}", u128::from_ne_bytes(bits))))
    }

    /// The name that a launcher gave the job; `None` if it is longer than [`MAX_BYTES`](Self::MAX_BYTES).
    pub fn new(name: impl Into<String>) -> Option<Self> {
        Some(name.into()).filter(|name| name.len() <= Self::MAX_BYTES).map(Self)
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Its beginning only.
impl fmt::Debug for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "JobId({}...)", beginning(&self.0))
    }
}

/// What others, and logs, get of a job's name, since anyone who knows it whole can join: six characters, and no more than half.
pub fn beginning(name: &str) -> String {
    name.chars().take((name.chars().count() / 2).min(6)).collect()
}
