//! Ranks that are apart, as the processes of a launcher are: each has its own thread and drives itself alone, and rank 0 gets all parts by messages.

use std::{collections::BTreeMap, io::Write, path::Path, thread};

use half::bf16;
use oxtile::{
    Runtime,
    comm::{Rank, WorldSize},
    context_parallel::Schedule,
};

use super::{Done, Job, JobError, Parts, bytes_of, seat};
use crate::{
    arguments::{Attention, Device},
    output::Completed,
    progress::Progress,
    safetensors::{Checkpoint, Dtype, TensorSpec, Writer},
};

/// Four tensors of other values.
fn write(path: &Path) {
    let shape = vec![2, 12, 1, 8];
    let specs = ["q", "k", "v", "dout"].map(|name| TensorSpec { name: name.to_owned(), dtype: Dtype::Bf16, shape: shape.clone() });
    let mut writer = Writer::create(path, &[], &specs, &BTreeMap::new()).expect("a new file");
    for (spec, first) in specs.iter().zip(1_u32..) {
        let values: Vec<_> = (0..192).map(|i| bf16::from_f32(((i * 37 + first * 101) % 64) as f32 / 32.0 - 1.0)).collect();
        writer.append(&spec.name, &bytes_of(&values)).expect("room");
    }
    writer.complete().and_then(Completed::publish).expect("it is complete");
}

fn bytes(path: &Path) -> Vec<Vec<u8>> {
    let file = Checkpoint::open(path).expect("an output");
    file.tensors().iter().map(|tensor| file.window(tensor, 0..tensor.bytes()).expect("its bytes").to_vec()).collect()
}

#[test]
fn ranks_that_are_apart_write_what_one_process_writes() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, together, apart) = (folder.path().join("in"), folder.path().join("together"), folder.path().join("apart"));
    write(&input);
    for (ranks, schedule) in [(3, Schedule::Ring), (2, Schedule::Pull)] {
        let world = WorldSize::new(ranks).expect("ranks");
        let request = |output: &Path| Attention {
            input: input.clone(),
            output: output.to_owned(),
            causal: None,
            window: [Some(4), Some(1)],
            scale: None,
            backward: true,
            context_parallel: Some(schedule),
            fp8: false,
            ranks: Some(world),
            device: Device::Emulated,
            json: false,
        };
        let open = |output: &Path| -> Result<(Attention, Job, Parts, Vec<seat::Seat<_>>), JobError> {
            let request = request(output);
            let (job, parts) = Job::open_shared(&request, world)?;
            let needs = seat::Needs::new(parts.context(schedule), world, false)?;
            let seats = seat::emulated(&Runtime::emulated_fast(ranks)?, needs)?;
            Ok((request, job, parts, seats))
        };
        let (request, job, parts, seats) = open(&together).expect("ranks");
        job.attend(&request, &parts, seats, schedule, String::new(), &mut Progress::hidden())
            .expect("it attends")
            .expect("a report")
            .1
            .publish()
            .expect("a name");

        let (request, _, parts, seats) = open(&apart).expect("ranks");
        let mut reports: Vec<Option<Done>> = thread::scope(|scope| {
            let rank = |seat: seat::Seat<_>| {
                let (job, _) = Job::open_shared(&request, world).expect("the same file");
                let (request, parts) = (&request, &parts);
                scope.spawn(move || {
                    job.attend(request, parts, vec![seat], schedule, String::new(), &mut Progress::hidden()).expect("it attends")
                })
            };
            let threads: Vec<_> = seats.into_iter().map(rank).collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
        });
        let written: Vec<_> = world.ranks().filter(|rank| reports[rank.index() as usize].is_some()).collect();
        assert_eq!(written, [Rank::ZERO]);
        reports.swap_remove(0).expect("rank 0's").1.publish().expect("a name");
        assert!(bytes(&together) == bytes(&apart), "{schedule} on {world}");
    }
}

/// An input that changes while it is read leaves the output of before.
#[test]
fn an_input_that_changes_replaces_nothing() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, output) = (folder.path().join("in"), folder.path().join("out"));
    write(&input);
    std::fs::write(&output, "precious").expect("a writable folder");
    let request = Attention {
        input: input.clone(),
        output: output.clone(),
        causal: None,
        window: [None, None],
        scale: None,
        backward: false,
        context_parallel: None,
        fp8: false,
        ranks: None,
        device: Device::Emulated,
        json: false,
    };
    let job = Job::open(&request).expect("a valid file");
    let tensors: Vec<Vec<u8>> = [192 * 2, 24 * 4].map(|bytes| vec![0; bytes]).into();
    std::fs::OpenOptions::new().append(true).open(&input).and_then(|mut file| file.write_all(b"more")).expect("it is there");
    let error = job.finish(&request, String::new(), Vec::new(), None, &tensors).expect_err("a refusal").to_string();
    assert!(error.contains("changed while it was being read"), "{error}");
    assert_eq!(std::fs::read(&output).expect("the file"), b"precious");
}
