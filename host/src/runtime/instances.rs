//! The owner of a view that spans the same elements on every rank.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use super::lock;
use super::memory::Memory;

/// Some bytes of ranks' instances of a piece of memory, which lie in one range of addresses.
#[derive(Clone)]
pub(crate) struct Instances {
    /// This rank's.
    pub memory: Arc<Memory>,
    /// The first address and the bytes of each rank's.
    pub pieces: Vec<(u64, u64)>,
}

impl Instances {
    /// The bytes that a view of them, or of a part of them, reaches; those between the pieces are left out.
    pub fn pieces(&self, address: u64, bytes: u64) -> Vec<(u64, u64)> {
        let piece = |(start, len): &(u64, u64)| {
            let (from, to) = ((*start).max(address), (start + len).min(address + bytes));
            (from < to).then(|| (from, to - from))
        };
        self.pieces.iter().filter_map(piece).collect()
    }

    fn place(&self) -> Place {
        (Arc::as_ptr(&self.memory) as usize, self.pieces.clone())
    }
}

/// What tells instances apart: the memory, by its address, and the pieces.
type Place = (usize, Vec<(u64, u64)>);

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
        let of = |pieces: &[(u64, u64)]| Instances { memory: Arc::clone(buffer.memory()), pieces: pieces.to_vec() };
        let all = of(&[(1000, 8), (1100, 8), (1200, 8)]);
        assert_eq!(all.pieces(1000, 208), [(1000, 8), (1100, 8), (1200, 8)]);
        assert_eq!(all.pieces(1003, 205), [(1003, 5), (1100, 8), (1200, 8)], "not elements 3 to 8 of each");
        assert_eq!(all.pieces(1008, 92), []);
        let (lent, some) = (Lent::default(), of(&[(1003, 5), (1201, 4)]));
        assert_eq!(some.pieces(1000, 208), [(1003, 5), (1201, 4)], "none of a rank that has no piece");
        let one = std::ptr::from_ref(lent.lend(all.clone()));
        assert!(!std::ptr::eq(lent.lend(some), one) && std::ptr::eq(lent.lend(all), one));
    }

    #[test]
    fn many_ranges_are_lent_and_dropped_at_once() {
        let stream = Runtime::emulated(1).unwrap().device(0).unwrap().stream().unwrap();
        let buffer = Buffer::<u8>::zeros(&stream, 8).unwrap();
        let range =
            |first| Instances { memory: Arc::clone(buffer.memory()), pieces: [0, 1, 2].map(|rank| (first + (rank << 20), 8)).to_vec() };
        let (begin, lent) = (Instant::now(), Lent::default());
        let one = lent.lend(range(0));
        for first in 0..300_000 {
            assert_eq!(lent.lend(range(first)).pieces[0].0, first);
            assert!(begin.elapsed() < Duration::from_secs(20), "{first} ranges");
        }
        assert!(std::ptr::eq(lent.lend(range(0)), one));
        drop(lent);
        assert_eq!(Arc::strong_count(buffer.memory()), 1);
        assert!(begin.elapsed() < Duration::from_secs(20));
    }
}
