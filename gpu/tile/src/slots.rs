//! Slots: vectors that devices store for one another, and that say by themselves that they have come.
//!
//! An element of a slot that has not come has all of its bits set: a NaN that no sender sends. So a receiver polls the data, not a flag after the data: one crossing of the link, and no fence
//! between stores. 16 bytes are stored by one instruction, and may arrive in parts of 4; the receiver waits for every element, and empties the slot again.
//!
//! The memory is the receiver's, so that no thread polls over a link. A slot is stored to again only after the sender has heard that it was emptied, for example because a part in another slot has come which the receiver sent in a later launch. Stores and loads are relaxed and at system scope: what
//! arrives in slots orders nothing else (PTX ISA, "Memory Consistency Model"). That the emptying comes before the next store is not in that model, but in the device: the stores of a launch have reached the memory of their device when the next one begins, and there the other device's store meets them.
//!
//! Known from small all-reduces of TensorRT-LLM and FlashInfer ("Lamport" buffers), where negative zero stands for what has not come, and is lost.

use crate::arch::{GlobalMemory, Target};
use crate::arrivals::Arrivals;
use crate::flag::Outcome;
use crate::global::GlobalMut;
use crate::num::{Float, Pod};
use crate::vector::Vector;

/// The word of a slot that holds two elements which have not come.
const EMPTY: u32 = u32::MAX;
/// Elements of a slot.
const ELEMENTS_OF_SLOT: u64 = 8;
/// The bits of the first element of a word, and of the second.
const ELEMENTS: [u32; 2] = [0xffff, 0xffff_0000];
/// Their signs.
const SIGNS: [u32; 2] = [1 << 15, 1 << 31];

/// Floating-point numbers of 16 bits, in slots of 8.
#[derive(Clone, Copy)]
pub struct Slots<T: Pod + Float>(GlobalMut<T>);

impl<T: Pod + Float> Slots<T> {
    /// The slots of so many elements at `address`, which this device reaches.
    ///
    /// # Safety
    /// As [`GlobalMut::from_raw_parts`]; all that use the memory at the same time use it as slots.
    #[inline(always)]
    pub const unsafe fn from_raw_parts(address: u64, length: u64) -> Self {
        const { assert!(size_of::<T>() == 2, "slots hold elements of 16 bits") };
        // SAFETY: passed on to the caller.
        Self(unsafe { GlobalMut::from_raw_parts(address, length) })
    }

    /// Stores a vector in the slot from element `index` on, a multiple of 8. A NaN of all bits is sent as one whose sign is not set. PTX `st.relaxed.sys.v4`.
    #[inline(always)]
    #[track_caller]
    pub fn send(&self, index: u64, vector: Vector<T>) {
        self.store(index, vector.words().map(sent));
    }

    /// Waits until every element of these slots has come, each from an element on, and empties them; none is a vector of zeros. PTX `ld.relaxed.sys.v4`.
    ///
    /// After a wait that is not answered, this one or an earlier one of the thread, it returns what is there: NaNs where nothing has come. The verdict names `flag` of the first slot that lacks an element, one of those that `arrivals` waits for.
    #[inline(always)]
    #[track_caller]
    pub fn receive<const N: usize>(&self, slots: [Option<u64>; N], arrivals: &mut Arrivals, flag: impl Fn(u32) -> u32) -> [Vector<T>; N] {
        let (outcome, found) = arrivals.until(|| {
            let found: [[u32; 4]; N] = core::array::from_fn(|i| slots[i].map_or([0; 4], |index| self.load(index)));
            let lacking = core::array::from_fn::<bool, N, _>(|i| !has_come(found[i])).into_iter().fold(false, |any, lacks| any | lacks);
            (!lacking, found)
        });
        if outcome == Outcome::Reached {
            slots.into_iter().flatten().for_each(|index| self.store(index, [EMPTY; 4]));
        } else {
            arrivals.give_up(outcome, || {
                let lacking: [u32; N] = core::array::from_fn(|i| if has_come(found[i]) { N as u32 } else { i as u32 });
                flag(lacking.into_iter().fold(N as u32 - 1, u32::min))
            });
        }
        found.map(Vector::from_words)
    }

    #[inline(always)]
    #[track_caller]
    fn load(&self, index: u64) -> [u32; 4] {
        // SAFETY: `range` checked the index where this build checks.
        unsafe { Target::load_relaxed_system_vector(self.0.range(index, ELEMENTS_OF_SLOT)) }
    }

    #[inline(always)]
    #[track_caller]
    fn store(&self, index: u64, words: [u32; 4]) {
        // SAFETY: as `load`.
        unsafe { Target::store_relaxed_system_vector(self.0.range(index, ELEMENTS_OF_SLOT), words) };
    }
}

/// The word as it is sent: no element has all bits set.
#[inline(always)]
fn sent(word: u32) -> u32 {
    let [a, b] = [0, 1].map(|i| if word & ELEMENTS[i] == ELEMENTS[i] { SIGNS[i] } else { 0 });
    word ^ a ^ b
}

/// Whether all elements have come.
#[inline(always)]
fn has_come(words: [u32; 4]) -> bool {
    words.into_iter().fold(true, |all, word| all & (word & ELEMENTS[0] != ELEMENTS[0]) & (word & ELEMENTS[1] != ELEMENTS[1]))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All bits become another NaN; all else is sent as it is.
    #[test]
    fn no_element_is_sent_as_one_that_has_not_come() {
        assert_eq!([0xffff_ffff, 0x1234_ffff, 0xffff_5678].map(sent), [0x7fff_7fff, 0x1234_7fff, 0x7fff_5678]);
        // -0, both infinities, the largest and NaNs of some bits.
        for word in [0, 0x8000_8000, 0x7f80_ff80, 0xff7f_7f7f, 0xfffe_7fff, 0x7fff_fffe] {
            assert_eq!(sent(word), word);
        }
    }

    #[test]
    fn each_element_is_waited_for() {
        let all = [0x8000_7fff, 0xfffe_ff80, 0, 0x7f80_3f80];
        assert!(has_come(all));
        for (element, word) in (0..8).map(|element| (element, element / 2)) {
            let mut some = all;
            some[word] |= ELEMENTS[element % 2];
            assert!(!has_come(some), "element {element}");
        }
    }
}
