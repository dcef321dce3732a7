//! Graphs: what they replay, and what they refuse to capture.

use std::panic::AssertUnwindSafe;

use oxtile::{Buffer, Error, Graph, PinnedBuffer, Result, Runtime, Stream};

use crate::support::{Copier, SEEDS, alias, everywhere, filled, numbers, runtime, stream, streams, unsanitized};

#[test]
fn a_replay_does_the_work_again() {
    for runtime in everywhere() {
        let [stream, other] = streams(&runtime);
        let copier = Copier::new(&runtime);
        let (mut source, first) = filled(&other, 2000, 1);
        let mut middle = Buffer::zeros(&stream, 2000).unwrap();
        let mut target = Buffer::zeros(&stream, 2000).unwrap();
        let graph = Graph::capture(&[&stream], || {
            copier.copy(&stream, &source, &mut middle)?;
            target.copy_from(&stream, &middle)
        })
        .unwrap();
        assert_eq!(target.to_vec(&stream).unwrap(), vec![0; 2000], "a capture runs nothing");
        graph.replay(&stream).unwrap();
        assert_eq!(target.to_vec(&stream).unwrap(), first);
        // A write on another stream comes before the replay, and the next after it.
        let second = numbers(2000, 2);
        source.copy_from_slice(&other, &second).unwrap();
        graph.replay(&stream).unwrap();
        source.fill_zero(&other).unwrap();
        other.synchronize().unwrap();
        assert_eq!(target.to_vec(&other).unwrap(), second);
    }
}

#[test]
fn streams_of_a_graph_are_ordered_by_their_buffers() {
    for runtime in everywhere() {
        let [first, second] = streams(&runtime);
        let copier = Copier::new(&runtime);
        let (source, expected) = filled(&first, 2000, 1);
        let mut middle = Buffer::zeros(&first, 2000).unwrap();
        let mut target = Buffer::zeros(&first, 2000).unwrap();
        let graph = Graph::capture(&[&first, &second], || {
            copier.copy(&first, &source, &mut middle)?;
            copier.copy(&second, &middle, &mut target)?;
            middle.fill_zero(&first)
        })
        .unwrap();
        graph.replay(&second).unwrap();
        assert_eq!(target.to_vec(&first).unwrap(), expected);
        assert_eq!(middle.to_vec(&second).unwrap(), vec![0; 2000]);
    }
}

/// Captures a write on one stream and a read through an alias on another, with or without an event between; replays it.
fn race(runtime: &Runtime, ordered: bool) -> bool {
    let [writer, reader] = streams(runtime);
    let (new, expected) = filled(&writer, 64, 1);
    let mut shared = Buffer::zeros(&writer, 64).unwrap();
    let mut seen = Buffer::zeros(&reader, 64).unwrap();
    let again = alias(&shared);
    let graph = Graph::capture::<Error>(&[&writer, &reader], || {
        shared.copy_from(&writer, &new)?;
        if ordered {
            reader.wait(&writer.record()?)?;
        }
        seen.copy_from(&reader, &again)
    })
    .unwrap();
    graph.replay(&writer).unwrap();
    seen.to_vec(&writer).unwrap() == expected
}

#[test]
fn events_order_the_streams_of_a_graph() {
    assert!(everywhere().all(|runtime| race(&runtime, true)));
    let unordered: Vec<_> = SEEDS.map(|seed| race(&unsanitized(seed, 1), false)).collect();
    assert!(unordered.contains(&false) && unordered.contains(&true), "{unordered:?}");
}

#[test]
fn a_graph_keeps_its_buffers() {
    for runtime in everywhere() {
        let stream = stream(&runtime);
        let (source, expected) = filled(&stream, 300, 1);
        let mut target = Buffer::zeros(&stream, 300).unwrap();
        let graph = Graph::capture(&[&stream], || target.copy_from(&stream, &source)).unwrap();
        drop(source);
        graph.replay(&stream).unwrap();
        drop(graph);
        assert_eq!(target.to_vec(&stream).unwrap(), expected);
    }
}

/// A call inside a capture that must be refused.
type Refused<'a> = (&'a str, &'a dyn Fn() -> Result<()>);

#[test]
fn what_cannot_be_captured_is_refused_and_the_capture_goes_on() {
    let runtime = runtime();
    let [stream, other] = streams(&runtime);
    let (source, expected) = filled(&stream, 16, 1);
    let mut target = Buffer::zeros(&stream, 16).unwrap();
    let outside = stream.record().unwrap();
    let earlier = Graph::capture::<Error>(&[&stream], || Ok(())).unwrap();
    let pinned = PinnedBuffer::<u32>::zeros(&stream, 16).unwrap();
    let graph = Graph::capture(&[&stream], || {
        assert!(stream.is_capturing() && !other.is_capturing());
        let inside = stream.record()?;
        let refused: [Refused<'_>; 10] = [
            ("waiting for a stream", &|| stream.synchronize()),
            ("allocating a buffer", &|| Buffer::<u32>::uninitialised(&stream, 1).map(drop)),
            ("allocating page-locked memory", &|| PinnedBuffer::<u32>::zeros(&stream, 1).map(drop)),
            ("a copy of pageable host memory", &|| source.to_vec(&stream).map(drop)),
            ("a copy from or to the host", &|| alias(&source).copy_from_pinned(&stream, &pinned)),
            ("the replay of a graph", &|| earlier.replay(&stream)),
            ("an event between captured and other work", &|| stream.wait(&outside)),
            ("an event between captured and other work", &|| other.wait(&inside)),
            ("asking for an event of a graph", &|| inside.synchronize()),
            ("asking for an event of a graph", &|| inside.is_done().map(drop)),
        ];
        for (what, call) in refused {
            let error = call().expect_err(what);
            assert!(matches!(error, Error::NotCapturable { .. }), "{what}: {error}");
            assert!(error.to_string().starts_with(&format!("{what} cannot be captured in a graph: ")), "{error}");
        }
        target.copy_from(&stream, &source)
    })
    .unwrap();
    graph.replay(&stream).unwrap();
    assert_eq!(target.to_vec(&stream).unwrap(), expected);
}

#[test]
fn a_failed_capture_leaves_its_streams_usable() {
    let runtime = runtime();
    let [first, second] = streams(&runtime);
    let works = |stream: &Stream| {
        let (buffer, expected) = filled(stream, 10, 4);
        !stream.is_capturing() && buffer.to_vec(stream).unwrap() == expected
    };
    let failed = Graph::capture(&[&first, &second], || first.synchronize());
    assert!(matches!(failed, Err(Error::NotCapturable { .. })));
    assert!(works(&first) && works(&second));
    let panicked = std::panic::catch_unwind(AssertUnwindSafe(|| {
        Graph::capture::<Error>(&[&first, &second], || std::panic::resume_unwind(Box::new("planned")))
    }));
    assert!(panicked.is_err());
    assert!(works(&first) && works(&second));
    assert!(Graph::capture::<Error>(&[], || Ok(())).is_err());
    assert!(Graph::capture::<Error>(&[&first, &first], || Ok(())).is_err());
    assert!(works(&first));
}

#[test]
fn memory_dropped_during_a_capture_is_freed_after_it() {
    for runtime in everywhere() {
        let [captured, other] = streams(&runtime);
        let (gone, _) = filled(&captured, 100, 1);
        let (kept, expected) = filled(&captured, 100, 2);
        let mut target = Buffer::zeros(&other, 100).unwrap();
        let graph = Graph::capture::<Error>(&[&captured], || {
            drop(gone);
            // Work outside the capture on memory last used by the captured stream waits for what came before it.
            target.copy_from(&other, &kept)
        })
        .unwrap();
        // Twice, so that a free that became part of the graph would show.
        graph.replay(&captured).unwrap();
        graph.replay(&captured).unwrap();
        assert_eq!(target.to_vec(&other).unwrap(), expected);
        captured.synchronize().unwrap();
    }
}
