//! Every built instance of some kernels is launched by a case: judged after the cases, if all of theirs were run on the emulator.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use crate::case::{Case, Size};

/// How the names of these kernels begin, and those of their cases.
const FAMILY: &str = "attention";

/// What was run.
struct Ran {
    cases: BTreeSet<String>,
    kernels: BTreeSet<String>,
}

static RAN: Mutex<Ran> = Mutex::new(Ran { cases: BTreeSet::new(), kernels: BTreeSet::new() });

/// Whether a case's launches count.
pub fn counts(case: &Case) -> bool {
    case.name.starts_with(FAMILY) && matches!(case.size, Size::Small | Size::Large)
}

/// Notes what a case launched.
pub fn note(case: &Case, kernels: &BTreeSet<String>) {
    let mut ran = RAN.lock().unwrap_or_else(PoisonError::into_inner);
    ran.cases.insert(case.name.clone());
    ran.kernels.extend(kernels.iter().cloned());
}

/// Names the instances that no case launched, unless not all cases were run.
pub fn finish(cases: &[Case]) -> Result<(), String> {
    let ran = RAN.lock().unwrap_or_else(PoisonError::into_inner);
    if cases.iter().filter(|case| counts(case)).any(|case| !ran.cases.contains(&case.name)) {
        return Ok(());
    }
    let built = oxtile_kernels::KERNELS.iter().flat_map(|family| family.instances).map(|info| info.name);
    let without: Vec<_> = built.filter(|name| name.starts_with(FAMILY) && !ran.kernels.contains(*name)).collect();
    if without.is_empty() { Ok(()) } else { Err(format!("instances that no case of tests/src/cases launches: {without:#?}")) }
}
