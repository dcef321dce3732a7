//! Graphs keep what their work needs: an arena that one of them still uses is not closed.

use oxtile::symmetric::{Arena, ArenaOptions, Epoch, SymmetricBuffer, SymmetricError};
use oxtile::{Buffer, Error, Graph, Result};

use super::support::World;

fn arenas(world: &World) -> Vec<Arena> {
    world.ranks.iter().map(|rank| Arena::open(rank, ArenaOptions::default()).unwrap()).collect()
}

fn buffers(arenas: &[Arena]) -> Vec<SymmetricBuffer<u32>> {
    arenas.iter().map(|arena| arena.buffer(4).unwrap()).collect()
}

/// How many keep the arena open, besides the handle of the test and that which asks.
fn handles(arena: &Arena) -> usize {
    match arena.clone().close().map_err(Error::from) {
        Err(Error::Symmetric(SymmetricError::InUse { handles })) => handles - 1,
        other => panic!("{other:?} with a handle that is there"),
    }
}

fn close(arenas: Vec<Arena>) -> Result<()> {
    let closing: Vec<_> = arenas.into_iter().map(Arena::close).collect::<Result<_, _>>()?;
    closing.into_iter().try_for_each(|arena| arena.finish())
}

#[test]
fn a_graph_on_a_buffer_keeps_its_arena_open() {
    let world = World::new(2, 0);
    let (arenas, stream) = (arenas(&world), &world.streams[0]);
    let mut buffers = buffers(&arenas);
    assert_eq!(handles(&arenas[0]), 1, "a buffer is one handle");
    let graph = Graph::capture(&[stream], || buffers[0].local_mut().fill_zero(stream)).unwrap();
    drop(buffers);
    assert_eq!(handles(&arenas[0]), 1, "the graph writes memory of the arena");
    graph.replay(stream).unwrap();
    stream.synchronize().unwrap();
    drop(graph);
    close(arenas).unwrap();
}

#[test]
fn a_graph_that_reaches_a_peer_keeps_its_arena_open() {
    let world = World::new(2, 1);
    let (arenas, stream) = (arenas(&world), &world.streams[0]);
    let (buffers, channels) = (buffers(&arenas), arenas.iter().map(|arena| arena.channel().unwrap()).collect::<Vec<_>>());
    let (other, own) = (world.rank(1), Buffer::from_slice(stream, &[5_u32; 4]).unwrap());
    let graph = Graph::capture(&[stream], || {
        buffers[0].peer(other)?.put(stream, &own, 0..4, 0)?;
        arenas[0].signal(stream, channels[0], other, Epoch::ZERO.next())
    });
    let graph = graph.unwrap();
    graph.replay(stream).unwrap();
    arenas[1].wait(&world.streams[1], channels[1], world.rank(0), Epoch::ZERO.next()).unwrap();
    assert_eq!(buffers[1].local().to_vec(&world.streams[1]).unwrap(), [5; 4]);
    drop(buffers);
    assert_eq!((handles(&arenas[0]), handles(&arenas[1])), (1, 0));
    drop(graph);
    close(arenas).unwrap();
}

#[test]
fn a_graph_is_not_replayed_in_an_arena_that_has_ended() {
    let world = World::new(2, 2);
    let (arenas, stream) = (arenas(&world), &world.streams[0]);
    let (channels, other) = (arenas.iter().map(|arena| arena.channel().unwrap()).collect::<Vec<_>>(), world.rank(1));
    let graph = Graph::capture(&[stream], || arenas[0].signal(stream, channels[0], other, Epoch::ZERO.next())).unwrap();
    graph.replay(stream).unwrap();
    arenas[0].abort("enough").unwrap();
    let error = graph.replay(stream).unwrap_err();
    assert!(matches!(&error, Error::Symmetric(SymmetricError::Aborted { rank, .. }) if rank.index() == 0), "{error}");
}

/// The stream of the last replay used the arena, and nothing else tells: closing waits for it.
#[test]
fn an_arena_waits_for_replays_whose_graph_is_gone() {
    for seed in 0..16 {
        let world = World::new(1, seed);
        let (arenas, stream) = (arenas(&world), world.ranks[0].device().stream().unwrap());
        let mut buffers = buffers(&arenas);
        let graph = Graph::capture(&[&world.streams[0]], || buffers[0].local_mut().fill_zero(&world.streams[0])).unwrap();
        drop(buffers);
        graph.replay(&stream).unwrap();
        drop(graph);
        close(arenas).unwrap();
        stream.synchronize().unwrap();
    }
}
