//! Bytes among 8-byte words that several threads may use at once.

use std::sync::atomic::{AtomicU64, Ordering};

/// Loads `N` bytes at a byte offset that is a multiple of `N`.
#[inline(always)]
pub(crate) fn load<const N: usize>(words: &[AtomicU64], offset: usize) -> [u8; N] {
    let mut bytes = [0; N];
    if N >= 8 {
        for (i, chunk) in bytes.chunks_exact_mut(8).enumerate() {
            chunk.copy_from_slice(&words[offset / 8 + i].load(Ordering::Relaxed).to_le_bytes());
        }
    } else {
        let word = words[offset / 8].load(Ordering::Relaxed) >> (offset % 8 * 8);
        bytes.copy_from_slice(&word.to_le_bytes()[..N]);
    }
    bytes
}

/// Stores `N` bytes at a byte offset that is a multiple of `N`.
#[inline(always)]
pub(crate) fn store<const N: usize>(words: &[AtomicU64], offset: usize, bytes: [u8; N]) {
    if N >= 8 {
        for (i, chunk) in bytes.chunks_exact(8).enumerate() {
            let word = u64::from_le_bytes(chunk.try_into().expect("chunks of 8"));
            words[offset / 8 + i].store(word, Ordering::Relaxed);
        }
    } else {
        let mut word = [0; 8];
        word[..N].copy_from_slice(&bytes);
        let shift = offset % 8 * 8;
        let mask = ((1u64 << (N * 8)) - 1) << shift;
        modify(&words[offset / 8], mask, |_| u64::from_le_bytes(word) << shift);
    }
}

/// Replaces the bits of `mask` by what `new` makes of the old word; returns the old word.
pub(crate) fn modify(word: &AtomicU64, mask: u64, new: impl Fn(u64) -> u64) -> u64 {
    word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |old| Some(old & !mask | new(old) & mask))
        .expect("the closure always returns a value")
}

/// Copies bytes out of words, any alignment.
pub(crate) fn read_bytes(words: &[AtomicU64], offset: usize, out: &mut [u8]) {
    let head = (offset.next_multiple_of(8) - offset).min(out.len());
    let (first, rest) = out.split_at_mut(head);
    for (i, byte) in first.iter_mut().enumerate() {
        [*byte] = load::<1>(words, offset + i);
    }
    let mut at = offset + head;
    for chunk in rest.chunks_mut(8) {
        let word = words[at / 8].load(Ordering::Relaxed).to_le_bytes();
        chunk.copy_from_slice(&word[..chunk.len()]);
        at += 8;
    }
}

/// Copies bytes into words, any alignment.
pub(crate) fn write_bytes(words: &[AtomicU64], offset: usize, bytes: &[u8]) {
    let head = (offset.next_multiple_of(8) - offset).min(bytes.len());
    let (first, rest) = bytes.split_at(head);
    for (i, &byte) in first.iter().enumerate() {
        store::<1>(words, offset + i, [byte]);
    }
    let mut at = offset + head;
    for chunk in rest.chunks(8) {
        match chunk.try_into() {
            Ok(word) => words[at / 8].store(u64::from_le_bytes(word), Ordering::Relaxed),
            Err(_) => {
                for (i, &byte) in chunk.iter().enumerate() {
                    store::<1>(words, at + i, [byte]);
                }
            }
        }
        at += 8;
    }
}
