//! What is recorded of streams, on the back end at hand: on GPUs between device events, on the emulator in steps.

use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

use oxtile::runtime::Kind;
use oxtile::timeline::{Activity, Clock, Recording, Span, Timeline};
use oxtile::{Buffer, Error, Graph, Runtime};

use crate::support::{Copier, emulated, filled, runtime, stream, streams};

/// All runtimes of a process share its GPUs, and there can be one recording of them at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What device events may be off, in microseconds.
const GRAIN: f64 = 2.0;

/// The spans that this file enqueued: other tests use the GPUs meanwhile.
fn ours(recording: &Recording) -> Vec<&Span> {
    recording.spans.iter().filter(|span| span.at.as_ref().is_some_and(|at| at.contains("runtime/timeline.rs"))).collect()
}

fn check(recording: &Recording, runtime: &Runtime) {
    assert_eq!(recording.clock, if runtime.kind() == Kind::Cuda { Clock::Device } else { Clock::Steps });
    for spans in recording.lanes().values() {
        assert!(spans.is_sorted_by(|a, b| a.end <= b.start), "{spans:?}");
    }
    assert_eq!(Recording::from_json(&recording.to_json()).unwrap().spans.len(), recording.spans.len());
}

#[test]
fn work_is_recorded_in_the_order_of_its_stream() {
    let _alone = alone();
    for runtime in [runtime(), emulated(1, 1)] {
        let [first, second] = streams(&runtime);
        let copier = Copier::new(&runtime);
        let mut source = Buffer::<u32>::uninitialised(&first, 1 << 16).unwrap();
        let mut middle = Buffer::<u32>::zeros(&first, 1 << 16).unwrap();
        let mut target = Buffer::<u32>::zeros(&second, 1 << 16).unwrap();
        // Kernels are loaded, and loading takes time.
        copier.copy(&first, &middle, &mut target).unwrap();
        first.synchronize().unwrap();
        let timeline = Timeline::start(&runtime).unwrap();
        source.copy_from_slice(&first, &vec![7_u32; 1 << 16]).unwrap();
        copier.copy(&first, &source, &mut middle).unwrap();
        target.copy_from(&second, &middle).unwrap();
        source.fill_zero(&first).unwrap();
        assert_eq!(target.to_vec(&second).unwrap()[65535], 7);
        first.synchronize().unwrap();
        let recording = timeline.finish().unwrap();
        check(&recording, &runtime);

        let ours = ours(&recording);
        let one = |activity, name: &str| {
            let found: Vec<_> = ours.iter().filter(|span| (span.activity, span.name.as_str()) == (activity, name)).collect();
            assert_eq!(found.len(), 1, "{activity} {name}: {ours:?}");
            found[0]
        };
        let (upload, kernel) = (one(Activity::Copy, "copy from host"), one(Activity::Kernel, "copy_words"));
        let (copy, fill) = (one(Activity::Copy, "copy"), one(Activity::Fill, "fill"));
        let download = one(Activity::Copy, "copy to host");
        for span in [upload, copy, fill, download] {
            assert_eq!(span.bytes, Some(4 << 16), "{span:?}");
        }
        assert!(ours.iter().all(|span| span.is_finished && span.duration() > 0.0), "{ours:?}");
        assert!([kernel, fill].iter().all(|span| span.lane() == upload.lane()) && copy.lane() != kernel.lane());
        assert!(upload.end <= kernel.start && kernel.end <= fill.start, "{ours:?}");
        // The second stream waits for the kernel: that is recorded too.
        assert!(kernel.end <= copy.start + GRAIN, "{kernel:?} and {copy:?}");
        let waits: Vec<_> = recording.spans.iter().filter(|s| s.activity == Activity::Wait && s.lane() == copy.lane()).collect();
        assert!(waits.iter().any(|wait| wait.end <= copy.start && wait.end + GRAIN >= kernel.end), "{waits:?}");
    }
}

#[test]
fn a_replay_is_recorded_and_a_capture_is_not() {
    let _alone = alone();
    for runtime in [runtime(), emulated(2, 1)] {
        let stream = stream(&runtime);
        let copier = Copier::new(&runtime);
        let (source, expected) = filled(&stream, 2000, 1);
        let mut target = Buffer::zeros(&stream, 2000).unwrap();
        stream.synchronize().unwrap();
        let timeline = Timeline::start(&runtime).unwrap();
        let graph = Graph::capture(&[&stream], || copier.copy(&stream, &source, &mut target)).unwrap();
        assert_eq!(ours(&timeline.recording().unwrap()), [] as [&Span; 0], "a capture runs nothing");
        graph.replay(&stream).unwrap();
        graph.replay(&stream).unwrap();
        stream.synchronize().unwrap();
        let recording = timeline.finish().unwrap();
        check(&recording, &runtime);
        let of = |activity| ours(&recording).into_iter().filter(|span| span.activity == activity).collect::<Vec<_>>();
        let (replays, kernels) = (of(Activity::Graph), of(Activity::Kernel));
        assert_eq!(replays.len(), 2);
        match runtime.kind() {
            Kind::Cuda => assert_eq!(kernels, [] as [&Span; 0], "a replay is one span"),
            Kind::Emulated => {
                // What it does is on a lane of its own, and its stream waits for that.
                let branch = kernels[0].stream;
                assert!(kernels.len() == 2 && branch != replays[0].stream && kernels[1].stream == branch);
                let waits: Vec<_> = recording.spans.iter().filter(|span| span.name == format!("wait for stream {branch}")).collect();
                for ((replay, kernel), wait) in replays.iter().zip(&kernels).zip(&waits) {
                    assert!(replay.end <= kernel.start && kernel.end <= wait.end && wait.lane() == replay.lane(), "{recording:?}");
                }
                assert_eq!(waits.len(), 2);
            }
        }
        assert_eq!(target.to_vec(&stream).unwrap(), expected);
    }
}

#[test]
fn what_is_not_asked_for_is_not_recorded() {
    let _alone = alone();
    for runtime in [runtime(), emulated(3, 1)] {
        let stream = stream(&runtime);
        let mut buffer = Buffer::<u32>::zeros(&stream, 4).unwrap();
        let timeline = Timeline::start(&runtime).unwrap();
        assert!(matches!(Timeline::start(&runtime), Err(Error::Invalid { what: "Timeline::start", .. })));
        drop(timeline);
        buffer.fill_zero(&stream).unwrap();
        stream.synchronize().unwrap();
        let timeline = Timeline::start(&runtime).unwrap();
        assert_eq!(ours(&timeline.recording().unwrap()), [] as [&Span; 0]);
        buffer.fill_zero(&stream).unwrap();
        stream.synchronize().unwrap();
        assert_eq!(ours(&timeline.finish().unwrap()).len(), 1);
    }
}

/// What the tests below run as a process of its own; does nothing that could fail without them.
#[test]
fn a_program() {
    let makers: [fn() -> Runtime; 2] = [runtime, || emulated(4, 1)];
    for make in makers {
        // One after the other: the first takes the file's name.
        let runtime = make();
        Buffer::<u32>::zeros(&stream(&runtime), 4).and_then(|zeros| zeros.to_vec(&stream(&runtime))).unwrap();
    }
}

/// Runs `a_program` with this variable and this rank, by the variable of a launcher.
fn run_program(file: &Path, rank: Option<(&str, &str)>) -> bool {
    let mut program = Command::new(std::env::current_exe().unwrap());
    program.args(["--exact", "timeline::a_program"]).env("OXTILE_TRACE", file);
    for launcher in ["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"] {
        program.env_remove(launcher);
    }
    program.envs(rank);
    program.output().unwrap().status.success()
}

#[test]
fn a_process_writes_what_its_runtimes_did() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("trace.json");
    assert!(run_program(&file, None) && run_program(&file, Some(("RANK", "3"))) && run_program(&file, Some(("SLURM_PROCID", "5"))));
    let cuda = runtime().kind() == Kind::Cuda;
    for (rank, name) in [(0, "trace.json"), (3, "trace.rank3.json"), (5, "trace.rank5.json")] {
        let recording = Recording::read(&folder.path().join(name)).unwrap();
        let fills = |recording: &Recording| recording.spans.iter().filter(|span| span.activity == Activity::Fill).count();
        assert_eq!(recording.clock, if cuda { Clock::Device } else { Clock::Steps });
        assert_eq!(recording.ranks().into_iter().collect::<Vec<_>>(), [rank]);
        // On a GPU the emulator's steps are beside it; two emulators are one after the other.
        assert_eq!(fills(&recording), if cuda { 1 } else { 2 });
        if !cuda {
            assert_eq!(recording.lanes().len(), 4, "each runtime's two streams");
        }
    }
    assert!(!run_program(&folder.path().join("no/such/folder/trace.json"), None), "a file that cannot be written is an error");
}
