//! The program of the example: ranks that share all weights learn, and have the bits of one device.

#[path = "../../examples/sharded_block/main.rs"]
mod example;

use example::comparison::{Comparison, Place};
use example::{Options, compare};
use oxtile::Runtime;
use oxtile::context_parallel::Schedule;

use crate::support::is_long;

fn by_threads(runtime: Runtime, ranks: u32, steps: u32, format: &str) -> Comparison {
    let options = Options { ranks, steps, format: format.to_owned(), ..Options::default() };
    compare(&Place::Threads(runtime), &options).unwrap_or_else(|error| panic!("{options:?}: {error}"))
}

#[test]
fn ranks_have_the_bits_of_one_device_in_every_format() {
    // Sums of three parts depend on their order.
    for (ranks, format) in [(3, "bf16"), (2, "mxfp8"), (2, "nvfp4")] {
        let found = by_threads(Runtime::emulated_fast(ranks).unwrap(), ranks, 2, format);
        assert!(found.to_string().ends_with(&format!("{ranks} of {ranks} ranks bit-equal to one device")), "{format}: {found}");
        assert!(found.losses[1] < found.losses[0], "{format}: {found}");
    }
}

#[test]
fn the_loss_falls_and_no_step_has_a_race() {
    if !is_long() {
        return;
    }
    for format in ["bf16", "mxfp8", "nvfp4"] {
        let found = by_threads(Runtime::emulated_fast(3).unwrap(), 3, 8, format);
        assert_eq!(found.equal, Some([3, 3]), "{format}: {found}");
        assert!(found.losses[7] < found.losses[0] / 2.0, "{format}: {found}");
        // With the checks of kernels and streams.
        assert_eq!(by_threads(Runtime::emulated(2).unwrap(), 2, 2, format).equal, Some([2, 2]), "{format}");
    }
}

/// A run that is timed trains no other device, and has the same losses.
#[test]
fn a_step_is_timed_without_a_comparison() {
    let options = Options { ranks: 2, steps: 3, is_compared: false, ..Options::default() };
    let timed = compare(&Place::Threads(Runtime::emulated_fast(2).unwrap()), &options).unwrap();
    let compared = by_threads(Runtime::emulated_fast(2).unwrap(), 2, 3, "bf16");
    assert_eq!((timed.equal, compared.equal), (None, Some([2, 2])));
    assert_eq!(timed.losses, compared.losses);
    assert!(timed.to_string().ends_with(" tokens a second on each rank"), "{timed}");
}

/// Passes that are captured in the first step and replayed in the others have the bits of one device, which enqueues its own.
#[test]
fn captured_passes_have_the_bits_of_one_device() {
    let formats = [(3, "bf16"), (2, "mxfp8"), (2, "nvfp4")];
    for (ranks, format) in formats.into_iter().take(if is_long() { 3 } else { 2 }) {
        let options = Options { ranks, steps: 2, format: format.to_owned(), is_captured: true, ..Options::default() };
        let found = compare(&Place::Threads(Runtime::emulated_fast(ranks).unwrap()), &options).unwrap();
        assert_eq!(found.equal, Some([ranks as usize; 2]), "{format}: {found}");
        assert!(found.losses[1] < found.losses[0], "{format}: {found}");
    }
    if !is_long() {
        return;
    }
    // With the checks of kernels and streams.
    let options = Options { steps: 2, is_captured: true, ..Options::default() };
    assert_eq!(compare(&Place::Threads(Runtime::emulated(2).unwrap()), &options).unwrap().equal, Some([2, 2]));
}

#[test]
fn a_format_that_is_not_there_is_named() {
    let options = Options { ranks: 1, steps: 1, format: "fp6".to_owned(), ..Options::default() };
    let error = compare(&Place::Threads(Runtime::emulated_fast(1).unwrap()), &options).unwrap_err();
    assert_eq!(error.to_string(), "there is no format fp6: give bf16, mxfp8 or nvfp4");
}

/// Ranks that share each sequence as well as all weights learn as one device does.
#[test]
fn ranks_may_share_the_sequence_too() {
    for (ranks, schedule) in [(2, Schedule::Pull), (2, Schedule::AllToAll)] {
        let options = Options { ranks, steps: 3, context_parallel: Some(schedule), ..Options::default() };
        let found = compare(&Place::Threads(Runtime::emulated(ranks).unwrap()), &options).unwrap();
        assert!(found.off.is_some_and(|off| off < 0.02), "{schedule}: {found}");
        assert!(found.losses[2] < found.losses[0], "{schedule}: {found}");
    }
}
