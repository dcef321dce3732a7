//! Groups of matrices that one launch works on: which CUDA block works on which.
//!
//! A group's table in device memory has, for each member, a record of [`RECORD`] words, and after all records, for each member, how many
//! CUDA blocks those before it take. Members without elements are in no table.
//!
//! | word of a record | |
//! |---|---|
//! | 0 | the member's number in the caller's order |
//! | 1, 2 | rows and columns |
//! | 3, 4, 5 | where it starts in the buffers that the members share; the kernel tells which buffers |
//!
//! A kernel of a group finds its member and then runs the code of the kernel of a single matrix.
//!
//! A table tells a kernel where to read and write, and no launch can check it, since it is on the device. So a table has its own type,
//! [`MemberTable`], which only `unsafe` code makes; the library's groups do, of shapes that they have checked.
//!
//! ```compile_fail,E0308
//! use oxtile_kernels::interleave::InterleaveRowsGroupedArgs;
//! use oxtile_tile::launch::{DeviceView, DeviceViewMut};
//! use oxtile_tile::num::e4m3;
//!
//! fn anywhere<'a>(compact: DeviceView<'a, e4m3>, interleaved: DeviceViewMut<'a, e4m3>, table: DeviceView<'a, u64>) {
//!     let _ = InterleaveRowsGroupedArgs { compact, interleaved, table };
//! }
//! ```
//!
//! ```
//! use oxtile_kernels::group::MemberTable;
//! use oxtile_kernels::interleave::InterleaveRowsGroupedArgs;
//! use oxtile_tile::launch::{DeviceView, DeviceViewMut};
//! use oxtile_tile::num::e4m3;
//!
//! fn of_members<'a>(compact: DeviceView<'a, e4m3>, interleaved: DeviceViewMut<'a, e4m3>, table: MemberTable<'a>) {
//!     let _ = InterleaveRowsGroupedArgs { compact, interleaved, table };
//! }
//! ```

use oxtile_tile::launch::{ArgumentWords, BufferAccess, Parameter, ParameterName, WordList, WordReader};
use oxtile_tile::prelude::*;

/// Words of a record.
pub const RECORD: usize = 6;
/// Words of a table for each member.
const WORDS: u64 = RECORD as u64 + 1;
/// Members that a warp asks for their first block at once.
const PROBES: u64 = 4 * warp::LANES as u64;
/// CUDA blocks of a launch.
const BLOCK_LIMIT: u64 = i32::MAX as u64;

/// A group's table in device memory, lent to a kernel: its [`Members`].
#[derive(Clone, Copy)]
pub struct MemberTable<'a> {
    words: DeviceView<'a, u64>,
    blocks: u64,
}

impl<'a> MemberTable<'a> {
    /// Lends a table whose members take so many CUDA blocks together.
    ///
    /// # Safety
    /// The caller vouches for each launch that takes the table: `words` is a table as the [module](self) says, made by the
    /// [`Grouped::blocks`] of that kernel, whose sum is `blocks`; each member's number has an input, and an amax where the kernel takes
    /// some; and the launch's buffers hold each member from where it starts, whole.
    pub const unsafe fn from_raw(words: DeviceView<'a, u64>, blocks: u64) -> Self {
        Self { words, blocks }
    }

    /// The grid of a kernel that is given the table.
    pub(crate) fn grid(&self) -> Result<Grid, LaunchError> {
        LaunchError::check_multiple("table", WORDS, self.words.len())?;
        LaunchError::check_alignment("table", 16, self.words.address())?;
        LaunchError::check_limit("blocks of a group", self.blocks, BLOCK_LIMIT)?;
        Ok(Grid::x(if self.words.is_empty() { 0 } else { self.blocks as u32 }))
    }
}

/// The table of a group, as its kernel takes it.
#[derive(Clone, Copy)]
pub struct Members(Global<u64>);

impl Members {
    /// Whether no member has elements.
    #[inline(always)]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

// SAFETY: an address and a length; `access` names that range.
unsafe impl Parameter for Members {
    type Argument<'a> = MemberTable<'a>;
    type Words<Rest: WordList> = <Global<u64> as Parameter>::Words<Rest>;
    const WORDS: usize = <Global<u64> as Parameter>::WORDS;

    fn pack(argument: &MemberTable<'_>, words: &mut ArgumentWords) {
        Global::<u64>::pack(&argument.words, words);
    }

    fn access<'s>(argument: &'s MemberTable<'_>, name: ParameterName, visit: &mut dyn FnMut(BufferAccess<'s>)) {
        Global::<u64>::access(&argument.words, name, visit);
    }

    fn unpack(words: &mut WordReader<'_>) -> Self {
        Self(Global::unpack(words))
    }

    #[inline(always)]
    unsafe fn take<Rest: WordList>(words: Self::Words<Rest>) -> (Self, Rest) {
        // SAFETY: passed on to the caller.
        let (entries, rest) = unsafe { Global::take::<Rest>(words) };
        (Self(entries), rest)
    }
}

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
    /// The member of this CUDA block. All lanes of each warp call it.
    #[inline(always)]
    pub fn of_block(Members(table): &Members) -> Self {
        let block = u64::from(block::index()[0]);
        let members = table.len() / WORDS;
        let first_block = |member| table.load(members * RECORD as u64 + member);
        // The last of `length` members from `below` on whose first block is not beyond this one: each round asks `PROBES` of them at once.
        let (mut below, mut length) = (0, members);
        while length > 1 {
            let step = length.div_ceil(PROBES);
            let counts = [0, 1, 2, 3].map(|part| {
                let probe = u64::from(thread::lane() + part * warp::LANES) * step;
                let is_before = probe < length && first_block(below + probe) <= block;
                warp::ballot(is_before).count_ones()
            });
            let found = u64::from(counts.iter().sum::<u32>() - 1) * step;
            (below, length) = (below + found, step.min(length - found));
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
        Self::place_of(self.block, across)
    }

    /// The place of any of the member's blocks.
    #[inline(always)]
    pub fn place_of(block: u64, across: u64) -> [u64; 2] {
        let (block, across) = (block as u32, across as u32);
        let down = block.checked_div(across).unwrap_or(0);
        [u64::from(block - down * across), u64::from(down)]
    }
}

/// The number of CUDA blocks that a kernel of a group takes for a member, from which the host makes the table.
pub trait Grouped {
    /// For a matrix of so many rows and columns; none for one without elements.
    fn blocks(rows: u64, columns: u64) -> u64;
}

/// Calls `part` for each of the `COUNT` parts of a CUDA block of a group, which do the work of single kernels' blocks one after the other: looking
/// for the member costs as much as a short block takes.
#[inline(always)]
pub(crate) fn for_each_part<const COUNT: u32>(block: u64, mut part: impl FnMut(u64)) {
    let mut i = 0;
    // An opaque end keeps the compiler from unrolling.
    while i < block::threads().min(COUNT) {
        part(block * u64::from(COUNT) + u64::from(i));
        i += 1;
    }
}
