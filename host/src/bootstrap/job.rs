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

/// Shows its beginning only.
impl fmt::Debug for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "JobId({}...)", beginning(&self.0))
    }
}

/// The part of a job's name for other programs and logs: six characters, and no more than half, since anyone who knows all of it can join.
pub fn beginning(name: &str) -> String {
    name.chars().take((name.chars().count() / 2).min(6)).collect()
}
