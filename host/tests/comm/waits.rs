//! Waits of a host that know of no arena, after signals that do not come: the arena ends them, by its deadline, with an error that names the rank.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use oxtile::comm::{Communicator, EmulatedCommunicator, Rank, ReduceOp, WorldSize};
use oxtile::symmetric::{Arena, ArenaOptions, Channel, Handover, SymmetricBuffer, SymmetricError};
use oxtile::{Buffer, EmulatedOptions, Error, PinnedBuffer, Result, Runtime, Stream};

use crate::arenas::FIRST;

const DEADLINE: Duration = Duration::from_millis(300);

/// What a test gives to a rank's thread.
struct Side<'a> {
    rank: &'a EmulatedCommunicator,
    arena: Arena,
    buffer: SymmetricBuffer<u32>,
    channel: Channel,
    handover: Handover,
    stream: Stream,
    other: Rank,
}

fn side(rank: &EmulatedCommunicator) -> Result<Side<'_>> {
    let arena = Arena::open(rank, ArenaOptions { deadline: DEADLINE, ..ArenaOptions::default() })?;
    let (buffer, channel, handover) = (arena.buffer(1)?, arena.channel()?, Handover::take(&arena)?);
    let other = Rank::new(1 - rank.rank().index(), rank.world()).unwrap();
    Ok(Side { rank, arena, buffer, channel, handover, stream: rank.device().stream()?, other })
}

/// Two ranks, a thread each. No order of streams could be given up: rank 1's thread may always come.
fn run(program: impl Fn(Side<'_>) -> Result<()> + Sync) -> Result<()> {
    let options = EmulatedOptions { devices: 2, patience: Duration::from_secs(5), ..EmulatedOptions::default() };
    let world = WorldSize::new(2).unwrap();
    let ranks = EmulatedCommunicator::world_of(&Runtime::emulated_with(options)?, world)?;
    let sides = ranks.iter().map(side).collect::<Result<Vec<_>>>()?;
    thread::scope(|scope| {
        let threads: Vec<_> = sides.into_iter().map(|side| scope.spawn(|| program(side))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().unwrap())
    })
}

/// Says that a rank is through, however it got there.
struct Through<'a>(&'a AtomicBool);

impl Through<'_> {
    fn wait(is_through: &AtomicBool) {
        while !is_through.load(Ordering::Acquire) {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Through<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Ways to wait for a stream on the host.
type Wait = (&'static str, fn(&Stream) -> Result<()>);

const WAITS: [Wait; 6] = [
    ("Stream::synchronize", |stream| stream.synchronize()),
    ("Event::synchronize", |stream| stream.record()?.synchronize()),
    ("a copy to the host", |stream| Buffer::<u32>::zeros(stream, 4)?.to_vec(stream).map(drop)),
    ("a copy from the host", |stream| Buffer::<u32>::zeros(stream, 4)?.copy_from_slice(stream, &[1_u32; 4])),
    ("pinned memory", |stream| {
        let mut pinned = PinnedBuffer::from_slice(stream, &[0_u32; 4])?;
        Buffer::<u32>::zeros(stream, 4)?.copy_to_pinned(stream, &mut pinned)?;
        pinned.as_slice().map(drop)
    }),
    ("a stream after it", |stream| {
        let later = stream.device().stream()?;
        later.wait(&stream.record()?)?;
        later.synchronize()
    }),
];

/// Rank 1's thread lives, and does not signal.
#[test]
fn every_wait_of_a_host_ends_by_the_deadline_of_the_arena() {
    let enqueue: [fn(&Side<'_>) -> Result<()>; 2] =
        [|side| side.arena.wait(&side.stream, side.channel, side.other, FIRST), |side| side.handover.accept(&side.stream, side.other)];
    for (what, wait) in WAITS {
        for enqueue in enqueue {
            let is_over = AtomicBool::new(false);
            run(|side| {
                if side.other.index() == 0 {
                    Through::wait(&is_over);
                    let error = side.arena.check().unwrap_err();
                    assert!(
                        matches!(&error, Error::Symmetric(SymmetricError::Aborted { rank, .. }) if *rank == side.other),
                        "{what}: {error}"
                    );
                    return Ok(());
                }
                let _through = Through(&is_over);
                side.buffer.peer(side.other)?;
                enqueue(&side)?;
                let start = Instant::now();
                let error = wait(&side.stream).expect_err(what);
                let took = start.elapsed();
                let SymmetricError::Deadline { rank, operation, missing, .. } = crate::arenas::symmetric::<()>(Err(error)) else {
                    panic!("{what}")
                };
                assert_eq!((rank, operation, missing), (side.arena.rank(), "a host's wait for a stream", vec![side.other]), "{what}");
                assert!((DEADLINE..DEADLINE + Duration::from_secs(1)).contains(&took), "{what} after {took:?}");
                // The streams were let go: they can be waited for, and used in another arena.
                side.stream.synchronize()
            })
            .unwrap();
        }
    }
}

/// A rank that is gone ends them at once.
#[test]
fn a_wait_of_a_host_ends_at_once_where_the_rank_is_gone() {
    let has_met = AtomicBool::new(false);
    run(|side| {
        if side.other.index() == 0 {
            side.buffer.peer(side.other)?;
            Through::wait(&has_met);
            return Ok(());
        }
        let meeting = Through(&has_met);
        side.buffer.peer(side.other)?;
        drop(meeting);
        side.arena.wait(&side.stream, side.channel, side.other, FIRST)?;
        let start = Instant::now();
        let error = side.stream.synchronize().unwrap_err();
        assert!(matches!(&error, Error::Symmetric(SymmetricError::Aborted { rank, .. }) if *rank == side.other), "{error}");
        assert!(start.elapsed() < DEADLINE * 2 / 3, "{:?}", start.elapsed());
        Ok(())
    })
    .unwrap();
}

/// What takes long on the device, and is no signal of the arena, is not cut off: here a collective whose other rank is late.
#[test]
fn work_that_waits_for_no_signal_may_take_longer_than_the_deadline() {
    run(|side| {
        let (stream, other) = (&side.stream, side.other);
        side.buffer.peer(other)?;
        side.arena.signal(stream, side.channel, other, FIRST)?;
        side.arena.wait(stream, side.channel, other, FIRST)?;
        stream.synchronize()?;
        let mut sum = Buffer::from_slice(stream, &[1_u32])?;
        if other.index() == 0 {
            thread::sleep(3 * DEADLINE);
        }
        side.rank.all_reduce(stream, &mut sum, ReduceOp::Sum)?;
        assert_eq!(sum.to_vec(stream)?, [2]);
        side.arena.check()?;
        drop((side.handover, side.buffer));
        side.arena.close()?.finish()
    })
    .unwrap();
}
