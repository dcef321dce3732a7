//! What goes wrong in a team ends the team, and nothing else.

use std::sync::{Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use oxtile::comm::{ArenaRank, HostRank, Rank, Team, WorldSize};
use oxtile::symmetric::{Arena, ArenaOptions, Channel, Epoch, SymmetricBuffer, SymmetricError};
use oxtile::{Buffer, Error, Result, Runtime, Stream};

use crate::support::World;

const FIRST: Epoch = Epoch::ZERO.next();

fn options(deadline: Duration) -> ArenaOptions {
    ArenaOptions { bytes: 1 << 12, deadline, ..ArenaOptions::default() }
}

/// A rank's arena with what an exchange with the next rank needs.
struct Side {
    arena: Arena,
    buffer: SymmetricBuffer<u32>,
    ready: Channel,
    stream: Stream,
}

impl Side {
    fn open(rank: &impl ArenaRank, deadline: Duration) -> Result<Self> {
        let arena = Arena::open(rank, options(deadline))?;
        let (buffer, ready) = (arena.buffer(1)?, arena.channel()?);
        Ok(Self { arena, buffer, ready, stream: rank.device().stream()? })
    }

    fn next(&self) -> Rank {
        Rank::new((self.arena.rank().index() + 1) % self.arena.world().get(), self.arena.world()).unwrap()
    }

    /// Sets the own word for all.
    fn say(&mut self, value: u32) -> Result<()> {
        self.buffer.local_mut().copy_from_pinned(&self.stream, &oxtile::PinnedBuffer::from_slice(&self.stream, &[value])?)?;
        self.arena.world().ranks().try_for_each(|to| self.arena.signal(&self.stream, self.ready, to, FIRST))
    }

    /// The word of the next rank.
    fn hear(&self) -> Result<u32> {
        self.arena.wait(&self.stream, self.ready, self.next(), FIRST)?;
        let target = Buffer::uninitialised(&self.stream, 1)?;
        let heard = self.buffer.peer(self.next())?.get(&self.stream, 0..1, target, 0)?.wait()?;
        Ok(heard.to_vec(&self.stream)?[0])
    }
}

/// Rank 3 says nothing in its team: the team's other member is told which, the other team and the world go on, and the team's ranks can make
/// another team.
#[test]
fn a_silent_member_ends_its_team_alone() {
    for seed in 0..8 {
        let world = World::new(4, seed);
        let (long, short) = (Duration::from_secs(30), Duration::from_millis(200));
        let pair = |first| Team::strided(world.size(), world.rank(first), 2, WorldSize::new(2).unwrap()).unwrap();
        let sides = |ranks: &[usize], team: &Team, deadline| -> Vec<Side> {
            ranks.iter().map(|i| Side::open(&world.ranks[*i].team(team).unwrap().unwrap(), deadline).unwrap()).collect()
        };
        let mut all: Vec<_> = world.ranks.iter().map(|rank| Side::open(rank, long).unwrap()).collect();
        let (mut even, mut odd) = (sides(&[0, 2], &pair(0), long), sides(&[1, 3], &pair(1), short));
        odd[0].say(1).unwrap();
        let error = odd[0].hear().unwrap_err();
        let Error::Symmetric(SymmetricError::Deadline { missing, .. }) = &error else { panic!("{error}") };
        assert_eq!(missing[0].index(), 1, "rank 3 is number 1 of its team: {error}");
        assert!(odd[0].say(1).is_err() && odd[1].hear().is_err(), "the team is unusable, on both members");

        for (i, side) in (10..).zip(&mut even) {
            side.say(i).unwrap();
        }
        assert_eq!(even.iter().map(|side| side.hear().unwrap()).collect::<Vec<_>>(), [11, 10]);
        for (i, side) in (20..).zip(&mut all) {
            side.say(i).unwrap();
        }
        assert_eq!(all.iter().map(|side| side.hear().unwrap()).collect::<Vec<_>>(), [21, 22, 23, 20]);

        let mut again = sides(&[1, 3], &pair(1), long);
        for (i, side) in (30..).zip(&mut again) {
            side.say(i).unwrap();
        }
        assert_eq!(again.iter().map(|side| side.hear().unwrap()).collect::<Vec<_>>(), [31, 30]);
    }
}

/// The same of ranks of a host, here threads: one that leaves its team without closing what it has is an error of that team.
#[test]
fn a_member_that_leaves_ends_its_team_alone() {
    let runtime = Runtime::emulated(3).unwrap();
    let devices: Vec<_> = (0..3).map(|index| runtime.device(index).unwrap()).collect();
    let size = WorldSize::new(3).unwrap();
    // In another order than the world's.
    let team = Team::new(size, &[2, 0].map(|i| Rank::new(i, size).unwrap())).unwrap();
    let (tell, told) = mpsc::channel();
    let told = Mutex::new(told);
    let program = |rank: HostRank| -> Result<()> {
        let mut world = Side::open(&rank, Duration::from_secs(30))?;
        let member = rank.team(&team)?;
        assert_eq!(member.as_ref().map(|member| member.rank().index()), [Some(1), None, Some(0)][rank.rank().index() as usize]);
        if let Some(member) = member {
            let mut side = Side::open(&member, Duration::from_secs(30))?;
            side.say(rank.rank().index())?;
            assert_eq!(side.hear()?, 2 - rank.rank().index());
            if rank.rank() == Rank::ZERO {
                // Not before the other has heard what was said.
                told.lock().unwrap().recv_timeout(Duration::from_secs(20)).expect("the other has heard it");
                drop((side, member));
            } else {
                tell.send(()).unwrap();
                // Number 1 of the team, which is rank 0 of the world, has left.
                side.arena.wait(&side.stream, side.ready, side.next(), FIRST.next())?;
                let (start, target) = (Instant::now(), Buffer::uninitialised(&side.stream, 1)?);
                let error = side.buffer.peer(side.next())?.get(&side.stream, 0..1, target, 0)?.wait().expect_err("no rank signals");
                assert!(matches!(&error, Error::Symmetric(SymmetricError::Aborted { rank, .. }) if rank.index() == 1), "{error}");
                assert!(start.elapsed() < Duration::from_secs(20), "it was told before its deadline");
            }
            // The same ranks are a new team.
            let member = rank.team(&team)?.expect("as before");
            let mut side = Side::open(&member, Duration::from_secs(30))?;
            side.say(5)?;
            assert_eq!(side.hear()?, 5);
            let Side { arena, buffer, .. } = side;
            drop(buffer);
            arena.close()?.finish()?;
        }
        world.say(rank.rank().index())?;
        assert_eq!(world.hear()?, (rank.rank().index() + 1) % 3);
        let Side { arena, buffer, .. } = world;
        drop(buffer);
        arena.close()?.finish()?;
        rank.close()
    };
    thread::scope(|scope| {
        let threads: Vec<_> = HostRank::threads(&devices).unwrap().into_iter().map(|rank| scope.spawn(|| program(rank))).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap().unwrap());
    });
    let other = Team::all(WorldSize::new(4).unwrap());
    assert!(HostRank::threads(&devices).unwrap()[0].team(&other).is_err(), "a team of another world");
}
