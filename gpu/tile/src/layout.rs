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

    /// Alignment of a tile, in bytes: an atom, or what the copy engine asks for.
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

    /// The descriptor of a matrix operand that starts at `address`.
    ///
    /// Of the two strides the one between atoms along the panel's rows is the same either way; the one between
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
