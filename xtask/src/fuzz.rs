//! The fuzz targets of `fuzz/`, by libFuzzer, each for some seconds.
//!
//! `fuzz/` is laid out as cargo-fuzz has it, which wants nightly for its sanitizers. Coverage counters alone are a pass that stable rustc has, and parsers without `unsafe`
//! need no more: a panic is what is looked for.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};

use crate::{root, say, target};

/// Seconds for all targets together.
const SECONDS: u64 = 60;
/// A target that tries fewer inputs in its time finds nothing: it is stuck, or compiled without optimisation.
const FEWEST: u64 = 2000;
/// What cargo-fuzz passes to rustc, but for sanitizers: counters of edges, and the operands of comparisons.
const FLAGS: &str = "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares";

/// Builds all targets and runs them. Returns whether all held.
pub fn checked() -> Result<bool> {
    let folder = target().join("fuzz");
    let host = host()?;
    say("cargo build --release of the fuzz targets");
    let mut build = Command::new(env!("CARGO"));
    // With a target named, build scripts and macros are compiled without counters.
    build.current_dir(root().join("fuzz")).args(["build", "--release", "--quiet", "--locked", "--bins", "--target", &host]);
    let built = build.env("CARGO_TARGET_DIR", &folder).env("RUSTFLAGS", FLAGS).status().context("cannot run cargo")?;
    ensure!(built.success(), "the fuzz targets do not build: libFuzzer needs a C++ compiler (c++)");
    let names = names()?;
    let seconds = SECONDS.div_ceil(names.len() as u64);
    let mut all_held = true;
    for name in &names {
        say(&format!("fuzz {name}, {seconds} s"));
        all_held &= run(name, &folder.join(&host).join("release").join(name), &folder, seconds)?;
    }
    Ok(all_held)
}

/// The targets, one a file.
fn names() -> Result<Vec<String>> {
    let entries = fs::read_dir(root().join("fuzz/targets")).context("cannot read fuzz/targets")?;
    let paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<PathBuf>>>()?;
    let mut names: Vec<String> = paths.iter().filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned())).collect();
    names.sort();
    ensure!(!names.is_empty(), "fuzz/targets is empty");
    Ok(names)
}

/// The triple of this host.
fn host() -> Result<String> {
    let version = Command::new("rustc").arg("-vV").output().context("cannot run rustc")?;
    let text = String::from_utf8_lossy(&version.stdout).into_owned();
    let host = text.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.context("rustc -vV names no host")?.to_owned())
}

/// Runs a target. What it found before is tried first, and then its seeds.
fn run(name: &str, program: &Path, folder: &Path, seconds: u64) -> Result<bool> {
    let [corpus, artifacts] = [format!("corpus/{name}"), format!("artifacts/{name}")].map(|path| folder.join(path));
    for path in [&corpus, &artifacts] {
        fs::create_dir_all(path).with_context(|| format!("cannot create {}", path.display()))?;
    }
    let mut fuzz = Command::new(program);
    fuzz.args([format!("-max_total_time={seconds}"), format!("-artifact_prefix={}/", artifacts.display())]);
    fuzz.args(["-print_final_stats=1", "-timeout=10", "-rss_limit_mb=2048"]);
    let dictionary = root().join(format!("fuzz/dictionaries/{name}.dict"));
    if dictionary.is_file() {
        fuzz.arg(format!("-dict={}", dictionary.display()));
    }
    let output = fuzz.arg(&corpus).arg(root().join(format!("fuzz/seeds/{name}"))).output().with_context(|| format!("cannot run {name}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        let last: Vec<_> = said.lines().rev().take(40).collect();
        last.iter().rev().for_each(|line| eprintln!("{line}"));
        eprintln!("fuzz target {name} failed: {} {} tries the input again", program.display(), artifacts.display());
        return Ok(false);
    }
    let Some(tried) = executed(&said) else { bail!("fuzz target {name} states no number of inputs: {said}") };
    println!("fuzz {name}: {tried} inputs, {}", coverage(&said).unwrap_or("no coverage stated"));
    ensure!(tried >= FEWEST, "fuzz target {name} tried {tried} inputs in {seconds} s, and {FEWEST} are the fewest that count");
    Ok(true)
}

/// The number of inputs, of libFuzzer's statistics.
fn executed(said: &str) -> Option<u64> {
    said.lines().find_map(|line| line.strip_prefix("stat::number_of_executed_units:"))?.trim().parse().ok()
}

/// `cov: 17 ft: 20`, of libFuzzer's last line.
fn coverage(said: &str) -> Option<&str> {
    let line = said.lines().rev().find(|line| line.starts_with('#') && line.contains(" cov: "))?;
    let begin = line.find("cov: ")?;
    line[begin..].split(" corp:").next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_are_read() {
        let said = "#2\tINITED cov: 9 ft: 9 corp: 1/1b\n#81\tDONE   cov: 17 ft: 20 corp: 3/9b\nstat::number_of_executed_units: 81\n";
        assert_eq!((executed(said), coverage(said)), (Some(81), Some("cov: 17 ft: 20")));
        assert_eq!((executed("noise"), coverage("noise")), (None, None));
    }

    /// What a target begins with, and its place in the manifest.
    #[test]
    fn every_target_has_seeds() {
        let manifest = fs::read_to_string(root().join("fuzz/Cargo.toml")).unwrap();
        for name in names().unwrap() {
            assert!(manifest.contains(&format!("path = \"targets/{name}.rs\"")), "{name} is no [[bin]] of fuzz/Cargo.toml");
            let seeds = fs::read_dir(root().join("fuzz/seeds").join(&name)).unwrap_or_else(|error| panic!("fuzz/seeds/{name}: {error}"));
            assert!(seeds.count() >= 2, "fuzz/seeds/{name}");
        }
    }
}
