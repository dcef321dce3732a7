//! Streams and events: what is ordered, and that nothing else is.

use std::time::Duration;

use oxtile::{Buffer, Error, Runtime};

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
        // The overwriting stream first, so that nothing else orders it behind the reads.
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
