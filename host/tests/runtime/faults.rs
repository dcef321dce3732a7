//! What a misbehaving kernel leads to on the emulator.

use oxtile::runtime::FaultKind;
use oxtile::{Buffer, Error};
use oxtile_tile::prelude::*;

use crate::support::{Copier, emulated, stream};

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
