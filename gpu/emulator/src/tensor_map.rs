//! Tensor maps: the 128-byte descriptors of tiled bulk copies (TMA).

/// Bytes of an encoded tensor map, as `CUtensorMap` has them. It must lie at a multiple of 64.
pub const TENSOR_MAP_BYTES: usize = 128;

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

/// A tensor in global memory and the box that one copy moves, innermost dimension first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorMap {
    /// Device address of element zero, a multiple of 16.
    pub address: u64,
    /// Bytes an element: 1, 2, 4 or 8.
    pub element_bytes: u32,
    /// Elements in each of one to five dimensions.
    pub dimensions: Vec<u64>,
    /// Bytes between neighbours in dimensions 1.., each a multiple of 16 (one fewer than `dimensions`).
    pub strides: Vec<u64>,
    /// Elements of the box in each dimension, at most 256.
    pub box_dimensions: Vec<u32>,
    /// Layout of the box in shared memory.
    pub swizzle: Swizzle,
}
