//! `cu_seqlens` of packed sequences: the check of the library against the rule in plain words.
#![no_main]

use libfuzzer_sys::fuzz_target;
use oxtile::thd::parsed;

// The first byte is the partition and the ranks, the second the number of elements that are padded ones; then numbers of two bytes.
fuzz_target!(|input: &[u8]| {
    let [first, count, rest @ ..] = input else { return };
    let mut numbers: Vec<u32> = rest.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]).into()).collect();
    // Some are near the largest that there are.
    numbers.iter_mut().filter(|number| **number >= 0xff00).for_each(|number| *number = u32::MAX - (0xffff - *number) * 0x40_0000);
    let padded = numbers.split_off(usize::from(*count).min(numbers.len()));
    parsed::sequences(&numbers, &padded, 1 + u32::from(first >> 1) % 5, first & 1 == 0);
});
