//! All ranks' memory as one range of addresses, in the program that GPUs and virtual ones run.

use oxtile::comm::Rank;
use oxtile::symmetric::{Arena, SymmetricBuffer};
use oxtile::{Buffer, Result, Stream};

use crate::watch::doing;

/// Reads every rank's buffer, where each holds `expected`. The stream has waited for all of it.
pub fn read_all(arena: &Arena, stream: &Stream, buffer: &SymmetricBuffer<u32>, expected: &[u32]) -> Result<()> {
    let (me, world) = (arena.rank(), arena.world());
    if !arena.capabilities().contiguous {
        assert!(buffer.contiguous().is_err(), "{me}: what is not said to be there is refused");
        return Ok(());
    }
    let (all, len) = (buffer.contiguous()?, expected.len() as u64);
    for rank in world.ranks() {
        let offset = all.address(rank)? - all.address(Rank::ZERO)?;
        assert_eq!(offset, u64::from(rank.index()) * all.stride() * 4, "{me}");
    }
    assert_eq!(all.address(me)?, buffer.local().address(), "{me}");
    doing(me, "getting from all at once");
    let found = all.get(stream, Buffer::uninitialised(stream, len * u64::from(world.get()))?)?.wait()?;
    assert_eq!(found.to_vec(stream)?, expected.repeat(world.get() as usize), "{me}");
    Ok(())
}
