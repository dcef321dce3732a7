//! Rows of a matrix that ranks put to one another and get from one another.

use oxtile::runtime::{RaceKind, StreamRace};
use oxtile::symmetric::{Epoch, Pitched, Rows, SymmetricBuffer};
use oxtile::timeline::{Activity, Timeline};
use oxtile::{Buffer, Error, Graph, PinnedBuffer, Result, Stream};

use crate::arenas::{Arenas, FIRST};
use crate::support::{numbers, seeds};

/// Rows of a matrix, and columns of a band of it.
const COUNT: u64 = 3;
const WIDTH: u64 = 2;

/// How rows travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    Put,
    Batch,
    Get,
}

/// Band `from` of the columns of a matrix of `bands` bands to band `to` of another.
fn band(bands: u64, from: u64, to: u64) -> Rows {
    let pitch = bands * WIDTH;
    Rows { count: COUNT, width: WIDTH, from: Pitched { start: from * WIDTH, pitch }, to: Pitched { start: to * WIDTH, pitch } }
}

/// Every rank has a matrix, and gets band `me` of each rank's as that rank's band: an exchange of columns.
fn exchange(all: &Arenas, by: By) -> Result<Vec<Vec<u32>>> {
    let size = u64::from(all.world.size().get());
    let len = COUNT * size * WIDTH;
    let (mut matrices, mut targets, ready) = (all.buffers(len), all.buffers(len), all.channels());
    for (matrix, i) in matrices.iter_mut().zip(0..) {
        let host = PinnedBuffer::from_slice(all.stream(i), &numbers(i as u32, len as u32))?;
        matrix.local_mut().copy_from_pinned(all.stream(i), &host)?;
    }
    for (i, arena) in all.arenas.iter().enumerate() {
        let (me, stream) = (i as u64, all.stream(i));
        for peer in arena.world().ranks() {
            let (rows, theirs) = (band(size, u64::from(peer.index()), me), targets[i].peer(peer)?);
            match by {
                By::Put => theirs.put_rows(stream, matrices[i].local(), rows)?,
                By::Batch => arena.batch(stream).put_rows(&theirs, matrices[i].local(), rows)?.enqueue()?,
                By::Get => {}
            }
            arena.signal(stream, ready[i], peer, FIRST)?;
        }
    }
    let mut found = Vec::new();
    for (i, arena) in all.arenas.iter().enumerate() {
        let (me, stream) = (i as u64, all.stream(i));
        let mut got = Buffer::uninitialised(stream, len)?;
        for peer in arena.world().ranks() {
            arena.wait(stream, ready[i], peer, FIRST)?;
            if by == By::Get {
                got = matrices[i].peer(peer)?.get_rows(stream, band(size, me, u64::from(peer.index())), got)?.then(stream)?;
            }
        }
        found.push((if by == By::Get { &got } else { targets[i].local() }).to_vec(stream)?);
    }
    all.world.streams.iter().try_for_each(Stream::synchronize)?;
    targets.clear();
    Ok(found)
}

#[test]
fn bands_of_columns_are_exchanged() {
    for (size, seeds) in [(1, 4), (2, seeds()), (3, 16), (4, 16)] {
        for (seed, by) in (0..seeds).flat_map(|seed| [By::Put, By::Batch, By::Get].map(|by| (seed, by))) {
            let all = Arenas::new(size, seed);
            let found = exchange(&all, by).unwrap_or_else(|error| panic!("{by:?} of {size} ranks, seed {seed}: {error}"));
            for (me, found) in (0..).zip(found) {
                let columns = u64::from(size) * WIDTH;
                let of = |row: u64, column: u64| 1000 * (column / WIDTH + 1) + row * columns + me * WIDTH + column % WIDTH;
                let expected: Vec<_> = (0..COUNT).flat_map(|row| (0..columns).map(move |column| of(row, column) as u32)).collect();
                assert_eq!(found, expected, "{by:?} of {size} ranks, seed {seed}");
            }
        }
    }
}

/// Two streams of rank 0 put bands to rank 1, which nothing orders.
fn two_bands(seed: u64, second: Rows) -> Result<()> {
    let all = Arenas::new(2, seed);
    let (buffers, one, side) = (all.buffers(16), all.world.rank(1), all.world.ranks[0].device().stream()?);
    let [own, other] = [all.stream(0), &side].map(|stream| Buffer::from_slice(stream, &numbers(0, 16)));
    let first = Rows { count: 3, width: 2, from: Pitched { start: 0, pitch: 2 }, to: Pitched { start: 0, pitch: 5 } };
    buffers[0].peer(one)?.put_rows(all.stream(0), &own?, first)?;
    buffers[0].peer(one)?.put_rows(&side, &other?, second)?;
    side.synchronize()?;
    all.stream(0).synchronize()
}

#[test]
fn rows_side_by_side_are_no_race_and_rows_that_meet_are() {
    let at = |start| Rows { count: 3, width: 3, from: Pitched { start: 0, pitch: 3 }, to: Pitched { start, pitch: 5 } };
    for seed in 0..32 {
        two_bands(seed, at(2)).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        // The last row of the one is the first of the other.
        let met = two_bands(seed, Rows { to: Pitched { start: 11, pitch: 3 }, count: 1, ..at(0) });
        let Err(Error::Race(race)) = met else { panic!("seed {seed}: {met:?}") };
        assert_eq!((race.kind, race.offset % 256, race.bytes), (RaceKind::Unordered, 44, 4), "{race}");
        assert!(race.to_string().contains("rows.rs"), "{race}");
    }
}

/// A consumer that reads a band after READY of another one.
fn early_read(seed: u64, right: bool) -> Result<(), Box<StreamRace>> {
    let run = || {
        let all = Arenas::new(2, seed);
        let (mut buffers, ready) = (all.buffers(12), all.channels());
        let [zero, one] = [0, 1].map(|index| all.world.rank(index));
        buffers[1].local_mut().fill_zero(all.stream(1))?;
        all.stream(1).synchronize()?;
        let own = Buffer::from_slice(all.stream(0), &numbers(0, 12))?;
        for slab in 0..2 {
            buffers[0].peer(one)?.put_rows(all.stream(0), &own, band(2, slab, slab))?;
            all.arenas[0].signal(all.stream(0), ready[0], one, Epoch::ZERO.later(slab + 1))?;
        }
        all.arenas[1].wait(all.stream(1), ready[1], zero, Epoch::ZERO.later(if right { 2 } else { 1 }))?;
        let target = Buffer::uninitialised(all.stream(1), 12)?;
        let got = buffers[1].peer(one)?.get_rows(all.stream(1), band(2, 1, 1), target)?;
        all.world.streams.iter().try_for_each(Stream::synchronize)?;
        drop(got);
        Ok(())
    };
    match run() {
        Err(Error::Race(race)) => Err(race),
        other => other.map_err(|error| panic!("seed {seed}: {error}")),
    }
}

#[test]
fn a_band_that_is_read_before_its_signal_is_a_race() {
    for seed in 0..32 {
        early_read(seed, true).unwrap();
        let race = early_read(seed, false).unwrap_err();
        assert_eq!(race.to_string(), early_read(seed, false).unwrap_err().to_string(), "seed {seed} replays its report");
    }
}

#[test]
fn rows_are_captured_and_replayed() {
    for seed in 0..16 {
        let all = Arenas::new(2, seed);
        let (buffers, one, stream) = (all.buffers(12), all.world.rank(1), all.stream(0));
        let mut own = Buffer::<u32>::zeros(stream, 12).unwrap();
        let graph = Graph::capture(&[stream], || {
            let peer = buffers[0].peer(one)?;
            peer.put_rows(stream, &own, band(2, 0, 1))?;
            all.arenas[0].batch(stream).put_rows(&peer, &own, band(2, 1, 0))?.enqueue()
        })
        .unwrap();
        for replay in 0..3 {
            own.copy_from_slice(stream, &numbers(replay, 12)).unwrap();
            graph.replay(stream).unwrap();
            stream.synchronize().unwrap();
            let swapped: Vec<_> = numbers(replay, 12).chunks(4).flat_map(|row| [row[2], row[3], row[0], row[1]]).collect();
            assert_eq!(buffers[1].local().to_vec(all.stream(1)).unwrap(), swapped, "seed {seed}");
        }
    }
}

#[test]
fn a_put_of_rows_is_one_span_with_all_its_bytes() {
    let all = Arenas::new(2, 0);
    let (buffers, stream) = (all.buffers(12), all.stream(0));
    let own = Buffer::from_slice(stream, &numbers(0, 12)).unwrap();
    let timeline = Timeline::start(&all.world.runtime).unwrap();
    buffers[0].peer(all.world.rank(1)).unwrap().put_rows(stream, &own, band(2, 0, 0)).unwrap();
    stream.synchronize().unwrap();
    let recording = timeline.finish().unwrap();
    let puts: Vec<_> = recording.spans.iter().filter(|span| span.activity == Activity::Copy).collect();
    assert!(matches!(&puts[..], [put] if put.name == "put to device 1" && put.bytes == Some(4 * COUNT * WIDTH)), "{puts:?}");
}

/// What lies between rows is not written.
#[test]
fn gaps_stay_as_they_were() {
    let all = Arenas::new(1, 0);
    let (mut buffers, stream) = (all.buffers(12), all.stream(0));
    buffers[0].local_mut().copy_from_slice(stream, &numbers(8, 12)).unwrap();
    let own = Buffer::from_slice(stream, &numbers(0, 12)).unwrap();
    let put = |buffer: &SymmetricBuffer<u32>, rows| buffer.peer(all.world.rank(0)).unwrap().put_rows(stream, &own, rows);
    put(&buffers[0], Rows { count: 0, ..band(2, 1, 1) }).unwrap();
    put(&buffers[0], Rows { width: 0, ..band(2, 1, 1) }).unwrap();
    put(&buffers[0], band(2, 0, 1)).unwrap();
    let expected: Vec<_> =
        numbers(8, 12).chunks(4).zip(numbers(0, 12).chunks(4)).flat_map(|(old, new)| [old[0], old[1], new[0], new[1]]).collect();
    assert_eq!(buffers[0].local().to_vec(stream).unwrap(), expected);
}

#[test]
fn rows_that_do_not_fit_are_refused() {
    let all = Arenas::new(2, 0);
    let (buffers, stream) = (all.buffers(12), all.stream(0));
    let (own, peer) = (Buffer::from_slice(stream, &numbers(0, 12)).unwrap(), buffers[0].peer(all.world.rank(1)).unwrap());
    let refused = |rows| {
        let put = peer.put_rows(stream, &own, rows).unwrap_err().to_string();
        let get = peer.get_rows(stream, rows, Buffer::zeros(stream, 12).unwrap()).unwrap_err().to_string();
        assert_eq!(put.replace("put_rows", "get_rows"), get);
        assert_eq!(all.arenas[0].batch(stream).put_rows(&peer, &own, rows).unwrap_err().to_string(), put);
        put
    };
    let right = band(2, 0, 0);
    let long = refused(Rows { count: 4, ..right });
    assert!(long.contains("14") && long.contains("12"), "{long}");
    let narrow = refused(Rows { to: Pitched { start: 0, pitch: 1 }, ..right });
    assert!(narrow.contains("rows of 2 elements at a pitch of 1 overlap: take a pitch of at least 2"), "{narrow}");
    let wide = refused(Rows { to: Pitched { start: 0, pitch: 1 << 29 }, ..right });
    assert!(wide.contains("at most 536870911"), "{wide}");
    refused(Rows { count: u64::MAX, ..right });
    refused(Rows { width: 13, count: 1, ..right });
    // Of a single row the pitch does not matter.
    peer.put_rows(stream, &own, Rows { count: 1, from: Pitched { start: 10, pitch: 0 }, ..right }).unwrap();
    let theirs = buffers[1].peer(all.world.rank(0)).unwrap();
    assert!(matches!(theirs.put_rows(all.stream(1), &own, right), Err(Error::WrongDevice { .. })));
    assert!(matches!(all.arenas[1].batch(all.stream(1)).put_rows(&peer, &own, right), Err(Error::Invalid { what: "Batch::put", .. })));
}
