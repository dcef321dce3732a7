//! What a misbehaving kernel leads to on the emulator.

use oxtile::runtime::FaultKind;
use oxtile::{Buffer, EmulatedOptions, Error, PinnedBuffer, Runtime, Stream};
use oxtile_tile::prelude::*;

use crate::support::{self, Copier, emulated, stream};

/// Writes one element beyond the end.
#[kernel(threads = 32, grid = one_block)]
pub fn overrun(target: GlobalMut<u32>) {
    target.store(u64::from(thread::index()) + 1, 1);
}

fn one_block(_: &OverrunArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    Ok(Grid::x(1))
}

#[test]
fn a_fault_is_reported_where_somebody_waits_and_ends_all_work() {
    let runtime = emulated(1, 1);
    let stream = stream(&runtime);
    let mut target = Buffer::<u32>::named(&stream, "weights", 32).unwrap();
    let kernel = runtime.load::<Overrun>().unwrap();
    kernel.launch(&stream, OverrunArgs { target: target.view_mut() }).unwrap();
    let error = stream.synchronize().unwrap_err();
    let Error::Fault(fault) = &error else { panic!("{error}") };
    assert_eq!(fault.kind, FaultKind::OutOfBounds);
    let text = error.to_string();
    assert!(text.contains("in kernel `overrun`, block (0, 0, 0), thread (31, 0, 0)"), "{text}");
    assert!(text.contains("faults.rs:"), "{text}");
    // As on a GPU, the error stays, and dropping is still fine.
    assert_eq!(stream.synchronize().unwrap_err().to_string(), text);
    assert_eq!(target.fill_zero(&stream).unwrap_err().to_string(), text);
    assert_eq!(Buffer::<u32>::zeros(&stream, 1).unwrap_err().to_string(), text);
}

/// A copy between buffers does not make bytes readable that were never written.
#[test]
fn a_copy_of_unwritten_memory_is_unwritten() {
    let runtime = emulated(1, 1);
    let stream = stream(&runtime);
    let source = Buffer::<u32>::uninitialised(&stream, 32).unwrap();
    let [mut copied, mut target] = ["copied", "target"].map(|name| Buffer::named(&stream, name, 32).unwrap());
    copied.copy_from(&stream, &source).unwrap();
    Copier::new(&runtime).copy(&stream, &copied, &mut target).unwrap();
    let error = stream.synchronize().unwrap_err();
    let Error::Fault(fault) = &error else { panic!("{error}") };
    assert_eq!(fault.kind, FaultKind::Uninitialised, "{error}");
}

/// Writes all elements but the last.
#[kernel(threads = 32, grid = one_block_of_most)]
pub fn most(target: GlobalMut<u32>) {
    let i = u64::from(thread::index());
    if i + 1 < target.len() {
        target.store(i, 7);
    }
}

fn one_block_of_most(_: &MostArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    Ok(Grid::x(1))
}

/// A buffer of 32 elements, of which a kernel wrote 31.
fn half_written(runtime: &Runtime, stream: &Stream) -> Buffer<u32> {
    let mut gradients = Buffer::<u32>::named(stream, "gradients", 32).unwrap();
    runtime.load::<Most>().unwrap().launch(stream, MostArgs { target: gradients.view_mut() }).unwrap();
    gradients
}

#[test]
fn the_host_reads_nothing_that_was_never_written() {
    type Read = fn(&Stream, &Buffer<u32>) -> oxtile::Result<()>;
    let reads: [Read; 4] = [
        |stream, buffer| buffer.to_vec(stream).map(drop),
        |stream, buffer| buffer.copy_to_slice(stream, &mut [0_u32; 32]),
        |stream, buffer| {
            let mut pinned = PinnedBuffer::<u32>::zeros(stream, 32)?;
            buffer.copy_to_pinned(stream, &mut pinned)?;
            pinned.as_slice().map(drop)
        },
        // The copy is as unwritten as its source.
        |stream, buffer| {
            let mut copied = Buffer::<u32>::named(stream, "gradients", 32)?;
            copied.copy_from(stream, buffer)?;
            copied.to_vec(stream).map(drop)
        },
    ];
    for (number, read) in reads.into_iter().enumerate() {
        let runtime = emulated(1, 1);
        let stream = stream(&runtime);
        let error = read(&stream, &half_written(&runtime, &stream)).unwrap_err();
        assert!(matches!(&error, Error::Unwritten { buffer, element: 31, elements: 32, .. } if buffer == "gradients"), "{error}");
        let text = error.to_string();
        for part in ["the host reads `gradients`, of which element 31 (of 32) was never written", "faults.rs:", "mend: let a kernel"] {
            assert!(text.contains(part), "no {part:?} in: {text}");
        }
        // No kernel had the copy.
        assert_eq!(text.contains("was never written, last given to kernel `most` as `target`\n"), number < 3, "{text}");
        // Nothing runs any more.
        assert_eq!(stream.synchronize().unwrap_err().to_string(), text);
    }
}

#[test]
fn what_is_written_is_read_and_new_memory_is_nan() {
    let runtime = emulated(1, 1);
    let stream = stream(&runtime);
    let mut gradients = half_written(&runtime, &stream);
    gradients.copy_from_slice(&stream, &[1_u32; 32]).unwrap();
    assert_eq!(gradients.to_vec(&stream).unwrap(), [1; 32]);
    assert_eq!(Buffer::<u32>::zeros(&stream, 4).unwrap().to_vec(&stream).unwrap(), [0; 4]);
    // The fast mode does not look, and does not hide it either.
    let fast = Runtime::emulated_fast(1).unwrap();
    let stream = support::stream(&fast);
    let numbers = Buffer::<f32>::uninitialised(&stream, 2).unwrap();
    assert!(numbers.to_vec(&stream).unwrap().iter().all(|number| number.is_nan()));
}

/// A test or `main` that returns an error prints it by `Debug`.
#[test]
fn an_error_reads_the_same_where_it_is_returned() {
    let runtime = emulated(1, 1);
    let stream = stream(&runtime);
    let mut target = Buffer::<u32>::named(&stream, "weights", 32).unwrap();
    runtime.load::<Overrun>().unwrap().launch(&stream, OverrunArgs { target: target.view_mut() }).unwrap();
    let error = stream.synchronize().unwrap_err();
    assert!(format!("{error:?}").starts_with("out of bounds: "), "{error:?}");
    assert_eq!(format!("{error:?}"), error.to_string());
}

/// The runtimes that are found first look for races; the one that does not is named so.
#[test]
fn emulated_runtimes_check_unless_they_are_asked_to_be_fast() {
    let finds = |runtime: Runtime| {
        let stream = support::stream(&runtime);
        let buffer = half_written(&runtime, &stream);
        matches!(buffer.to_vec(&stream), Err(Error::Unwritten { .. }))
    };
    let with = Runtime::emulated_with(EmulatedOptions::default());
    assert_eq!(
        [Runtime::checked(3), Runtime::emulated(2), with, Runtime::emulated_fast(1)].map(|r| finds(r.unwrap())),
        [true, true, true, false]
    );
}
