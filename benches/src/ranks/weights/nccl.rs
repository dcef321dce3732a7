//! A rank's buffers for NCCL in the place of pulls and scatters: whole weights, or gradients, by turns in two.

use anyhow::{Context, Result};
use half::bf16 as Half;
use oxtile::comm::{Communicator, NcclCommunicator, ReduceOp};
use oxtile::num::bf16;
use oxtile::sum_parts::SumParts;
use oxtile::{Buffer, Stream};
use oxtile_tile::launch::DeviceViewMut;

use super::layers::{Layers, repeated};

pub struct InPlace {
    whole: [Buffer<bf16>; 2],
    shard: Buffer<bf16>,
    /// Reads an element of what was gathered.
    touch: SumParts<bf16, bf16>,
    first: Buffer<bf16>,
}

impl InPlace {
    /// Buffers with random values: products of zeros take less power, and so less time.
    pub fn new(stream: &Stream, layers: Layers, ranks: u64, pattern: &[Half]) -> Result<Self> {
        let largest = layers.largest();
        let filled = |at: usize, len: u64| Buffer::from_slice(stream, &repeated(pattern, at, 0, len));
        Ok(Self {
            whole: [filled(0, largest)?, filled(1, largest)?],
            shard: filled(2, largest.div_ceil(ranks))?,
            touch: SumParts::new(&stream.device().runtime())?,
            first: Buffer::uninitialised(stream, 1)?,
        })
    }

    /// The whole of the weight at a place.
    pub fn whole(&self, at: usize) -> &Buffer<bf16> {
        &self.whole[at % 2]
    }

    /// Elements of a buffer, as a product or a collective writes them.
    pub fn target(buffer: &Buffer<bf16>, len: u64) -> DeviceViewMut<'_, bf16> {
        let access = buffer.view().access("whole");
        // SAFETY: the buffer has them. The runtime is told of each use of it, and orders them; the host reads none.
        unsafe { DeviceViewMut::from_raw(access.address, len, access.owner) }
    }

    /// A gather of each weight, the next one beside the products of the one before.
    pub fn gathers(
        &self,
        layers: Layers,
        comm: Option<&NcclCommunicator>,
        [compute, beside]: [&Stream; 2],
        product: &mut dyn FnMut(usize) -> Result<()>,
    ) -> Result<()> {
        let comm = comm.context("there is no NCCL")?;
        let Self { whole, shard, touch, first } = self;
        let ranks = u64::from(comm.world().get());
        let gather = |at: usize| -> Result<()> {
            let ([rows, columns], whole) = (layers.shape(at), &whole[at % 2]);
            let elements = rows * columns / ranks;
            Ok(comm.all_gather(beside, shard.view().slice(0, elements), Self::target(whole, elements * ranks))?)
        };
        gather(0)?;
        for at in 0..layers.places() {
            // The first read waits for this gather alone: the next one is not enqueued yet.
            touch.round(compute, whole[at % 2].view().slice(0, 1), Self::target(first, 1))?;
            if at + 1 < layers.places() {
                gather(at + 1)?;
            }
            product(at)?;
        }
        Ok(())
    }

    /// A reduce-scatter of each gradient, beside the product of the next one. The last weight comes first.
    pub fn reductions(
        &self,
        layers: Layers,
        comm: Option<&NcclCommunicator>,
        beside: &Stream,
        product: &mut dyn FnMut(usize) -> Result<()>,
    ) -> Result<()> {
        let comm = comm.context("there is no NCCL")?;
        let ranks = u64::from(comm.world().get());
        for at in (0..layers.places()).rev() {
            product(at)?;
            let ([rows, columns], whole) = (layers.shape(at), self.whole(at));
            let elements = rows * columns / ranks;
            comm.reduce_scatter(beside, whole.view().slice(0, elements * ranks), Self::target(&self.shard, elements), ReduceOp::Sum)?;
        }
        Ok(())
    }
}
