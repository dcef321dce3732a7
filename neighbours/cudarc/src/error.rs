//! What can go wrong.

use std::fmt;

use cudarc::driver::DriverError;

/// An error of Oxtile, of cudarc, or of the two together.
pub enum Error {
    /// Oxtile's, in its own words.
    Oxtile(oxtile::Error),
    /// The driver's, as cudarc gives it.
    Cudarc(DriverError),
    /// A context, a stream or a slice that cannot be lent: what, why, and how to mend it.
    Lend(String),
}

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl From<oxtile::Error> for Error {
    fn from(error: oxtile::Error) -> Self {
        Self::Oxtile(error)
    }
}

impl From<DriverError> for Error {
    fn from(error: DriverError) -> Self {
        Self::Cudarc(error)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Oxtile(error) => error.fmt(f),
            Self::Cudarc(error) => write!(f, "cudarc: {error}"),
            Self::Lend(why) => f.write_str(why),
        }
    }
}

/// The text of `Display`.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Error {}
