//! What ranks can do together.

use oxtile_tile::launch::{DeviceView, DeviceViewMut};
use oxtile_tile::num::{Pod, bf16, e4m3, e5m2, f16};

use super::team::Team;
use crate::rank::{DType, Rank, ReduceOp, WorldSize};
use crate::runtime::{Buffer, Error, Result, Stream};

/// An element that can be reduced: the number types that NCCL knows. Sums of integers wrap, sums of [`e4m3`] and [`e5m2`] saturate at the largest finite
/// value; NCCL reduces these two types from 2.24 on, and on devices of compute capability 9.0 or newer.
pub trait Reducible: Pod {
    /// Which type it is.
    const DTYPE: DType;
}

macro_rules! reducible {
    ($($t:ty: $dtype:ident)*) => { $(impl Reducible for $t { const DTYPE: DType = DType::$dtype; })* };
}
reducible!(u8: U8 u32: U32 u64: U64 i8: I8 i32: I32 i64: I64 f32: F32 f64: F64 bf16: Bf16 f16: F16 e4m3: E4m3 e5m2: E5m2);

/// The ranks of one world, or of one team of it, seen from one of them.
///
/// Lengths count elements; a length of zero is legal. A call enqueues and returns. It fails only for mistakes that this rank
/// can see by itself, and then nothing is enqueued. Mistakes of other ranks show when the stream is
/// waited for. Calls of one rank come one after another, on whatever streams.
///
/// What a call reads and writes are views: `&buffer` and `&mut buffer` stand for all of a buffer, `buffer.view().slice(start, end)` for a part.
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
    fn all_reduce<'a, T: Reducible>(&self, stream: &Stream, buffer: impl Into<DeviceViewMut<'a, T>>, op: ReduceOp) -> Result<()>;

    /// Makes `output` the shards of all ranks one after another, in the order of ranks. Every shard has one length, and
    /// `output` that times the number of ranks.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce), and [`Length`](crate::Error::Length).
    #[track_caller]
    fn all_gather<'a, T: Pod>(
        &self,
        stream: &Stream,
        shard: impl Into<DeviceView<'a, T>>,
        output: impl Into<DeviceViewMut<'a, T>>,
    ) -> Result<()>;

    /// Makes `shard` this rank's part of the element-wise reduction of all ranks' inputs: with `n` elements in `shard`,
    /// those from `rank * n`. Every input has `n` times the number of ranks.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce), and [`Length`](crate::Error::Length).
    #[track_caller]
    fn reduce_scatter<'a, T: Reducible>(
        &self,
        stream: &Stream,
        input: impl Into<DeviceView<'a, T>>,
        shard: impl Into<DeviceViewMut<'a, T>>,
        op: ReduceOp,
    ) -> Result<()>;

    /// Makes `buffer`, of one length on all ranks, that of `root`.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce), and [`Invalid`](crate::Error::Invalid) for a root of another world.
    #[track_caller]
    fn broadcast<'a, T: Pod>(&self, stream: &Stream, buffer: impl Into<DeviceViewMut<'a, T>>, root: Rank) -> Result<()>;

    /// Makes part `r` of `output` part `rank` of rank `r`'s `input`: both consist of one part a rank, all of one length.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce), and [`Length`](crate::Error::Length), also for a length that the number of ranks does not divide.
    #[track_caller]
    fn all_to_all<'a, T: Pod>(
        &self,
        stream: &Stream,
        input: impl Into<DeviceView<'a, T>>,
        output: impl Into<DeviceViewMut<'a, T>>,
    ) -> Result<()>;

    /// Sends and receives views, all at once: each message waits only for its other end, so that a
    /// ring is one exchange a rank. Between two ranks messages are taken in the order in which they are sent. Ranks that
    /// neither send nor receive do not call.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce), and [`Invalid`](crate::Error::Invalid) for a peer of another world.
    #[track_caller]
    fn exchange<T: Pod>(
        &self,
        stream: &Stream,
        sends: &[(Rank, DeviceView<'_, T>)],
        receives: &[(Rank, DeviceViewMut<'_, T>)],
    ) -> Result<()>;

    /// Sends a buffer. Later work of the stream may wait until `to` receives it.
    ///
    /// # Errors
    /// As [`exchange`](Self::exchange).
    #[track_caller]
    fn send<'a, T: Pod>(&self, stream: &Stream, buffer: impl Into<DeviceView<'a, T>>, to: Rank) -> Result<()> {
        self.exchange(stream, &[(to, buffer.into())], &[])
    }

    /// Receives a buffer of the length that `from` sends.
    ///
    /// # Errors
    /// As [`exchange`](Self::exchange).
    #[track_caller]
    fn recv<'a, T: Pod>(&self, stream: &Stream, buffer: impl Into<DeviceViewMut<'a, T>>, from: Rank) -> Result<()> {
        self.exchange(stream, &[], &[(from, buffer.into())])
    }

    /// The calls of `body` as one, made when it ends: none of them waits for another, so that sends and receives may come in any order, and all data go
    /// together. Nothing is enqueued before the end: the body waits for nothing, and what the calls read and write is used after the group. A stream
    /// of the calls goes on when all of them are done, whatever their streams. The calls that a body made before it failed are made all the same, since
    /// other ranks wait for them. A [rank alone](super::SingleRank) copies at once, and delivers messages at the end.
    ///
    /// # Errors
    /// What the body returns; [`Invalid`](crate::Error::Invalid) for a group in a group, and, of the calls in it, for one on another communicator, or
    /// one of two that use the same elements of which one writes them; an error of the transport.
    fn group<R>(&self, body: impl FnOnce() -> Result<R>) -> Result<R>;

    /// A communicator of the ranks that name the same colour, ordered by `key` and then by their ranks here; none for a rank that names none. Every
    /// rank calls it, and waits for all: drive each by a thread of its own. One thread that drives several makes [teams](Self::team).
    ///
    /// # Errors
    /// Ranks that do not come, or call something else; [`Invalid`](crate::Error::Invalid) inside a [group](Self::group); an error of the transport.
    fn split(&self, colour: Option<u32>, key: u32) -> Result<Option<Self>>
    where
        Self: Sized;

    /// A communicator of a team's members, numbered as in the team; none for a rank outside. Every rank calls it, a rank outside too.
    ///
    /// # Errors
    /// As [`split`](Self::split), and [`Invalid`](crate::Error::Invalid) for a team of a world of another size.
    fn team(&self, team: &Team) -> Result<Option<Self>>
    where
        Self: Sized,
    {
        check_team(team, self.world(), "Communicator::team")?;
        let place = team.rank_of(self.rank());
        self.split(place.map(|_| 0), place.map_or(0, Rank::index))
    }

    /// Waits on the host for the work of a stream, within the transport's deadline if it has one: a rank that does not come is an error then.
    ///
    /// # Errors
    /// As [`Stream::synchronize`]; an error of the transport.
    #[track_caller]
    fn wait(&self, stream: &Stream) -> Result<()> {
        stream.synchronize()
    }

    /// Later work of the stream starts when every rank's stream has come here. The host does not wait.
    ///
    /// # Errors
    /// [`ForeignRuntime`](crate::Error::ForeignRuntime); an error of the transport.
    #[track_caller]
    fn barrier(&self, stream: &Stream) -> Result<()>;
}

/// Fails for a team of a world of another size.
pub(super) fn check_team(team: &Team, world: WorldSize, what: &'static str) -> Result<()> {
    if team.world() == world {
        return Ok(());
    }
    Err(Error::Invalid { what, why: format!("the team is of a world of {}, this one has {world}", team.world()) })
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
