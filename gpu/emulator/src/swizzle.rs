//! How tiles of 16-byte chunks are permuted in shared memory.

/// How 16-byte chunks are permuted in shared memory (`CUtensorMapSwizzle`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Swizzle {
    /// Rows one after another.
    None,
    /// 32-byte rows: address bit 4 is xored with bit 7.
    Bytes32,
    /// 64-byte rows: address bits 4..6 are xored with bits 7..9.
    Bytes64,
    /// 128-byte rows: address bits 4..7 are xored with bits 7..10.
    Bytes128,
}

impl Swizzle {
    /// Bytes of a swizzled row, at most which the inner box dimension may span.
    pub(crate) fn span(self) -> Option<u32> {
        match self {
            Self::None => None,
            Self::Bytes32 => Some(32),
            Self::Bytes64 => Some(64),
            Self::Bytes128 => Some(128),
        }
    }

    /// Where a shared address goes: its 16-byte chunk is permuted by the row (PTX ISA, "Swizzling modes").
    pub fn apply(self, address: u32) -> u32 {
        match self {
            Self::None => address,
            Self::Bytes32 => address ^ (address >> 3 & 0x10),
            Self::Bytes64 => address ^ (address >> 3 & 0x30),
            Self::Bytes128 => address ^ (address >> 3 & 0x70),
        }
    }
}
