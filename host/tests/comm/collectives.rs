//! Every collective against its definition, at every world size and under many seeds.

use oxtile::comm::{Communicator, EmulatedCommunicator, ReduceMax, ReduceOp, Team, WorldSize};
use oxtile::num::bf16;
use oxtile::{Buffer, Graph, Result, Runtime, Stream};

use crate::support::{WORLDS, World, numbers};

/// A program of all ranks, driven from one thread, at every world size under several seeds.
fn everywhere(program: impl Fn(&World, u32)) {
    for size in WORLDS {
        for seed in 0..8 {
            program(&World::new(size, seed), size);
        }
    }
}

#[test]
fn gathers() {
    everywhere(|world, size| {
        let (shards, mut gathered) = (world.buffers(|rank| numbers(rank, 5)), world.zeros(5 * u64::from(size)));
        for (i, rank) in world.ranks.iter().enumerate() {
            rank.all_gather(&world.streams[i], &shards[i], &mut gathered[i]).unwrap();
        }
        let expected: Vec<_> = (0..size).flat_map(|rank| numbers(rank, 5)).collect();
        assert!(world.read(&gathered).iter().all(|found| *found == expected));
    });
}

#[test]
fn reduces_and_scatters() {
    everywhere(|world, size| {
        for op in [ReduceOp::Sum, ReduceOp::Max] {
            let total = |column: u32| match op {
                ReduceOp::Sum => (0..size).map(|rank| 1000 * (rank + 1) + column).sum::<u32>(),
                ReduceOp::Max => 1000 * size + column,
            };
            let mut whole = world.buffers(|rank| numbers(rank, 3 * size));
            let (inputs, mut shards) = (world.buffers(|rank| numbers(rank, 3 * size)), world.zeros(3));
            for (i, rank) in world.ranks.iter().enumerate() {
                rank.all_reduce(&world.streams[i], &mut whole[i], op).unwrap();
                rank.reduce_scatter(&world.streams[i], &inputs[i], &mut shards[i], op).unwrap();
            }
            let expected: Vec<_> = (0..3 * size).map(total).collect();
            assert!(world.read(&whole).iter().all(|found| *found == expected));
            assert_eq!(world.read(&shards).concat(), expected);
        }
    });
}

#[test]
fn broadcasts_and_transposes() {
    everywhere(|world, size| {
        let mut rooted = world.buffers(|rank| numbers(rank, 4));
        let (inputs, mut outputs) = (world.buffers(|rank| numbers(rank, 2 * size)), world.zeros(2 * u64::from(size)));
        for (i, rank) in world.ranks.iter().enumerate() {
            rank.broadcast(&world.streams[i], &mut rooted[i], world.rank(size - 1)).unwrap();
            rank.barrier(&world.streams[i]).unwrap();
            rank.all_to_all(&world.streams[i], &inputs[i], &mut outputs[i]).unwrap();
        }
        assert!(world.read(&rooted).iter().all(|found| *found == numbers(size - 1, 4)));
        for (me, found) in (0..).zip(world.read(&outputs)) {
            let expected: Vec<_> = (0..size).flat_map(|from| numbers(from, 2 * size)[2 * me as usize..][..2].to_vec()).collect();
            assert_eq!(found, expected);
        }
    });
}

#[test]
fn a_ring_is_one_exchange_a_rank() {
    everywhere(|world, size| {
        let (own, mut received) = (world.buffers(|rank| numbers(rank, 6)), world.zeros(6));
        for (i, rank) in world.ranks.iter().enumerate() {
            let (next, before) = ((i as u32 + 1) % size, (i as u32 + size - 1) % size);
            let receives = [(world.rank(before), received[i].view_mut())];
            rank.exchange(&world.streams[i], &[(world.rank(next), own[i].view())], &receives).unwrap();
        }
        for (i, found) in world.read(&received).into_iter().enumerate() {
            assert_eq!(found, numbers((i as u32 + size - 1) % size, 6));
        }
    });
}

/// What a call does with parts of buffers leaves the rest as it is, and calls of a group may use parts of one buffer that do not overlap.
#[test]
fn calls_take_parts_of_buffers() {
    everywhere(|world, size| {
        let (own, mut whole) = (world.buffers(|rank| numbers(rank, 6)), world.zeros(4 * u64::from(size) + 2));
        let mut halves = world.zeros(6);
        for (i, rank) in world.ranks.iter().enumerate() {
            let (next, before) = ((i as u32 + 1) % size, (i as u32 + size - 1) % size);
            let (stream, shard, end) = (&world.streams[i], own[i].view().slice(1, 3), 2 * u64::from(size));
            rank.group(|| {
                let (first, second) = whole[i].view_mut().split_at(end + 1);
                rank.all_gather(stream, shard, first.split_at(1).1)?;
                rank.all_gather(stream, own[i].view().slice(4, 6), second.split_at(end).0)
            })
            .unwrap();
            let (first, second) = halves[i].view_mut().split_at(3);
            let sends = [(world.rank(next), own[i].view().slice(3, 6)), (world.rank(next), own[i].view().slice(0, 3))];
            rank.exchange(stream, &sends, &[(world.rank(before), first), (world.rank(before), second)]).unwrap();
            rank.all_reduce(stream, halves[i].view_mut().split_at(5).1, ReduceOp::Sum).unwrap();
        }
        let of_all = |part: std::ops::Range<usize>| (0..size).flat_map(move |rank| numbers(rank, 6)[part.clone()].to_vec());
        let expected: Vec<_> = std::iter::once(0).chain(of_all(1..3)).chain(of_all(4..6)).chain([0]).collect();
        assert!(world.read(&whole).iter().all(|found| *found == expected));
        let sum: u32 = (0..size).map(|rank| numbers(rank, 6)[2]).sum();
        for (i, found) in world.read(&halves).into_iter().enumerate() {
            let before = numbers((i as u32 + size - 1) % size, 6);
            assert_eq!(found, [&before[3..6], &before[0..2], &[sum]].concat());
        }
    });
}

/// The overlap of two calls of a group is found by elements.
#[test]
fn calls_of_a_group_do_not_write_the_same_elements() {
    let world = World::new(1, 0);
    let (own, mut whole, rank, stream) = (world.zeros(3), world.zeros(5), &world.ranks[0], &world.streams[0]);
    let error = rank.group(|| {
        rank.all_gather(stream, &own[0], whole[0].view_mut().slice_mut(0, 3))?;
        rank.all_gather(stream, &own[0], whole[0].view_mut().slice_mut(2, 5))
    });
    assert!(error.unwrap_err().to_string().contains("another call of the group uses these elements"));
}

#[test]
fn messages_are_taken_in_the_order_in_which_they_are_sent() {
    let world = World::new(2, 3);
    let sent = [world.buffers(|_| vec![1, 2]), world.buffers(|_| vec![3, 4])];
    let mut received = [world.zeros(2), world.zeros(2)];
    for message in &sent {
        world.ranks[0].send(&world.streams[0], &message[0], world.rank(1)).unwrap();
    }
    for message in &mut received {
        world.ranks[1].recv(&world.streams[1], &mut message[1], world.rank(0)).unwrap();
    }
    assert_eq!(received.map(|message| message[1].to_vec(&world.streams[1]).unwrap()), [[1, 2], [3, 4]]);
}

#[test]
fn empty_ranks_join() {
    everywhere(|world, size| {
        let (shards, mut gathered) = (world.zeros(0), world.zeros(0));
        for (i, rank) in world.ranks.iter().enumerate() {
            rank.all_gather(&world.streams[i], &shards[i], &mut gathered[i]).unwrap();
            rank.all_reduce(&world.streams[i], &mut gathered[i], ReduceOp::Sum).unwrap();
        }
        assert_eq!(world.read(&gathered), vec![Vec::<u32>::new(); size as usize]);
    });
}

#[test]
fn amaxes_are_agreed() {
    everywhere(|world, size| {
        let mut slots: Vec<_> =
            world.streams.iter().zip(0..).map(|(s, r)| Buffer::from_slice(s, &[r as f32, 7.0 - r as f32]).unwrap()).collect();
        for (i, rank) in world.ranks.iter().enumerate() {
            (rank as &dyn ReduceMax).reduce_max(&world.streams[i], &mut slots[i]).unwrap();
        }
        for (slots, stream) in slots.iter().zip(&world.streams) {
            assert_eq!(slots.to_vec(stream).unwrap(), [size as f32 - 1.0, 7.0]);
        }
    });
}

/// Three times 1 + 2^-8 is 3 + 3 * 2^-8, which rounds to 3 + 2^-6; rounding after each addition gives 3.
#[test]
fn sums_of_bf16_are_rounded_once() {
    let world = World::new(3, 0);
    let one = |stream| Buffer::<bf16>::from_slice(stream, &[bf16::from_bits(0x3f80), bf16::from_bits(0x3b80)]).unwrap();
    let mut values: Vec<_> = world.streams.iter().map(one).collect();
    for (i, rank) in world.ranks.iter().enumerate() {
        rank.all_reduce(&world.streams[i], &mut values[i], ReduceOp::Sum).unwrap();
    }
    // 3 * 1 and 3 * 2^-8.
    let found: Vec<_> = values[0].to_vec(&world.streams[0]).unwrap().iter().map(|x| x.to_bits()).collect();
    assert_eq!(found, [0x4040, 0x3c40]);
}

#[test]
fn teams_call_beside_the_world() {
    for seed in 0..8 {
        let world = World::new(4, seed);
        let even = Team::strided(world.size(), world.rank(0), 2, WorldSize::new(2).unwrap()).unwrap();
        let odd = Team::new(world.size(), &[world.rank(3), world.rank(1)]).unwrap();
        let mut values = world.buffers(|rank| vec![1 << rank]);
        for (i, rank) in world.ranks.iter().enumerate() {
            let (mine, other) = if i % 2 == 0 { (&even, &odd) } else { (&odd, &even) };
            assert!(rank.team(other).unwrap().is_none(), "rank {i} is not of {other:?}");
            let member = rank.team(mine).unwrap().expect("a member");
            assert_eq!(Some(member.rank()), mine.rank_of(rank.rank()));
            member.all_reduce(&world.streams[i], &mut values[i], ReduceOp::Sum).unwrap();
        }
        assert_eq!(world.read(&values), [[5], [10], [5], [10]]);
    }
}

/// The same program, a thread a rank, as separate processes would run it.
fn as_a_rank(rank: &EmulatedCommunicator) -> Result<Vec<u32>> {
    let (stream, side): (Stream, Stream) = (rank.device().stream()?, rank.device().stream()?);
    let mut value = Buffer::from_slice(&stream, &[rank.rank().index() + 1])?;
    for round in 0..20 {
        // Calls of one rank come in one order on whatever streams.
        rank.all_reduce(if round % 2 == 0 { &stream } else { &side }, &mut value, ReduceOp::Max)?;
    }
    let mut all = Buffer::zeros(&side, u64::from(rank.world().get()))?;
    rank.all_gather(&side, &value, &mut all)?;
    all.to_vec(&side)
}

#[test]
fn ranks_may_be_threads() {
    for size in [2, 4] {
        let world = World::new(size, 5);
        let found: Vec<_> = std::thread::scope(|scope| {
            let ranks: Vec<_> = world.ranks.iter().map(|rank| scope.spawn(|| as_a_rank(rank).unwrap())).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        assert_eq!(found, vec![vec![size; size as usize]; size as usize]);
    }
}

#[test]
fn a_graph_holds_collectives() {
    for seed in 0..8 {
        let world = World::new(3, seed);
        let mut values = world.buffers(|rank| vec![rank + 1]);
        let capture = |(i, value): (usize, &mut Buffer<u32>)| {
            Graph::capture(&[&world.streams[i]], || world.ranks[i].all_reduce(&world.streams[i], value, ReduceOp::Sum)).unwrap()
        };
        let graphs: Vec<_> = values.iter_mut().enumerate().map(capture).collect();
        for _ in 0..3 {
            graphs.iter().zip(&world.streams).for_each(|(graph, stream)| graph.replay(stream).unwrap());
        }
        // 1 + 2 + 3, then three times that, twice.
        assert_eq!(world.read(&values), [[54], [54], [54]]);
    }
}

#[test]
fn a_communicator_of_gpus_is_not_emulated() {
    if let Ok(gpus) = Runtime::cuda() {
        assert!(EmulatedCommunicator::world_of(&gpus, WorldSize::ONE).is_err());
    }
}
