//! A world of one rank.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use oxtile_tile::launch::{DeviceView, DeviceViewMut};
use oxtile_tile::num::Pod;

use super::communicator::{Communicator, Reducible};
use super::group;
use super::operand::Operand;
use crate::rank::{Rank, ReduceOp, WorldSize};
use crate::runtime::backend::{Caller, Copy, CopyRows, Direction};
use crate::runtime::memory;
use crate::runtime::{Device, Error, Result, Stream};

/// The communicator of a program that runs alone: a reduction leaves its buffer as it is, a gather is a copy.
#[derive(Clone)]
pub struct SingleRank {
    device: Device,
    /// The same for all handles of one communicator.
    identity: Arc<()>,
}

/// A call in a group: its stream, and the messages to oneself that it sends and receives.
struct Call {
    stream: Stream,
    sent: Vec<Operand>,
    received: Vec<(Operand, Caller)>,
}

impl SingleRank {
    /// The only rank, on its device.
    pub fn new(device: &Device) -> Self {
        Self { device: device.clone(), identity: Arc::default() }
    }

    fn id(&self) -> usize {
        Arc::as_ptr(&self.identity) as usize
    }

    /// Notes a call on memory; in a group its stream goes on after the other calls.
    fn join(&self, stream: &Stream, what: &'static str, uses: &[Operand]) -> Result<()> {
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
            sent.extend(sends.into_iter().map(|from| (stream.clone(), from)));
            received.extend(receives.into_iter().map(|(to, caller)| (stream.clone(), to, caller)));
        }
        let delivered = Self::deliver(sent, received);
        let Some((first, others)) = streams.split_first() else { return delivered };
        let _enqueue = first.runtime.enqueue();
        let joined = first.order_after(others);
        let joined = joined.and_then(|()| others.iter().try_for_each(|other| other.order_after(std::slice::from_ref(first))));
        delivered.and(joined)
    }

    fn deliver(sent: Vec<(Stream, Operand)>, received: Vec<(Stream, Operand, Caller)>) -> Result<()> {
        check_count(sent.len(), received.len())?;
        sent.into_iter().zip(received).try_for_each(|((from, source), (to, target, caller))| {
            if source.bytes != target.bytes {
                return Err(Error::Length { what: "Communicator::recv, in bytes", expected: source.bytes, found: target.bytes });
            }
            to.0.order_after(std::slice::from_ref(&from.0))?;
            copy(&to, &source, &target, caller)
        })
    }

    /// Copies what one view holds to the other, in a group too.
    #[track_caller]
    fn copy<T: Pod>(&self, stream: &Stream, what: &'static str, from: DeviceView<'_, T>, to: &DeviceViewMut<'_, T>) -> Result<()> {
        self.check_stream(stream, what)?;
        let uses = [Operand::read(stream, what, from)?, Operand::written(stream, what, to)?];
        if from.len() != to.len() {
            return Err(Error::Length { what, expected: to.len(), found: from.len() });
        }
        self.join(stream, what, &uses)?;
        let [from, to] = uses;
        copy(stream, &from, &to, Location::caller())
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

    fn all_reduce<'a, T: Reducible>(&self, stream: &Stream, buffer: impl Into<DeviceViewMut<'a, T>>, _op: ReduceOp) -> Result<()> {
        const WHAT: &str = "Communicator::all_reduce";
        self.check_stream(stream, WHAT)?;
        self.join(stream, WHAT, &[Operand::written(stream, WHAT, &buffer.into())?])
    }

    fn all_gather<'a, T: Pod>(
        &self,
        stream: &Stream,
        shard: impl Into<DeviceView<'a, T>>,
        output: impl Into<DeviceViewMut<'a, T>>,
    ) -> Result<()> {
        self.copy(stream, "Communicator::all_gather", shard.into(), &output.into())
    }

    fn reduce_scatter<'a, T: Reducible>(
        &self,
        stream: &Stream,
        input: impl Into<DeviceView<'a, T>>,
        shard: impl Into<DeviceViewMut<'a, T>>,
        _op: ReduceOp,
    ) -> Result<()> {
        self.copy(stream, "Communicator::reduce_scatter", input.into(), &shard.into())
    }

    fn broadcast<'a, T: Pod>(&self, stream: &Stream, buffer: impl Into<DeviceViewMut<'a, T>>, root: Rank) -> Result<()> {
        const WHAT: &str = "Communicator::broadcast";
        self.check_stream(stream, WHAT)?;
        if root != Rank::ZERO {
            return Err(Error::Invalid { what: WHAT, why: format!("{root} is not of this world, which has rank 0 alone") });
        }
        // The root's buffer is only read.
        self.join(stream, WHAT, &[Operand { writes: false, ..Operand::written(stream, WHAT, &buffer.into())? }])
    }

    fn all_to_all<'a, T: Pod>(
        &self,
        stream: &Stream,
        input: impl Into<DeviceView<'a, T>>,
        output: impl Into<DeviceViewMut<'a, T>>,
    ) -> Result<()> {
        self.copy(stream, "Communicator::all_to_all", input.into(), &output.into())
    }

    /// Messages to oneself are taken in the order in which they are sent.
    fn exchange<T: Pod>(
        &self,
        stream: &Stream,
        sends: &[(Rank, DeviceView<'_, T>)],
        receives: &[(Rank, DeviceViewMut<'_, T>)],
    ) -> Result<()> {
        const WHAT: &str = "Communicator::exchange";
        self.check_stream(stream, WHAT)?;
        let peers = sends.iter().map(|(peer, _)| *peer).chain(receives.iter().map(|(peer, _)| *peer));
        if let Some(peer) = peers.into_iter().find(|peer| *peer != Rank::ZERO) {
            return Err(Error::Invalid { what: WHAT, why: format!("{peer} is not of this world, which has rank 0 alone") });
        }
        let caller = Location::caller();
        let sent: Vec<_> = sends.iter().map(|(_, from)| Operand::read(stream, WHAT, *from)).collect::<Result<_>>()?;
        let received = receives.iter().map(|(_, to)| Ok((stream.clone(), Operand::written(stream, WHAT, to)?, caller)));
        let received: Vec<_> = received.collect::<Result<_>>()?;
        let uses: Vec<_> = sent.iter().chain(received.iter().map(|(_, to, _)| to)).cloned().collect();
        if group::join(self.id(), WHAT, &uses)? {
            let received = received.into_iter().map(|(_, to, caller)| (to, caller)).collect();
            group::keep(Call { stream: stream.clone(), sent, received });
            return Ok(());
        }
        Self::deliver(sent.into_iter().map(|from| (stream.clone(), from)).collect(), received)
    }

    /// Its calls are made at once, one after another, messages at its end, where its streams wait for each other: there is no other rank to wait for.
    fn group<R>(&self, body: impl FnOnce() -> Result<R>) -> Result<R> {
        let open = group::begin(self.id())?;
        let done = body();
        let ended = Self::end_group(open.take_kept());
        drop(open);
        done.and_then(|done| ended.map(|()| done))
    }

    fn split(&self, colour: Option<u32>, _key: u32) -> Result<Option<Self>> {
        group::refuse("Communicator::split", "a group is under way on this thread: split before it or after it")?;
        Ok(colour.map(|_| Self::new(&self.device)))
    }

    fn barrier(&self, stream: &Stream) -> Result<()> {
        const WHAT: &str = "Communicator::barrier";
        self.check_stream(stream, WHAT)?;
        self.join(stream, WHAT, &[])
    }
}

fn copy(stream: &Stream, from: &Operand, to: &Operand, caller: Caller) -> Result<()> {
    let copy = Copy {
        direction: Direction::DeviceToDevice,
        target: to.address,
        source: from.address,
        bytes: from.bytes,
        rows: CopyRows::ONE,
        caller,
    };
    memory::copy(&stream.0, copy, Some(&to.memory), Some(&from.memory))
}

fn check_count(sent: usize, received: usize) -> Result<()> {
    if sent == received {
        return Ok(());
    }
    let why = format!("{sent} messages are sent and {received} received, all by rank 0: there is no other rank");
    Err(Error::Invalid { what: "Communicator::exchange", why })
}

impl fmt::Debug for SingleRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SingleRank").field("device", &self.device).finish_non_exhaustive()
    }
}
