//! Which source lines made a kernel that lint refuses: those of checks that can panic, of memory used for registers, of operations, copies and calls.

use std::{collections::BTreeMap, fs, path::Path};

use crate::{
    Kernel,
    lint::Cause,
    ptx,
    sass::{Instruction, Listing},
};

/// How the module of core's panics stands in a mangled name.
const PANICKING: &str = "4core9panicking";

/// How many lines are named.
const MOST_LINES: usize = 4;

/// The functions of `core::panicking` that the code of an entry calls.
pub(crate) fn panics(ptx: &str) -> Vec<String> {
    distinct(steps(ptx).into_iter().filter_map(|step| panic(step.line)))
}

/// The lines on which a kernel that was compiled with line tables can panic.
pub(crate) fn panic_lines(kernel: &Kernel, folder: &Path) -> Vec<String> {
    lines_of(&ptx_of(kernel), |line| panic(line).is_some(), folder)
}

/// The lines of a kernel that was compiled with line tables which are the cause of a finding.
pub(crate) fn lines(cause: &Cause, kernel: &Kernel, listing: impl FnOnce() -> Option<Listing>, folder: &Path) -> Vec<String> {
    match cause {
        Cause::Memory => listing().map_or_else(Vec::new, |listing| memory_lines(kernel, &listing, folder)),
        Cause::Operation(name) => lines_of(&ptx_of(kernel), |line| ptx::operations(line).any(|operation| operation == name), folder),
        Cause::LastingCopy => lines_of(&ptx_of(kernel), is_lasting_copy, folder),
        Cause::Call(_) => Vec::new(),
    }
}

/// The lines on which an entry's PTX calls a function, where it has line tables.
pub(crate) fn call_lines(ptx: &str, function: &str, folder: &Path) -> Vec<String> {
    let names = |line: &str| line.split(|c: char| !c.is_alphanumeric() && !"_$.".contains(c)).any(|word| word == function);
    lines_of(ptx, |line| is_call(line) && names(line), folder)
}

/// Whether a line calls a function, on a condition or always.
fn is_call(line: &str) -> bool {
    line.starts_with("call") || line.starts_with('@') && line.contains(" call")
}

/// Whether a line copies with a cache policy, a thread at a time.
fn is_lasting_copy(line: &str) -> bool {
    line.contains("cp.async.") && !line.contains("cp.async.bulk") && line.contains(".L2::cache_hint")
}

fn ptx_of(kernel: &Kernel) -> String {
    fs::read_to_string(&kernel.ptx).unwrap_or_default()
}

/// The source lines of these lines of PTX.
fn lines_of(ptx: &str, is_meant: impl Fn(&str) -> bool, folder: &Path) -> Vec<String> {
    named(own_places(steps(ptx).into_iter().map(|step| (step.place, is_meant(step.line))), folder), folder)
}

/// The lines on which a kernel can panic, or else uses memory for registers.
fn memory_lines(kernel: &Kernel, listing: &Listing, folder: &Path) -> Vec<String> {
    let panics = panic_lines(kernel, folder);
    if !panics.is_empty() {
        return panics;
    }
    let ptx = ptx_of(kernel);
    // LLVM's accesses are those of arrays, ptxas's are spills. Zeros that fill an array have no line of their own.
    let is_array = |line: &str| ["ld.local", "st.local"].iter().any(|name| line.contains(name)) && !line.ends_with(", 0;");
    let arrays = own_places(steps(&ptx).into_iter().map(|step| (step.place, is_array(step.line))), folder);
    if !arrays.is_empty() {
        return named(arrays, folder);
    }
    let is_local = |instruction: &Instruction| ["LDL", "STL"].iter().any(|name| instruction.mnemonic().starts_with(name));
    let accesses = listing.instructions.iter().map(|instruction| (instruction.source.clone(), is_local(instruction)));
    named(own_places(accesses, folder), folder)
}

/// Lines below a folder as a person there names them, the first ones.
fn named(mut lines: Vec<String>, folder: &Path) -> Vec<String> {
    let root = format!("{}/", folder.display());
    lines.iter_mut().for_each(|line| *line = line.strip_prefix(&root).unwrap_or(line).to_owned());
    if lines.len() > MOST_LINES {
        let more = lines.len() - MOST_LINES;
        lines.truncate(MOST_LINES);
        lines.push(format!("{more} more"));
    }
    lines
}

/// The places in a folder of the instructions that are meant. If all of these were inlined into its sources, the places there before them: line tables do not
/// tell from where code was called.
fn own_places(instructions: impl Iterator<Item = (Option<String>, bool)>, folder: &Path) -> Vec<String> {
    let (mut own, mut direct, mut before) = (None, Vec::new(), Vec::new());
    for (place, is_meant) in instructions {
        let Some(place) = place else { continue };
        let is_own = Path::new(&place).starts_with(folder);
        if is_own {
            own = Some(place.clone());
        }
        match is_meant {
            true if is_own => direct.push(place),
            true => before.push(own.clone().unwrap_or(place)),
            false => {}
        }
    }
    distinct(if direct.is_empty() { before } else { direct }.into_iter())
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

/// A line of PTX in a function that is none of core's panics.
struct Step<'a> {
    line: &'a str,
    /// The source line, if the PTX has line tables.
    place: Option<String>,
}

fn steps(ptx: &str) -> Vec<Step<'_>> {
    let files: BTreeMap<&str, &str> = ptx.lines().filter_map(file).collect();
    let (mut found, mut place, mut inside) = (Vec::new(), None, false);
    for line in ptx.lines().map(str::trim) {
        if line.contains(".entry ") || line.contains(".func") {
            (inside, place) = (line.contains(PANICKING), None);
        } else if let Some(directive) = line.strip_prefix(".loc") {
            place = located(directive, &files).or(place);
        } else if !inside {
            found.push(Step { line, place: place.clone() });
        }
    }
    found
}

/// The function of `core::panicking` that a line calls.
fn panic(line: &str) -> Option<String> {
    line.find(PANICKING).filter(|_| is_call(line)).map(|at| path(&line[at..]))
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
        let places = |folder| own_places(steps(PTX).into_iter().map(|step| (step.place, panic(step.line).is_some())), Path::new(folder));
        assert_eq!(places("/crate"), ["/crate/src/ops.rs:60"]);
        // The line before what was inlined from elsewhere.
        assert_eq!(places("/crate/src/k.rs:7"), ["/crate/src/k.rs:7"]);
        assert_eq!(path("4core9panicking9panic_fmt17h0123456789abcdefE, ();"), "core::panicking::panic_fmt");
        assert_eq!(panics(".visible .entry k(\n)\n{\n\tcall.uni helper, ();\n}\n"), [""; 0]);
    }
}
