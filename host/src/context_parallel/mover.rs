//! Keys and values on their way from their owners, and gradients on their way back.

use oxtile_tile::launch::{DeviceView, DeviceViewMut};

use super::launches::{owner_of, reader_of};
use super::messages::Messages;
use super::pull::Pull;
use crate::comm::Rank;
use crate::runtime::{Result, Stream};
use crate::thd::Share;

/// Who reads whose keys in a pass: of each rank, whether it reads those of each.
pub(super) type Reads = Vec<Vec<bool>>;

/// The bytes of keys and of values, or of their gradients.
pub(super) type Both<'v> = [DeviceView<'v, u8>; 2];
pub(super) type BothMut<'v> = [DeviceViewMut<'v, u8>; 2];

/// How they travel.
pub(super) enum Mover<'t> {
    /// Sent by their owner, which knows who reads them.
    Messages(&'t dyn Messages),
    /// Read from the memory of their owner, and written to it.
    Pull(Box<Pull>),
}

impl Mover<'_> {
    /// Before a pass: others may read these keys and values.
    pub fn publish(&self, stream: &Stream, share: Share, own: Both<'_>, reads: &Reads) -> Result<()> {
        match self {
            Self::Messages(_) => Ok(()),
            Self::Pull(pull) => pull.publish(stream, share, own, reads),
        }
    }

    /// Brings the keys and values that the rank reads in a step.
    pub fn fetch(&self, stream: &Stream, share: Share, step: u32, own: Both<'_>, into: BothMut<'_>, reads: &Reads) -> Result<()> {
        let (me, owner, reader) = (share.rank, owner_of(share, step), reader_of(share, step));
        match self {
            Self::Messages(messages) => {
                let sends: Vec<_> = own.into_iter().filter(|_| is(reads, reader, me)).map(|view| (reader, view)).collect();
                let receives: Vec<_> = into.into_iter().filter(|_| is(reads, me, owner)).map(|view| (owner, view)).collect();
                messages.exchange(stream, &sends, &receives)
            }
            Self::Pull(pull) if is(reads, me, owner) => pull.fetch(stream, owner, into),
            Self::Pull(_) => Ok(()),
        }
    }

    /// Gives the gradients of what was read in a step to its owner, and takes those of the rank that read from here. `slots` are where gradients of each rank
    /// arrive.
    pub fn deliver<'v>(
        &self,
        stream: &Stream,
        share: Share,
        step: u32,
        gradients: Both<'_>,
        slots: impl Fn(Rank) -> BothMut<'v>,
        reads: &Reads,
    ) -> Result<()> {
        let (me, owner, reader) = (share.rank, owner_of(share, step), reader_of(share, step));
        match self {
            Self::Messages(messages) => {
                let sends: Vec<_> = gradients.into_iter().filter(|_| is(reads, me, owner)).map(|view| (owner, view)).collect();
                let receives: Vec<_> = slots(reader).into_iter().filter(|_| is(reads, reader, me)).map(|view| (reader, view)).collect();
                messages.exchange(stream, &sends, &receives)
            }
            Self::Pull(pull) if is(reads, me, owner) => pull.deliver(stream, share, owner, gradients),
            Self::Pull(_) => Ok(()),
        }
    }

    /// After a backward pass: gradients of all readers are in their slots.
    pub fn collect(&self, stream: &Stream, share: Share, reads: &Reads) -> Result<()> {
        match self {
            Self::Messages(_) => Ok(()),
            Self::Pull(pull) => pull.collect(stream, share, reads),
        }
    }
}

/// Whether a rank reads the keys of another.
pub(super) fn is(reads: &Reads, rank: Rank, owner: Rank) -> bool {
    reads[rank.index() as usize][owner.index() as usize]
}
