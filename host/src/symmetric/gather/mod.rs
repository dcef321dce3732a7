//! All-gathers in chunks that can be waited for one by one.
//!
//! | file | what it holds |
//! |---|---|
//! | `pieces` | where the pieces of a shard lie, and their chunks |
//! | `places` | what is read: the places of a gather, and the token of an epoch |
//! | `pull` | each member fetches the others' shards |
//! | `push` | each member puts its shard to the others |
//! | `collective` | by the collectives of a communicator |

mod collective;
mod pieces;
mod places;
mod pull;
mod push;

use std::sync::Arc;

use oxtile_tile::num::Pod;

pub use collective::CollectiveGather;
pub use places::{Places, Ready, ReleaseError};
pub use pull::{GatherMemory, PullGather};
pub use push::{PushGather, PushMemory, PutOrder};

use crate::comm::{Member, Rank};
use crate::runtime::{Buffer, Result, Stream};
use crate::symmetric::replaced;

/// An all-gather of shards of one length, in chunks, again and again: by copy engines ([`PullGather`], [`PushGather`]) or by the collectives of a
/// communicator ([`CollectiveGather`]).
///
/// What is gathered lies in [`Places`], which are given once and stay: an operation is bound to them once. Each epoch is a
/// [`Ready`], without which no stream may read them:
///
/// 1. the [`shard`](Self::shard) is written;
/// 2. [`start`](Self::start) gathers it, and gives the epoch;
/// 3. a stream that is to read is given the epoch ([`Ready::whole`], [`Ready::chunk`]), and waits only for the part that it is given;
/// 4. [`release`](Self::release) takes the epoch back, after the last reader.
///
/// Every member calls them in this order; none of them waits on the host or allocates device memory. A gather is not captured, since its epochs grow. Work that reads
/// the places may be captured; its graph is replayed on a stream that was given the epoch.
///
/// ```
/// use oxtile::comm::{EmulatedCommunicator, WorldSize};
/// use oxtile::gemm::{Gemm, GemmConfig};
/// use oxtile::num::bf16;
/// use oxtile::symmetric::{ChunkedGather, CollectiveGather};
/// use oxtile::{Buffer, Result, Runtime};
///
/// # fn main() -> Result<()> {
/// let runtime = Runtime::checked(1)?;
/// let rank = EmulatedCommunicator::world_of(&runtime, WorldSize::ONE)?.remove(0);
/// let (compute, copies) = (rank.device().stream()?, rank.device().stream()?);
/// let mut gather = CollectiveGather::<bf16, _>::new(&rank, &copies, &[64 * 64], 1)?;
/// let (b, mut d) = (Buffer::zeros(&compute, 64 * 64)?, Buffer::zeros(&compute, 64 * 64)?);
///
/// // Bound once to the place of the operand.
/// let places = gather.places().clone();
/// let gemm = Gemm::<bf16, bf16>::new(&runtime, GemmConfig { m: 64, n: 64, k: 64, ..GemmConfig::default() })?;
/// let mut product = gemm.bind(&compute, places.whole().view(), b.view(), None, d.view_mut())?;
/// assert!(product.run(&compute).is_err(), "no epoch was given");
/// for _ in 0..3 {
///     gather.shard(&compute)?.fill_zero(&compute)?;
///     let ready = gather.start()?;
///     ready.whole(&compute)?;
///     product.run(&compute)?;
///     gather.release(ready)?;
/// }
/// # Ok(()) }
/// ```
///
/// What an epoch lends does not outlive it:
///
/// ```compile_fail,E0505
/// # use oxtile::symmetric::ChunkedGather;
/// # fn after(gather: &mut impl ChunkedGather<f32>, stream: &oxtile::Stream) -> oxtile::Result<()> {
/// let ready = gather.start()?;
/// let whole = ready.whole(stream)?;
/// gather.release(ready)?;
/// whole.to_vec(stream)?;
/// # Ok(()) }
/// ```
pub trait ChunkedGather<T: Pod> {
    /// Where what is gathered lies, in every epoch.
    fn places(&self) -> &Places<T>;

    /// The pieces of this member's shard, to write for the next epoch: later work of `stream` comes after all work that still reads the shard. Write it by enqueued
    /// work, not by a graph: replays are not ordered after those readers.
    ///
    /// # Errors
    /// [`Error::NotCapturable`](crate::Error::NotCapturable) in a graph; [`Error::Invalid`](crate::Error::Invalid) for a stream of another device, and,
    /// where the shard lies among what is gathered, for an epoch that was not released; a failure of the arena; an error of the driver.
    #[track_caller]
    fn shards(&mut self, stream: &Stream) -> Result<&mut [Buffer<T>]>;

    /// The only piece of this member's shard, or the first: see [`shards`](Self::shards).
    ///
    /// # Errors
    /// As [`shards`](Self::shards).
    #[track_caller]
    fn shard(&mut self, stream: &Stream) -> Result<&mut Buffer<T>> {
        self.shards(stream).map(|pieces| &mut pieces[0])
    }

    /// Begins an epoch: gathers the members' shards, after the work on them so far.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for the epoch before that was not released, and where other buffers were assigned to those that [`shards`](Self::shards) lends;
    /// [`Error::NotCapturable`](crate::Error::NotCapturable) in a graph; a failure of the arena; an error of the driver.
    #[track_caller]
    fn start(&mut self) -> Result<Ready<T>>;

    /// Ends the epoch: the places are written again after all work that the streams with the epoch have enqueued so far. What they enqueue later is
    /// [`Error::NotReady`](crate::Error::NotReady). A thread that enqueues at the same time is not seen: join it first.
    ///
    /// # Errors
    /// With the epoch, to be released again: [`Error::NotCapturable`](crate::Error::NotCapturable) in a graph; [`Error::Invalid`](crate::Error::Invalid) for
    /// the epoch of another gather; a failure of the arena; an error of the driver.
    #[track_caller]
    fn release(&mut self, ready: Ready<T>) -> Result<(), ReleaseError<T>>;
}

/// The other members of a team by their numbers in it and in the world, beginning after this one.
fn others_of(member: &Member) -> Arc<[(Rank, Rank)]> {
    let world_rank = |of| member.team().world_rank(of).unwrap_or(member.world_rank());
    member.others().map(|of| (of, world_rank(of))).collect()
}

/// Where buffers lie that are lent to be written, and how long they are.
fn lent<T: Pod>(own: &[Buffer<T>]) -> Vec<(u64, u64)> {
    own.iter().map(|own| (own.address(), own.len())).collect()
}

/// Fails where others were assigned to them, which no rank would read.
fn check_lent<T: Pod>(own: &[Buffer<T>], before: &[(u64, u64)], what: &'static str) -> Result<()> {
    if lent(own) == before { Ok(()) } else { Err(replaced(what, "what ChunkedGather::shards lends")) }
}

/// Why a gather is in no graph.
const WHAT_GROWS: &str = "a gather, whose epochs grow";
const INSTEAD: &str = "capture puts, gets and a Handover in place of it";
