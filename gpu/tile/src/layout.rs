//! Where the elements of a shared tile lie: swizzles and the descriptors of matrix instructions.
//!
//! A swizzled tile is cut into panels as wide as the swizzle's span. A panel lies row by row; eight of its rows
//! are an atom, in which the 16-byte chunks of a row are permuted by the row's number, so that a column of
//! chunks meets all banks.
//!
//! ```text
//! ROWS x 128 bytes, Swizzle128       chunk c of row r lies at r * 128 + (c ^ r % 8) * 16
//! row 0   0 1 2 3 4 5 6 7
//! row 1   1 0 3 2 5 4 7 6
//! row 2   2 3 0 1 6 7 4 5
//! ```
//!
//! Sources: PTX ISA 5.5.6 (swizzling modes of tensor copies), 9.7.15.5.1 (matrix-descriptor of `wgmma`).

/// How the 16-byte chunks of a shared tile are permuted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SwizzleMode {
    /// Not at all: rows lie one after the other, whatever their width.
    None,
    /// In rows of 32 bytes.
    Bytes32,
    /// In rows of 64 bytes.
    Bytes64,
    /// In rows of 128 bytes.
    Bytes128,
}

/// Rows of an atom.
pub const ATOM_ROWS: u32 = 8;

impl SwizzleMode {
    /// Bytes of a panel's row; 0 without swizzle, where a tile is one panel.
    pub const fn span(self) -> u32 {
        match self {
            Self::None => 0,
            Self::Bytes32 => 32,
            Self::Bytes64 => 64,
            Self::Bytes128 => 128,
        }
    }

    /// Alignment of a tile, in bytes: an atom, or what TMA asks for.
    pub const fn alignment(self) -> u32 {
        match self {
            Self::None => 128,
            _ => ATOM_ROWS * self.span(),
        }
    }

    /// The shared address where the byte of an unswizzled address lies: bits 4 to 6 are xored with bits 7 to 9, as
    /// many as the span has chunks.
    #[inline(always)]
    pub const fn apply(self, address: u32) -> u32 {
        match self {
            Self::None => address,
            _ => address ^ (address >> 3 & (self.span() - 16)),
        }
    }

    /// Bits 62 and 63 of a matrix descriptor.
    const fn code(self) -> u64 {
        match self {
            Self::None => 0,
            Self::Bytes128 => 1,
            Self::Bytes64 => 2,
            Self::Bytes32 => 3,
        }
    }
}

/// A swizzle as a type.
pub trait Swizzle: Copy + Send + Sync + 'static {
    /// Which.
    const MODE: SwizzleMode;
}

macro_rules! swizzles {
    ($($(#[$doc:meta])* $name:ident => $mode:ident;)*) => { $(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy)]
        pub struct $name;

        impl Swizzle for $name {
            const MODE: SwizzleMode = SwizzleMode::$mode;
        }
    )* };
}

swizzles! {
    /// Rows one after the other.
    Linear => None;
    /// [`SwizzleMode::Bytes32`].
    Swizzle32 => Bytes32;
    /// [`SwizzleMode::Bytes64`].
    Swizzle64 => Bytes64;
    /// [`SwizzleMode::Bytes128`].
    Swizzle128 => Bytes128;
}

/// A field of a descriptor: bytes in units of 16.
const fn field(bytes: u32) -> u64 {
    (bytes as u64 & 0x3_ffff) >> 4
}

/// The layout of a tile of `rows` rows of `row_bytes` bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TileLayout {
    /// Rows.
    pub rows: u32,
    /// Bytes of a row of the tile.
    pub row_bytes: u32,
    /// The swizzle of its panels.
    pub swizzle: SwizzleMode,
}

impl TileLayout {
    /// Bytes of a row of a panel.
    pub const fn panel_row(self) -> u32 {
        match self.swizzle {
            SwizzleMode::None => self.row_bytes,
            mode => mode.span(),
        }
    }

    /// Bytes of a panel.
    pub const fn panel(self) -> u32 {
        self.rows * self.panel_row()
    }

    /// How many panels.
    pub const fn panels(self) -> u32 {
        self.row_bytes / self.panel_row()
    }

    /// Where a byte of a row lies, for a tile at `address`, which is aligned.
    #[inline(always)]
    pub const fn address(self, address: u32, row: u32, byte: u32) -> u32 {
        let (panel, rest) = (byte / self.panel_row(), byte % self.panel_row());
        self.swizzle.apply(address + panel * self.panel() + row * self.panel_row() + rest)
    }

    /// The row, and the byte of it, that lie at this offset in the tile: what [`address`](Self::address) finds.
    pub const fn place(self, offset: u32) -> (u32, u32) {
        // A swizzle is its own inverse: it leaves the bits that it reads.
        let straight = self.swizzle.apply(offset);
        let (panel, rest) = (straight / self.panel(), straight % self.panel());
        (rest / self.panel_row(), panel * self.panel_row() + rest % self.panel_row())
    }

    /// The descriptor of a matrix operand that starts at `address`.
    ///
    /// There are two strides. The one between atoms along the panel's rows is the same either way; the one between
    /// panels counts only where the panels follow each other in the direction that is not reduced (`mn_major`).
    #[inline(always)]
    pub const fn descriptor(self, address: u32, mn_major: bool) -> u64 {
        let panels = if mn_major { self.panel() } else { 16 };
        field(address) | field(panels) << 16 | field(ATOM_ROWS * self.panel_row()) << 32 | self.swizzle.code() << 62
    }

    /// What is added to a descriptor for the operand `step` instructions further along the reduced direction, of
    /// which each takes 32 bytes of a K-major operand, or `depth` rows of another.
    #[inline(always)]
    pub const fn step(self, step: u32, depth: u32, mn_major: bool) -> u64 {
        let bytes = if mn_major {
            step * depth * self.panel_row()
        } else {
            (step * 32 / self.panel_row()) * self.panel() + step * 32 % self.panel_row()
        };
        (bytes >> 4) as u64
    }
}

impl TileLayout {
    /// How many of these shared-memory accesses of 4 bytes by one warp fall on the bank that most do: 1 is free of
    /// conflicts. Accesses to one word are one.
    pub fn bank_conflicts(addresses: &[u32]) -> u32 {
        let bank = |address: u32| address / 4 % 32;
        let is_first = |i: usize| addresses[..i].iter().all(|&other| other / 4 != addresses[i] / 4);
        let on = |b: u32| (0..addresses.len()).filter(|&i| is_first(i) && bank(addresses[i]) == b).count() as u32;
        (0..32).map(on).max().unwrap_or(0)
    }
}

/// Prints the tile by 16-byte chunks: each line 128 bytes of shared memory, each entry `row.chunk` of the tile.
impl core::fmt::Display for TileLayout {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let chunks = self.row_bytes / 16;
        for line in 0..self.rows * self.row_bytes / 128 {
            for slot in 0..8 {
                let at = line * 128 + slot * 16;
                let found = (0..self.rows * chunks).find(|i| self.address(0, i / chunks, i % chunks * 16) == at);
                match found {
                    Some(i) => write!(f, "{:>3}.{}", i / chunks, i % chunks)?,
                    None => write!(f, "    -")?,
                }
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use std::string::ToString;
    use std::vec::Vec;

    use super::*;

    const SWIZZLES: [SwizzleMode; 3] = [SwizzleMode::Bytes32, SwizzleMode::Bytes64, SwizzleMode::Bytes128];

    fn layouts() -> impl Iterator<Item = TileLayout> {
        let sizes = [8, 16, 64, 72].into_iter().flat_map(|rows| [128, 256, 384].map(|row_bytes| (rows, row_bytes)));
        sizes.flat_map(|(rows, row_bytes)| SWIZZLES.map(|swizzle| TileLayout { rows, row_bytes, swizzle }))
    }

    /// Where hardware finds a byte of an operand, from the fields of a descriptor (PTX ISA 9.7.15.5.1).
    fn byte_of_operand(descriptor: u64, mode: SwizzleMode, mn_major: bool, mn_byte: u32, k_byte: u32, k_row: u32) -> u32 {
        let field = |shift: u32| ((descriptor >> shift & 0x3fff) << 4) as u32;
        let (start, leading, stride, span) = (field(0), field(16), field(32), mode.span());
        let (row, byte, panel) = if mn_major { (k_row, mn_byte % span, mn_byte / span) } else { (mn_byte, k_byte, 0) };
        mode.apply(start + row % 8 * span + row / 8 * stride + panel * leading + byte)
    }

    #[test]
    fn a_tile_is_a_permutation_of_its_bytes() {
        for layout in layouts() {
            let mut seen = std::vec![false; (layout.rows * layout.row_bytes) as usize];
            for (row, byte) in (0..layout.rows).flat_map(|row| (0..layout.row_bytes).map(move |byte| (row, byte))) {
                let at = layout.address(4096, row, byte) - 4096;
                assert!(!core::mem::replace(&mut seen[at as usize], true), "{layout:?}: two bytes at {at}");
                assert_eq!(layout.place(at), (row, byte), "{layout:?}: byte {at}");
            }
        }
    }

    /// What TMA writes by the tile's layout, an instruction reads by the descriptor: in either direction, at every
    /// step, for elements of one byte and of two.
    #[test]
    fn descriptors_find_what_the_layout_placed() {
        for layout in layouts() {
            let start = 7 * 1024;
            for step in 0..layout.row_bytes / 32 {
                let part = layout.descriptor(start, false) + layout.step(step, 16, false);
                for (row, byte) in (0..layout.rows).flat_map(|row| (0..32).map(move |byte| (row, byte))) {
                    let read = byte_of_operand(part, layout.swizzle, false, row, byte, 0);
                    assert_eq!(
                        read,
                        layout.address(start, row, step * 32 + byte),
                        "{layout:?} along K, step {step}, row {row}, byte {byte}"
                    );
                }
            }
            for step in 0..layout.rows / 16 {
                let part = layout.descriptor(start, true) + layout.step(step, 16, true);
                for (row, byte) in (0..16).flat_map(|row| (0..layout.row_bytes).map(move |byte| (row, byte))) {
                    let read = byte_of_operand(part, layout.swizzle, true, byte, 0, row);
                    assert_eq!(
                        read,
                        layout.address(start, step * 16 + row, byte),
                        "{layout:?} along MN, step {step}, row {row}, byte {byte}"
                    );
                }
            }
        }
    }

    #[test]
    fn columns_of_chunks_meet_all_banks() {
        let column = |swizzle: SwizzleMode| {
            let layout = TileLayout { rows: 8, row_bytes: 128, swizzle };
            // The first chunks of eight rows, as `ldmatrix` reads them: a lane a word.
            let addresses: Vec<u32> = (0..32).map(|lane| layout.address(0, lane / 4, lane % 4 * 4)).collect();
            TileLayout::bank_conflicts(&addresses)
        };
        assert_eq!([SwizzleMode::None, SwizzleMode::Bytes32, SwizzleMode::Bytes64, SwizzleMode::Bytes128].map(column), [8, 1, 1, 1]);
        assert_eq!(TileLayout::bank_conflicts(&[0, 128, 256, 4, 4]), 3);
    }

    /// Numbers below `end`, the same every run (Vigna, "splitmix64").
    fn below(state: &mut u64, end: u32) -> u32 {
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (*state ^ *state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ mixed >> 31) % u64::from(end)) as u32
    }

    /// What other parts take for granted, for random layouts and places.
    #[test]
    fn properties_of_layouts() {
        let mut state = 7;
        for _ in 0..20_000 {
            let swizzle = SWIZZLES[below(&mut state, 3) as usize];
            let (rows, panels) = (8 * (1 + below(&mut state, 32)), 1 + below(&mut state, 6));
            let layout = TileLayout { rows, row_bytes: panels * swizzle.span(), swizzle };
            let start = below(&mut state, 64) * swizzle.alignment();
            let (row, chunk) = (below(&mut state, rows), below(&mut state, layout.row_bytes / 16));
            let at = layout.address(start, row, 16 * chunk);
            let place = std::format!("{layout:?} at {start}, row {row}, chunk {chunk}");
            assert!(
                at >= start && at + 16 <= start + rows * layout.row_bytes && at.is_multiple_of(16),
                "{place}: chunks stay whole and inside"
            );

            // A box of TMA is a panel: rows as wide as the span, one after the other, swizzled by address.
            let (panel, rest) = (16 * chunk / swizzle.span(), 16 * chunk % swizzle.span());
            let engine = match swizzle {
                SwizzleMode::None => oxtile_emulator::tensor_map::Swizzle::None,
                SwizzleMode::Bytes32 => oxtile_emulator::tensor_map::Swizzle::Bytes32,
                SwizzleMode::Bytes64 => oxtile_emulator::tensor_map::Swizzle::Bytes64,
                SwizzleMode::Bytes128 => oxtile_emulator::tensor_map::Swizzle::Bytes128,
            };
            assert_eq!(engine.apply(start + panel * layout.panel() + row * swizzle.span() + rest), at, "{place}: TMA");

            // Chunks of a panel's row are told apart by an xor, rows of atoms by an addition.
            let first = layout.address(start, row, panel * swizzle.span());
            assert_eq!(first ^ rest, at, "{place}: an xor");
            if row + ATOM_ROWS < rows {
                assert_eq!(layout.address(start, row + ATOM_ROWS, 16 * chunk), at + ATOM_ROWS * swizzle.span(), "{place}: the next atom");
            }

            // Eight rows of one chunk, as `ldmatrix` and `stmatrix` move them, meet each bank once.
            let top = row / ATOM_ROWS * ATOM_ROWS;
            let column: Vec<u32> = (0..32).map(|lane| layout.address(start, top + lane / 4, 16 * chunk + 4 * (lane % 4))).collect();
            assert_eq!(TileLayout::bank_conflicts(&column), 1, "{place}: banks");
        }
    }

    #[test]
    fn a_layout_prints_itself() {
        let text = TileLayout { rows: 8, row_bytes: 128, swizzle: SwizzleMode::Bytes128 }.to_string();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "  0.0  0.1  0.2  0.3  0.4  0.5  0.6  0.7");
        assert_eq!(lines[3], "  3.3  3.2  3.1  3.0  3.7  3.6  3.5  3.4");
        let narrow = TileLayout { rows: 8, row_bytes: 32, swizzle: SwizzleMode::Bytes32 }.to_string();
        assert_eq!(narrow.lines().nth(1), Some("  4.1  4.0  5.1  5.0  6.1  6.0  7.1  7.0"));
    }
}
