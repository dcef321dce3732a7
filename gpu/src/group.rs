//! Groups of matrices that one launch works on: which CUDA block works on which.
//!
//! A group's table in device memory has, for each member, a record of [`RECORD`] words, and after all records, for each member, how many
//! CUDA blocks those before it take. Members without elements are in no table.
//!
//! | word of a record | |
//! |---|---|
//! | 0 | the member's number in the caller's order |
//! | 1, 2 | rows and columns |
//! | 3, 4, 5 | where it starts in the buffers that the members share; what, the kernel says |
//!
//! A kernel of a group finds its member and then does what the kernel of a single matrix does, by the same code.

use oxtile_tile::prelude::*;

/// Words of a record.
pub const RECORD: usize = 6;
/// Words of a table for each member.
const WORDS: u64 = RECORD as u64 + 1;
/// CUDA blocks of a launch.
const BLOCK_LIMIT: u64 = i32::MAX as u64;

/// The member that a CUDA block works on.
#[derive(Clone, Copy)]
pub(crate) struct Member {
    /// Its number in the caller's order.
    pub index: u64,
    pub rows: u64,
    pub columns: u64,
    /// Where it starts in the buffers that the members share.
    pub starts: [u64; 3],
    /// The CUDA block among the member's.
    pub block: u64,
}

impl Member {
    /// The member of this CUDA block, of a table that counts `blocks`.
    #[inline(always)]
    pub fn of_block(table: &Global<u64>, blocks: u64) -> Self {
        let block = u64::from(block::index()[0]);
        debug_assert!(block < blocks, "the grid is that of the table");
        let members = table.len() / WORDS;
        let first_block = |member| table.load(members * RECORD as u64 + member);
        // The last member whose first block is not beyond this one.
        let (mut below, mut above) = (0, members);
        while below + 1 < above {
            let middle = (below + above) / 2;
            if first_block(middle) <= block { below = middle } else { above = middle }
        }
        let [index_rows, columns_start, starts] = [0, 2, 4].map(|word| table.load_vector(below * RECORD as u64 + word));
        Self {
            index: index_rows.lane(0),
            rows: index_rows.lane(1),
            columns: columns_start.lane(0),
            starts: [columns_start.lane(1), starts.lane(0), starts.lane(1)],
            block: block - first_block(below),
        }
    }

    /// Elements of the member.
    #[inline(always)]
    pub fn elements(&self) -> u64 {
        self.rows * self.columns
    }

    /// This CUDA block's place, across and down, where `across` of the member's lie side by side.
    #[inline(always)]
    pub fn place(&self, across: u64) -> [u64; 2] {
        let (block, across) = (self.block as u32, across as u32);
        let down = block.checked_div(across).unwrap_or(0);
        [u64::from(block - down * across), u64::from(down)]
    }
}

/// How many CUDA blocks a kernel of a group takes for a member: what the host makes the table by.
pub trait Grouped {
    /// For a matrix of so many rows and columns; none for one without elements.
    fn blocks(rows: u64, columns: u64) -> u64;
}

/// The grid for a table that counts so many CUDA blocks.
pub(crate) fn grid(table: &DeviceView<'_, u64>, blocks: u64) -> Result<Grid, LaunchError> {
    LaunchError::check_multiple("table", WORDS, table.len())?;
    LaunchError::check_alignment("table", 16, table.address())?;
    LaunchError::check_limit("blocks", blocks, BLOCK_LIMIT)?;
    Ok(Grid::x(if table.is_empty() { 0 } else { blocks as u32 }))
}
