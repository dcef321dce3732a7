//! What is taken from an arena, and that every rank takes the same.
//!
//! `[notice, verdict | signal words | buffers]`: signals first, so that what overruns a buffer meets another buffer. Every writer of a signal has a
//! line of 128 bytes of its own.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Mutex;

use oxtile_tile::arrivals::{self, VERDICT};

use crate::comm::{Rank, WorldSize};
use crate::rank::SymmetricError;
use crate::runtime::runtime::lock;
use crate::runtime::{Error, Result};

/// Bytes between signal words.
pub(super) const LINE: u64 = 8 * arrivals::LINE;
/// The alignment of a buffer, in bytes.
const ALIGNMENT: u64 = 256;

/// Something taken from an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Item {
    Buffer {
        bytes: u64,
    },
    Channel,
    /// Channels one after another.
    Flags {
        count: u32,
    },
}

impl fmt::Display for Item {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Buffer { bytes } => write!(f, "a buffer of {bytes} bytes"),
            Self::Channel => write!(f, "a channel"),
            Self::Flags { count } => write!(f, "{count} flags"),
        }
    }
}

pub(super) struct Layout {
    world: WorldSize,
    channels: u32,
    heap: u64,
    bytes: u64,
    taken: Mutex<Taken>,
}

#[derive(Default)]
struct Taken {
    items: Vec<Item>,
    /// For each item, the hash of all items up to it.
    hashes: Vec<u64>,
    end: u64,
    channels: u32,
    /// How many items of each other rank are known to agree.
    checked: BTreeMap<Rank, usize>,
}

impl Layout {
    pub fn new(world: WorldSize, channels: u32, bytes: u64) -> Result<Self> {
        let too_large = Error::TooLarge { what: "ArenaOptions::bytes", count: bytes, element_bytes: 1 };
        let heap = (LINE * (1 + u64::from(channels) * u64::from(world.get()))).next_multiple_of(ALIGNMENT);
        let bytes = bytes.checked_next_multiple_of(ALIGNMENT).and_then(|bytes| bytes.checked_add(heap)).ok_or(too_large)?;
        Ok(Self { world, channels, heap, bytes, taken: Mutex::new(Taken { end: heap, ..Taken::default() }) })
    }

    /// The bytes of the whole arena.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes that are not taken.
    pub fn room(&self) -> u64 {
        self.bytes - lock(&self.taken).end
    }

    /// Where buffers begin.
    pub fn heap(&self) -> u64 {
        self.heap
    }

    /// The word that tells a rank that another ended the arena.
    pub fn notice(&self) -> u64 {
        0
    }

    /// The word in which a kernel leaves the line of a flag that did not come.
    pub fn verdict(&self) -> u64 {
        8 * VERDICT
    }

    /// The channel of a word of signals, and the rank that writes it.
    pub fn writer(&self, word: u64) -> Option<(u64, Rank)> {
        let line = (word / LINE).checked_sub(1)?;
        let (channel, source) = (line / u64::from(self.world.get()), line % u64::from(self.world.get()));
        Some((channel, Rank::new(source as u32, self.world)?)).filter(|_| channel < self.channels.into())
    }

    /// The word of a channel that `source` writes.
    pub fn word(&self, channel: u64, source: Rank) -> u64 {
        LINE * (1 + channel * u64::from(self.world.get()) + u64::from(source.index()))
    }

    /// All words of signals.
    pub fn words(&self) -> impl Iterator<Item = u64> {
        (1..=u64::from(self.channels) * u64::from(self.world.get())).map(|line| LINE * line)
    }

    /// Takes an item. Returns its number, and its offset or the index of the channel.
    pub fn take(&self, item: Item) -> Result<(usize, u64)> {
        let taken = &mut *lock(&self.taken);
        let place = match item {
            Item::Buffer { bytes } => {
                let left = self.bytes - taken.end;
                let needed = bytes.checked_next_multiple_of(ALIGNMENT).unwrap_or(u64::MAX);
                if needed > left {
                    return Err(SymmetricError::Full { needed, left }.into());
                }
                taken.end += needed;
                taken.end - needed
            }
            Item::Channel | Item::Flags { .. } => {
                let count = if let Item::Flags { count } = item { count } else { 1 };
                if count > self.channels - taken.channels {
                    return Err(SymmetricError::NoChannel { channels: self.channels }.into());
                }
                taken.channels += count;
                u64::from(taken.channels - count)
            }
        };
        let hash = mix(taken.hashes.last().copied().unwrap_or(0), item);
        taken.items.push(item);
        taken.hashes.push(hash);
        Ok((taken.items.len() - 1, place))
    }

    /// The note of an item for the other ranks: the hash of all items up to it, and what it is.
    pub fn note(&self, number: usize) -> Vec<u8> {
        let taken = lock(&self.taken);
        [&taken.hashes[number].to_le_bytes(), taken.items[number].to_string().as_bytes()].concat()
    }

    pub fn is_checked(&self, other: Rank, number: usize) -> bool {
        lock(&self.taken).checked.get(&other).is_some_and(|checked| number < *checked)
    }

    /// Compares another rank's note of an item with this rank's.
    pub fn compare(&self, rank: Rank, other: Rank, number: usize, theirs: &[u8]) -> Result<()> {
        let mine = self.note(number);
        if mine != theirs {
            let text = |note: &[u8]| String::from_utf8_lossy(note.get(8..).unwrap_or_default()).into_owned();
            let (mut found, mut expected) = (text(&mine), text(theirs));
            if found == expected {
                (found, expected) = (format!("{found} after other ones"), format!("{expected} after others"));
            }
            return Err(SymmetricError::Layout { number, rank, found, other, expected }.into());
        }
        let checked = &mut lock(&self.taken).checked;
        let known = checked.entry(other).or_default();
        *known = (*known).max(number + 1);
        Ok(())
    }
}

/// FNV-1a over what is taken (Fowler, Noll, Vo).
fn mix(hash: u64, item: Item) -> u64 {
    let words = match item {
        Item::Buffer { bytes } => [1, bytes],
        Item::Channel => [2, 0],
        Item::Flags { count } => [3, count.into()],
    };
    let bytes = words.iter().flat_map(|word: &u64| word.to_le_bytes());
    bytes.fold(hash ^ 0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}
