//! A world of one rank.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use oxtile_tile::num::Pod;

use super::communicator::{Communicator, Reducible};
use super::group;
use crate::rank::{Rank, ReduceOp, WorldSize};
use crate::runtime::backend::{Caller, Copy, Direction};
use crate::runtime::memory::{self, Memory};
use crate::runtime::{Buffer, Device, Error, Result, Stream};

/// The communicator of a program that runs alone: a reduction of one is the thing itself, a gather is a copy.
#[derive(Clone)]
pub struct SingleRank {
    device: Device,
    /// By which its handles are known to be of one communicator.
    identity: Arc<()>,
}

/// A call in a group: its stream, and the messages to oneself that it sends and receives.
struct Call {
    stream: Stream,
    sent: Vec<Arc<Memory>>,
    received: Vec<(Arc<Memory>, Caller)>,
}

impl SingleRank {
    /// The only rank, on its device.
    pub fn new(device: &Device) -> Self {
        Self { device: device.clone(), identity: Arc::default() }
    }

    fn id(&self) -> usize {
        Arc::as_ptr(&self.identity) as usize
    }

    /// Notes a call on memory; in a group its stream goes on behind the other calls.
    fn join<'a>(&self, stream: &Stream, what: &'static str, uses: impl Iterator<Item = (&'a Arc<Memory>, bool)>) -> Result<()> {
        if group::join(self.id(), what, uses)? {
            group::keep(Call { stream: stream.clone(), sent: Vec::new(), received: Vec::new() });
        }
        Ok(())
    }

    /// Copies what a group sent to what it received, in the order of the calls; then all of its streams wait for each other.
    fn end_group(calls: Vec<Call>) -> Result<()> {
        let streams: Vec<_> = calls.iter().map(|call| Arc::clone(&call.stream.0)).collect();
        let (mut sent, mut received) = (Vec::new(), Vec::new());
        for Call { stream, sent: sends, received: receives } in calls {
            sent.extend(sends.into_iter().map(|memory| (stream.clone(), memory)));
            received.extend(receives.into_iter().map(|(memory, caller)| (stream.clone(), memory, caller)));
        }
        let delivered = Self::deliver(sent, received);
        let Some((first, others)) = streams.split_first() else { return delivered };
        let _enqueue = first.runtime.enqueue();
        let joined = first.order_after(others);
        let joined = joined.and_then(|()| others.iter().try_for_each(|other| other.order_after(std::slice::from_ref(first))));
        delivered.and(joined)
    }

    fn deliver(sent: Vec<(Stream, Arc<Memory>)>, received: Vec<(Stream, Arc<Memory>, Caller)>) -> Result<()> {
        check_count(sent.len(), received.len())?;
        sent.into_iter().zip(received).try_for_each(|((from, source), (to, target, caller))| {
            if source.bytes != target.bytes {
                return Err(Error::Length { what: "Communicator::recv, in bytes", expected: source.bytes, found: target.bytes });
            }
            to.0.order_after(std::slice::from_ref(&from.0))?;
            let copy =
                Copy { direction: Direction::DeviceToDevice, target: target.address, source: source.address, bytes: source.bytes, caller };
            memory::copy(&to.0, copy, Some(&target), Some(&source))
        })
    }

    /// Copies what one buffer holds to the other, in a group too.
    #[track_caller]
    fn copy<T: Pod>(&self, stream: &Stream, what: &'static str, from: &Buffer<T>, to: &mut Buffer<T>) -> Result<()> {
        self.check_stream(stream, what)?;
        from.check_stream(stream, what)?;
        to.check_stream(stream, what)?;
        if from.len() != to.len() {
            return Err(Error::Length { what, expected: to.len(), found: from.len() });
        }
        self.join(stream, what, [(from.memory(), false), (to.memory(), true)].into_iter())?;
        to.copy_from(stream, from)
    }

    fn check_stream(&self, stream: &Stream, what: &'static str) -> Result<()> {
        let found = stream.device();
        if found == self.device {
            return Ok(());
        }
        let why = format!("the stream is on {found:?}, the communicator on {:?}: use a stream of that device", self.device);
        Err(Error::Invalid { what, why })
    }
}

impl Communicator for SingleRank {
    fn rank(&self) -> Rank {
        Rank::ZERO
    }

    fn world(&self) -> WorldSize {
        WorldSize::ONE
    }

    fn all_reduce<T: Reducible>(&self, stream: &Stream, buffer: &mut Buffer<T>, _op: ReduceOp) -> Result<()> {
        const WHAT: &str = "Communicator::all_reduce";
        self.check_stream(stream, WHAT)?;
        buffer.check_stream(stream, WHAT)?;
        self.join(stream, WHAT, [(buffer.memory(), true)].into_iter())
    }

    fn all_gather<T: Pod>(&self, stream: &Stream, shard: &Buffer<T>, output: &mut Buffer<T>) -> Result<()> {
        self.copy(stream, "Communicator::all_gather", shard, output)
    }

    fn reduce_scatter<T: Reducible>(&self, stream: &Stream, input: &Buffer<T>, shard: &mut Buffer<T>, _op: ReduceOp) -> Result<()> {
        self.copy(stream, "Communicator::reduce_scatter", input, shard)
    }

    fn broadcast<T: Pod>(&self, stream: &Stream, buffer: &mut Buffer<T>, root: Rank) -> Result<()> {
        const WHAT: &str = "Communicator::broadcast";
        self.check_stream(stream, WHAT)?;
        if root != Rank::ZERO {
            return Err(Error::Invalid { what: WHAT, why: format!("{root} is not of this world, which has rank 0 alone") });
        }
        buffer.check_stream(stream, WHAT)?;
        // The root's buffer is only read.
        self.join(stream, WHAT, [(buffer.memory(), false)].into_iter())
    }

    fn all_to_all<T: Pod>(&self, stream: &Stream, input: &Buffer<T>, output: &mut Buffer<T>) -> Result<()> {
        self.copy(stream, "Communicator::all_to_all", input, output)
    }

    /// Messages to oneself are taken in the order in which they are sent.
    fn exchange<T: Pod>(&self, stream: &Stream, sends: &[(Rank, &Buffer<T>)], receives: &mut [(Rank, &mut Buffer<T>)]) -> Result<()> {
        const WHAT: &str = "Communicator::exchange";
        self.check_stream(stream, WHAT)?;
        let peers = sends.iter().map(|(peer, _)| *peer).chain(receives.iter().map(|(peer, _)| *peer));
        if let Some(peer) = peers.into_iter().find(|peer| *peer != Rank::ZERO) {
            return Err(Error::Invalid { what: WHAT, why: format!("{peer} is not of this world, which has rank 0 alone") });
        }
        sends.iter().try_for_each(|(_, from)| from.check_stream(stream, WHAT))?;
        receives.iter().try_for_each(|(_, to)| to.check_stream(stream, WHAT))?;
        let uses = sends.iter().map(|(_, from)| (from.memory(), false)).chain(receives.iter().map(|(_, to)| (to.memory(), true)));
        if group::join(self.id(), WHAT, uses)? {
            let caller = Location::caller();
            let sent = sends.iter().map(|(_, from)| Arc::clone(from.memory())).collect();
            let received = receives.iter().map(|(_, to)| (Arc::clone(to.memory()), caller)).collect();
            group::keep(Call { stream: stream.clone(), sent, received });
            return Ok(());
        }
        check_count(sends.len(), receives.len())?;
        sends.iter().zip(receives).try_for_each(|((_, from), (_, to))| to.copy_from(stream, from))
    }

    /// Its calls are made at once, one after another, messages at its end, where its streams wait for each other: there is nobody else to wait for.
    fn group<R>(&self, body: impl FnOnce() -> Result<R>) -> Result<R> {
        let open = group::begin(self.id())?;
        let done = body();
        let ended = Self::end_group(open.take_kept());
        drop(open);
        done.and_then(|done| ended.map(|()| done))
    }

    fn split(&self, colour: Option<u32>, _key: u32) -> Result<Option<Self>> {
        group::refuse("Communicator::split", "a group is under way on this thread: split before it or behind it")?;
        Ok(colour.map(|_| Self::new(&self.device)))
    }

    fn barrier(&self, stream: &Stream) -> Result<()> {
        const WHAT: &str = "Communicator::barrier";
        self.check_stream(stream, WHAT)?;
        self.join(stream, WHAT, std::iter::empty())
    }
}

fn check_count(sent: usize, received: usize) -> Result<()> {
    if sent == received {
        return Ok(());
    }
    let why = format!("{sent} messages are sent and {received} received, all by rank 0: nobody else is there");
    Err(Error::Invalid { what: "Communicator::exchange", why })
}

impl fmt::Debug for SingleRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SingleRank").field("device", &self.device).finish_non_exhaustive()
    }
}
