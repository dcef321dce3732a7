//! Streams and events: what is ordered, and that nothing else is.

use std::time::{Duration, Instant};

use oxtile::comm::{Communicator, EmulatedCommunicator, WorldSize};
use oxtile::{Buffer, EmulatedOptions, Error, Graph, PinnedBuffer, Result, Runtime};

use crate::support::{Copier, SEEDS, alias, emulated, everywhere, filled, runtime, stream, streams, unsanitized};

#[test]
fn reading_waits_for_the_write_of_another_stream() {
    for runtime in everywhere() {
        let [first, second] = streams(&runtime);
        let copier = Copier::new(&runtime);
        let (source, expected) = filled(&first, 4096, 1);
        let mut middle = Buffer::zeros(&first, 4096).unwrap();
        let mut target = Buffer::zeros(&second, 4096).unwrap();
        copier.copy(&first, &source, &mut middle).unwrap();
        copier.copy(&second, &middle, &mut target).unwrap();
        assert_eq!(target.to_vec(&second).unwrap(), expected);
    }
}

#[test]
fn writing_waits_for_the_reads_of_other_streams() {
    for runtime in everywhere() {
        let [first, second, third] = streams(&runtime);
        let (mut source, expected) = filled(&first, 4096, 1);
        let mut copies = [Buffer::zeros(&first, 4096).unwrap(), Buffer::zeros(&second, 4096).unwrap()];
        copies[0].copy_from(&first, &source).unwrap();
        copies[1].copy_from(&second, &source).unwrap();
        source.fill_zero(&third).unwrap();
        // The overwriting stream first, so that nothing else orders it after the reads.
        assert_eq!(source.to_vec(&third).unwrap(), vec![0; 4096]);
        assert_eq!(copies[0].to_vec(&first).unwrap(), expected);
        assert_eq!(copies[1].to_vec(&second).unwrap(), expected);
    }
}

#[test]
fn the_last_write_wins() {
    for runtime in everywhere() {
        let [first, second] = streams(&runtime);
        let (one, _) = filled(&first, 64, 1);
        let (two, expected) = filled(&second, 64, 2);
        let mut target = Buffer::zeros(&first, 64).unwrap();
        target.copy_from(&first, &one).unwrap();
        target.copy_from(&second, &two).unwrap();
        assert_eq!(target.to_vec(&first).unwrap(), expected);
    }
}

/// Overwrites memory on one stream and reads it on another, through an alias, with or without an event between.
fn race(runtime: &Runtime, ordered: bool) -> bool {
    let [writer, reader] = streams(runtime);
    let (new, expected) = filled(&writer, 64, 1);
    let mut shared = Buffer::zeros(&writer, 64).unwrap();
    let mut seen = Buffer::zeros(&reader, 64).unwrap();
    writer.synchronize().unwrap();
    reader.synchronize().unwrap();
    shared.copy_from(&writer, &new).unwrap();
    if ordered {
        reader.wait(&writer.record().unwrap()).unwrap();
    }
    seen.copy_from(&reader, &alias(&shared)).unwrap();
    let seen = seen.to_vec(&reader).unwrap();
    writer.synchronize().unwrap();
    seen == expected
}

#[test]
fn events_order_streams_under_every_seed() {
    assert!(everywhere().all(|runtime| race(&runtime, true)));
}

#[test]
fn a_forgotten_event_shows_under_some_seed() {
    let outcomes = || SEEDS.map(|seed| race(&unsanitized(seed, 1), false)).collect::<Vec<_>>();
    let first = outcomes();
    assert!(first.contains(&true) && first.contains(&false), "{first:?}");
    assert_eq!(first, outcomes(), "a seed replays its order");
}

#[test]
fn events_are_done_when_their_stream_got_there() {
    let runtime = runtime();
    let stream = stream(&runtime);
    let (source, _) = filled(&stream, 1 << 16, 1);
    let mut target = Buffer::zeros(&stream, 1 << 16).unwrap();
    let start = stream.record().unwrap();
    target.copy_from(&stream, &source).unwrap();
    let end = stream.record().unwrap();
    while !end.is_done().unwrap() {}
    assert!(start.is_done().unwrap());
    let elapsed = end.elapsed_since(&start).unwrap();
    assert!(elapsed > Duration::ZERO && elapsed < Duration::from_secs(60), "{elapsed:?}");
}

#[test]
fn events_and_streams_of_other_runtimes_are_refused() {
    let (here, there) = (emulated(0, 1), emulated(0, 1));
    let event = stream(&there).record().unwrap();
    assert!(matches!(stream(&here).wait(&event), Err(Error::ForeignRuntime { what: "Stream::wait" })));
    let mut buffer = Buffer::<u32>::zeros(&stream(&there), 1).unwrap();
    assert!(matches!(buffer.fill_zero(&stream(&here)), Err(Error::ForeignRuntime { .. })));
}

#[test]
fn events_order_streams_of_different_devices() {
    for seed in SEEDS {
        let runtime = emulated(seed, 2);
        let [near, far] = [0, 1].map(|device| runtime.device(device).unwrap().stream().unwrap());
        let done = near.record().unwrap();
        far.wait(&done).unwrap();
        far.synchronize().unwrap();
        assert!(done.is_done().unwrap());
    }
}

/// Readers on one stream: only the first of them has to make the stream wait, and all have to come after that wait.
#[test]
fn threads_may_share_a_stream() {
    let runtime = runtime();
    let [writer, reader] = streams(&runtime);
    let shared = filled(&writer, 10_000, 9);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let copier = Copier::new(&runtime);
                let mut target = Buffer::zeros(&reader, 10_000).unwrap();
                copier.copy(&reader, &shared.0, &mut target).unwrap();
                assert_eq!(target.to_vec(&reader).unwrap(), shared.1);
            });
        }
    });
}

#[test]
fn many_threads_may_enqueue() {
    let runtime = runtime();
    let shared = filled(&stream(&runtime), 10_000, 9);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let (own, copier) = (stream(&runtime), Copier::new(&runtime));
                let mut target = Buffer::zeros(&own, 10_000).unwrap();
                copier.copy(&own, &shared.0, &mut target).unwrap();
                assert_eq!(target.to_vec(&own).unwrap(), shared.1);
            });
        }
    });
}

/// The host's waits end by the runtime's deadline, and name the stream and the work that it comes after; the work goes on, and the memory of a copy that was not
/// made stays as it was.
#[test]
fn waits_for_streams_have_a_deadline() {
    let (deadline, patience) = (Some(Duration::from_millis(80)), Duration::from_secs(30));
    let options = EmulatedOptions { devices: 2, deadline, patience, ..EmulatedOptions::default() };
    let runtime = Runtime::emulated_with(options).unwrap();
    let ranks = EmulatedCommunicator::world_of(&runtime, WorldSize::new(2).unwrap()).unwrap();
    let streams = [0, 1].map(|index| runtime.device(index).unwrap().stream().unwrap());
    let mut value = Buffer::from_slice(&streams[0], &[1_u32, 2]).unwrap();
    ranks[0].barrier(&streams[0]).unwrap();
    let event = streams[0].record().unwrap();
    let in_time = |what: &str, result: Result<()>| {
        let error = result.expect_err(what);
        let Error::StreamDeadline { stream, device, last, limit } = &error else { panic!("{what}: {error}") };
        assert_eq!((*stream, *device, Some(*limit)), (streams[0].raw(), 0, deadline), "{what}");
        assert!(last.starts_with("Communicator::barrier (enqueued at ") && last.contains("streams.rs:"), "{what}: {last}");
        assert!(error.to_string().contains("OXTILE_DEADLINE"), "{error}");
    };
    let start = Instant::now();
    in_time("synchronize", streams[0].synchronize());
    in_time("an event", event.synchronize());
    let mut found = [7_u32; 2];
    in_time("a copy to the host", value.copy_to_slice(&streams[0], &mut found));
    assert_eq!(found, [7; 2]);
    in_time("a vector", value.to_vec(&streams[0]).map(drop));
    in_time("a copy to the device", value.copy_from_slice(&streams[0], &[8_u32, 9]));
    assert!(start.elapsed() < Duration::from_secs(5), "nothing waited for the patience");
    // Nothing is lost: when the other rank comes, all of it goes on.
    ranks[1].barrier(&streams[1]).unwrap();
    event.synchronize().unwrap();
    assert_eq!(value.to_vec(&streams[0]).unwrap(), [1, 2]);
    streams[1].synchronize().unwrap();
}

/// Page-locked memory that a copy may still write is not handed out.
#[test]
fn page_locked_memory_has_the_deadline_too() {
    let options = EmulatedOptions { devices: 2, deadline: Some(Duration::from_millis(50)), ..EmulatedOptions::default() };
    let runtime = Runtime::emulated_with(options).unwrap();
    let ranks = EmulatedCommunicator::world_of(&runtime, WorldSize::new(2).unwrap()).unwrap();
    let streams = [0, 1].map(|index| runtime.device(index).unwrap().stream().unwrap());
    let value = Buffer::from_slice(&streams[0], &[1_u32, 2]).unwrap();
    let mut pinned = PinnedBuffer::<u32>::zeros(&streams[0], 2).unwrap();
    ranks[0].barrier(&streams[0]).unwrap();
    value.copy_to_pinned(&streams[0], &mut pinned).unwrap();
    let error = pinned.as_slice().unwrap_err();
    assert!(matches!(&error, Error::StreamDeadline { last, .. } if last.starts_with("copy to host (enqueued at ")), "{error}");
    ranks[1].barrier(&streams[1]).unwrap();
    assert_eq!(pinned.as_slice().unwrap(), [1, 2]);
}

/// Whether all goes well or not, a deadline that is not reached changes nothing.
#[test]
fn a_deadline_that_is_far_changes_nothing() {
    let options = EmulatedOptions { deadline: Some(Duration::from_secs(60)), ..EmulatedOptions::default() };
    let runtime = Runtime::emulated_with(options).unwrap();
    let stream = stream(&runtime);
    let mut sum = Buffer::from_slice(&stream, &[5_u32; 64]).unwrap();
    let graph = {
        let (copier, source) = (Copier::new(&runtime), Buffer::from_slice(&stream, &[6_u32; 64]).unwrap());
        let graph = Graph::capture(&[&stream], || {
            assert!(matches!(stream.synchronize(), Err(Error::NotCapturable { .. })));
            copier.copy(&stream, &source, &mut sum)
        });
        graph.unwrap()
    };
    graph.replay(&stream).unwrap();
    assert_eq!(sum.to_vec(&stream).unwrap(), [6; 64]);
    let event = stream.record().unwrap();
    event.synchronize().unwrap();
    assert!(event.is_done().unwrap());
}
