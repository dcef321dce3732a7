//! What is of another arena, device or runtime is refused before anything is enqueued.

use oxtile::comm::Team;
use oxtile::symmetric::{
    Arena, ArenaOptions, Channel, ChunkedGather, GatherMemory, Handover, PullGather, PushGather, PushMemory, SymmetricBuffer,
};
use oxtile::{Buffer, Error, Result, Runtime, Stream};

use crate::arenas::{Arenas, FIRST, options};

/// An arena beside the first of the world's only rank.
fn beside(all: &Arenas) -> Arena {
    Arena::open(&all.world.ranks[0], ArenaOptions { channels: 4, ..options() }).unwrap()
}

/// The channel of another arena has the place of one of this arena's own: its signals would be taken for that one's.
#[test]
fn channels_of_another_arena_are_refused() {
    let all = Arenas::new(1, 0);
    let (here, stream, zero) = (beside(&all), all.stream(0), all.world.rank(0));
    let own = here.channel().unwrap();
    for channel in [(); 6].map(|()| all.arenas[0].channel().unwrap()) {
        let refused = [
            here.signal(stream, channel, zero, FIRST),
            here.wait(stream, channel, zero, FIRST),
            here.batch(stream).signal(channel, zero, FIRST).and_then(|batch| batch.enqueue()),
            here.batch(stream).wait(channel, zero, FIRST).and_then(|batch| batch.enqueue()),
        ];
        for refused in refused {
            let error = refused.unwrap_err();
            assert!(matches!(&error, Error::Invalid { what: "Channel", .. }), "{error}");
            let mend = "it is of another arena than this one of rank 0: use one that this arena gave (Arena::channel)";
            assert!(error.to_string().contains(mend), "{error}");
        }
    }
    here.signal(stream, own, zero, FIRST).and_then(|()| here.wait(stream, own, zero, FIRST)).unwrap();
    here.ticket(stream).unwrap().wait().unwrap();
}

/// Another arena would not know of the stream, nor be kept by a graph: its memory could be gone before the put.
#[test]
fn a_peer_of_another_arena_is_refused_by_a_batch() {
    let all = Arenas::new(1, 0);
    let (here, stream, buffers) = (beside(&all), all.stream(0), all.buffers(4));
    let own = Buffer::<u32>::zeros(stream, 4).unwrap();
    let put = here.batch(stream).put(&buffers[0].peer(all.world.rank(0)).unwrap(), &own, 0..4, 0);
    assert!(matches!(&put, Err(Error::Invalid { what: "Batch::put", .. })), "{put:?}");
}

/// A gather over one arena with another's memory would take the signals of that arena's own gather for its own: rank 0 would have a result of which
/// rank 1, which never called, has no part.
#[test]
fn gathers_with_memory_of_another_arena_are_refused() {
    let all = Arenas::new(1, 0);
    let (here, stream, world) = (beside(&all), all.stream(0), all.world.size());
    let member = Team::all(world).member(all.world.rank(0)).unwrap();
    let mend = "the memory is of another arena: take it from the one that is gathered over";
    let pull = |of: &Arena| PullGather::new(&here, &member, GatherMemory::<u32>::take(of, 4).unwrap(), stream, 1);
    let error = pull(&all.arenas[0]).unwrap_err();
    assert_eq!(error.to_string(), format!("PullGather::new: {mend}"));
    let push = |of: &Arena| PushGather::new(&here, &member, PushMemory::<u32>::take(of, 4, 1).unwrap(), [stream, stream], 1);
    let error = push(&all.arenas[0]).unwrap_err();
    assert_eq!(error.to_string(), format!("PushGather::new: {mend}"));
    assert!(pull(&here).is_ok() && push(&here).is_ok());
}

/// All that enqueues work of rank 0's arena, with memory of the stream's own device where it takes any.
fn all_on(all: &Arenas, buffer: &SymmetricBuffer<u32>, channel: Channel, stream: &Stream) -> Vec<(&'static str, Result<()>)> {
    let (arena, zero, one) = (&all.arenas[0], all.world.rank(0), all.world.rank(1));
    let member = Team::all(all.world.size()).member(zero).unwrap();
    let own = Buffer::<u32>::zeros(stream, 4).unwrap();
    let [to_get, to_get_each] = [(); 2].map(|()| Buffer::<u32>::zeros(stream, 4).unwrap());
    let peer = buffer.peer(one).unwrap();
    let pull = |on| PullGather::new(arena, &member, GatherMemory::<u32>::take(arena, 4).unwrap(), on, 1);
    let push = |on| PushGather::new(arena, &member, PushMemory::<u32>::take(arena, 4, 2).unwrap(), on, 1);
    // Of both ranks, since its flags are the other's.
    let handovers: Vec<_> = all.arenas.iter().map(|arena| Handover::take(arena).unwrap()).collect();
    let handover = &handovers[0];
    vec![
        ("signal", arena.signal(stream, channel, one, FIRST)),
        ("wait", arena.wait(stream, channel, one, FIRST)),
        ("batch", arena.batch(stream).signal(channel, one, FIRST).and_then(|batch| batch.enqueue())),
        ("put", peer.put(stream, &own, 0..4, 0)),
        ("batch of puts", arena.batch(stream).put(&peer, &own, 0..4, 0).and_then(|batch| batch.enqueue())),
        ("get", peer.get(stream, 0..4, to_get, 0).map(drop)),
        ("get_each", buffer.get_each(stream, &[(one, 0..4)], to_get_each).map(drop)),
        ("contiguous view", buffer.contiguous().unwrap().view(stream).map(drop)),
        ("ticket", arena.ticket(stream).map(drop)),
        ("pull", pull(stream).map(drop)),
        ("shard", pull(all.stream(0)).and_then(|mut gather| gather.shard(stream).map(drop))),
        ("push", push([stream, all.stream(0)]).map(drop)),
        ("push, arrivals", push([all.stream(0), stream]).map(drop)),
        ("push, reader", read_on(all, stream)),
        ("push, writer", push([all.stream(0), all.stream(0)]).and_then(|mut gather| gather.shard(stream).map(drop))),
        ("handover", handover.publish(stream, one)),
        ("handover, wait", handover.accept(stream, one)),
    ]
}

/// The epoch of rank 0's gather with itself, given to a stream.
fn read_on(all: &Arenas, reader: &Stream) -> Result<()> {
    let (arena, own, zero) = (&all.arenas[0], all.stream(0), all.world.rank(0));
    let alone = Team::new(all.world.size(), &[zero])?.member(zero).expect("it is its only member");
    let mut gather = PushGather::new(arena, &alone, PushMemory::<u32>::take(arena, 4, 1)?, [own, own], 1)?;
    gather.shard(own)?.fill_zero(own)?;
    gather.start()?.whole(reader).map(drop)
}

#[test]
fn streams_of_another_device_are_refused() {
    let all = Arenas::with(2, 0, ArenaOptions { bytes: 1 << 16, channels: 64, ..options() });
    let (buffers, channels) = (all.buffers(4), all.channels());
    for (what, refused) in all_on(&all, &buffers[0], channels[0], all.stream(1)) {
        let error = refused.expect_err(what);
        let is_typed = matches!(&error, Error::Invalid { .. } | Error::WrongDevice { .. });
        assert!(is_typed && error.to_string().contains("use a stream of device 0"), "{what}: {error}");
    }
    // Nothing of it was enqueued: neither the wait nor the note of the missing rank.
    all.world.streams.iter().try_for_each(|stream| stream.synchronize()).unwrap();
    all.arenas[0].ticket(all.stream(0)).unwrap().wait().unwrap();
}

#[test]
fn streams_of_another_runtime_are_refused() {
    let all = Arenas::with(2, 0, ArenaOptions { bytes: 1 << 16, channels: 64, ..options() });
    let (buffers, channels) = (all.buffers(4), all.channels());
    let foreign = Runtime::emulated(1).unwrap().device(0).unwrap().stream().unwrap();
    for (what, refused) in all_on(&all, &buffers[0], channels[0], &foreign) {
        let error = refused.expect_err(what);
        assert!(matches!(&error, Error::ForeignRuntime { .. }), "{what}: {error}");
    }
    foreign.synchronize().unwrap();
}
