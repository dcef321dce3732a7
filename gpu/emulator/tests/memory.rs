//! Faults of memory: each is typed and names the tensor, the place in it and the line.

mod common;
use common::*;
use oxtile_emulator::{FaultKind, GridRun, Launch, Memory, MemoryError, Options, ReadOrder, Reservation, device};

#[test]
fn memory_faults_name_tensor_offset_and_line() {
    let fault = reported(job(|a| store(a[1] + 4 * u64::from(thread() + 1), 1)), FaultKind::OutOfBounds);
    let text = fault.to_string();
    for part in ["`output`", "offset 256", "256 bytes", "thread (63, 0, 0)", "kernel `faulty`", "mod.rs"] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    let fault = reported(job(|a| _ = device::global_read::<16>(a[0] + 8, ReadOrder::Weak)), FaultKind::Misaligned);
    assert!(fault.to_string().contains("misaligned access: an access of 16 bytes at offset 8 of `input`"), "{fault}");
    reported(job(|_| shared_store(256, 1)), FaultKind::OutOfBounds);
    let fault = reported(|| Job::new("forgotten", 1, 64, 64, 0, |_| shared_store(12, 1)), FaultKind::OutOfBounds);
    assert!(fault.to_string().ends_with("mend: name the layout that the kernel claims: #[kernel(shared = ...)]"), "{fault}");
    reported(job(|_| _ = shared_load(thread() * 4)), FaultKind::Uninitialised);
    reported(job(|a| _ = load(a[0] + (1 << 40))), FaultKind::OutOfBounds);
}

#[test]
fn uninitialised_and_freed_global_memory_is_found() {
    let memory = Memory::new();
    let scratch = memory.allocate("scratch", 64, 0);
    let launch = Launch::new("reader", 1, 1, |a| _ = load(a[0] + 8)).arguments(&[scratch]);
    let run = |launch: &Launch| GridRun::new(&memory, launch.clone(), Options::default()).unwrap().run();
    let fault = run(&launch).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Uninitialised);
    assert!(fault.to_string().contains("offset 8 of `scratch`"), "{fault}");
    memory.write(scratch, &[0; 12]).unwrap();
    run(&launch).unwrap();
    memory.free(scratch).unwrap();
    let fault = run(&launch).unwrap_err();
    assert_eq!(fault.kind, FaultKind::UseAfterFree, "{fault}");
    assert_eq!(memory.free(scratch), Err(MemoryError::NotAllocated { address: scratch }));
}

/// Sums of four elements are those of each, from all threads at once, and lie on 16 bytes.
#[test]
fn sums_of_four_elements_are_atomic_each() {
    let memory = Memory::new();
    let sums = memory.allocate("sums", 32, 0);
    memory.write(sums, &[0; 32]).unwrap();
    let run = |launch: Launch| GridRun::new(&memory, launch.arguments(&[sums]), Options::default()).unwrap().run();
    run(Launch::new("adder", 2, 64, |a| device::add_vector(a[0] + 16, [1.0, 2.0, 0.5, thread() as f32]))).unwrap();
    let mut bytes = [0; 32];
    memory.read(sums, &mut bytes).unwrap();
    let found: Vec<f32> = bytes.chunks_exact(4).map(|word| f32::from_le_bytes(word.try_into().unwrap())).collect();
    assert_eq!(found, [0.0, 0.0, 0.0, 0.0, 128.0, 256.0, 64.0, 4032.0]);
    let fault = run(Launch::new("adder", 1, 1, |a| device::add_vector(a[0] + 8, [1.0; 4]))).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Misaligned, "{fault}");
    assert!(run(Launch::new("adder", 1, 1, |a| device::add_vector(a[0] + 32, [1.0; 4]))).is_err(), "beyond the end");
}

/// A copy between device buffers initialises nothing.
#[test]
fn copied_bytes_are_as_initialised_as_their_source() {
    let memory = Memory::new();
    let [source, target] = ["source", "target"].map(|name| memory.allocate(name, 64, 0));
    memory.write(source, &[1; 32]).unwrap();
    memory.write(target, &[2; 64]).unwrap();
    memory.copy(target + 8, source + 4, 56).unwrap();
    let launch = |offset| Launch::new("reader", 1, 1, |a| _ = load(a[0])).arguments(&[target + offset]);
    let run = |offset| GridRun::new(&memory, launch(offset), Options::default()).unwrap().run();
    for initialised in [0, 4, 8, 32] {
        run(initialised).unwrap();
    }
    let fault = run(36).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Uninitialised);
    assert!(fault.to_string().contains("offset 36 of `target`"), "{fault}");
    let mut bytes = [0; 64];
    memory.read(target, &mut bytes).unwrap();
    assert_eq!(bytes, *[[2; 8].as_slice(), &[1; 28], &[255; 28]].concat());
    assert!(memory.copy(target + 32, source, 40).is_err());
}

/// Neither device memory nor shared memory reads as zero before it is written, in fast mode either.
#[test]
fn new_memory_reads_as_nan() {
    let (memory, range) = (Memory::new(), Reservation::new(512));
    let parts = [memory.allocate("whole", 256, 0), memory.allocate_in(&range, 256, "part", 256, 0).unwrap()];
    for address in parts {
        let mut bytes = [0; 256];
        memory.read(address, &mut bytes).unwrap();
        assert_eq!(bytes, [255; 256]);
        assert_eq!(memory.first_unwritten(address, 256), Ok(Some(0)));
        memory.write(address + 8, &[0; 16]).unwrap();
        assert_eq!(memory.first_unwritten(address + 8, 16), Ok(None));
        assert_eq!(memory.first_unwritten(address + 10, 15), Ok(Some(14)));
    }
    // Memory at a place that was written and freed is new.
    memory.free(parts[1]).unwrap();
    let mut bytes = [0; 256];
    memory.read(memory.allocate_in(&range, 256, "again", 256, 0).unwrap(), &mut bytes).unwrap();
    assert_eq!(bytes, [255; 256]);
    let job = Job::new("shared", 1, 1, 1, 64, |a| store(a[1], shared_load(12)));
    job.run(Options::fast()).unwrap();
    assert_eq!(job.output(), [u32::MAX]);
}

#[test]
fn tensors_are_named_by_their_parameters() {
    let mut job = Job::new("named", 1, 1, 4, 0, |a| store(a[1] + 16, 1));
    let name = oxtile_emulator::TensorName { name: "scales".to_owned(), address: job.output, bytes: 16 };
    job.launch.tensors.push(name);
    let fault = job.run(Options::default()).unwrap_err();
    assert!(fault.to_string().contains("`scales`"), "{fault}");
}
