//! Rows that ranks put to the next one of a ring, by flags that are taken back: eager, and as a graph.

use oxtile::comm::Rank;
use oxtile::symmetric::{Arena, Pitched, Rows};
use oxtile::{Buffer, Graph, Result, Stream};

use crate::gpu::{later, numbers};
use crate::watch::{doing, settle};

/// Rows of a matrix, and columns of each of its two bands.
const COUNT: u64 = 96;
const WIDTH: u64 = 500;
const LEN: u64 = 2 * COUNT * WIDTH;
const READY: u32 = 0;
const FREE: u32 = 1;
const ROUNDS: u32 = 6;

/// One band of a matrix to one of another.
fn band(from: u64, to: u64) -> Rows {
    let pitch = 2 * WIDTH;
    Rows { count: COUNT, width: WIDTH, from: Pitched { start: from * WIDTH, pitch }, to: Pitched { start: to * WIDTH, pitch } }
}

/// The same numbers with the bands of each row swapped.
fn swapped(values: &[u32]) -> Vec<u32> {
    let swap = |row: &[u32]| [&row[WIDTH as usize..], &row[..WIDTH as usize]].concat();
    values.chunks(2 * WIDTH as usize).flat_map(swap).collect()
}

/// Every rank puts its matrix, its bands swapped, to the next rank, which copies it away.
pub fn exchange(arena: &Arena, [compute, out]: [&Stream; 2]) -> Result<()> {
    let (me, world) = (arena.rank(), arena.world());
    let shifted = |by: u32| Rank::new((me.index() + by) % world.get(), world).expect("of this world");
    let (next, last) = (shifted(1), shifted(world.get() - 1));
    let (matrix, flags) = (arena.buffer::<u32>(LEN)?, arena.flags("bands", 2)?);
    let (mut own, mut taken) = (Buffer::<u32>::zeros(out, LEN)?, Buffer::<u32>::zeros(compute, LEN)?);
    doing(me, "opening the place of the rank before");
    flags.open(compute, FREE, last)?;
    let put = |own: &Buffer<u32>| {
        let (batch, peer) = (arena.batch(out).take_back(&flags, FREE, next)?, matrix.peer(next)?);
        batch.put_rows(&peer, own, band(0, 1))?.put_rows(&peer, own, band(1, 0))?.set(&flags, READY, next)?.enqueue()
    };
    let take = |taken: &mut Buffer<u32>| {
        flags.take_back(compute, READY, last)?;
        taken.copy_from(compute, matrix.local())?;
        flags.set(compute, FREE, last)
    };
    let graph = Graph::capture(&[out, compute], || put(&own).and_then(|()| take(&mut taken)))?;
    for round in 0..ROUNDS {
        doing(me, format!("round {round} of putting rows"));
        later(&mut own, out, &numbers(me, round, LEN as u32))?;
        if round % 2 == 0 {
            graph.replay(compute)?;
        } else {
            put(&own)?;
            take(&mut taken)?;
        }
        settle(compute)?;
        assert!(taken.to_vec(compute)? == swapped(&numbers(last, round, LEN as u32)), "{me}, round {round}: the rows that {last} put");
    }
    doing(me, "getting rows");
    settle(out)?;
    let mut mine = arena.buffer::<u32>(LEN)?;
    later(mine.local_mut(), compute, &numbers(me, 0, LEN as u32))?;
    let got = Buffer::uninitialised(compute, COUNT * WIDTH)?;
    let rows = Rows { to: Pitched { start: 0, pitch: WIDTH }, ..band(1, 0) };
    let got = mine.peer(me)?.get_rows(compute, rows, got)?.wait()?;
    let second = numbers(me, 0, LEN as u32).chunks(WIDTH as usize).skip(1).step_by(2).flatten().copied().collect::<Vec<_>>();
    assert!(got.to_vec(compute)? == second, "{me}: the rows that it got");
    Ok(())
}
