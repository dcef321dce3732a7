//! What ranks can do together.

use oxtile_tile::num::{Pod, bf16, f16};

use super::rank::{Rank, WorldSize};
use crate::runtime::{Buffer, Result, Stream};

/// How elements of the ranks become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReduceOp {
    /// Their sum. In which order is up to the communicator; each run of one communicator takes the same.
    Sum,
    /// The largest. What a NaN among floats gives is up to the communicator.
    Max,
}

/// An element that can be reduced: the number types that NCCL knows, among those of kernels.
pub trait Reducible: Pod {}

macro_rules! reducible {
    ($($t:ty)*) => { $(impl Reducible for $t {})* };
}
reducible!(u8 u32 u64 i32 f32 f64 bf16 f16);

/// The ranks of one world, seen from one of them.
///
/// Lengths count elements; a length of zero is legal. A call enqueues and returns; it fails only for what this rank
/// alone can see to be wrong, and then nothing is enqueued. What the other ranks do wrong shows when the stream is
/// waited for.
pub trait Communicator {
    /// This rank.
    fn rank(&self) -> Rank;

    /// How many ranks there are.
    fn world(&self) -> WorldSize;

    /// Makes `buffer`, of one length on all ranks, the element-wise reduction of all ranks' buffers.
    ///
    /// # Errors
    /// [`ForeignRuntime`](crate::Error::ForeignRuntime), [`WrongDevice`](crate::Error::WrongDevice); an error of the transport.
    fn all_reduce<T: Reducible>(&self, stream: &Stream, buffer: &mut Buffer<T>, op: ReduceOp) -> Result<()>;

    /// Makes `output` the shards of all ranks one after another, in the order of ranks. Every shard has one length, and
    /// `output` that times the number of ranks.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce), and [`Length`](crate::Error::Length).
    fn all_gather<T: Pod>(&self, stream: &Stream, shard: &Buffer<T>, output: &mut Buffer<T>) -> Result<()>;

    /// Makes `shard` this rank's part of the element-wise reduction of all ranks' inputs: with `n` elements in `shard`,
    /// those from `rank * n`. Every input has `n` times the number of ranks.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce), and [`Length`](crate::Error::Length).
    fn reduce_scatter<T: Reducible>(&self, stream: &Stream, input: &Buffer<T>, shard: &mut Buffer<T>, op: ReduceOp) -> Result<()>;

    /// Makes `buffer`, of one length on all ranks, that of `root`.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce), and [`Invalid`](crate::Error::Invalid) for a root of another world.
    fn broadcast<T: Pod>(&self, stream: &Stream, buffer: &mut Buffer<T>, root: Rank) -> Result<()>;

    /// Later work of the stream starts when every rank's stream has come here. The host does not wait.
    ///
    /// # Errors
    /// [`ForeignRuntime`](crate::Error::ForeignRuntime); an error of the transport.
    fn barrier(&self, stream: &Stream) -> Result<()>;
}

/// Agreement on the largest magnitudes of many tensors: what quantization needs of a world, and no more.
pub trait ReduceMax {
    /// Makes each slot the largest of all ranks' slots of that place, in one collective for all of them. The slots hold
    /// amaxes: not negative, not NaN. Every rank has the same number, a rank with empty shards too.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    fn reduce_max(&self, stream: &Stream, slots: &mut Buffer<f32>) -> Result<()>;
}
