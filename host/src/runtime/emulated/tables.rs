//! However much comes and goes, the scheduler's tables hold what is there.

use std::panic::Location;

use super::EmulatedOptions;
use crate::runtime::runtime::lock;
use crate::runtime::{Buffer, Device, Error, Graph, RaceKind, Result, Runtime, Stream};

/// More than any table needs for what is there at a time, and far less than there are rounds.
const MOST: usize = 100;

pub(crate) fn check(runtime: &Runtime, round: u32) {
    let sizes = lock(&runtime.0.backend.cluster().unwrap().state).sizes();
    assert!(sizes.iter().all(|(_, size)| *size <= MOST), "after {round} rounds: {sizes:?}");
}

fn device(seed: u64) -> (Runtime, Device) {
    let runtime = Runtime::emulated_with(EmulatedOptions { seed: Some(seed), ..EmulatedOptions::default() }).unwrap();
    let device = runtime.device(0).unwrap();
    (runtime, device)
}

#[test]
fn streams_that_come_and_go_leave_nothing() -> Result<()> {
    let (runtime, device) = device(1);
    for round in 0..3000 {
        let (stream, side) = (device.stream()?, device.stream()?);
        let mut buffer = Buffer::<u32>::zeros(&stream, 64)?;
        buffer.fill_zero(&side)?;
        stream.wait(&side.record()?)?;
        stream.synchronize()?;
        check(&runtime, round);
    }
    Ok(())
}

#[test]
fn graphs_that_come_and_go_leave_nothing() -> Result<()> {
    let (runtime, device) = device(2);
    let (stream, side) = (device.stream()?, device.stream()?);
    let (mut one, mut two) = (Buffer::<u32>::zeros(&stream, 64)?, Buffer::<u32>::zeros(&stream, 64)?);
    for round in 0..500 {
        let graph = Graph::capture(&[&stream, &side], || {
            one.fill_zero(&stream)?;
            two.copy_from(&side, &one)
        })?;
        graph.replay(&stream)?;
        graph.replay(&stream)?;
        drop(graph);
        stream.synchronize()?;
        check(&runtime, round);
    }
    Ok(())
}

/// What a stream does on its way out is not taken for that of a later one: only a stream that was waited for leaves its place in the clocks.
#[test]
fn a_stream_takes_the_place_of_one_that_was_waited_for() -> Result<()> {
    for seed in 0..16 {
        let (_runtime, device) = device(seed);
        let other = device.stream()?;
        let memory = Buffer::<u64>::zeros(&other, 2)?;
        other.synchronize()?;
        let fill =
            |stream: &Stream, word: u64| stream.0.runtime.backend.fill(stream.0.id, memory.address() + 8 * word, 1, 8, Location::caller());
        let first = device.stream()?;
        let name = first.raw();
        fill(&first, 0)?;
        first.synchronize()?;
        drop(first);
        let second = device.stream()?;
        assert_eq!(second.raw(), name);
        fill(&second, 0)?;
        drop(second);
        // Until that is done too, which was not waited for.
        (0..100).try_for_each(|_| fill(&other, 1).and_then(|()| other.synchronize()))?;
        let third = device.stream()?;
        assert_ne!(third.raw(), name);
        fill(&third, 0)?;
        let error = third.synchronize().unwrap_err();
        assert!(matches!(&error, Error::Race(race) if race.kind == RaceKind::Unordered), "seed {seed}: {error}");
    }
    Ok(())
}
