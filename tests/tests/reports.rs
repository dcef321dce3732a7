//! What a kernel's author reads when a kernel is wrong: each report names the kernel, the parameter and the line.

use oxtile::{Buffer, EmulatedOptions, Runtime};
use oxtile_emulator::Mode;
use oxtile_tile::prelude::*;

#[kernel(threads = 32, grid = one_block)]
pub fn one_too_far(input: Global<f32>, output: GlobalMut<f32>) {
    let i = u64::from(thread::index());
    output.store(i, input.load(i + 1));
}

fn one_block(_: &OneTooFarArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    Ok(Grid::x(1))
}

#[derive(SharedStorage)]
struct Cells {
    cells: SharedArray<f32, 64>,
}

#[kernel(threads = 64, grid = racy_block, shared = Cells)]
pub fn no_barrier(output: GlobalMut<f32>) {
    let (cells, t) = (Cells::claim().cells, thread::index());
    cells.store(t, 0.0);
    block::sync();
    cells.store(t, t as f32);
    output.store(u64::from(t), cells.load(63 - t));
}

fn racy_block(_: &NoBarrierArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    Ok(Grid::x(1))
}

#[kernel(threads = 32, grid = shared_block, shared = Cells)]
pub fn beyond_shared(output: GlobalMut<f32>) {
    let cells = Cells::claim().cells;
    if thread::index() == 0 {
        cells.store(64, 0.0);
        output.store(0, 1.0);
    }
}

fn shared_block(_: &BeyondSharedArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    Ok(Grid::x(1))
}

/// The line of `what` in this file.
fn line_of(what: &str) -> String {
    let line = include_str!("reports.rs").lines().position(|line| line.contains(what)).expect("the line is here") + 1;
    format!("reports.rs:{line}")
}

fn report(run: impl FnOnce(&Runtime, &oxtile::Stream) -> oxtile::Result<()>) -> String {
    let options = EmulatedOptions { mode: Mode::Check, seed: Some(1), ..EmulatedOptions::default() };
    let runtime = Runtime::emulated_with(options).unwrap();
    let stream = runtime.device(0).unwrap().stream().unwrap();
    let outcome = run(&runtime, &stream).and_then(|()| stream.synchronize());
    outcome.expect_err("the kernel is wrong").to_string()
}

#[test]
fn an_element_too_far_names_the_parameter_and_the_line() {
    let text = report(|runtime, stream| {
        let input = Buffer::from_slice(stream, &[0.0_f32; 32])?;
        let mut output = Buffer::<f32>::zeros(stream, 32)?;
        runtime.load::<OneTooFar>()?.launch(stream, OneTooFarArgs { input: input.view(), output: output.view_mut() })
    });
    for part in ["one_too_far", "index 32 of `input`, which has length 32", &line_of("input.load(i + 1)")] {
        assert!(text.contains(part), "no {part:?} in:\n{text}");
    }
}

#[test]
fn a_slice_is_as_long_as_it_says() {
    let text = report(|runtime, stream| {
        let input = Buffer::from_slice(stream, &[0.0_f32; 64])?;
        let mut output = Buffer::<f32>::zeros(stream, 32)?;
        let args = OneTooFarArgs { input: input.view().slice(8, 40), output: output.view_mut() };
        runtime.load::<OneTooFar>()?.launch(stream, args)
    });
    assert!(text.contains("index 32 of `input`, which has length 32"), "{text}");
}

#[test]
fn a_missing_barrier_is_a_race_with_both_lines() {
    let text = report(|runtime, stream| {
        let mut output = Buffer::<f32>::zeros(stream, 64)?;
        runtime.load::<NoBarrier>()?.launch(stream, NoBarrierArgs { output: output.view_mut() })
    });
    for part in ["no_barrier", &line_of("cells.store(t, t as f32)"), &line_of("cells.load(63 - t)")] {
        assert!(text.contains(part), "no {part:?} in:\n{text}");
    }
}

#[test]
fn shared_arrays_are_bounded() {
    let text = report(|runtime, stream| {
        let mut output = Buffer::<f32>::zeros(stream, 1)?;
        runtime.load::<BeyondShared>()?.launch(stream, BeyondSharedArgs { output: output.view_mut() })
    });
    for part in ["index 64 of the shared array at byte 0, which has length 64", &line_of("cells.store(64, 0.0)")] {
        assert!(text.contains(part), "no {part:?} in:\n{text}");
    }
}
