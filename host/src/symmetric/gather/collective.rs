//! The all-gather by the collectives of a communicator.

use std::fmt;

use oxtile_tile::launch::DeviceViewMut;
use oxtile_tile::num::Pod;

use super::super::signal::Epoch;
use super::pieces::{Gathered, Pieces, bounds};
use super::places::{Arrived, Places, Ready, ReleaseError};
use super::{ChunkedGather, INSTEAD, WHAT_GROWS, check_lent, lent};
use crate::comm::Communicator;
use crate::runtime::{Buffer, Error, Event, Result, Stream};

/// The ranks of a communicator gather by its collectives, NCCL's or those of the virtual cluster: across hosts too, and where there is no symmetric memory. In
/// one chunk that is an all-gather, in several an exchange for each. There is no arena, so [`Ready::wait`] has no deadline of one; NCCL's deadline
/// is that of [`NcclCommunicator::synchronize`](crate::comm::NcclCommunicator::synchronize).
pub struct CollectiveGather<'c, T, C> {
    communicator: &'c C,
    stream: Stream,
    /// The pieces of the shard.
    own: Vec<Buffer<T>>,
    /// Where these lie, and how long they are.
    lent: Vec<(u64, u64)>,
    output: Buffer<T>,
    gathered: Gathered,
    places: Places<T>,
    chunks: u64,
    epoch: Epoch,
}

impl<'c, T: Pod, C: Communicator> CollectiveGather<'c, T, C> {
    /// For shards with a piece of each length of `lens`, the same on all ranks, gathered on `stream` in `chunks` chunks.
    ///
    /// # Errors
    /// [`Error::Invalid`] for no chunks or no pieces; as [`Buffer::uninitialised`].
    pub fn new(communicator: &'c C, stream: &Stream, lens: &[u64], chunks: u64) -> Result<Self> {
        const WHAT: &str = "CollectiveGather::new";
        if chunks == 0 {
            return Err(Error::Invalid { what: WHAT, why: "0 chunks: take at least one".to_owned() });
        }
        let gathered = Pieces::new::<T>(WHAT, lens)?.gathered::<T>(WHAT, communicator.world().get())?;
        let own = lens.iter().map(|len| Buffer::uninitialised(stream, *len)).collect::<Result<Vec<_>>>()?;
        let lent = lent(&own);
        let output = Buffer::uninitialised(stream, gathered.len)?;
        let places = Places::new("CollectiveGather", None, &output, &gathered, chunks)?;
        Ok(Self { communicator, stream: stream.clone(), own, lent, output, gathered, places, chunks, epoch: Epoch::ZERO })
    }

    /// Gathers whole shards, in one call.
    #[track_caller]
    fn gather_whole(&mut self) -> Result<()> {
        let (communicator, stream, mut rest) = (self.communicator, &self.stream, Rest::new(&mut self.output));
        let gather = |(piece, own): (usize, &Buffer<T>)| {
            let (start, len) = self.gathered.whole(piece);
            communicator.all_gather(stream, own, rest.take(start, len))
        };
        match self.own.len() {
            1 => self.own.iter().enumerate().try_for_each(gather),
            _ => communicator.group(|| self.own.iter().enumerate().try_for_each(gather)),
        }
    }

    /// Gathers one chunk of all members' shards.
    #[track_caller]
    fn gather_chunk(&mut self, chunk: u64) -> Result<()> {
        let (mut sends, mut receives, mut rest) = (Vec::new(), Vec::new(), Rest::new(&mut self.output));
        for (piece, own) in self.own.iter().enumerate() {
            let (start, end) = bounds(own.len(), self.chunks, chunk);
            for member in self.communicator.world().ranks().filter(|_| start < end) {
                sends.push((member, own.view().slice(start, end)));
                receives.push((member, rest.take(self.gathered.place(piece, member) + start, end - start)));
            }
        }
        self.communicator.exchange(&self.stream, &sends, &receives)
    }

    fn end(&self, ready: &Ready<T>) -> Result<()> {
        self.stream.0.refuse_capture(WHAT_GROWS, INSTEAD)?;
        self.places.check_own(ready, "CollectiveGather::release")?;
        self.places.order_after_readers(&self.stream)?;
        self.places.shut();
        Ok(())
    }
}

impl<T: Pod, C: Communicator> ChunkedGather<T> for CollectiveGather<'_, T, C> {
    fn places(&self) -> &Places<T> {
        &self.places
    }

    /// The runtime orders the writes of a buffer after its earlier uses.
    fn shards(&mut self, stream: &Stream) -> Result<&mut [Buffer<T>]> {
        stream.0.refuse_capture(WHAT_GROWS, INSTEAD)?;
        self.own.iter().try_for_each(|own| own.check_stream(stream, "CollectiveGather::shards"))?;
        Ok(&mut self.own)
    }

    fn start(&mut self) -> Result<Ready<T>> {
        self.stream.0.refuse_capture(WHAT_GROWS, INSTEAD)?;
        check_lent(&self.own, &self.lent, "CollectiveGather::start")?;
        self.places.check_released("CollectiveGather::start")?;
        self.epoch = self.epoch.next();
        let mut events = Vec::new();
        for chunk in 0..self.chunks {
            match self.chunks {
                1 => self.gather_whole()?,
                _ => self.gather_chunk(chunk)?,
            }
            events.push(vec![self.stream.mark()?]);
        }
        let (done, members) = (self.stream.mark()?, self.gathered.members as usize);
        let chunks: Vec<Vec<Vec<Event>>> = vec![events; members];
        Ok(self.places.open(Arrived { epoch: self.epoch, chunks, done, ticket: None }))
    }

    fn release(&mut self, ready: Ready<T>) -> Result<(), ReleaseError<T>> {
        self.end(&ready).map_err(|error| ReleaseError { ready, error })
    }
}

/// What is left of a buffer whose parts are written, from its beginning on.
struct Rest<'a, T> {
    view: Option<DeviceViewMut<'a, T>>,
    /// Where the rest begins.
    start: u64,
}

impl<'a, T: Pod> Rest<'a, T> {
    fn new(buffer: &'a mut Buffer<T>) -> Self {
        Self { view: Some(buffer.view_mut()), start: 0 }
    }

    /// The part from `start` on, after those that were taken.
    fn take(&mut self, start: u64, len: u64) -> DeviceViewMut<'a, T> {
        let view = self.view.take().expect("it is put back");
        let (_, view) = view.split_at(start - self.start);
        let (part, rest) = view.split_at(len);
        (self.view, self.start) = (Some(rest), start + len);
        part
    }
}

impl<T, C> fmt::Debug for CollectiveGather<'_, T, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CollectiveGather").field("epoch", &self.epoch).finish_non_exhaustive()
    }
}
