//! The owner of a view that spans the same elements on every rank.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use super::lock;
use super::memory::Memory;

/// Some bytes of each rank's instance of a piece of memory, which lie in one range of addresses.
#[derive(Clone)]
pub(crate) struct Instances {
    /// This rank's.
    pub memory: Arc<Memory>,
    /// Where those of rank 0 lie.
    pub first: u64,
    /// Bytes from one rank's to the next one's.
    pub stride: u64,
    pub ranks: u32,
    /// How many of each.
    pub bytes: u64,
}

impl Instances {
    /// The bytes that a view of them, or of a part of them, reaches; those between the ranks' instances are left out.
    pub fn pieces(&self, address: u64, bytes: u64) -> Vec<(u64, u64)> {
        let piece = |rank: u64| {
            let start = self.first + rank * self.stride;
            let (from, to) = (start.max(address), (start + self.bytes).min(address + bytes));
            (from < to).then(|| (from, to - from))
        };
        (0..u64::from(self.ranks)).filter_map(piece).collect()
    }

    fn place(&self) -> Place {
        (Arc::as_ptr(&self.memory) as usize, self.first, self.stride, self.ranks, self.bytes)
    }
}

/// What tells instances apart: the memory, by its address, and the other fields.
type Place = (usize, u64, u64, u32, u64);

/// What was lent, each once: it stays where it is as long as this is there.
#[derive(Default)]
pub(crate) struct Lent(Mutex<HashMap<Place, Arc<Instances>>>);

impl Lent {
    pub fn lend(&self, instances: Instances) -> &Instances {
        let mut known = lock(&self.0);
        let lent = Arc::as_ptr(known.entry(instances.place()).or_insert_with(|| Arc::new(instances)));
        // SAFETY: what is in the map is never changed, replaced or removed before this is dropped, and the reference ends before that; it does not
        // move with the map, since an `Arc` holds it.
        unsafe { &*lent }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::runtime::{Buffer, Runtime};

    #[test]
    fn a_part_reaches_what_lies_in_it_and_what_is_lent_is_lent_once() {
        let stream = Runtime::emulated(1).unwrap().device(0).unwrap().stream().unwrap();
        let buffer = Buffer::<u8>::zeros(&stream, 8).unwrap();
        let all = Instances { memory: Arc::clone(buffer.memory()), first: 1000, stride: 100, ranks: 3, bytes: 8 };
        assert_eq!(all.pieces(1000, 208), [(1000, 8), (1100, 8), (1200, 8)]);
        assert_eq!(all.pieces(1003, 205), [(1003, 5), (1100, 8), (1200, 8)], "not elements 3 to 8 of each");
        assert_eq!(all.pieces(1008, 92), []);
        let (lent, some) = (Lent::default(), Instances { first: 1003, bytes: 5, ..all.clone() });
        assert_eq!(some.pieces(1003, 205), [(1003, 5), (1103, 5), (1203, 5)]);
        let one = std::ptr::from_ref(lent.lend(all.clone()));
        assert!(!std::ptr::eq(lent.lend(some), one) && std::ptr::eq(lent.lend(all), one));
    }

    #[test]
    fn many_ranges_are_lent_and_dropped_at_once() {
        let stream = Runtime::emulated(1).unwrap().device(0).unwrap().stream().unwrap();
        let buffer = Buffer::<u8>::zeros(&stream, 8).unwrap();
        let range = |first| Instances { memory: Arc::clone(buffer.memory()), first, stride: 1 << 20, ranks: 3, bytes: 8 };
        let (begin, lent) = (Instant::now(), Lent::default());
        let one = lent.lend(range(0));
        for first in 0..300_000 {
            assert_eq!(lent.lend(range(first)).first, first);
            assert!(begin.elapsed() < Duration::from_secs(20), "{first} ranges");
        }
        assert!(std::ptr::eq(lent.lend(range(0)), one));
        drop(lent);
        assert_eq!(Arc::strong_count(buffer.memory()), 1);
        assert!(begin.elapsed() < Duration::from_secs(20));
    }
}
