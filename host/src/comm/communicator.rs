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

/// A number type that is reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
pub enum DType {
    U8,
    U32,
    U64,
    I32,
    F32,
    F64,
    Bf16,
    F16,
}

/// An element that can be reduced: the number types that NCCL knows, among those of kernels.
pub trait Reducible: Pod {
    /// Which type it is.
    const DTYPE: DType;
}

macro_rules! reducible {
    ($($t:ty: $dtype:ident)*) => { $(impl Reducible for $t { const DTYPE: DType = DType::$dtype; })* };
}
reducible!(u8: U8 u32: U32 u64: U64 i32: I32 f32: F32 f64: F64 bf16: Bf16 f16: F16);

/// The ranks of one world, or of one team of it, seen from one of them.
///
/// Lengths count elements; a length of zero is legal. A call enqueues and returns; it fails only for what this rank
/// alone can see to be wrong, and then nothing is enqueued. What the other ranks do wrong shows when the stream is
/// waited for. Calls of one rank come one after another, on whatever streams.
pub trait Communicator {
    /// This rank.
    fn rank(&self) -> Rank;

    /// How many ranks there are.
    fn world(&self) -> WorldSize;

    /// Makes `buffer`, of one length on all ranks, the element-wise reduction of all ranks' buffers.
    ///
    /// # Errors
    /// [`ForeignRuntime`](crate::Error::ForeignRuntime), [`WrongDevice`](crate::Error::WrongDevice); an error of the transport.
    #[track_caller]
    fn all_reduce<T: Reducible>(&self, stream: &Stream, buffer: &mut Buffer<T>, op: ReduceOp) -> Result<()>;

    /// Makes `output` the shards of all ranks one after another, in the order of ranks. Every shard has one length, and
    /// `output` that times the number of ranks.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce), and [`Length`](crate::Error::Length).
    #[track_caller]
    fn all_gather<T: Pod>(&self, stream: &Stream, shard: &Buffer<T>, output: &mut Buffer<T>) -> Result<()>;

    /// Makes `shard` this rank's part of the element-wise reduction of all ranks' inputs: with `n` elements in `shard`,
    /// those from `rank * n`. Every input has `n` times the number of ranks.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce), and [`Length`](crate::Error::Length).
    #[track_caller]
    fn reduce_scatter<T: Reducible>(&self, stream: &Stream, input: &Buffer<T>, shard: &mut Buffer<T>, op: ReduceOp) -> Result<()>;

    /// Makes `buffer`, of one length on all ranks, that of `root`.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce), and [`Invalid`](crate::Error::Invalid) for a root of another world.
    #[track_caller]
    fn broadcast<T: Pod>(&self, stream: &Stream, buffer: &mut Buffer<T>, root: Rank) -> Result<()>;

    /// Makes part `r` of `output` part `rank` of rank `r`'s `input`: both are as many parts of one length as there are ranks.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce), and [`Length`](crate::Error::Length), also for a length that is not so many parts.
    #[track_caller]
    fn all_to_all<T: Pod>(&self, stream: &Stream, input: &Buffer<T>, output: &mut Buffer<T>) -> Result<()>;

    /// Sends and receives whole buffers, all at once: the messages wait for each other's ends, never for each other, so that a
    /// ring is one exchange a rank. Between two ranks messages are taken in the order in which they are sent. Ranks that
    /// neither send nor receive do not call.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce), and [`Invalid`](crate::Error::Invalid) for a peer of another world.
    #[track_caller]
    fn exchange<T: Pod>(&self, stream: &Stream, sends: &[(Rank, &Buffer<T>)], receives: &mut [(Rank, &mut Buffer<T>)]) -> Result<()>;

    /// Sends a buffer. Later work of the stream may wait until `to` receives it.
    ///
    /// # Errors
    /// As [`exchange`](Self::exchange).
    #[track_caller]
    fn send<T: Pod>(&self, stream: &Stream, buffer: &Buffer<T>, to: Rank) -> Result<()> {
        self.exchange(stream, &[(to, buffer)], &mut [])
    }

    /// Receives a buffer of the length that `from` sends.
    ///
    /// # Errors
    /// As [`exchange`](Self::exchange).
    #[track_caller]
    fn recv<T: Pod>(&self, stream: &Stream, buffer: &mut Buffer<T>, from: Rank) -> Result<()> {
        self.exchange(stream, &[], &mut [(from, buffer)])
    }

    /// Later work of the stream starts when every rank's stream has come here. The host does not wait.
    ///
    /// # Errors
    /// [`ForeignRuntime`](crate::Error::ForeignRuntime); an error of the transport.
    #[track_caller]
    fn barrier(&self, stream: &Stream) -> Result<()>;
}

/// Agreement on the largest magnitudes of many tensors: what quantization needs of a world, and no more.
pub trait ReduceMax {
    /// Makes each slot the largest of all ranks' slots of that place, in one collective for all of them. The slots hold
    /// amaxes: not negative, not NaN. Every rank has the same number, a rank with empty shards too.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    #[track_caller]
    fn reduce_max(&self, stream: &Stream, slots: &mut Buffer<f32>) -> Result<()>;
}

/// What every communicator offers to quantization.
impl<C: Communicator> ReduceMax for C {
    fn reduce_max(&self, stream: &Stream, slots: &mut Buffer<f32>) -> Result<()> {
        self.all_reduce(stream, slots, ReduceOp::Max)
    }
}
