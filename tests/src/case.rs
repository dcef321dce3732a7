//! What a case is, and how it compares.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::sync::{Mutex, PoisonError};

use oxtile::{Runtime, Stream};

/// How much work a case is: decides where it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// For the emulator with every check on, and for memcheck.
    Small,
    /// For the emulator's fast mode and the GPU.
    Large,
    /// As large, of what another case covers on the emulator: elements of the same width in another format. For the GPU, and for the emulator where
    /// long runs are asked for.
    Twin,
    /// For the GPU: more tiles than it has multiprocessors, of work that would take the emulator minutes. The emulated device
    /// has so few multiprocessors that a small case covers the same branches.
    Waves,
}

/// What a case says when it fails.
pub type Outcome = Result<(), String>;

type Run = Box<dyn Fn(&Runtime) -> Outcome + Send + Sync>;

/// One case, to be run on a runtime of any kind.
pub struct Case {
    pub name: String,
    pub size: Size,
    pub run: Run,
}

impl Case {
    pub fn new(name: impl Into<String>, size: Size, run: impl Fn(&Runtime) -> Outcome + Send + Sync + 'static) -> Self {
        Self { name: name.into(), size, run: Box::new(run) }
    }
}

/// A stream on the first device.
pub fn stream(runtime: &Runtime) -> Result<Stream, String> {
    text(runtime.device(0))?.stream().map_err(|e| e.to_string())
}

/// Says that a part of a case cannot be done here and why, and how many such parts there were; the same part once.
pub fn skipped(part: &str, reason: &dyn std::fmt::Display) {
    static PARTS: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let mut parts = PARTS.lock().unwrap_or_else(PoisonError::into_inner);
    let text = format!("{part}: {reason}");
    if !parts.contains(&text) {
        eprintln!("skip {}: {text}", parts.len() + 1);
        parts.insert(text);
    }
}

/// An error as its text.
pub fn text<T, E: std::fmt::Display>(result: Result<T, E>) -> Result<T, String> {
    result.map_err(|e| e.to_string())
}

/// Whether a number is the expected one to within a bound. What is not a number agrees with itself, and an infinity too, but with nothing else.
pub fn agrees(found: f64, expected: f64, bound: f64) -> bool {
    if expected.is_nan() { found.is_nan() } else { found == expected || (found - expected).abs() <= bound }
}

/// Fails at the first element that differs.
pub fn equal<T: PartialEq + Debug>(what: &str, found: &[T], expected: &[T]) -> Outcome {
    if found.len() != expected.len() {
        return Err(format!("{what}: {} elements, expected {}", found.len(), expected.len()));
    }
    let differing = found.iter().zip(expected).filter(|(f, e)| f != e).count();
    match found.iter().zip(expected).position(|(f, e)| f != e) {
        None => Ok(()),
        Some(i) => Err(format!("{what}[{i}] is {:x?}, expected {:x?} ({differing} of {} differ)", found[i], expected[i], found.len())),
    }
}

#[cfg(test)]
mod tests {
    use super::agrees;

    #[test]
    fn what_is_not_a_number_agrees_with_itself_alone() {
        let (nan, infinity) = (f64::NAN, f64::INFINITY);
        assert!(agrees(nan, nan, 0.0) && agrees(infinity, infinity, 0.0) && agrees(1.0, 1.5, 0.5));
        for (found, expected) in [(1.0, nan), (nan, 1.0), (infinity, nan), (nan, infinity), (-infinity, infinity), (1.0, 1.6)] {
            assert!(!agrees(found, expected, 0.5), "{found} and {expected}");
        }
    }
}
