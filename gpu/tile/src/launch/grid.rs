//! The grid of a launch, what it may depend on, and why there is none.

use core::fmt;

/// Blocks in x, y and z.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grid {
    /// At most 2^31 - 1.
    pub x: u32,
    /// At most 65535.
    pub y: u32,
    /// At most 65535.
    pub z: u32,
    /// Blocks of a cluster that is made at launch, of which `x` is a multiple: at most 8, of a kernel that is compiled for none; 1 means as it is compiled.
    pub cluster: u32,
}

impl Grid {
    /// A grid of `x` blocks. Zero blocks is legal: the launch does nothing.
    pub const fn x(x: u32) -> Self {
        Self::xyz(x, 1, 1)
    }

    /// A grid of `x` by `y` blocks.
    pub const fn xy(x: u32, y: u32) -> Self {
        Self::xyz(x, y, 1)
    }

    /// A grid of `x` by `y` by `z` blocks.
    pub const fn xyz(x: u32, y: u32, z: u32) -> Self {
        Self { x, y, z, cluster: 1 }
    }

    /// The same in clusters of so many neighbours in x, which run at the same time ([`cluster`](crate::cluster)). Needs sm_90.
    pub const fn in_clusters(self, blocks: u32) -> Self {
        Self { cluster: blocks, ..self }
    }

    /// One block for every `per_block` of `items`.
    ///
    /// # Errors
    /// More than 2^31 - 1 blocks; `argument` is named as the cause.
    pub fn cover(argument: &'static str, items: u64, per_block: u32) -> Result<Self, LaunchError> {
        let blocks = items.div_ceil(u64::from(per_block));
        match i32::try_from(blocks) {
            Ok(x) => Ok(Self::x(x.cast_unsigned())),
            Err(_) => {
                Err(LaunchError { argument, problem: Problem::TooLarge { found: items, limit: i32::MAX as u64 * u64::from(per_block) } })
            }
        }
    }

    /// One block for every row of `width` elements of a tensor of `length`; none for a tensor of none.
    ///
    /// # Errors
    /// A length that is not a multiple of the width, and more than 2^31 - 1 rows; `argument` is named as the cause.
    pub fn rows(argument: &'static str, length: u64, width: u64) -> Result<Self, LaunchError> {
        LaunchError::check_multiple(argument, width, length)?;
        let rows = length.checked_div(width).unwrap_or(0);
        match i32::try_from(rows) {
            Ok(x) => Ok(Self::x(x.cast_unsigned())),
            Err(_) => {
                Err(LaunchError { argument, problem: Problem::TooLarge { found: length, limit: (i32::MAX as u64).saturating_mul(width) } })
            }
        }
    }

    /// `x` blocks across and, down, one for every `per_block` of `items`: in y and, where those are more than 65535, in z too. The one at `y` and
    /// `z` is number `z * count_y + y`; the last ones may be beyond the items, and a kernel leaves them without work.
    ///
    /// # Errors
    /// More than 65535^2 blocks down; `argument` is named as the cause.
    pub fn down(x: u32, argument: &'static str, items: u64, per_block: u64) -> Result<Self, LaunchError> {
        const LIMIT: u64 = u16::MAX as u64;
        LaunchError::check_limit(argument, items, (LIMIT * LIMIT).saturating_mul(per_block))?;
        let blocks = items.div_ceil(per_block);
        let z = blocks.div_ceil(LIMIT).max(1);
        Ok(Self::xyz(x, blocks.div_ceil(z) as u32, z as u32))
    }

    /// The number of blocks.
    pub const fn blocks(self) -> u64 {
        self.x as u64 * self.y as u64 * self.z as u64
    }
}

/// What a grid may depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Multiprocessors of the device.
    pub multiprocessors: u32,
    /// Dynamic shared memory a block may ask for, in bytes.
    pub shared_bytes_per_block: u32,
}

/// An argument that does not fit its kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchError {
    /// The parameter's name.
    pub argument: &'static str,
    /// What is wrong with it.
    pub problem: Problem,
}

/// What is wrong with an argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Problem {
    /// The view has the wrong number of elements.
    Length {
        /// How many the other arguments ask for.
        expected: u64,
        /// How many there are.
        found: u64,
    },
    /// A count is not a multiple.
    Multiple {
        /// Of what it must be a multiple.
        of: u64,
        /// The count.
        found: u64,
    },
    /// A count is over the kernel's limit.
    TooLarge {
        /// The count.
        found: u64,
        /// The limit.
        limit: u64,
    },
    /// A count is under the least that the kernel takes.
    TooSmall {
        /// The count.
        found: u64,
        /// The least.
        least: u64,
    },
    /// The address is not aligned.
    Alignment {
        /// The alignment in bytes.
        bytes: u64,
        /// The address.
        address: u64,
    },
}

impl LaunchError {
    /// Fails unless `found` is `expected`.
    ///
    /// # Errors
    /// [`Problem::Length`] for `argument`.
    pub fn check_length(argument: &'static str, expected: u64, found: u64) -> Result<(), Self> {
        if found == expected { Ok(()) } else { Err(Self { argument, problem: Problem::Length { expected, found } }) }
    }

    /// Fails unless `found` is a multiple of `of`.
    ///
    /// # Errors
    /// [`Problem::Multiple`] for `argument`.
    pub fn check_multiple(argument: &'static str, of: u64, found: u64) -> Result<(), Self> {
        if found.is_multiple_of(of) { Ok(()) } else { Err(Self { argument, problem: Problem::Multiple { of, found } }) }
    }

    /// Fails if `found` is over `limit`.
    ///
    /// # Errors
    /// [`Problem::TooLarge`] for `argument`.
    pub fn check_limit(argument: &'static str, found: u64, limit: u64) -> Result<(), Self> {
        if found <= limit { Ok(()) } else { Err(Self { argument, problem: Problem::TooLarge { found, limit } }) }
    }

    /// Fails if `found` is under `least`.
    ///
    /// # Errors
    /// [`Problem::TooSmall`] for `argument`.
    pub fn check_at_least(argument: &'static str, least: u64, found: u64) -> Result<(), Self> {
        if found >= least { Ok(()) } else { Err(Self { argument, problem: Problem::TooSmall { found, least } }) }
    }

    /// Fails unless `address` is a multiple of `bytes`.
    ///
    /// # Errors
    /// [`Problem::Alignment`] for `argument`.
    pub fn check_alignment(argument: &'static str, bytes: u64, address: u64) -> Result<(), Self> {
        if address.is_multiple_of(bytes) { Ok(()) } else { Err(Self { argument, problem: Problem::Alignment { bytes, address } }) }
    }
}

impl fmt::Display for LaunchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.argument;
        match self.problem {
            Problem::Length { expected, found } => write!(f, "`{name}` has {found} elements; the other arguments ask for {expected}"),
            Problem::Multiple { of, found } => write!(f, "`{name}` counts {found}, which is not a multiple of {of}: pad it"),
            Problem::TooLarge { found, limit } => write!(f, "`{name}` counts {found}; this kernel takes at most {limit}: split the call"),
            Problem::TooSmall { found, least } => write!(f, "`{name}` counts {found}; this kernel needs at least {least}"),
            Problem::Alignment { bytes, address } => {
                write!(f, "`{name}` starts at {address:#x}, which is not {bytes}-byte aligned: start the view at an aligned element")
            }
        }
    }
}

impl core::error::Error for LaunchError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_down_are_folded_into_z() {
        assert_eq!(Grid::down(3, "rows", 0, 8), Ok(Grid::xy(3, 0)));
        assert_eq!(Grid::down(3, "rows", 65_535 * 8, 8), Ok(Grid::xy(3, 65_535)));
        // One block is beyond the last.
        assert_eq!(Grid::down(3, "rows", 65_536 * 8 + 1, 8), Ok(Grid::xyz(3, 32_769, 2)));
        for items in (1..20).map(|shift| (1_u64 << 35 >> shift) + 5) {
            let Grid { y, z, .. } = Grid::down(1, "rows", items, 8).unwrap();
            let (blocks, found) = (items.div_ceil(8), u64::from(y) * u64::from(z));
            assert!((blocks..blocks + u64::from(z)).contains(&found) && y <= 65_535 && z <= 65_535, "{items}: {y} by {z}");
        }
    }

    #[test]
    fn a_block_a_row() {
        assert_eq!(Grid::rows("input", 12, 4), Ok(Grid::x(3)));
        assert_eq!([Grid::rows("input", 0, 4), Grid::rows("input", 0, 0)], [Ok(Grid::x(0)); 2]);
        let refused = |length, width| Grid::rows("input", length, width).unwrap_err().problem;
        assert_eq!(refused(13, 4), Problem::Multiple { of: 4, found: 13 });
        assert_eq!(refused(1, 0), Problem::Multiple { of: 0, found: 1 });
        assert_eq!(refused(1 << 40, 2), Problem::TooLarge { found: 1 << 40, limit: 2 * i32::MAX as u64 });
    }

    #[test]
    fn a_count_that_is_too_small_says_what_is_needed() {
        extern crate std;
        assert_eq!(LaunchError::check_at_least("section", 1, 1), Ok(()));
        let error = LaunchError::check_at_least("section", 1, 0).unwrap_err();
        assert_eq!(std::string::ToString::to_string(&error), "`section` counts 0; this kernel needs at least 1");
    }

    #[test]
    fn a_limit_counts_what_it_names() {
        let error = Grid::down(1, "rows", 65_535 * 65_535 * 8 + 1, 8).unwrap_err();
        assert_eq!(error, LaunchError { argument: "rows", problem: Problem::TooLarge { found: 34_358_689_801, limit: 34_358_689_800 } });
    }
}
