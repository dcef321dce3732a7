//! The commands: from a request to what is printed.

use std::io::{self, Write};

use serde::Serialize;

use crate::{
    Error,
    arguments::{self, Operation, Request},
    attention, build,
    compare::Comparison,
    completions, demo, dequantize, doctor, explain, gradients,
    inspect::{Inspection, histogram},
    join, launch, man, new,
    output::Completed,
    overlap,
    progress::Progress,
    quantize, shard, summed,
    text::{bytes, count, path, printable_lines},
    timeline,
};

/// Carries out a request. Results go to `out`, progress to standard error.
///
/// # Errors
/// Whatever the command reports.
pub fn run(request: Request, out: &mut dyn Write) -> Result<(), Error> {
    match request {
        Request::Text(text) if has_colours() => print(out, &text.ansi().to_string()),
        Request::Text(text) => print(out, &text.to_string()),
        Request::Completions(request) => print(out, &completions::script(&request)),
        Request::Man(request) => {
            let (text, files) = man::run(&request)?;
            print(out, &text).and_then(|()| publish(files))
        }
        Request::Quantize(request) => quantize(&request, out),
        Request::Dequantize(request) => dequantize(&request, out),
        Request::Compare(request) => {
            let comparison = Comparison::of(&request.reference, &request.other, &mut Progress::on_terminal())?;
            print_report(out, &comparison, request.json)?;
            Ok(request.max_relative.map_or(Ok(()), |bound| comparison.check(bound))?)
        }
        Request::Inspect(request) => {
            let mut inspection = Inspection::of(&request.file, &mut Progress::on_terminal())?;
            if let Some(picture) = &request.histogram {
                let (drawn, picture) = histogram::draw(&request, picture, &mut Progress::on_terminal())?;
                inspection.histogram = Some(drawn);
                return deliver(out, &inspection, request.json, [picture]);
            }
            print_report(out, &inspection, request.json)
        }
        Request::Attention(request) => match attention::run(&request, &mut Progress::on_terminal())? {
            Some((report, output)) => deliver(out, &report, request.json, [output]),
            None => Ok(()),
        },
        Request::Overlap(request) if request.leaves_out_its_format() => Err(Error::Format),
        Request::Overlap(request) => match request.operation {
            Operation::AllGather => print_report(out, &overlap::run(&request).map_err(Error::Overlap)?, request.json),
            Operation::Gradients => print_report(out, &gradients::run(&request).map_err(Error::Overlap)?, request.json),
            Operation::ReduceScatter | Operation::AllReduce => {
                print_report(out, &summed::run(&request).map_err(Error::Overlap)?, request.json)
            }
        },
        Request::Shard(request) => {
            let (report, files) = shard::run(&request, &mut Progress::on_terminal())?;
            deliver(out, &report, request.json, files)
        }
        Request::Join(request) => {
            let (report, file) = join::run(&request, &mut Progress::on_terminal())?;
            deliver(out, &report, request.json, [file])
        }
        Request::Launch(request) => Ok(launch::run(&request)?),
        Request::Timeline(request) => {
            let (report, files) = timeline::run(&request)?;
            print(out, &printable_lines(&report.to_string())).and_then(|()| publish(files))
        }
        Request::Doctor(request) => {
            let report = doctor::run();
            print_report(out, &report, request.json)?;
            Ok(report.check()?)
        }
        Request::New(request) => {
            let made = new::run(&request)?;
            print(out, &printable_lines(&made.to_string()))?;
            Ok(made.publish()?)
        }
        Request::Build(request) => {
            let build = build::Job::new(&request)?;
            // Also where the kernels may not be used: it shows what to mend.
            print(out, &printable_lines(&build.table()))?;
            print(out, &printable_lines(&build.finish()?.to_string()))
        }
        Request::Explain(request) => {
            let (report, pictures) = explain::run(&request)?;
            print(out, &printable_lines(&report.to_string())).and_then(|()| publish(pictures))
        }
        Request::DemoCheckpoint(request) => demo_checkpoint(&request, out),
    }
}

fn quantize(request: &arguments::Quantize, out: &mut dyn Write) -> Result<(), Error> {
    let (mut device, choice) = quantize::runtime::open(request.device)?;
    let (outcome, output) = quantize::complete(&request.input, &request.output, request.recipe, &mut device, &mut Progress::on_terminal())?;
    let report = quantize::report::Report::new(&request.input, &request.output, choice, &outcome);
    deliver(out, &report, request.json, [output])
}

fn dequantize(request: &arguments::Dequantize, out: &mut dyn Write) -> Result<(), Error> {
    let (mut device, choice) = quantize::runtime::open(request.device)?;
    let (outcome, output) = dequantize::run(request, &mut device, &mut Progress::on_terminal())?;
    deliver(out, &dequantize::Report::new(request, choice, outcome), request.json, [output])
}

fn demo_checkpoint(request: &arguments::DemoCheckpoint, out: &mut dyn Write) -> Result<(), Error> {
    let (parameters, size, output) = demo::write(&request.output, request.seed, request.dtype)?;
    let text = format!(
        "seed    {}\noutput  {}, {}\nweights {} {} parameters\n",
        request.seed,
        path(&request.output),
        bytes(size),
        count(parameters),
        request.dtype,
    );
    print(out, &text).and_then(|()| publish([output]))
}

/// Prints what was done, then gives the outputs their names: if the report cannot be printed, no output is left.
fn deliver(
    out: &mut dyn Write,
    report: &(impl Serialize + ToString),
    json: bool,
    outputs: impl IntoIterator<Item = Completed>,
) -> Result<(), Error> {
    print_report(out, report, json)?;
    publish(outputs)
}

fn publish(outputs: impl IntoIterator<Item = Completed>) -> Result<(), Error> {
    Ok(outputs.into_iter().try_for_each(Completed::publish)?)
}

fn print_report(out: &mut dyn Write, report: &(impl Serialize + ToString), json: bool) -> Result<(), Error> {
    if json {
        let mut text = serde_json::to_string_pretty(report).expect("a report is JSON");
        text.push('\n');
        print(out, &text)
    } else {
        print(out, &printable_lines(&report.to_string()))
    }
}

/// Whether standard output is a terminal that shows colours, and nothing (`NO_COLOR`, `TERM=dumb`) forbids them.
fn has_colours() -> bool {
    anstream::AutoStream::choice(&io::stdout()) != anstream::ColorChoice::Never
}

fn print(out: &mut dyn Write, text: &str) -> Result<(), Error> {
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        // `oxtile inspect FILE | head`: the reader has seen enough.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => Ok(result?),
    }
}
