//! Sizes of a product over all ranks, and of what one rank multiplies: two types, so that one is not taken for the other.

use crate::comm::WorldSize;
use crate::runtime::{Error, Result};

/// A product over all ranks: rows of `A` and `D`, columns of `B` and `D`, and the dimension that is summed.
///
/// What one rank multiplies is a [`Local`], which no call takes for a `Global`:
///
/// ```compile_fail,E0308
/// # use oxtile::comm::WorldSize;
/// # use oxtile::overlap::{AllGatherConfig, Global, Split};
/// let global = Global { m: 8192, n: 8192, k: 8192 };
/// let local = global.local(WorldSize::new(4).unwrap(), Split::Columns).unwrap();
/// AllGatherConfig::new(local);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Global {
    /// Rows of `A` and `D`.
    pub m: u64,
    /// Columns of `B` and `D`.
    pub n: u64,
    /// Columns of `A`, rows of `B`.
    pub k: u64,
}

/// What one rank multiplies. Made by [`Global::local`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Local {
    m: u64,
    n: u64,
    k: u64,
}

/// The dimension that the ranks divide among themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// Rows of `D`.
    Rows,
    /// Columns of `D`.
    Columns,
    /// The sum.
    Sum,
}

impl Global {
    /// The part of each of so many ranks.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the ranks do not divide the dimension.
    pub fn local(self, ranks: WorldSize, split: Split) -> Result<Local> {
        let Self { m, n, k } = self;
        let (field, size) = match split {
            Split::Rows => ("m", m),
            Split::Columns => ("n", n),
            Split::Sum => ("k", k),
        };
        let count = u64::from(ranks.get());
        if !size.is_multiple_of(count) {
            let why = format!("{field} is {size}, which {ranks} do not divide: pad it to {}", size.next_multiple_of(count));
            return Err(Error::Invalid { what: "Global::local", why });
        }
        let part = |of: Split, size: u64| if of == split { size / count } else { size };
        Ok(Local { m: part(Split::Rows, m), n: part(Split::Columns, n), k: part(Split::Sum, k) })
    }
}

impl Local {
    /// Rows of the rank's result.
    pub fn m(&self) -> u64 {
        self.m
    }

    /// Columns of the rank's result.
    pub fn n(&self) -> u64 {
        self.n
    }

    /// The length of the rank's sums.
    pub fn k(&self) -> u64 {
        self.k
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_of_one_dimension_and_whole() {
        let (global, three) = (Global { m: 6, n: 12, k: 7 }, WorldSize::new(3).unwrap());
        assert_eq!(global.local(three, Split::Rows).unwrap(), Local { m: 2, n: 12, k: 7 });
        assert_eq!(global.local(three, Split::Columns).unwrap(), Local { m: 6, n: 4, k: 7 });
        let error = global.local(three, Split::Sum).unwrap_err().to_string();
        assert_eq!(error, "Global::local: k is 7, which 3 ranks do not divide: pad it to 9");
    }
}
