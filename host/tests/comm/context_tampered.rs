//! Messages of context parallelism that are tampered with, between the operation and the virtual cluster.

use oxtile::comm::{Communicator, EmulatedCommunicator, Rank, ReduceOp, Reducible, WorldSize};
use oxtile::num::Pod;
use oxtile::sum_parts::SumParts;
use oxtile::{Error, Result, Stream};
use oxtile_tile::launch::{DeviceView, DeviceViewMut};

/// What becomes of messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    Nothing,
    /// Keys of the rank on the other side.
    OwnerAfter,
    /// The chunks of keys and of values in another order.
    ChunksSwapped,
    /// Keys are sent, and their values assumed to be there.
    ValuesAssumed,
    /// Nothing of rank 0 arrives.
    OneOwnerLeftOut,
    /// Gradients of other ranks' keys are not sent.
    GradientsKept,
    /// They are sent to the rank on the other side.
    GradientsToAnother,
    /// Each rank has its own largest scores.
    MaxLogitKept,
}

/// A communicator with a bug.
pub struct Tampered<'r> {
    pub of: &'r EmulatedCommunicator,
    pub bug: Bug,
    /// Bytes of a rank's keys.
    pub keys: u64,
}

/// A view that is written by one call.
fn part<'a, T>(view: &DeviceViewMut<'a, T>, [start, end]: [u64; 2]) -> DeviceViewMut<'a, T> {
    let access = view.access("a message");
    assert!(start <= end && end <= view.len());
    // SAFETY: elements of the view, for the same owner; parts of one view do not overlap, and one message writes each.
    unsafe { DeviceViewMut::from_raw(access.address + start * size_of::<T>() as u64, end - start, access.owner) }
}

impl Tampered<'_> {
    /// The rank as far on the other side of this one.
    fn mirrored(&self, rank: Rank) -> Rank {
        let world = self.world().get();
        Rank::new((2 * self.rank().index() + world - rank.index()) % world, self.world()).unwrap()
    }

    /// The bug, if it is one of messages of so many bytes: of keys and values, or of their gradients.
    fn bug_of(&self, bytes: u64) -> Bug {
        let of_gradients = matches!(self.bug, Bug::GradientsKept | Bug::GradientsToAnother);
        if of_gradients == (bytes == 2 * self.keys) { self.bug } else { Bug::Nothing }
    }
}

impl Communicator for Tampered<'_> {
    fn rank(&self) -> Rank {
        self.of.rank()
    }

    fn world(&self) -> WorldSize {
        self.of.world()
    }

    fn exchange<T: Pod>(
        &self,
        stream: &Stream,
        sends: &[(Rank, DeviceView<'_, T>)],
        receives: &[(Rank, DeviceViewMut<'_, T>)],
    ) -> Result<()> {
        let all: Vec<_> = receives.iter().map(|(from, view)| (*from, part(view, [0, view.len()]))).collect();
        let bytes = sends.first().map_or(0, |(_, view)| view.len()) * size_of::<T>() as u64;
        let is_first = |rank: Rank| rank.index() == 0;
        match self.bug_of(bytes) {
            Bug::Nothing | Bug::MaxLogitKept => self.of.exchange(stream, sends, &all),
            Bug::OwnerAfter | Bug::GradientsToAnother => {
                let sends: Vec<_> = sends.iter().map(|(to, view)| (self.mirrored(*to), *view)).collect();
                let receives: Vec<_> = all.into_iter().map(|(from, view)| (self.mirrored(from), view)).collect();
                self.of.exchange(stream, &sends, &receives)
            }
            Bug::ChunksSwapped => {
                let halves = |len: u64| [[len / 2, len], [0, len / 2]];
                let sends = sends.iter().flat_map(|(to, view)| halves(view.len()).map(|[start, end]| (*to, view.slice(start, end))));
                let receives = all.iter().flat_map(|(from, view)| {
                    let [second, first] = halves(view.len());
                    [first, second].map(|range| (*from, part(view, range)))
                });
                self.of.exchange(stream, &sends.collect::<Vec<_>>(), &receives.collect::<Vec<_>>())
            }
            Bug::ValuesAssumed => self.of.exchange(stream, &sends[..1], &all[..1]),
            Bug::OneOwnerLeftOut => {
                let sends: Vec<_> = sends.iter().filter(|_| !is_first(self.rank())).copied().collect();
                let receives: Vec<_> = all.into_iter().filter(|(from, _)| !is_first(*from)).collect();
                if sends.is_empty() && receives.is_empty() { Ok(()) } else { self.of.exchange(stream, &sends, &receives) }
            }
            Bug::GradientsKept => Ok(()),
        }
    }

    fn all_gather<'a, T: Pod>(
        &self,
        stream: &Stream,
        shard: impl Into<DeviceView<'a, T>>,
        output: impl Into<DeviceViewMut<'a, T>>,
    ) -> Result<()> {
        let (shard, output) = (shard.into(), output.into());
        // Operations are compared by bytes.
        if self.bug != Bug::MaxLogitKept || size_of::<T>() != size_of::<f32>() {
            return self.of.all_gather(stream, shard, output);
        }
        let copy = SumParts::<f32, f32>::new(&stream.device().runtime())?;
        (0..u64::from(self.world().get())).try_for_each(|rank| {
            let [from, len] = [rank, 1].map(|n| n * shard.len());
            let (own, part) = (shard.access("numbers"), part(&output, [from, from + len]).access("numbers"));
            // SAFETY: the same memory, of elements of as many bytes, for the same owners.
            let (own, part) =
                unsafe { (DeviceView::from_raw(own.address, len, own.owner), DeviceViewMut::from_raw(part.address, len, part.owner)) };
            copy.run(stream, own, 1, len, part)
        })
    }

    fn all_reduce<'a, T: Reducible>(&self, stream: &Stream, buffer: impl Into<DeviceViewMut<'a, T>>, op: ReduceOp) -> Result<()> {
        self.of.all_reduce(stream, buffer, op)
    }

    fn reduce_scatter<'a, T: Reducible>(
        &self,
        stream: &Stream,
        input: impl Into<DeviceView<'a, T>>,
        shard: impl Into<DeviceViewMut<'a, T>>,
        op: ReduceOp,
    ) -> Result<()> {
        self.of.reduce_scatter(stream, input, shard, op)
    }

    fn broadcast<'a, T: Pod>(&self, stream: &Stream, buffer: impl Into<DeviceViewMut<'a, T>>, root: Rank) -> Result<()> {
        self.of.broadcast(stream, buffer, root)
    }

    fn all_to_all<'a, T: Pod>(
        &self,
        stream: &Stream,
        input: impl Into<DeviceView<'a, T>>,
        output: impl Into<DeviceViewMut<'a, T>>,
    ) -> Result<()> {
        self.of.all_to_all(stream, input, output)
    }

    fn group<R>(&self, body: impl FnOnce() -> Result<R>) -> Result<R> {
        self.of.group(body)
    }

    fn split(&self, _: Option<u32>, _: u32) -> Result<Option<Self>> {
        Err(Error::Invalid { what: "Tampered::split", why: "it is not asked for".to_owned() })
    }

    fn barrier(&self, stream: &Stream) -> Result<()> {
        self.of.barrier(stream)
    }
}
