//! Teams of ranks on GPUs: what goes wrong in one ends it alone.

use std::time::{Duration, Instant};

use oxtile::comm::{HostRank, Rank, Team};
use oxtile::symmetric::{Arena, ArenaOptions, Epoch, SymmetricError};
use oxtile::{Error, Result};

use crate::gpu::{meet, options, program};
use crate::watch::doing;

/// Ranks 2 and 0 of a world are a team whose members wait for each other in vain. Then they make another, in which all works, and so it does in the
/// world, which knows nothing of it.
pub fn rank(rank: HostRank) -> Result<()> {
    let world = rank.world();
    let team = Team::new(world, &[2, 0].map(|index| Rank::new(index, world).expect("of three")))?;
    if let Some(member) = rank.team(&team)? {
        silence(&member)?;
        drop(member);
        program(rank.team(&team)?.expect("as before"), options())?;
    }
    program(rank, options())
}

fn silence(member: &HostRank) -> Result<()> {
    let (deadline, stream) = (Duration::from_secs(2), member.device().stream()?);
    doing(member.rank(), "meeting the other member");
    meet(member)?;
    let arena = Arena::open(member, ArenaOptions { deadline, ..options() })?;
    let (buffer, channel) = (arena.buffer::<u32>(4)?, arena.channel()?);
    let other = Rank::new(1 - member.rank().index(), member.world()).expect("of two");
    buffer.peer(other)?;
    doing(member.rank(), "waiting in a team for a signal that is never sent");
    let start = Instant::now();
    arena.wait(&stream, channel, other, Epoch::ZERO.next())?;
    // A host's wait that knows of no arena ends as that for a ticket.
    let wait = || if member.rank() == Rank::ZERO { arena.ticket(&stream)?.wait() } else { stream.synchronize() };
    let error = wait().expect_err("no rank signals");
    let is_told = matches!(&error, Error::Symmetric(SymmetricError::Deadline { .. } | SymmetricError::Aborted { .. }));
    assert!(is_told && start.elapsed() < deadline + Duration::from_secs(1), "{error}, after {:?}", start.elapsed());
    stream.synchronize()
}
