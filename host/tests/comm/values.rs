//! Values of operands.

use half::bf16 as Half;

/// Values that tell places apart, and whose products are not exact in bf16.
pub fn values(seed: u64, len: u64) -> Vec<Half> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        Half::from_f32((state >> 40) as f32 / (1 << 22) as f32 - 2.0)
    };
    (0..len).map(next).collect()
}
