//! Grouped calls, and communicators of some ranks: the same cases for every communicator. A rank a thread.

use oxtile::comm::{Communicator, Rank, ReduceOp, Reducible, Team, WorldSize};
use oxtile::num::{Float, bf16, e4m3, e5m2, f16};
use oxtile::{Buffer, Error, HostElement, Result, Stream};

/// A case of one rank, with two streams of its device.
pub trait Case: Sync {
    fn run<C: Communicator>(&self, comm: &C, streams: [&Stream; 2]) -> Result<()>;
}

macro_rules! cases {
    ($($name:ident = $body:ident;)*) => {
        $(
            pub struct $name;
            impl Case for $name {
                fn run<C: Communicator>(&self, comm: &C, streams: [&Stream; 2]) -> Result<()> {
                    $body(comm, streams)
                }
            }
        )*
    };
}

cases! {
    Rings = rings;
    Together = together;
    TwoStreams = two_streams;
    Halves = halves;
    Teams = teams;
    Misuse = misuse;
    Failed = failed;
    Dtypes = dtypes;
}

fn rank_at<C: Communicator>(comm: &C, by: u32) -> Rank {
    Rank::new((comm.rank().index() + by) % comm.world().get(), comm.world()).expect("of this world")
}

fn expect(what: &str, stream: &Stream, buffer: &Buffer<u32>, expected: &[u32]) -> Result<()> {
    assert_eq!(buffer.to_vec(stream)?, expected, "{what}");
    Ok(())
}

/// All send before they receive: without the group, they would wait for each other.
fn rings<C: Communicator>(comm: &C, [stream, _]: [&Stream; 2]) -> Result<()> {
    let (me, world) = (comm.rank().index(), comm.world().get());
    let (mine, mut theirs) = (Buffer::from_slice(stream, &[me; 1000])?, Buffer::<u32>::zeros(stream, 1000)?);
    for step in 0..3 {
        comm.group(|| {
            comm.send(stream, &mine, rank_at(comm, step))?;
            comm.recv(stream, &mut theirs, rank_at(comm, world * 3 - step))
        })?;
        expect("a ring", stream, &theirs, &[rank_at(comm, world * 3 - step).index(); 1000])?;
    }
    Ok(())
}

/// Calls of every kind as one, some of which are empty; what the body returns comes back.
fn together<C: Communicator>(comm: &C, [stream, _]: [&Stream; 2]) -> Result<()> {
    let (me, world) = (comm.rank().index(), comm.world().get());
    let mut sum = Buffer::from_slice(stream, &[me, 1])?;
    let (shard, mut all) = (Buffer::from_slice(stream, &[me, me])?, Buffer::<u32>::zeros(stream, 2 * u64::from(world))?);
    let mut told = Buffer::from_slice(stream, &[100 + me])?;
    let (parts, mut part) = (Buffer::from_slice(stream, &vec![me + 1; world as usize])?, Buffer::<u32>::zeros(stream, 1)?);
    let (turned_from, mut turned) = (Buffer::from_slice(stream, &vec![me; world as usize])?, Buffer::<u32>::zeros(stream, world.into())?);
    for _ in 0..2 {
        let found = comm.group(|| {
            comm.all_reduce(stream, &mut sum, ReduceOp::Sum)?;
            comm.all_gather(stream, &shard, &mut all)?;
            comm.broadcast(stream, &mut told, rank_at(comm, world - me))?;
            comm.reduce_scatter(stream, &parts, &mut part, ReduceOp::Sum)?;
            comm.all_to_all(stream, &turned_from, &mut turned)?;
            // Only read, so that both calls may.
            comm.all_reduce(stream, &mut Buffer::<u32>::zeros(stream, 0)?, ReduceOp::Max)?;
            Ok(7)
        })?;
        assert_eq!(found, 7);
    }
    let triangle = world * (world - 1) / 2;
    expect("all_reduce twice", stream, &sum, &[world * triangle, world * world])?;
    expect("all_gather", stream, &all, &(0..world).flat_map(|rank| [rank, rank]).collect::<Vec<_>>())?;
    expect("broadcast", stream, &told, &[100])?;
    expect("reduce_scatter", stream, &part, &[triangle + world])?;
    expect("all_to_all", stream, &turned, &(0..world).collect::<Vec<_>>())?;
    comm.group(|| Ok(()))
}

/// Each stream of a group's calls goes on when all of them are done.
fn two_streams<C: Communicator>(comm: &C, [one, other]: [&Stream; 2]) -> Result<()> {
    let (me, world) = (comm.rank().index(), comm.world().get());
    let (mut first, mut second) = (Buffer::from_slice(one, &[me])?, Buffer::from_slice(other, &[1_u32])?);
    for _ in 0..3 {
        comm.group(|| {
            comm.all_reduce(one, &mut first, ReduceOp::Max)?;
            comm.all_reduce(other, &mut second, ReduceOp::Sum)
        })?;
    }
    // On the stream of the other one's call.
    expect("the first", other, &first, &[world - 1])?;
    expect("the second", one, &second, &[world.pow(3)])
}

/// Even and odd ranks, the last first; then rank 0 stays out; then each half is split again.
fn halves<C: Communicator>(comm: &C, [stream, _]: [&Stream; 2]) -> Result<()> {
    let (me, world) = (comm.rank().index(), comm.world().get());
    let half = comm.split(Some(me % 2), world - me)?.expect("a colour was named");
    let members: Vec<_> = (0..world).rev().filter(|rank| rank % 2 == me % 2).collect();
    assert_eq!(half.world().get() as usize, members.len());
    assert_eq!(members[half.rank().index() as usize], me);
    let mut sum = Buffer::from_slice(stream, &[me])?;
    half.all_reduce(stream, &mut sum, ReduceOp::Sum)?;
    expect("a half", stream, &sum, &[members.iter().sum()])?;
    let mut all = Buffer::<u32>::zeros(stream, members.len() as u64)?;
    half.all_gather(stream, &Buffer::from_slice(stream, &[me])?, &mut all)?;
    expect("in the order of keys", stream, &all, &members)?;
    // The whole still works beside its parts.
    let mut count = Buffer::from_slice(stream, &[1_u32])?;
    comm.all_reduce(stream, &mut count, ReduceOp::Sum)?;
    expect("the whole", stream, &count, &[world])?;
    let rest = comm.split((me != 0).then_some(5), 0)?;
    assert_eq!(rest.map(|rest| (rest.world().get(), rest.rank().index())), (me != 0).then(|| (world - 1, me - 1)));
    let alone = half.split(Some(half.rank().index()), 0)?.expect("a colour was named");
    assert_eq!((alone.world(), alone.rank()), (WorldSize::ONE, Rank::ZERO));
    alone.all_reduce(stream, &mut count, ReduceOp::Sum)?;
    expect("alone", stream, &count, &[world])
}

/// The members of a team, in an order of its own; a rank outside has no communicator.
fn teams<C: Communicator>(comm: &C, [stream, _]: [&Stream; 2]) -> Result<()> {
    let (me, world) = (comm.rank().index(), comm.world());
    let last = Rank::new(world.get() - 1, world).expect("of this world");
    let members = if world == WorldSize::ONE { vec![last] } else { vec![last, Rank::ZERO] };
    let team = Team::new(world, &members)?;
    let part = comm.team(&team)?;
    assert_eq!(part.is_some(), members.contains(&comm.rank()));
    if let Some(part) = part {
        assert_eq!(part.rank(), team.rank_of(comm.rank()).expect("a member"));
        let mut told = Buffer::from_slice(stream, &[me])?;
        part.broadcast(stream, &mut told, Rank::ZERO)?;
        expect("the first member's", stream, &told, &[last.index()])?;
        // By its number in the world a rank is not of the team.
        let far = Rank::new(2, WorldSize::new(3).expect("three")).expect("of three");
        assert!(matches!(part.broadcast(stream, &mut told, far), Err(Error::Invalid { .. })));
        assert!(matches!(part.group(|| part.send(stream, &told, far)), Err(Error::Invalid { .. })));
    }
    let larger = Team::all(WorldSize::new(world.get() + 1).expect("not zero"));
    assert!(matches!(comm.team(&larger).map(|_| ()), Err(Error::Invalid { .. })));
    comm.barrier(stream)?;
    stream.synchronize()
}

/// What does not belong into a group is an error before anything is enqueued, and the group goes on.
fn misuse<C: Communicator>(comm: &C, [stream, _]: [&Stream; 2]) -> Result<()> {
    let (me, world) = (comm.rank().index(), comm.world().get());
    let other = comm.split(Some(0), me)?.expect("a colour was named");
    let invalid = |what: &str, why: &str, result: Result<()>| {
        let error = result.expect_err(what).to_string();
        assert!(error.contains(why), "{what}: {error}");
    };
    let mut sum = Buffer::from_slice(stream, &[me])?;
    let mut spare = Buffer::from_slice(stream, &[1_u32])?;
    let [mut all, mut turned] = [Buffer::<u32>::zeros(stream, world.into())?, Buffer::<u32>::zeros(stream, world.into())?];
    comm.group(|| {
        comm.all_reduce(stream, &mut sum, ReduceOp::Sum)?;
        invalid("a group in a group", "groups do not nest", comm.group(|| Ok(())));
        invalid("another's group", "groups do not nest", other.group(|| Ok(())));
        invalid("a split", "a group is under way", comm.split(Some(0), 0).map(|_| ()));
        invalid("a team", "a group is under way", comm.team(&Team::all(comm.world())).map(|_| ()));
        invalid("another's call", "another communicator", other.all_reduce(stream, &mut spare, ReduceOp::Sum));
        invalid("another's barrier", "another communicator", other.barrier(stream));
        invalid("a second use", "calls of a group have no order", comm.all_reduce(stream, &mut sum, ReduceOp::Sum));
        invalid("its use as another's root", "calls of a group have no order", comm.broadcast(stream, &mut sum, rank_at(comm, 1)));
        invalid("its use as a root", "calls of a group have no order", comm.broadcast(stream, &mut sum, comm.rank()));
        invalid("its use as a shard", "calls of a group have no order", comm.all_gather(stream, &sum, &mut all));
        invalid("its use as a part", "calls of a group have no order", comm.reduce_scatter(stream, &all, &mut sum, ReduceOp::Sum));
        comm.all_to_all(stream, &all, &mut turned)?;
        invalid("a second exchange", "calls of a group have no order", comm.all_to_all(stream, &all, &mut turned));
        Ok(())
    })?;
    expect("once", stream, &sum, &[world * (world - 1) / 2])?;
    other.group(|| other.all_reduce(stream, &mut spare, ReduceOp::Sum))?;
    expect("the other's", stream, &spare, &[world])
}

/// What a body called before it failed is made all the same.
fn failed<C: Communicator>(comm: &C, [stream, _]: [&Stream; 2]) -> Result<()> {
    let world = comm.world().get();
    let mut sum = Buffer::from_slice(stream, &[1_u32])?;
    let error = comm.group(|| -> Result<()> {
        comm.all_reduce(stream, &mut sum, ReduceOp::Sum)?;
        Err(Error::Invalid { what: "the body", why: "it fails".to_owned() })
    });
    assert_eq!(error.unwrap_err().to_string(), "the body: it fails");
    expect("what was called before", stream, &sum, &[world])?;
    comm.all_reduce(stream, &mut sum, ReduceOp::Sum)?;
    expect("and after", stream, &sum, &[world * world])
}

/// A sum and a largest of a type, whole and by shards: against a loop over what each rank brings. All sums are exact, in whatever order.
fn reduces<C: Communicator, T>(comm: &C, stream: &Stream, of: impl Fn(u32, u32) -> T, fold: [&dyn Fn(T, T) -> T; 2]) -> Result<()>
where
    T: Reducible + HostElement<Device = T> + PartialEq + std::fmt::Debug,
{
    let (me, world) = (comm.rank().index(), comm.world().get());
    let len = 3 * world;
    for (op, fold) in [ReduceOp::Sum, ReduceOp::Max].into_iter().zip(fold) {
        let mut expected: Vec<T> = (0..len).map(|i| of(0, i)).collect();
        for rank in 1..world {
            expected.iter_mut().zip(0..).for_each(|(sum, i)| *sum = fold(*sum, of(rank, i)));
        }
        let mine: Vec<T> = (0..len).map(|i| of(me, i)).collect();
        let (mut whole, mut shard) = (Buffer::from_slice(stream, &mine)?, Buffer::from_slice(stream, &mine[..3])?);
        comm.reduce_scatter(stream, &whole, &mut shard, op)?;
        comm.all_reduce(stream, &mut whole, op)?;
        assert_eq!(whole.to_vec(stream)?, expected, "{op:?} of {:?}", T::DTYPE);
        let part = 3 * me as usize;
        assert_eq!(shard.to_vec(stream)?, expected[part..part + 3], "{op:?} of {:?}, a shard", T::DTYPE);
    }
    Ok(())
}

/// Values of both signs that differ by rank and place.
fn pattern(rank: u32, i: u32) -> i32 {
    ((7 * rank + 5 * i + rank * i) % 11) as i32 - 5
}

fn dtypes<C: Communicator>(comm: &C, [stream, _]: [&Stream; 2]) -> Result<()> {
    macro_rules! integers {
        ($($t:ty)*) => { $(
            // Large ones, so that sums wrap.
            let of = |rank, i| (pattern(rank, i) as $t).wrapping_mul(<$t>::MAX / 7);
            reduces(comm, stream, of, [&<$t>::wrapping_add, &|a: $t, b: $t| if a > b { a } else { b }])?;
        )* };
    }
    integers!(u8 u32 u64 i8 i32 i64);
    reduces(comm, stream, |rank, i| pattern(rank, i) as f32 * 0.5, [&|a, b| a + b, &f32::max])?;
    reduces(comm, stream, |rank, i| f64::from(pattern(rank, i)) * 0.125, [&|a, b| a + b, &f64::max])?;
    macro_rules! narrow {
        ($($t:ty: $scale:literal)*) => { $(
            let of = |rank, i| <$t>::from_f32((pattern(rank, i) % $scale) as f32);
            let add = |a: $t, b: $t| <$t>::from_f32(a.to_f32() + b.to_f32());
            let max = |a: $t, b: $t| if a.to_f32() > b.to_f32() { a } else { b };
            let reduced = reduces(comm, stream, of, [&add, &max]);
            // An NCCL before 2.24.
            if !matches!(&reduced, Err(Error::Invalid { why, .. }) if why.contains("take 2.24 or newer")) {
                reduced?;
            }
        )* };
    }
    // All sums of eight ranks have few enough bits.
    narrow!(bf16: 6 f16: 6 e4m3: 3 e5m2: 2);
    Ok(())
}
