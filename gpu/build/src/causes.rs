//! What in the sources made a kernel that lint refuses: the checks that can panic, and the lines that use memory for registers.

use std::{collections::BTreeMap, fs, path::Path};

use crate::{Kernel, sass::Listing};

/// How the module of core's panics stands in a mangled name.
const PANICKING: &str = "4core9panicking";

/// How many lines are named.
const MOST_LINES: usize = 4;

/// A call of a function that panics.
#[derive(Debug, PartialEq)]
struct Panic {
    function: String,
    /// Where, if the PTX has line tables.
    place: Option<String>,
}

/// The functions of `core::panicking` that the code of an entry calls.
pub(crate) fn panics(ptx: &str) -> Vec<String> {
    distinct(calls(ptx).into_iter().map(|panic| panic.function))
}

/// The lines of a kernel that was compiled with line tables on which it can panic, or else uses memory for registers. Of code that was
/// inlined into the sources in `folder` the line there before it, since line tables do not tell from where it was called.
pub(crate) fn lines(kernel: &Kernel, listing: &Listing, folder: &Path) -> Vec<String> {
    let ptx = fs::read_to_string(&kernel.ptx).unwrap_or_default();
    let mut lines = distinct(calls(&ptx).into_iter().filter_map(|panic| panic.place));
    if lines.is_empty() {
        lines = memory_lines(listing, folder);
    }
    let root = format!("{}/", folder.display());
    lines.iter_mut().for_each(|line| *line = line.strip_prefix(&root).unwrap_or(line).to_owned());
    if lines.len() > MOST_LINES {
        let more = lines.len() - MOST_LINES;
        lines.truncate(MOST_LINES);
        lines.push(format!("{more} more"));
    }
    lines
}

fn memory_lines(listing: &Listing, folder: &Path) -> Vec<String> {
    let mut own = None;
    let places = listing.instructions.iter().filter_map(|instruction| {
        let place = instruction.source.as_ref()?;
        if Path::new(place).starts_with(folder) {
            own = Some(place);
        }
        ["LDL", "STL"].iter().any(|name| instruction.mnemonic().starts_with(name)).then(|| own.unwrap_or(place).clone())
    });
    distinct(places)
}

/// Each once, in the order in which they come first.
fn distinct(texts: impl Iterator<Item = String>) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    for text in texts {
        if !found.contains(&text) {
            found.push(text);
        }
    }
    found
}

/// The calls of panicking functions by functions that are none themselves.
fn calls(ptx: &str) -> Vec<Panic> {
    let files: BTreeMap<&str, &str> = ptx.lines().filter_map(file).collect();
    let (mut found, mut place, mut inside) = (Vec::new(), None, false);
    for line in ptx.lines().map(str::trim) {
        if line.contains(".entry ") || line.contains(".func") {
            (inside, place) = (line.contains(PANICKING), None);
        } else if let Some(directive) = line.strip_prefix(".loc") {
            place = located(directive, &files).or(place);
        } else if line.starts_with("call") || line.starts_with('@') && line.contains(" call") {
            let function = line.find(PANICKING).filter(|_| !inside).map(|at| path(&line[at..]));
            found.extend(function.map(|function| Panic { function, place: place.clone() }));
        }
    }
    found
}

/// `.file 1 "src/lib.rs"`.
fn file(line: &str) -> Option<(&str, &str)> {
    let (number, path) = line.trim().strip_prefix(".file")?.trim().split_once(char::is_whitespace)?;
    Some((number, path.split('"').nth(1)?))
}

/// `1 12 5` as `src/lib.rs:12`.
fn located(place: &str, files: &BTreeMap<&str, &str>) -> Option<String> {
    let mut words = place.split([' ', '\t', ',']).filter(|word| !word.is_empty());
    let (file, line) = (words.next()?, words.next()?);
    (line != "0").then(|| Some(format!("{}:{line}", files.get(file)?)))?
}

/// `4core9panicking11panic_const...` as `core::panicking::panic_const`.
fn path(mangled: &str) -> String {
    let (mut names, mut rest) = (Vec::new(), mangled);
    loop {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let Some(name) = rest[..digits].parse::<usize>().ok().and_then(|length| rest.get(digits..digits + length)) else { break };
        // In the older scheme a hash comes last.
        if name.len() != 17 || !name.starts_with('h') {
            names.push(name);
        }
        rest = &rest[digits + name.len()..];
    }
    names.join("::")
}

#[cfg(test)]
mod tests {
    use super::*;

    const PTX: &str = r#"
.func _RNvNtNtCsgJ6_4core9panicking11panic_const23panic_const_div_by_zero
()
;
.visible .entry k(
)
{
	.loc	1 7 20
	div.u64 %rd1, %rd2, %rd3;
	.loc	2 60 9
	{ // callseq 0, 0
	call.uni _RNvNtNtCsgJ6_4core9panicking11panic_const23panic_const_div_by_zero, ();
	call.uni _RNvNtNtCsgJ6_4core9panicking11panic_const23panic_const_div_by_zero, ();
	}
}
.func _RNvNtNtCsgJ6_4core9panicking11panic_const23panic_const_div_by_zero()
{
	call.uni _ZN4core9panicking9panic_fmt17h0123456789abcdefE, ();
}
	.file	1 "/crate/src/k.rs"
	.file	2 "/crate/src/ops.rs"
"#;

    #[test]
    fn panics_are_named_with_their_lines() {
        let function = "core::panicking::panic_const::panic_const_div_by_zero";
        assert_eq!(panics(PTX), [function]);
        assert_eq!(calls(PTX)[0].place.as_deref(), Some("/crate/src/ops.rs:60"));
        assert_eq!(path("4core9panicking9panic_fmt17h0123456789abcdefE, ();"), "core::panicking::panic_fmt");
        assert_eq!(panics(".visible .entry k(\n)\n{\n\tcall.uni helper, ();\n}\n"), [""; 0]);
    }
}
