//! What is recorded of ranks: the program of the example, under many seeds.

#[path = "../../examples/timeline.rs"]
mod example;

use oxtile::comm::{Communicator, EmulatedCommunicator, ReduceOp, WorldSize};
use oxtile::runtime::Mode;
use oxtile::timeline::{Activity, Clock, Recording, Span, Timeline};
use oxtile::{Buffer, EmulatedOptions, Error, Runtime};

const SEEDS: std::ops::Range<u64> = 0..64;

fn recording(seed: u64) -> Recording {
    let options = EmulatedOptions { devices: 2, mode: Mode::Fast, seed: Some(seed), ..EmulatedOptions::default() };
    example::recorded(&Runtime::emulated_with(options).unwrap()).unwrap()
}

/// The spans of a rank that are of one sort and whose name begins so.
fn spans<'a>(recording: &'a Recording, rank: u32, activity: Activity, name: &str) -> Vec<&'a Span> {
    recording.spans.iter().filter(|span| (span.rank, span.activity) == (rank, activity) && span.name.starts_with(name)).collect()
}

fn one<'a>(recording: &'a Recording, rank: u32, activity: Activity, name: &str) -> &'a Span {
    let found = spans(recording, rank, activity, name);
    assert_eq!(found.len(), 1, "{activity} {name:?} of rank {rank}: {found:?}");
    found[0]
}

/// Every span is done, none of a stream overlaps the next, and the file holds the same.
fn check(recording: &Recording) {
    assert_eq!((recording.clock, recording.dropped), (Clock::Steps, 0));
    for (lane, spans) in recording.lanes() {
        assert!(spans.iter().all(|span| span.is_finished && span.end > span.start), "{spans:?}");
        assert!(spans.is_sorted_by(|a, b| a.end <= b.start), "{lane:?}: {spans:?}");
    }
    assert_eq!(Recording::from_json(&recording.to_json()).unwrap(), *recording);
}

#[test]
fn what_nothing_orders_overlaps() {
    let mut overlapping = 0;
    for seed in SEEDS {
        let recording = recording(seed);
        check(&recording);
        let get = one(&recording, 0, Activity::Copy, "get from device 1");
        assert_eq!((get.bytes, get.device), (Some(4096), 0));
        assert!(get.at.as_ref().is_some_and(|at| at.contains("examples/timeline.rs:")), "{get:?}");
        let kernels = spans(&recording, 0, Activity::Kernel, "amax");
        assert_eq!(kernels.len(), 5);
        assert!(kernels.iter().all(|kernel| kernel.stream != get.stream));
        // The last one reads what was fetched.
        assert!(kernels[4].start >= get.end, "seed {seed}: {get:?} and {:?}", kernels[4]);
        overlapping += u32::from(kernels[..4].iter().any(|kernel| kernel.overlaps(get)));
    }
    assert!(overlapping > 16, "a copy and a kernel overlap in {overlapping} of 64 schedules");
}

#[test]
fn a_wait_ends_behind_what_it_waits_for() {
    for seed in SEEDS {
        let recording = recording(seed);
        for (from, to) in [(1, 0), (0, 1)] {
            let signal = one(&recording, from, Activity::Signal, "signal 1 to device");
            let wait = one(&recording, to, Activity::Wait, "wait for signal 1");
            assert!(wait.end > signal.end, "seed {seed}: {signal:?} and {wait:?}");
        }
        // READY stands after the write and before the get; DONE after the get and before the next write.
        let [write, get] = [(1, "copy"), (0, "get")].map(|(rank, name)| one(&recording, rank, Activity::Copy, name));
        let [first, second] = [1, 0].map(|rank| one(&recording, rank, Activity::Signal, "signal"));
        let fills = spans(&recording, 1, Activity::Fill, "fill");
        let again = fills.iter().find(|fill| fill.bytes == Some(4096)).expect("the shard is written again");
        let order = [write.end, first.start, first.end, get.end, second.start, second.end, again.end];
        assert!(order.is_sorted(), "seed {seed}: {order:?}");
        // The kernel that needs the shard waits for the stream of the get, between that and its own beginning.
        let waits = spans(&recording, 0, Activity::Wait, &format!("wait for stream {}", get.stream));
        assert!(waits.iter().any(|wait| wait.end >= get.end), "seed {seed}: {waits:?}");
    }
}

#[test]
fn ranks_leave_a_collective_when_all_have_come() {
    for seed in SEEDS {
        let recording = recording(seed);
        let [a, b] = [0, 1].map(|rank| one(&recording, rank, Activity::Collective, "all_reduce"));
        assert!(a.overlaps(b) && (a.bytes, b.bytes) == (Some(4), Some(4)), "seed {seed}: {a:?} and {b:?}");
    }
}

#[test]
fn what_hangs_is_in_the_recording() {
    let runtime = Runtime::emulated(2).unwrap();
    let ranks = EmulatedCommunicator::world_of(&runtime, WorldSize::new(2).unwrap()).unwrap();
    let streams: Vec<_> = ranks.iter().map(|rank| rank.device().stream().unwrap()).collect();
    let mut values: Vec<_> = streams.iter().map(|stream| Buffer::from_slice(stream, &[1_u32]).unwrap()).collect();
    let timeline = Timeline::start(&runtime).unwrap();
    // Both are driven from here, so that no other rank can come any more.
    ranks[1].all_reduce(&streams[1], &mut values[1], ReduceOp::Sum).unwrap();
    ranks[0].all_reduce(&streams[0], &mut values[0], ReduceOp::Sum).unwrap();
    ranks[0].all_reduce(&streams[0], &mut values[0], ReduceOp::Sum).unwrap();
    assert!(matches!(streams[0].synchronize(), Err(Error::Stuck { .. })));
    let recording = timeline.finish().unwrap();
    let last = recording.lanes().into_values().next().unwrap().pop().unwrap();
    assert_eq!((last.activity, last.name.as_str(), last.rank, last.is_finished), (Activity::Collective, "all_reduce", 0, false));
    assert!(last.at.as_ref().is_some_and(|at| at.contains("comm/timeline.rs:")), "{last:?}");
    assert!(recording.to_json().contains("\"unfinished\":true"));
}

#[test]
fn more_ranks_than_devices_share_one() {
    let runtime = Runtime::emulated(1).unwrap();
    let ranks = EmulatedCommunicator::world_of(&runtime, WorldSize::new(2).unwrap()).unwrap();
    let streams: Vec<_> = ranks.iter().map(|rank| rank.device().stream().unwrap()).collect();
    let timeline = Timeline::start(&runtime).unwrap();
    ranks.iter().zip(&streams).try_for_each(|(rank, stream)| rank.barrier(stream)).unwrap();
    streams.iter().try_for_each(|stream| stream.synchronize()).unwrap();
    let recording = timeline.finish().unwrap();
    check(&recording);
    assert_eq!((recording.ranks().len(), recording.lanes().len()), (1, 2));
}
