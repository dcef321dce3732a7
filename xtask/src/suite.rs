//! `test`: everything that needs no GPU, one count at the end.

use std::{
    fs,
    io::{BufRead, BufReader},
    process::{Command, ExitCode, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use lexopt::Parser;

use crate::{
    cargo, fuzz, kernels, machine, neighbours, package,
    portable::{self, Extent},
    processor_time, programs, target, wheel,
};

/// How many of the slowest are printed.
const SLOWEST: usize = 10;

/// The counts and times so far.
#[derive(Default)]
struct Tally {
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
    fn part<T>(&mut self, name: &'static str, work: impl FnOnce(&mut Self) -> T) -> T {
        let before = processor_time::of_children();
        let result = work(self);
        let time = before.zip(processor_time::of_children()).map(|(before, after)| (after - before, name));
        self.processor_times.extend(time);
        result
    }

    /// One step that passes or fails as a whole.
    fn step(&mut self, name: &str, work: impl FnOnce() -> Result<bool>) {
        println!("== {name}");
        let start = Instant::now();
        let passed = work().unwrap_or_else(|error| {
            eprintln!("error: {error:#}");
            false
        });
        self.count(name, start.elapsed(), passed);
    }

    /// A step that ran beside others: what it wrote is printed now. Whether it passed.
    fn beside(&mut self, name: &str, time: Duration, output: Result<Output>) -> bool {
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

    fn fail(&mut self, what: String) {
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
    fn tests(&mut self, name: &str, command: &mut Command, mut print: impl FnMut(&str)) -> Result<()> {
        print(&format!("== {name}"));
        let before = self.failed;
        // One pipe for both streams: cargo names a test program on one of them, its results come on the other.
        let (reader, writer) = std::io::pipe().context("cannot open a pipe")?;
        command.stdout(writer.try_clone()?).stderr(writer).stdin(Stdio::null());
        let mut child = command.spawn().with_context(|| format!("cannot run {name}"))?;
        // The command holds the pipe's writing end: without it reading ends when the child does.
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let (mut program, mut start) = (name.to_owned(), Instant::now());
        for line in BufReader::new(reader).split(b'\n') {
            let line = String::from_utf8_lossy(&line?).into_owned();
            print(&line);
            if let Some(named) = program_named(&line) {
                (program, start) = (named, Instant::now());
            } else if let Some(summary) = line.strip_prefix("test result: ") {
                self.add(summary);
                self.times.push((start.elapsed(), program.clone()));
            } else if let Some(test) = failed_test(&line) {
                self.failures.push(format!("{program}: {test}"));
            } else if line.contains(" skipped: ") {
                self.reasons.push(line);
            }
        }
        if !child.wait()?.success() && self.failed == before {
            self.fail(format!("{name}: it failed without a summary"));
        }
        Ok(())
    }

    /// Runs `cargo test` and the case binary beside each other: some tests compile for a long time on one thread. What the cases write is
    /// printed at the end.
    fn tests_beside_cases(&mut self, tests: &mut Command, cases: &mut Command) -> Result<()> {
        let (mut beside, mut written) = (Self::default(), String::new());
        let both = thread::scope(|scope| {
            let running = scope.spawn(|| beside.tests("oxtile-tests", cases, |line| written.extend([line, "\n"])));
            let tested = self.tests("cargo test", tests, |line| println!("{line}"));
            tested.and(running.join().expect("reading what cases write does not panic"))
        });
        print!("{written}");
        self.absorb(beside);
        both
    }

    /// Adds what another one counted.
    fn absorb(&mut self, Self { passed, failed, skipped, failures, reasons, times, processor_times }: Self) {
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

    fn report(mut self) -> ExitCode {
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

/// The test program that cargo is about to run: `Running unittests src/lib.rs (target/...)`, `Doc-tests oxtile`.
fn program_named(line: &str) -> Option<String> {
    let line = line.trim_start();
    if let Some(package) = line.strip_prefix("Doc-tests ") {
        return Some(format!("doc tests of {package}"));
    }
    let (source, path) = line.strip_prefix("Running ")?.split_once(" (")?;
    // The file is named after its crate, with a hash: `target/debug/deps/oxtile_build-0123456789abcdef)`.
    let file = path.rsplit('/').next()?.rsplit_once('-')?.0;
    Some(format!("{file}: {source}"))
}

/// `test name ... FAILED`, of any test program.
fn failed_test(line: &str) -> Option<&str> {
    Some(line.strip_prefix("test ")?.strip_suffix("FAILED")?.trim_end().strip_suffix("...")?.trim_end())
}

/// A line that the case binary leaves in the file `OXTILE_TIMES`: seconds, a tab, the name of the case.
fn case_time(line: &str) -> Option<(Duration, String)> {
    let (seconds, name) = line.split_once('\t')?;
    Some((Duration::try_from_secs_f64(seconds.parse().ok()?).ok()?, name.into()))
}

fn succeeds(command: &mut Command) -> Result<bool> {
    Ok(command.status().with_context(|| format!("cannot run {:?}", command.get_program()))?.success())
}

/// A step that ran beside others: its name, time and output.
type Judged = (&'static str, Duration, Result<Output>);

/// Compiles the host's code while the kernels compile: these keep one core busy, in a target directory of their own. The tests' own step
/// comes last.
fn compile_for_the_host(whole: bool) -> Vec<Judged> {
    let judge = |name, command: &mut Command| {
        let start = Instant::now();
        let output = command.output().with_context(|| format!("cannot run {name}"));
        (name, start.elapsed(), output)
    };
    let mut judged = Vec::new();
    if whole {
        let lints = ["clippy", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings"];
        judged.push(judge("cargo clippy", &mut cargo(lints)));
        // A link that leads nowhere is an error.
        let mut doc = cargo(["doc", "--workspace", "--lib", "--no-deps", "--quiet"]);
        judged.push(judge("cargo doc", doc.env("RUSTDOCFLAGS", "-D warnings")));
    }
    judged.push(judge("cargo test --no-run", &mut cargo(["test", "--workspace", "--no-run", "--quiet"])));
    judged
}

/// `test [--long] [FILTER...]`: the whole suite; with a filter, only the tests whose names contain it; `--long` tries all of what is
/// sampled otherwise, and more seeds.
pub fn run(arguments: &mut Parser) -> Result<ExitCode> {
    let (long, filter): (Vec<_>, Vec<_>) = arguments.raw_args()?.partition(|argument| argument == "--long");
    let long = (!long.is_empty()).then_some(("OXTILE_LONG", "1"));
    let mut tally = Tally::default();
    machine::ready()?;
    let whole = filter.is_empty();
    if whole {
        machine::components()?;
        tally.step("cargo fmt --check", || succeeds(&mut cargo(["fmt", "--all", "--check"])));
    }
    let judged = tally.part("compiling", |tally| {
        thread::scope(|scope| {
            let judged = scope.spawn(|| compile_for_the_host(whole));
            if whole {
                tally.step("build-ptx for other architectures", || {
                    portable::check(if long.is_some() { Extent::Long } else { Extent::Changed })
                });
            }
            tally.step("build-ptx", || if long.is_some() { kernels::all().map(|_| true) } else { kernels::pass() });
            judged.join().expect("compiling does not panic")
        })
    });
    let compiled = judged.into_iter().map(|(name, time, output)| tally.beside(name, time, output)).last();
    if compiled != Some(true) {
        // Programs that lie there are of other sources.
        return Ok(tally.report());
    }
    let mut tests = cargo(["test", "--workspace", "--no-fail-fast", "--"]);
    let times = target().join("case-times.tsv");
    let _ = fs::remove_file(&times);
    let mut cases = programs::compiled_cases();
    cases.env("OXTILE_TIMES", &times).envs(long).args(&filter);
    if let Err(error) = tally.part("testing", |tally| tally.tests_beside_cases(tests.args(&filter).envs(long), &mut cases)) {
        tally.fail(format!("the tests: {error:#}"));
    }
    if whole && long.is_some() {
        // A workspace of its own, in release: minutes of compiling.
        tally.part("fuzz", |tally| tally.step("the fuzz targets", fuzz::checked));
        tally.part("wheel", |tally| tally.step("the Python wheel", wheel::checked));
        tally.part("neighbours", |tally| tally.step("the crates for cudarc and candle", neighbours::checked));
        tally.part("packages", |tally| tally.step("package --check", || package::run(&package::architectures()?, true).map(|()| true)));
    }
    let case_times = fs::read_to_string(&times).unwrap_or_default();
    tally.times.extend(case_times.lines().filter_map(case_time));
    Ok(tally.report())
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
    fn programs_and_cases_are_recognised() {
        let line = "     Running unittests src/lib.rs (target/debug/deps/oxtile_build-0123456789abcdef)";
        assert_eq!(program_named(line).unwrap(), "oxtile_build: unittests src/lib.rs");
        assert_eq!(program_named("   Doc-tests oxtile").unwrap(), "doc tests of oxtile");
        assert_eq!(case_time("1.5\temulated::small::amax::f32"), Some((Duration::from_millis(1500), "emulated::small::amax::f32".into())));
        assert_eq!(case_time("noise"), None);
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
    fn tests_and_cases_beside_each_other_count() {
        let mut tally = Tally::default();
        let program = |text: &str| {
            let mut sh = Command::new("sh");
            sh.args(["-c", &format!("echo test result: {text}")]);
            sh
        };
        let failing = "FAILED. 1 passed\\; 3 failed\\; 4 ignored; echo test gemm ... FAILED";
        tally.tests_beside_cases(&mut program("ok. 2 passed"), &mut program(failing)).unwrap();
        assert_eq!((tally.passed, tally.failed, tally.skipped), (3, 3, 4));
        assert_eq!(tally.failures, ["oxtile-tests: gemm"]);
        let missing = tally.tests_beside_cases(&mut program("ok. 2 passed"), &mut Command::new("/nothing"));
        assert!(missing.unwrap_err().to_string().contains("oxtile-tests"));
        assert_eq!(tally.passed, 5);
    }

    #[test]
    fn what_is_skipped_is_counted_and_says_why() {
        let mut tally = Tally::default();
        let program = "echo python: 1 test skipped: no network >&2; echo test result: ok. 2 passed\\; 0 failed\\; 1 ignored";
        tally.tests("sh", Command::new("sh").args(["-c", program]), |_| ()).unwrap();
        assert_eq!((tally.skipped, &tally.reasons[..]), (1, &["python: 1 test skipped: no network".to_owned()][..]));
    }
}
