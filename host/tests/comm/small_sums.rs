//! Small sums over ranks, of members that are not all ranks.

use half::bf16 as Half;
use oxtile::comm::Team;
use oxtile::num::bf16;
use oxtile::overlap::AllReduceMethod::OneShot;
use oxtile::overlap::{AllReduceMemory, GemmAllReduce, OverlapMemory};
use oxtile::{Buffer, Result};

use crate::arenas::Arenas;
use crate::reduced::{config, options};

/// Members that are not all ranks, in another order than those: each has the sum in the order of the members.
#[test]
fn a_team_has_small_sums_of_its_own() -> Result<()> {
    let (all, config) = (Arenas::with(3, 1, options()), config(OneShot, 1, [4, 8, 16]));
    let members = [2, 0];
    let team = |members: &[u32]| Team::new(all.world.size(), &members.iter().map(|rank| all.world.rank(*rank)).collect::<Vec<_>>());
    let (team, other) = (team(&members)?, team(&[1])?);
    let (mut made, mut operands) = (Vec::new(), Vec::new());
    for rank in [0, 1, 2] {
        let (i, stream) = (rank as usize, all.stream(rank as usize));
        let out = all.world.ranks[i].device().urgent_stream()?;
        // All ranks of the world take as much, also one that is in another team, of another size.
        let member = if rank == 1 { &other } else { &team }.member(all.world.rank(rank)).expect("it is a member");
        let parts = OverlapMemory::take(&all.arenas[i], &member, config.bytes::<bf16, bf16>(team.size())?, &out)?;
        made.push(GemmAllReduce::<bf16, bf16>::new(&AllReduceMemory::take(&parts, 2 * 4 * 8)?, stream, config)?);
        let value = |value: f32| bf16::from_bits(Half::from_f32(value).to_bits());
        operands.push([Buffer::from_slice(stream, &[value(1.0 + rank as f32); 4 * 8])?, Buffer::from_slice(stream, &[value(1.0); 8 * 8])?]);
    }
    let mut bound = Vec::new();
    for rank in members {
        let (i, [a, b]) = (rank as usize, &operands[rank as usize]);
        bound.push(made[i].bind(all.stream(i), a.view(), b.view(), None)?);
    }
    for _ in 0..3 {
        for (product, rank) in bound.iter_mut().zip(members) {
            product.run(all.stream(rank as usize))?;
        }
    }
    for (product, rank) in bound.iter().zip(members) {
        let i = rank as usize;
        all.arenas[i].ticket(all.stream(i))?.wait()?;
        let found = product.buffer().to_vec_as::<Half>(all.stream(i))?;
        assert!(found.iter().all(|found| found.to_f32() == 32.0), "rank {rank}: {found:?}");
    }
    Ok(())
}
