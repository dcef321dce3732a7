//! The kernels on architectures on which none has tuned them: compiled, assembled and checked where their sources changed.
//!
//! It takes six minutes of processor time, and its result depends on nothing but the sources, the flags, the compiler and ptxas. So the file
//! `gpu/portable.toml` holds for each crate of kernels with what the check passed: a checkout with the same is not checked again. `cargo xtask
//! build-ptx --portable --accept` checks and writes it; `test --long` checks whatever it holds.

use std::{collections::BTreeSet, fmt::Write, fs, path::PathBuf};

use anyhow::{Context, Result};
use oxtile_build::{Arch, CudaTools, Toolchain, source_hash};

use crate::{
    kernels::{CRATES, for_archs},
    machine, root, say,
};

/// The architectures beside the default one: those of every run, one of each kind, and those of long ones.
///
/// One of each kind is enough: no kernel has another body on sm_120a than on sm_100a, which a test of tidiness states; bodies on
/// sm_89 are those on sm_80, but for conversions of FP8, which are those on sm_90a.
const EVERY_RUN: [&str; 2] = ["sm_80", "sm_100a"];
const LONG_RUNS: [&str; 2] = ["sm_89", "sm_120a"];

/// How much is checked.
#[derive(Clone, Copy, PartialEq)]
pub enum Extent {
    /// The crates that are not as accepted.
    Changed,
    /// All, and what passed is accepted if asked for.
    Anew { accept: bool },
    /// All, on more architectures.
    Long,
}

/// Whether the kernels that need no feature of Hopper alone also pass on the other architectures: findings that only cost
/// speed there (sm_80 converts FP8 in software) are counted, not refused. Writes no output folder.
pub fn check(extent: Extent) -> Result<bool> {
    let (toolchain, tools) = machine::ready()?;
    let more = if extent == Extent::Long { &LONG_RUNS[..] } else { &[] };
    let archs = EVERY_RUN.iter().chain(more).map(|name| name.parse()).collect::<Result<Vec<Arch>, _>>()?;
    let accepted = accepted();
    let (mut passed, mut lines) = (true, Vec::new());
    for folder in CRATES {
        let line = line(folder, &toolchain, &tools)?;
        if extent == Extent::Changed && accepted.contains(&line) {
            say(&format!("{folder}: passed with the same sources, compiler and ptxas (gpu/portable.toml)"));
            continue;
        }
        let findings = for_archs(root().join(folder), &archs).inspect()?.findings;
        let (slow, wrong): (Vec<_>, Vec<_>) = findings.iter().partition(|finding| finding.slow);
        wrong.iter().for_each(|finding| eprintln!("  {finding}"));
        let kernels: BTreeSet<_> = slow.iter().map(|finding| (&finding.kernel, &finding.arch)).collect();
        if !kernels.is_empty() {
            eprintln!("  note: {} kernels of {folder} keep registers in memory on these architectures", kernels.len());
        }
        passed &= wrong.is_empty();
        if extent == Extent::Changed && passed {
            eprintln!("  note: `cargo xtask build-ptx --portable --accept` lets the next run skip this");
        }
        lines.push(line);
    }
    if passed && extent == (Extent::Anew { accept: true }) {
        accept(&lines)?;
    }
    Ok(passed)
}

fn file() -> PathBuf {
    root().join("gpu/portable.toml")
}

/// The lines of the file; none if it is not there.
fn accepted() -> BTreeSet<String> {
    fs::read_to_string(file()).unwrap_or_default().lines().map(str::to_owned).collect()
}

/// All that the result of a crate depends on. The hash of its sources is also that of the flags.
fn line(folder: &str, toolchain: &Toolchain, tools: &CudaTools) -> Result<String> {
    let (sources, archs) = (source_hash(root().join(folder))?, EVERY_RUN.join(", "));
    Ok(format!("{folder:?} = \"{sources}, {}, ptxas {}, {archs}\"", toolchain.version, tools.release))
}

fn accept(lines: &[String]) -> Result<()> {
    let mut text =
        String::from("# These kernels passed on other architectures; `cargo xtask build-ptx --portable --accept` rewrites it.\n\n");
    lines.iter().for_each(|line| _ = writeln!(text, "{line}"));
    fs::write(file(), text).with_context(|| format!("cannot write {}", file().display()))
}
