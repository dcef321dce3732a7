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

#[derive(Clone, Copy, Parameter)]
pub struct Ends {
    pub query_ends: Global<u32>,
    pub offset: u32,
}

#[derive(Clone, Copy, Parameter)]
pub struct Batch {
    pub sequences: Ends,
    pub weights: Option<Global<u32>>,
}

#[kernel(threads = 32, grid = field_block)]
pub fn beyond_a_field(sequences: Ends, batch: Batch, output: GlobalMut<u32>) {
    let i = u64::from(thread::index());
    if i == 0 {
        let sum =
            sequences.query_ends.load(u64::from(sequences.offset)) + batch.sequences.query_ends.load(u64::from(batch.sequences.offset));
        output.store(i, sum + batch.weights.map_or(0, |weights| weights.load(3)));
    }
}

fn field_block(args: &BeyondAFieldArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_limit("sequences.offset", args.sequences.offset.into(), 100)?;
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
    for part in
        ["no_barrier", "two accesses to `cells[", "]` of `Cells`", &line_of("cells.store(t, t as f32)"), &line_of("cells.load(63 - t)")]
    {
        assert!(text.contains(part), "no {part:?} in:\n{text}");
    }
}

#[test]
fn shared_arrays_are_bounded() {
    let text = report(|runtime, stream| {
        let mut output = Buffer::<f32>::zeros(stream, 1)?;
        runtime.load::<BeyondShared>()?.launch(stream, BeyondSharedArgs { output: output.view_mut() })
    });
    for part in ["index 64 of `cells` of `Cells`, which has length 64", &line_of("cells.store(64, 0.0)")] {
        assert!(text.contains(part), "no {part:?} in:\n{text}");
    }
}

#[kernel(threads = 32, grid = forgotten_block)]
pub fn without_its_layout(output: GlobalMut<f32>) {
    let forgotten = Cells::claim().cells;
    forgotten.store(thread::index(), 1.0);
    output.store(u64::from(thread::index()), forgotten.load(thread::index()));
}

fn forgotten_block(_: &WithoutItsLayoutArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    Ok(Grid::x(1))
}

#[test]
fn a_layout_that_the_attribute_lacks_is_named() {
    let text = report(|runtime, stream| {
        let mut output = Buffer::<f32>::zeros(stream, 32)?;
        runtime.load::<WithoutItsLayout>()?.launch(stream, WithoutItsLayoutArgs { output: output.view_mut() })
    });
    for part in [
        "claims `Cells`, 256 bytes of shared memory; its launch has 0",
        &line_of("let forgotten = Cells::claim().cells;"),
        "#[kernel(shared = ..)]",
    ] {
        assert!(text.contains(part), "no {part:?} in:\n{text}");
    }
}

/// Launches [`beyond_a_field`](fn@beyond_a_field) on views of three elements, read at these places.
fn fields(first: u32, second: u32, weighted: bool) -> String {
    report(|runtime, stream| {
        // Each of its own: reports know a field by its memory.
        let array = || Buffer::from_slice(stream, &[0_u32, 2, 4]);
        let ([ends, others, weights], mut output) = ([array()?, array()?, array()?], Buffer::<u32>::zeros(stream, 1)?);
        runtime.load::<BeyondAField>()?.launch(
            stream,
            BeyondAFieldArgs {
                sequences: EndsArgument { query_ends: ends.view(), offset: first },
                batch: BatchArgument {
                    sequences: EndsArgument { query_ends: others.view(), offset: second },
                    weights: weighted.then(|| weights.view()),
                },
                output: output.view_mut(),
            },
        )
    })
}

#[test]
fn an_element_too_far_names_the_field_of_a_struct() {
    for (text, field) in [
        (fields(3, 0, false), "sequences.query_ends"),
        (fields(0, 3, false), "batch.sequences.query_ends"),
        (fields(0, 0, true), "batch.weights"),
    ] {
        let expected = format!("index 3 of `{field}`, which has length 3");
        assert!(text.contains(&expected), "no {expected:?} in:\n{text}");
    }
}

fn from_the_first(ends: &Buffer<u32>) -> EndsArgument<'_> {
    EndsArgument { query_ends: ends.view(), offset: 0 }
}

#[test]
fn errors_name_the_field_of_a_struct() {
    let text = fields(101, 0, false);
    assert!(text.contains("`sequences.offset` counts 101"), "{text}");
    // A view that another runtime lent.
    let text = report(|runtime, stream| {
        let other = Runtime::emulated(1)?;
        let foreign = Buffer::from_slice(&other.device(0)?.stream()?, &[0_u32; 3])?;
        let (ends, mut output) = (Buffer::from_slice(stream, &[0_u32, 2, 4])?, Buffer::<u32>::zeros(stream, 1)?);
        let args = BeyondAFieldArgs {
            sequences: from_the_first(&ends),
            batch: BatchArgument { sequences: from_the_first(&foreign), weights: None },
            output: output.view_mut(),
        };
        runtime.load::<BeyondAField>()?.launch(stream, args)
    });
    assert!(text.contains("`batch.sequences.query_ends` was not lent by the runtime of the stream"), "{text}");
}
