//! A world of one rank.

use oxtile_tile::num::Pod;

use super::communicator::{Communicator, ReduceMax, ReduceOp, Reducible};
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

    fn barrier(&self, stream: &Stream) -> Result<()> {
        self.check_stream(stream, "Communicator::barrier")
    }
}

impl ReduceMax for SingleRank {
    fn reduce_max(&self, stream: &Stream, slots: &mut Buffer<f32>) -> Result<()> {
        self.all_reduce(stream, slots, ReduceOp::Max)
    }
}
