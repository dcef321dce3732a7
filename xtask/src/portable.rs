//! The kernels on architectures on which none has tuned them: compiled, assembled and checked where their sources changed (`passed`).

use std::collections::BTreeSet;

use anyhow::Result;
use oxtile_build::Arch;

use crate::{
    kernels::{CRATES, for_archs},
    machine,
    passed::{self, Part},
    root, say,
};

/// The architectures beside the default one: those of every run, one of each kind, and those of long ones.
///
/// One of each kind is enough: no kernel has another body on sm_120a than on sm_100a, which a test of tidiness states; bodies on
/// sm_89 are those on sm_80, but for conversions of FP8, which are those on sm_90a.
const EVERY_RUN: Part = Part { name: "portable", archs: &["sm_80", "sm_100a"], has_ratchet: false };
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
    machine::ready()?;
    let more = if extent == Extent::Long { &LONG_RUNS[..] } else { &[] };
    let archs = EVERY_RUN.archs.iter().chain(more).map(|name| name.parse()).collect::<Result<Vec<Arch>, _>>()?;
    let (mut passed, sources) = (true, passed::sources()?);
    for folder in CRATES {
        if extent == Extent::Changed && EVERY_RUN.has(folder)? {
            say(&EVERY_RUN.reason(folder));
            continue;
        }
        let findings = for_archs(root().join(folder), &archs).inspect()?.findings;
        let (slow, wrong): (Vec<_>, Vec<_>) = findings.iter().partition(|finding| finding.is_slow());
        wrong.iter().for_each(|finding| eprintln!("  {finding}"));
        let kernels: BTreeSet<_> = slow.iter().map(|finding| (&finding.kernel, &finding.arch)).collect();
        if !kernels.is_empty() {
            eprintln!("  note: {} kernels of {folder} keep registers in memory on these architectures", kernels.len());
        }
        passed &= wrong.is_empty();
        if extent == Extent::Changed && passed {
            eprintln!("  note: `cargo xtask build-ptx --portable --accept` lets the next run skip this");
        }
    }
    if passed && extent == (Extent::Anew { accept: true }) {
        EVERY_RUN.accept(&sources)?;
    }
    Ok(passed)
}
