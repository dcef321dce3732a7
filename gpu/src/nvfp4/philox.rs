//! Random bits from a counter: Philox 4x32 with 10 rounds (Salmon, Moraes, Dror and Shaw, SC 2011).

use oxtile_tile::num::multiply_wide;

/// Four random words. As cuRAND's `Philox4_32_10` numbers them: of the seed, subsequence `sequence`, call `offset`.
#[inline(always)]
pub(super) fn philox(seed: u64, offset: u64, sequence: u64) -> [u32; 4] {
    let mut counter = [offset as u32, (offset >> 32) as u32, sequence as u32, (sequence >> 32) as u32];
    let mut key = [seed as u32, (seed >> 32) as u32];
    for _ in 0..10 {
        let [a, b] = [multiply_wide(counter[0], 0xd251_1f53), multiply_wide(counter[2], 0xcd9e_8d57)];
        counter = [b[1] ^ counter[1] ^ key[0], b[0], a[1] ^ counter[3] ^ key[1], a[0]];
        key = [key[0].wrapping_add(0x9e37_79b9), key[1].wrapping_add(0xbb67_ae85)];
    }
    counter
}
