//! Scheduling decisions under which a test still fails, of which none can be left out.

use std::cell::{Cell, RefCell};
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use oxtile_emulator::Sentence;

use super::likeness::Failure;
use crate::runtime::emulated::{Decision, Script};
use crate::runtime::{EmulatedOptions, Error, Result};

/// How long the search for the shortest schedule of a failure may take, if `OXTILE_SHRINK` does not say.
const PATIENCE: Duration = Duration::from_secs(10);
/// Lines of a report on a shrunk schedule.
const LINES: usize = 12;
/// More decisions than this are not told.
const MOST_TOLD: usize = 20;
/// More decisions than this are not looked through.
const MOST_DECISIONS: usize = 1 << 21;

/// How long the search may take, by `OXTILE_SHRINK`: a number of seconds.
pub(super) fn patience() -> Result<Duration> {
    let Ok(text) = std::env::var("OXTILE_SHRINK") else { return Ok(PATIENCE) };
    let seconds = text.trim().parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    seconds.ok_or_else(|| Error::Invalid { what: "OXTILE_SHRINK", why: format!("`{text}` is not a number of seconds; 0 shrinks nothing") })
}

/// The report on the shortest schedule of a failure, in lines of two spaces. `attempt` runs the test by a script, which it gives back.
pub(super) fn report(
    options: &EmulatedOptions,
    failure: &Failure,
    patience: Duration,
    mut attempt: impl FnMut(&EmulatedOptions, Script) -> (Option<Failure>, Script),
) -> String {
    const SWITCH: &str = "OXTILE_SHRINK=0 turns this off, another number is the seconds that it may take";
    if patience.is_zero() {
        return String::new();
    }
    let (start, runs, likeness) = (Instant::now(), Cell::new(1_u32), failure.likeness());
    let is_alike = |found: &Option<Failure>| found.as_ref().is_some_and(|found| found.likeness() == likeness);
    let (found, noted) = attempt(options, Script::seeded());
    let unshrunk = |why: &str| format!("\n  its schedule is not shrunk: {why}\n  {SWITCH}");
    if !is_alike(&found) {
        return unshrunk(
            "another run under the seed does not fail so (several host threads that enqueue, a clock, or what an earlier run left make each run another)",
        );
    }
    let all = noted.decisions();
    if all.len() > MOST_DECISIONS || start.elapsed() > patience / 4 {
        return unshrunk(&format!("a run has {} decisions and takes {:.1?}", all.len(), start.elapsed()));
    }
    let step_limit = 4 * noted.longest() + 10_000;
    let otherwise = RefCell::new(String::new());
    let mut fails = |decisions: &[Decision]| {
        (start.elapsed() < patience).then(|| {
            runs.set(runs.get() + 1);
            let found = attempt(options, Script::given(decisions, step_limit)).0;
            if let Some(other) = found.as_ref().filter(|_| decisions.is_empty() && !is_alike(&found)) {
                otherwise.replace(format!("\n  the default order fails too, otherwise: {}", other.text.lines().next().unwrap_or_default()));
            }
            is_alike(&found)
        })
    };
    let first = if fails(all) == Some(true) {
        all
    } else if fails(&[]) == Some(true) {
        &[]
    } else {
        return unshrunk(
            "the run is not repeated by its decisions (several host threads that enqueue, a clock, or what an earlier run left make each run another)",
        );
    };
    let (needed, is_least) = shortest(first, fails);
    if needed.is_empty() && !failure.is_of_order() {
        return format!("\n  the default order fails too; {SWITCH}");
    }
    if needed.len() > MOST_TOLD {
        let (needed, all) = (needed.len(), all.len());
        return unshrunk(&format!("{needed} of {all} scheduling decisions are left, too many to tell{}", otherwise.take()));
    }
    let (last, told) = attempt(options, Script::given(&needed, step_limit).told(failure.about()));
    let mut steps: Vec<String> = fold(&told.story(), LINES - 3);
    last.as_ref().unwrap_or(failure).end(&mut steps);
    let mut text = match (needed.len(), all.len()) {
        (0, all) => format!("\n  the shortest schedule that fails needs none of {all} scheduling decisions: it is the default order"),
        (needed, all) => {
            format!("\n  the shortest schedule that fails needs {needed} of {all} scheduling decisions, the rest is the default order")
        }
    };
    text.push_str(" (the lowest thread that can go on runs until it waits):");
    for (number, step) in steps.iter().enumerate() {
        let _ = write!(text, "\n  {}. {step}", number + 1);
    }
    let least = if is_least { "found" } else { "the shortest so far: the time was over;" };
    let _ = write!(text, "\n  {least} in {} runs, {:.1} s; {SWITCH}", runs.get() + 1, start.elapsed().as_secs_f64());
    text
}

/// The sentences that matter, at most so many; the rest of long stories is counted.
fn fold(story: &[Sentence], most: usize) -> Vec<String> {
    if story.len() <= most {
        return story.iter().map(|sentence| sentence.text.clone()).collect();
    }
    let more = |count: usize| format!("({count} more in the default order)");
    let mut lines = Vec::new();
    for group in story.chunk_by(|a, b| !a.matters && !b.matters) {
        match group {
            [one] => lines.push(one.text.clone()),
            many => lines.push(more(many.len())),
        }
    }
    if lines.len() > most {
        let (first, last) = (most / 2, most - most / 2 - 1);
        let left = lines.len() - first - last;
        lines.splice(first..lines.len() - last, [format!("({left} more like these)")]);
    }
    lines
}

/// A part of a list that fails, from which no element can be left out (Zeller, Hildebrandt: Simplifying and Isolating Failure-Inducing Input, 2002), and whether that
/// was found out in time. `fails` gives none once the time is over.
fn shortest<T: Clone>(all: &[T], mut fails: impl FnMut(&[T]) -> Option<bool>) -> (Vec<T>, bool) {
    let mut left = all.to_vec();
    if left.is_empty() || fails(&[]) == Some(true) {
        return (Vec::new(), true);
    }
    // A prefix first: what comes after it is not needed.
    let (mut passing, mut failing) = (0, left.len());
    while failing - passing > 1 {
        let middle = passing.midpoint(failing);
        match fails(&left[..middle]) {
            Some(true) => failing = middle,
            Some(false) => passing = middle,
            None => break,
        }
    }
    left.truncate(failing);
    let mut size = left.len().div_ceil(2);
    while left.len() > 1 {
        let mut is_shorter = false;
        let mut at = 0;
        while at < left.len() {
            let without = [&left[..at], &left[(at + size).min(left.len())..]].concat();
            match fails(&without) {
                Some(true) => (left, is_shorter) = (without, true),
                Some(false) => at += size,
                None => return (left, false),
            }
        }
        match (size, is_shorter) {
            (1, false) => break,
            (1, true) => {}
            _ => size = size.div_ceil(2),
        }
    }
    (left, true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shortest_part_is_found() {
        let all: Vec<u32> = (0..1000).collect();
        let needs = |wanted: &[u32]| {
            let mut runs = 0;
            let (found, is_least) = shortest(&all, |part| {
                runs += 1;
                Some(wanted.iter().all(|number| part.contains(number)))
            });
            assert!(is_least && runs < 200, "{runs} runs");
            found
        };
        assert!(needs(&[]).is_empty());
        assert_eq!(needs(&[0]), [0]);
        assert_eq!(needs(&[999]), [999]);
        assert_eq!(needs(&[3, 4, 700]), [3, 4, 700]);
    }

    #[test]
    fn a_search_ends_with_its_time() {
        let all: Vec<u32> = (0..1000).collect();
        let mut runs = 0;
        let (found, is_least) = shortest(&all, |part| {
            runs += 1;
            (runs <= 12).then(|| part.contains(&5) && part.contains(&90))
        });
        assert!(!is_least && found.contains(&5) && found.contains(&90) && found.len() < 200, "{found:?}");
    }

    #[test]
    fn long_stories_are_folded() {
        let sentence = |number: usize, matters| Sentence { text: number.to_string(), matters };
        let story: Vec<_> = (0..30).map(|number| sentence(number, number % 10 == 3)).collect();
        let told = fold(&story, 9);
        assert_eq!(
            told,
            [
                "(3 more in the default order)",
                "3",
                "(9 more in the default order)",
                "13",
                "(9 more in the default order)",
                "23",
                "(6 more in the default order)"
            ]
        );
        let all: Vec<_> = (0..30).map(|number| sentence(number, true)).collect();
        assert_eq!(fold(&all, 5), ["0", "1", "(26 more like these)", "28", "29"]);
        assert_eq!(fold(&all[..5], 5).len(), 5);
    }
}
