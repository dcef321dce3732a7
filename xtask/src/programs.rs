//! Runs the project's programs on the kernels built here.

use std::{
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use anyhow::{Context, Result, ensure};
use lexopt::{Arg, Parser};

use crate::{cargo, commit, kernels, root, say, target};

/// The seed of the checkpoint that `demo` makes.
const DEMO_SEED: &str = "22700000";

/// `cargo run` of a program of the workspace.
fn program(package: &str, binary: &str, profile: &[&str]) -> Command {
    let mut cargo = cargo(["run", "--quiet", "--package", package, "--bin", binary]);
    cargo.args(profile).arg("--").env("OXTILE_COMMIT", commit());
    cargo
}

/// Compiles a program, and prints that it does: the first time it takes minutes, which are not the program's own.
fn compile(package: &str, binary: &str, profile: &[&str]) -> Result<()> {
    say(&format!("cargo: {binary}, minutes the first time"));
    let mut cargo = cargo(["build", "--quiet", "--package", package, "--bin", binary]);
    let status = cargo.args(profile).env("OXTILE_COMMIT", commit()).status().context("cannot run cargo")?;
    ensure!(status.success(), "{binary} does not compile: see above");
    Ok(())
}

/// The case binary as `cargo test --workspace` compiled it: with the features of the whole workspace. `cargo run` of its package alone
/// would compile the kernels, the library and the cases again, with fewer.
pub fn compiled_cases() -> Command {
    let mut cases = Command::new(target().join("debug/oxtile-tests"));
    cases.current_dir(root()).env("OXTILE_COMMIT", commit());
    cases
}

fn status(command: &mut Command) -> Result<ExitCode> {
    let status = command.status().with_context(|| format!("cannot run {:?}", command.get_program()))?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The case binary.
fn cases() -> Command {
    program("oxtile-tests", "oxtile-tests", &[])
}

/// Runs the cases with this in their name on the emulator, under one seed if it is given.
pub fn emulated_cases(filter: &str, seed: Option<u64>) -> Result<ExitCode> {
    let mut cases = cases();
    if let Some(seed) = seed {
        cases.env("OXTILE_SEED", seed.to_string());
    }
    status(cases.args([filter, "--skip", "cuda::", "--skip", "mutation::"]))
}

/// `bench [FILTER...]`: the arguments go to the benchmark program as they are.
pub fn bench(arguments: &mut Parser) -> Result<ExitCode> {
    let arguments: Vec<_> = arguments.raw_args()?.collect();
    kernels::shipped()?;
    compile("oxtile-benches", "oxtile-benches", &["--release"])?;
    status(program("oxtile-benches", "oxtile-benches", &["--release"]).args(arguments))
}

/// `demo [--input FILE]`: quantizes a checkpoint to MXFP8, on the GPU if there is one, else on the emulator.
pub fn demo(arguments: &mut Parser) -> Result<ExitCode> {
    let mut input: Option<PathBuf> = None;
    while let Some(argument) = arguments.next()? {
        match argument {
            Arg::Long("input") => input = Some(std::path::absolute(arguments.value()?)?),
            other => return Err(other.unexpected().into()),
        }
    }
    kernels::shipped()?;
    let folder = target().join("demo");
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let made = folder.join("checkpoint.safetensors");
    compile("oxtile-cli", "oxtile", &[])?;
    let oxtile = || program("oxtile-cli", "oxtile", &[]);
    if input.is_none() {
        say(&format!("oxtile demo-checkpoint --seed {DEMO_SEED} --output {}", short(&made)));
        let made = status(oxtile().args(["demo-checkpoint", "--seed", DEMO_SEED, "--output"]).arg(&made))?;
        if made != ExitCode::SUCCESS {
            return Ok(made);
        }
    }
    let (input, output) = (input.unwrap_or(made), folder.join("mxfp8.safetensors"));
    say(&format!("oxtile quantize --input {} --format mxfp8 --output {}", short(&input), short(&output)));
    status(oxtile().args(["quantize", "--format", "mxfp8", "--input"]).arg(input).arg("--output").arg(output))
}

/// A path as one would type it here.
fn short(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).display().to_string()
}
