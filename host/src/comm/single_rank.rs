//! A world of one rank.

use oxtile_tile::num::Pod;

use super::communicator::{Communicator, ReduceOp, Reducible};
use super::rank::{Rank, WorldSize};
use crate::runtime::{Buffer, Device, Error, Result, Stream};

/// The communicator of a program that runs alone: a reduction of one is the thing itself, a gather is a copy.
#[derive(Clone, Debug)]
pub struct SingleRank {
    device: Device,
}

impl SingleRank {
    /// The only rank, on its device.
    pub fn new(device: &Device) -> Self {
        Self { device: device.clone() }
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
        self.check_stream(stream, "Communicator::all_reduce")?;
        buffer.check_stream(stream, "Communicator::all_reduce")
    }

    fn all_gather<T: Pod>(&self, stream: &Stream, shard: &Buffer<T>, output: &mut Buffer<T>) -> Result<()> {
        self.check_stream(stream, "Communicator::all_gather")?;
        output.copy_from(stream, shard)
    }

    fn reduce_scatter<T: Reducible>(&self, stream: &Stream, input: &Buffer<T>, shard: &mut Buffer<T>, _op: ReduceOp) -> Result<()> {
        self.check_stream(stream, "Communicator::reduce_scatter")?;
        shard.copy_from(stream, input)
    }

    fn broadcast<T: Pod>(&self, stream: &Stream, buffer: &mut Buffer<T>, root: Rank) -> Result<()> {
        const WHAT: &str = "Communicator::broadcast";
        self.check_stream(stream, WHAT)?;
        if root != Rank::ZERO {
            return Err(Error::Invalid { what: WHAT, why: format!("{root} is not of this world, which has rank 0 alone") });
        }
        buffer.check_stream(stream, WHAT)
    }

    fn all_to_all<T: Pod>(&self, stream: &Stream, input: &Buffer<T>, output: &mut Buffer<T>) -> Result<()> {
        self.check_stream(stream, "Communicator::all_to_all")?;
        output.copy_from(stream, input)
    }

    /// Messages to oneself are taken in the order in which they are sent.
    fn exchange<T: Pod>(&self, stream: &Stream, sends: &[(Rank, &Buffer<T>)], receives: &mut [(Rank, &mut Buffer<T>)]) -> Result<()> {
        const WHAT: &str = "Communicator::exchange";
        self.check_stream(stream, WHAT)?;
        let peers = sends.iter().map(|(peer, _)| *peer).chain(receives.iter().map(|(peer, _)| *peer));
        if let Some(peer) = peers.into_iter().find(|peer| *peer != Rank::ZERO) {
            return Err(Error::Invalid { what: WHAT, why: format!("{peer} is not of this world, which has rank 0 alone") });
        }
        if sends.len() != receives.len() {
            let why = format!("{} messages are sent and {} received, all by rank 0: nobody else is there", sends.len(), receives.len());
            return Err(Error::Invalid { what: WHAT, why });
        }
        sends.iter().zip(receives).try_for_each(|((_, from), (_, to))| to.copy_from(stream, from))
    }

    fn barrier(&self, stream: &Stream) -> Result<()> {
        self.check_stream(stream, "Communicator::barrier")
    }
}
