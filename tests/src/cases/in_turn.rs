//! Ranks that take turns on one device, since ranks at once need several devices: a collective gives a rank what the others gave in their
//! last turn. So a result that depends on `n` collectives in a row is right in turn `n + 1`.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

use oxtile::comm::{Communicator, DType, Rank, ReduceOp, Reducible, WorldSize};
use oxtile::{Buffer, Error, Result, Stream};
use oxtile_tile::launch::{DeviceView, DeviceViewMut};
use oxtile_tile::num::Pod;

/// Bytes by the number of the collective in its rank's turn, and by rank.
type Board = HashMap<(usize, u32), Vec<u8>>;

/// One of the ranks.
pub struct InTurn {
    rank: Rank,
    world: WorldSize,
    board: Rc<RefCell<Board>>,
    calls: Cell<usize>,
}

impl InTurn {
    /// All ranks of a world.
    pub fn world(ranks: u32) -> Vec<Self> {
        let (world, board) = (WorldSize::new(ranks).expect("at least one rank"), Rc::default());
        world.ranks().map(|rank| Self { rank, world, board: Rc::clone(&board), calls: Cell::new(0) }).collect()
    }

    /// The rank's next turn: its collectives are counted anew.
    pub fn begin(&self) -> &Self {
        self.calls.set(0);
        self
    }

    /// Leaves this rank's bytes and takes those of all, zeros for a rank that had no turn yet.
    fn meet(&self, bytes: Vec<u8>) -> Vec<Vec<u8>> {
        let call = self.calls.replace(self.calls.get() + 1);
        let nothing = vec![0; bytes.len()];
        let mut board = self.board.borrow_mut();
        board.insert((call, self.rank.index()), bytes);
        self.world.ranks().map(|rank| board.get(&(call, rank.index())).unwrap_or(&nothing).clone()).collect()
    }
}

/// The view as bytes, for work on this stream alone.
fn bytes<T: Pod>(stream: &Stream, view: DeviceView<'_, T>) -> Result<Buffer<u8>> {
    // SAFETY: the viewed buffer outlives the use below, which is on the one stream that uses it, and any bytes are a `Pod`.
    unsafe { Buffer::borrow_raw(&stream.device(), view.address(), view.len() * size_of::<T>() as u64) }
}

fn unused<T>(what: &'static str) -> Result<T> {
    Err(Error::Invalid { what, why: "no case with ranks in turn calls it: write it".to_owned() })
}

impl Communicator for InTurn {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn world(&self) -> WorldSize {
        self.world
    }

    fn all_reduce<'a, T: Reducible>(&self, stream: &Stream, buffer: impl Into<DeviceViewMut<'a, T>>, op: ReduceOp) -> Result<()> {
        if (T::DTYPE, op) != (DType::F32, ReduceOp::Max) {
            return unused("InTurn::all_reduce");
        }
        let largest = |bytes: [&[u8]; 2]| {
            let [a, b] = bytes.map(|bytes| f32::from_le_bytes(bytes.try_into().expect("four bytes")));
            a.max(b).to_le_bytes()
        };
        let mut buffer = bytes(stream, buffer.into().as_view())?;
        let all = self.meet(buffer.to_vec(stream)?).into_iter();
        let join = |a: Vec<u8>, b: Vec<u8>| a.chunks(4).zip(b.chunks(4)).flat_map(|(a, b)| largest([a, b])).collect();
        buffer.copy_from_slice(stream, &all.reduce(join).expect("at least one rank"))
    }

    fn all_gather<'a, T: Pod>(
        &self,
        stream: &Stream,
        shard: impl Into<DeviceView<'a, T>>,
        output: impl Into<DeviceViewMut<'a, T>>,
    ) -> Result<()> {
        let all = self.meet(bytes(stream, shard.into())?.to_vec(stream)?);
        bytes(stream, output.into().as_view())?.copy_from_slice(stream, &all.concat())
    }

    fn reduce_scatter<'a, T: Reducible>(
        &self,
        _: &Stream,
        _: impl Into<DeviceView<'a, T>>,
        _: impl Into<DeviceViewMut<'a, T>>,
        _: ReduceOp,
    ) -> Result<()> {
        unused("InTurn::reduce_scatter")
    }

    fn broadcast<'a, T: Pod>(&self, _: &Stream, _: impl Into<DeviceViewMut<'a, T>>, _: Rank) -> Result<()> {
        unused("InTurn::broadcast")
    }

    fn all_to_all<'a, T: Pod>(&self, _: &Stream, _: impl Into<DeviceView<'a, T>>, _: impl Into<DeviceViewMut<'a, T>>) -> Result<()> {
        unused("InTurn::all_to_all")
    }

    fn exchange<T: Pod>(&self, _: &Stream, _: &[(Rank, DeviceView<'_, T>)], _: &[(Rank, DeviceViewMut<'_, T>)]) -> Result<()> {
        unused("InTurn::exchange")
    }

    fn group<R>(&self, _: impl FnOnce() -> Result<R>) -> Result<R> {
        unused("InTurn::group")
    }

    fn split(&self, _: Option<u32>, _: u32) -> Result<Option<Self>> {
        unused("InTurn::split")
    }

    fn barrier(&self, _: &Stream) -> Result<()> {
        unused("InTurn::barrier")
    }
}
