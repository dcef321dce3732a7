//! Parameters in parameters, given or left out: a part of [conformance](super::conformance).

use oxtile::{Buffer, Runtime, Stream};
use oxtile_conformance::THREADS;
use oxtile_conformance::parameters::{NESTED_WORDS, Nested, NestedArgs, Numbers, TableArgument, TablesArgument};

use super::conformance::{Bytes, Run, words};

fn table(values: &Buffer<u32>, turned: bool, numbers: Numbers) -> TableArgument<'_> {
    TableArgument { values: values.view(), turned, numbers }
}

/// Everything given, nothing that may be left out, and in between; the bytes of all.
pub(super) fn nested(runtime: &Runtime, stream: &Stream) -> Bytes {
    let run = Run { runtime, stream };
    let (values, others, none) = (run.input(&words(THREADS))?, run.input(&words(2 * THREADS)[THREADS as usize..])?, run.input::<u32>(&[])?);
    let numbers = Numbers { small: 3, large: 7 << 40 | 5, negative: false, signed: -11, long: i64::MIN + 13, real: -0.5 };
    let other = Numbers { negative: true, ..numbers };
    let mut written = Vec::new();
    for (second, view, given, summed, sums) in [
        (true, Some(others.view()), true, true, true),
        (false, None, true, true, false),
        (true, Some(none.view()), false, false, true),
        (false, None, false, false, false),
    ] {
        let (mut output, mut totals) = (run.output(NESTED_WORDS * THREADS)?, run.output(THREADS)?);
        run.launch::<Nested>(NestedArgs {
            before: 17,
            tables: TablesArgument { first: table(&values, !given, numbers), second: second.then(|| table(&others, true, other)), summed },
            view,
            table: given.then(|| table(&values, true, numbers)),
            sums: sums.then(|| totals.view_mut()),
            after: !second,
            output: output.view_mut(),
        })?;
        written.extend([run.bytes(&output)?, run.bytes(&totals)?].concat());
    }
    Ok(written)
}
