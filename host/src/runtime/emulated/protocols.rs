//! Exhaustive searches of signal protocols, on bare words.

use std::panic::Location;
use std::time::Duration;

use super::{EmulatedOptions, Exploration, Explored, explore};
use crate::runtime::POISON;
use crate::runtime::backend::{Copy, CopyRows, Direction};
use crate::runtime::{Buffer, Error, Mode, RaceKind, Result, Runtime, Stream};

/// A rank of a protocol: a stream, another for work that must overtake it, and words that every rank may write.
struct Node {
    stream: Stream,
    control: Stream,
    words: Buffer<u64>,
}

const WORDS: u64 = 16;

fn nodes(count: u32, exploration: &Exploration) -> Result<Vec<Node>> {
    let options =
        EmulatedOptions { devices: count, mode: Mode::Check, exploration: Some(exploration.clone()), ..EmulatedOptions::default() };
    let runtime = Runtime::emulated_with(options)?;
    let node = |device| {
        let (stream, control) = (runtime.device(device)?.stream()?, runtime.device(device)?.stream()?);
        let words = Buffer::zeros(&stream, WORDS)?;
        stream.synchronize()?;
        Ok(Node { stream, control, words })
    };
    (0..count).map(node).collect()
}

impl Node {
    fn word(&self, index: u64) -> u64 {
        self.words.address() + 8 * index
    }

    fn set(&self, at: u64, value: u64) -> Result<()> {
        set(&self.stream, at, value)
    }

    fn wait(&self, index: u64, value: u64) -> Result<()> {
        wait(&self.stream, self.word(index), value)
    }

    fn copy(&self, target: u64, source: u64) -> Result<()> {
        copy(&self.stream, target, source)
    }

    fn fill(&self, index: u64, byte: u8) -> Result<()> {
        fill(&self.stream, self.word(index), byte)
    }

    fn finish(&self) -> Result<()> {
        self.stream.synchronize()?;
        self.control.synchronize()
    }

    fn value(&self, index: u64) -> Result<u64> {
        self.stream.0.runtime.backend.read_word(self.stream.0.id, self.word(index), Duration::ZERO)
    }
}

fn set(stream: &Stream, at: u64, value: u64) -> Result<()> {
    stream.0.runtime.backend.write_value(stream.0.id, at, value, Location::caller())
}

fn wait(stream: &Stream, at: u64, value: u64) -> Result<()> {
    stream.0.runtime.backend.wait_value(stream.0.id, at, value, Location::caller())
}

fn copy(stream: &Stream, target: u64, source: u64) -> Result<()> {
    let copy = Copy { direction: Direction::DeviceToDevice, target, source, bytes: 8, rows: CopyRows::ONE, caller: Location::caller() };
    stream.0.runtime.backend.copy(stream.0.id, copy)
}

fn fill(stream: &Stream, at: u64, byte: u8) -> Result<()> {
    stream.0.runtime.backend.fill(stream.0.id, at, byte, 8, Location::caller())
}

/// What rank `me` of a ring sends in a round.
fn sent(me: usize, round: u64) -> u8 {
    (10 * round) as u8 + me as u8 + 1
}

/// Whether each rank of a ring has received from the rank before it, in words 4..
fn check_ring(nodes: &[Node], rounds: u64) -> Result<()> {
    for (me, node) in nodes.iter().enumerate() {
        let last = (me + nodes.len() - 1) % nodes.len();
        for round in 0..rounds {
            assert_eq!(node.value(4 + round)?, bytes(sent(last, round)), "rank {me} of {}, round {round}", nodes.len());
        }
    }
    Ok(())
}

fn bytes(byte: u8) -> u64 {
    u64::from_le_bytes([byte; 8])
}

/// Flags of two values: the receiver resets and acknowledges, the sender waits for the acknowledgement (NCCL's copy-engine collectives).
/// Words of the receiver: data 0 and 1, flags 2 and 3, results 8..; of the sender: acknowledgements 0 and 1, source 4.
fn reset_protocol(exploration: &Exploration, acknowledged: bool) -> Result<()> {
    let nodes = nodes(2, exploration)?;
    let (sender, receiver) = (&nodes[0], &nodes[1]);
    for round in 0..4 {
        let slot = round % 2;
        if acknowledged && round >= 2 {
            sender.wait(slot, 1)?;
            sender.set(sender.word(slot), 0)?;
        }
        sender.fill(4, round as u8 + 1)?;
        sender.copy(receiver.word(slot), sender.word(4))?;
        sender.set(receiver.word(2 + slot), 1)?;

        receiver.wait(2 + slot, 1)?;
        receiver.set(receiver.word(2 + slot), 0)?;
        receiver.copy(receiver.word(8 + round), receiver.word(slot))?;
        receiver.set(sender.word(slot), 1)?;
    }
    nodes.iter().try_for_each(Node::finish)?;
    for round in 0..4 {
        assert_eq!(receiver.value(8 + round)?, bytes(round as u8 + 1), "round {round}");
    }
    Ok(())
}

#[test]
fn flags_that_are_reset_need_an_acknowledgement() {
    let Explored { states, .. } = explore(|exploration| reset_protocol(exploration, true)).unwrap();
    assert!(states >= 20, "{states} states");
    // The reset of one round and the signal of the next meet in one word: a flag is taken twice, or lost.
    let error = explore(|exploration| reset_protocol(exploration, false)).unwrap_err();
    let Error::Race(race) = &error else { panic!("{error}") };
    assert!(matches!(race.kind, RaceKind::Signal | RaceKind::Unordered), "{race}");
}

/// `symmetric::Handover` in a ring: every rank fills a place of the next one and empties its own, the same work each round, as a graph's replays do.
/// Words of each rank: READY 0, FREE 1, what was put here 2, source 3, results 4..
fn handover(exploration: &Exploration, count: u32, rounds: u64, acquires: bool) -> Result<()> {
    let nodes = nodes(count, exploration)?;
    let shifted = |me: usize, by: usize| &nodes[(me + by) % nodes.len()];
    for (me, node) in nodes.iter().enumerate() {
        node.set(shifted(me, nodes.len() - 1).word(1), 1)?;
    }
    for round in 0..rounds {
        for (me, node) in nodes.iter().enumerate() {
            let (next, last) = (shifted(me, 1), shifted(me, nodes.len() - 1));
            node.fill(3, sent(me, round))?;
            if acquires {
                node.wait(1, 1)?;
                node.set(node.word(1), 0)?;
            }
            node.copy(next.word(2), node.word(3))?;
            node.set(next.word(0), 1)?;

            node.wait(0, 1)?;
            node.set(node.word(0), 0)?;
            node.copy(node.word(4 + round), node.word(2))?;
            node.set(last.word(1), 1)?;
        }
    }
    nodes.iter().try_for_each(Node::finish)?;
    check_ring(&nodes, rounds)
}

#[test]
fn handovers_of_two_and_three_ranks_lose_no_flag() {
    for (count, rounds, fewest) in [(2, 3, 50), (3, 2, 300)] {
        let Explored { states, .. } = explore(|exploration| handover(exploration, count, rounds, true)).unwrap();
        assert!(states >= fewest, "{count} ranks: {states} states");
        let error = explore(|exploration| handover(exploration, count, rounds, false)).unwrap_err();
        assert!(matches!(error, Error::Race(_)), "{count} ranks: {error}");
    }
}

/// `symmetric::Flags` in a ring, whose consumer is a kernel: it waits for READY, reads, and its stream resets READY after it and then sets FREE, the same work
/// each round. Words of each rank: READY 0, FREE 1, what was put here 2, source 3, results 4..
fn chunk_flags(exploration: &Exploration, count: u32, rounds: u64, resets_first: bool) -> Result<()> {
    let nodes = nodes(count, exploration)?;
    let shifted = |me: usize, by: usize| &nodes[(me + by) % nodes.len()];
    for (me, node) in nodes.iter().enumerate() {
        node.set(shifted(me, nodes.len() - 1).word(1), 1)?;
    }
    for round in 0..rounds {
        for (me, node) in nodes.iter().enumerate() {
            let (next, last) = (shifted(me, 1), shifted(me, nodes.len() - 1));
            let out = &node.control;
            wait(out, node.word(1), 1)?;
            set(out, node.word(1), 0)?;
            fill(out, node.word(3), sent(me, round))?;
            copy(out, next.word(2), node.word(3))?;
            set(out, next.word(0), 1)?;

            node.wait(0, 1)?;
            node.copy(node.word(4 + round), node.word(2))?;
            if resets_first {
                node.set(node.word(0), 0)?;
                node.set(last.word(1), 1)?;
            } else {
                node.set(last.word(1), 1)?;
                node.set(node.word(0), 0)?;
            }
        }
    }
    nodes.iter().try_for_each(Node::finish)?;
    check_ring(&nodes, rounds)
}

#[test]
fn chunk_flags_of_two_and_three_ranks_are_not_lost() {
    for (count, rounds, fewest) in [(2, 3, 50), (3, 2, 300)] {
        let Explored { states, .. } = explore(|exploration| chunk_flags(exploration, count, rounds, true)).unwrap();
        assert!(states >= fewest, "{count} ranks: {states} states");
        // Before the reset FREE lets the next READY come, which the reset then takes away.
        let error = explore(|exploration| chunk_flags(exploration, count, rounds, false)).unwrap_err();
        assert!(matches!(error, Error::Race(_) | Error::Stuck { .. }), "{count} ranks: {error}");
    }
}

/// Rank 0 gets from rank 1, passes on to rank 2, and gives up at any moment. Words: 0 notice, 1 signal from the rank before, 2 data, 3 what it
/// received, 5 what holds rank 1 up.
fn poison_protocol(exploration: &Exploration, others_first: bool) -> Result<()> {
    let nodes = nodes(3, exploration)?;
    let (first, middle, last) = (&nodes[1], &nodes[0], &nodes[2]);
    // Rank 1 is late, by any amount.
    set(&first.control, first.word(5), 1)?;
    first.wait(5, 1)?;
    first.fill(2, 7)?;
    first.set(middle.word(1), 1)?;

    middle.wait(1, 1)?;
    middle.copy(middle.word(2), first.word(2))?;
    middle.set(last.word(1), 1)?;

    last.wait(1, 1)?;
    last.copy(last.word(3), middle.word(2))?;

    // Giving up: the others are told, and the own waits are released.
    let tell = || set(&middle.control, last.word(0), POISON);
    let release = || set(&middle.control, middle.word(1), POISON);
    if others_first {
        tell().and_then(|()| release())?
    } else {
        release().and_then(|()| tell())?
    }

    last.stream.synchronize()?;
    let notice = last.value(0)?;
    let received = last.value(3)?;
    nodes.iter().try_for_each(Node::finish)?;
    // What was received without a notice is right.
    if notice < POISON && received != bytes(7) {
        return Err(Error::Invalid { what: "poison", why: "data that was never sent was taken as valid".to_owned() });
    }
    Ok(())
}

#[test]
fn poison_reaches_the_others_before_what_it_lets_go() {
    let Explored { states, .. } = explore(|exploration| poison_protocol(exploration, true)).unwrap();
    assert!(states >= 20, "{states} states");
    let error = explore(|exploration| poison_protocol(exploration, false)).unwrap_err();
    assert!(error.to_string().contains("taken as valid"), "{error}");
}

/// READY and DONE between all of `count` ranks, `rounds` times: each rank writes, and gets from each other. Words: 0 own data,
/// 1.. READY by rank, 5.. DONE by rank, 9.. what was got.
fn ready_done(exploration: &Exploration, count: u32, rounds: u64, waits_for_done: bool) -> Result<()> {
    let nodes = nodes(count, exploration)?;
    let others = |me: usize| (0..count as usize).filter(move |other| *other != me);
    for round in 1..=rounds {
        for (me, node) in nodes.iter().enumerate() {
            if waits_for_done {
                others(me).try_for_each(|other| node.wait(5 + other as u64, round - 1))?;
            }
            node.fill(0, (10 * round) as u8 + me as u8)?;
            others(me).try_for_each(|other| node.set(nodes[other].word(1 + me as u64), round))?;
            for other in others(me) {
                node.wait(1 + other as u64, round)?;
                node.copy(node.word(9 + other as u64), nodes[other].word(0))?;
                node.set(nodes[other].word(5 + me as u64), round)?;
            }
        }
    }
    nodes.iter().try_for_each(Node::finish)?;
    for (me, node) in nodes.iter().enumerate() {
        for other in others(me) {
            assert_eq!(node.value(9 + other as u64)?, bytes((10 * rounds) as u8 + other as u8), "rank {me} of rank {other}");
        }
    }
    Ok(())
}

#[test]
fn ready_and_done_order_two_and_three_ranks() {
    // Two rounds at least: the second waits for DONE.
    for (count, rounds, fewest) in [(2, 3, 20), (3, 2, 600)] {
        let Explored { states, .. } = explore(|exploration| ready_done(exploration, count, rounds, true)).unwrap();
        assert!(states >= fewest, "{count} ranks: {states} states");
        let error = explore(|exploration| ready_done(exploration, count, rounds, false)).unwrap_err();
        assert!(matches!(error, Error::Race(_)), "{count} ranks: {error}");
    }
}

/// A wait in a circle is found in every order.
#[test]
fn a_circle_of_waits_is_stuck() {
    let circle = |exploration: &Exploration| {
        let nodes = nodes(2, exploration)?;
        for (me, node) in nodes.iter().enumerate() {
            node.wait(1, 1)?;
            node.set(nodes[1 - me].word(1), 1)?;
        }
        nodes.iter().try_for_each(Node::finish)
    };
    assert!(matches!(explore(circle), Err(Error::Stuck { .. })));
}
