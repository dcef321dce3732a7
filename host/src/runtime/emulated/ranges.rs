//! Memory of several ranks in one range of addresses.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use oxtile_emulator::{Memory, Reservation};

use super::operation::misuse;
use crate::runtime::error::{Error, Result};

/// One of the pieces of a range, which all have one size.
pub(crate) struct Place<'a> {
    /// The name of the range: the same for all of its pieces, and for no other.
    pub range: &'a str,
    pub index: u32,
    pub count: u32,
}

/// What lies after each piece, where an overrun is found.
const GAP: u64 = 256;

/// The ranges that are there.
#[derive(Default)]
pub(super) struct Ranges(BTreeMap<(String, u64), Weak<Reservation>>);

impl Ranges {
    /// Allocates one piece; returns its address, and the distance between two. The first piece reserves the range, the last one frees it.
    pub fn allocate(&mut self, memory: &Memory, place: &Place<'_>, name: &str, bytes: u64, device: u32) -> Result<(u64, u64)> {
        let too_large = Error::TooLarge { what: "emulated memory", count: bytes, element_bytes: 1 };
        let stride = bytes.checked_next_multiple_of(GAP).and_then(|bytes| bytes.checked_add(GAP));
        let whole = stride.and_then(|stride| stride.checked_mul(place.count.into())).filter(|whole| *whole < isize::MAX as u64 - GAP);
        let (Some(stride), Some(whole)) = (stride, whole) else { return Err(too_large) };
        self.0.retain(|_, range| range.strong_count() > 0);
        // Ranks that ask for other sizes are told so when they meet.
        let key = (place.range.to_owned(), whole);
        let range = self.0.get(&key).and_then(Weak::upgrade).unwrap_or_else(|| Reservation::new(whole));
        self.0.insert(key, Arc::downgrade(&range));
        let offset = u64::from(place.index) * stride;
        let address = memory.allocate_in(&range, offset, name, bytes, device).map_err(misuse)?;
        Ok((address, stride))
    }
}
