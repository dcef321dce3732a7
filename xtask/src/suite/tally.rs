//! Counts, times and failures of what was run.

use std::{
    io::{BufRead, BufReader},
    process::{Command, ExitCode, Output, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};

use crate::processor_time;

/// How many of the slowest are printed.
const SLOWEST: usize = 10;

/// The counts and times so far.
#[derive(Default)]
pub struct Tally {
    passed: u64,
    failed: u64,
    skipped: u64,
    /// What failed, each with its program.
    failures: Vec<String>,
    /// Why, one line for each program that skips some.
    reasons: Vec<String>,
    times: Vec<(Duration, String)>,
    /// Processor time and name of each of the suite's parts, which run one after the other.
    processor_times: Vec<(Duration, &'static str)>,
}

impl Tally {
    /// One part of the suite, whose processor time is told.
    pub fn part<T>(&mut self, name: &'static str, work: impl FnOnce(&mut Self) -> T) -> T {
        let before = processor_time::of_children();
        let result = work(self);
        let time = before.zip(processor_time::of_children()).map(|(before, after)| (after - before, name));
        self.processor_times.extend(time);
        result
    }

    /// One step that passes or fails as a whole.
    pub fn step(&mut self, name: &str, work: impl FnOnce() -> Result<bool>) {
        println!("== {name}");
        let start = Instant::now();
        let passed = work().unwrap_or_else(|error| {
            eprintln!("error: {error:#}");
            false
        });
        self.count(name, start.elapsed(), passed);
    }

    /// A step that ran beside others: what it wrote is printed now. Whether it passed.
    pub fn beside(&mut self, name: &str, time: Duration, output: Result<Output>) -> bool {
        println!("== {name}");
        let passed = match output {
            Ok(output) => {
                eprint!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
                output.status.success()
            }
            Err(error) => {
                eprintln!("error: {error:#}");
                false
            }
        };
        self.count(name, time, passed);
        passed
    }

    /// Times of parts of what was run, for the list of the slowest.
    pub fn timed(&mut self, parts: impl IntoIterator<Item = (Duration, String)>) {
        self.times.extend(parts);
    }

    pub fn fail(&mut self, what: String) {
        self.failed += 1;
        self.failures.push(what);
    }

    fn count(&mut self, name: &str, time: Duration, passed: bool) {
        self.passed += u64::from(passed);
        if !passed {
            self.fail(name.to_owned());
        }
        self.times.push((time, name.into()));
    }

    /// Runs tests, prints what they write and adds up their summaries. A program that fails without a summary is one failure.
    pub fn tests(&mut self, name: &str, command: &mut Command, mut print: impl FnMut(&str)) -> Result<()> {
        print(&format!("== {name}"));
        let before = self.failed;
        // One pipe for both streams: cargo names a test program on one of them, its results come on the other.
        let (reader, writer) = std::io::pipe().context("cannot open a pipe")?;
        command.stdout(writer.try_clone()?).stderr(writer).stdin(Stdio::null());
        let mut child = command.spawn().with_context(|| format!("cannot run {name}"))?;
        // The command holds the pipe's writing end: without it reading ends when the child does.
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let (mut program, mut start, mut summaries) = (name.to_owned(), Instant::now(), 0);
        for line in BufReader::new(reader).split(b'\n') {
            let line = String::from_utf8_lossy(&line?).into_owned();
            print(&line);
            if let Some(named) = documented(&line) {
                (program, start) = (named, Instant::now());
            } else if let Some(summary) = line.strip_prefix("test result: ") {
                self.add(summary);
                summaries += 1;
                self.times.push((start.elapsed(), program.clone()));
            } else if let Some(test) = failed_test(&line) {
                self.failures.push(format!("{program}: {test}"));
            } else if line.contains(" skipped: ") {
                self.reasons.push(line);
            }
        }
        if !child.wait()?.success() && self.failed == before {
            self.fail(format!("{name}: it failed without a summary"));
        } else if summaries == 0 {
            self.fail(format!("{name}: it ended without a summary"));
        }
        Ok(())
    }

    /// Adds what another one counted.
    pub fn absorb(&mut self, Self { passed, failed, skipped, failures, reasons, times, processor_times }: Self) {
        self.passed += passed;
        self.failed += failed;
        self.skipped += skipped;
        self.failures.extend(failures);
        self.reasons.extend(reasons);
        self.times.extend(times);
        self.processor_times.extend(processor_times);
    }

    /// Adds `ok. 3 passed; 1 failed; 0 ignored; ...`.
    fn add(&mut self, summary: &str) {
        let words: Vec<&str> = summary.split([' ', ';']).filter(|word| !word.is_empty()).collect();
        let count = |what| words.windows(2).find(|pair| pair[1] == what).and_then(|pair| pair[0].parse().ok()).unwrap_or(0);
        self.passed += count("passed");
        self.failed += count("failed");
        self.skipped += count("ignored");
    }

    #[cfg(test)]
    pub fn counts(&self) -> [u64; 3] {
        [self.passed, self.failed, self.skipped]
    }

    #[cfg(test)]
    pub fn failures(&self) -> &[String] {
        &self.failures
    }

    pub fn report(mut self) -> ExitCode {
        self.times.sort_by_key(|(time, _)| std::cmp::Reverse(*time));
        println!("\n== slowest");
        for (time, name) in self.times.iter().take(SLOWEST) {
            println!("{:8.2} s  {name}", time.as_secs_f64());
        }
        println!("\n== processor time");
        let whole = (self.processor_times.iter().map(|(time, _)| time).sum(), "all");
        for (time, name) in self.processor_times.iter().chain([&whole]) {
            println!("{:8.0} s  {name}", time.as_secs_f64());
        }
        self.reasons.iter().for_each(|reason| println!("\n{reason}"));
        if !self.failures.is_empty() {
            println!("\n== failed");
            self.failures.iter().for_each(|what| println!("{what}"));
        }
        println!("\n{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped);
        if self.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

/// The package whose documentation is tested next: `   Doc-tests oxtile`.
fn documented(line: &str) -> Option<String> {
    Some(format!("doc tests of {}", line.trim_start().strip_prefix("Doc-tests ")?))
}

/// `test name ... FAILED`, of any test program.
fn failed_test(line: &str) -> Option<&str> {
    Some(line.strip_prefix("test ")?.strip_suffix("FAILED")?.trim_end().strip_suffix("...")?.trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summaries_add_up() {
        let mut tally = Tally::default();
        tally.add("ok. 3 passed; 0 failed; 2 ignored; 0 measured; 5 filtered out; finished in 0.01s");
        tally.add("FAILED. 1 passed; 4 failed; 0 ignored; 0 measured; 0 filtered out");
        assert_eq!((tally.passed, tally.failed, tally.skipped), (4, 4, 2));
    }

    #[test]
    fn what_failed_is_recognised() {
        assert_eq!(documented("   Doc-tests oxtile").unwrap(), "doc tests of oxtile");
        assert_eq!(failed_test("test mutation::gemm      ... FAILED"), Some("mutation::gemm"));
        assert_eq!(failed_test("test mutation::gemm      ... ok"), None);
    }

    #[test]
    fn steps_beside_others_count() {
        let mut tally = Tally::default();
        for (program, passes) in [("exit 0", true), ("exit 1", false)] {
            assert_eq!(tally.beside("sh", Duration::ZERO, Command::new("sh").args(["-c", program]).output().context("sh")), passes);
        }
        assert!(!tally.beside("nothing", Duration::ZERO, Command::new("/nothing").output().context("nothing")));
        assert_eq!((tally.passed, tally.failed), (1, 2));
        assert_eq!(tally.failures, ["sh", "nothing"]);
    }

    #[test]
    fn a_program_that_fails_without_a_summary_counts() {
        let mut tally = Tally::default();
        tally.tests("sh", Command::new("sh").args(["-c", "echo test result: ok. 2 passed; exit 3"]), |_| ()).unwrap();
        assert_eq!((tally.passed, tally.failed), (2, 1));
        assert_eq!(tally.failures, ["sh: it failed without a summary"]);
    }

    #[test]
    fn what_is_skipped_is_counted_and_says_why() {
        let mut tally = Tally::default();
        let program = "echo python: 1 test skipped: no network >&2; echo test result: ok. 2 passed\\; 0 failed\\; 1 ignored";
        tally.tests("sh", Command::new("sh").args(["-c", program]), |_| ()).unwrap();
        assert_eq!((tally.skipped, &tally.reasons[..]), (1, &["python: 1 test skipped: no network".to_owned()][..]));
    }
}
