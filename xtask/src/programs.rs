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

/// Builds a program and gives its path. The whole workspace's features are asked for, as `cargo test --workspace` asks: what either of them
/// compiled, the other does not compile again.
fn build(binary: &str, profile: Profile) -> Result<PathBuf> {
    say(&format!("cargo: {binary}, minutes the first time"));
    let (options, folder): (&[&str], _) = match profile {
        Profile::Dev => (&[], "debug"),
        Profile::Release => (&["--release"], "release"),
    };
    let mut cargo = cargo(["build", "--workspace", "--bin", binary]);
    let status = cargo.args(options).env("OXTILE_COMMIT", commit()).status().context("cannot run cargo")?;
    ensure!(status.success(), "{binary} does not compile: see above");
    Ok(target().join(folder).join(binary))
}

#[derive(Clone, Copy)]
enum Profile {
    Dev,
    Release,
}

/// A program of this checkout, in its root.
fn program(path: impl AsRef<Path>) -> Command {
    let mut program = Command::new(path.as_ref());
    program.current_dir(root()).env("OXTILE_COMMIT", commit());
    program
}

/// The case binary as `cargo test --workspace` compiled it. It notes which kernels each case launches.
pub fn compiled_cases() -> Command {
    let mut cases = program(target().join("debug/oxtile-tests"));
    cases.env("OXTILE_LAUNCHES", target().join("oxtile/launches.tsv"));
    cases
}

fn status(command: &mut Command) -> Result<ExitCode> {
    let status = command.status().with_context(|| format!("cannot run {:?}", command.get_program()))?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs the emulated cases of the kernels whose names begin so, under one seed if it is given.
pub fn emulated_cases(kernel: &str, seed: Option<u64>) -> Result<ExitCode> {
    build("oxtile-tests", Profile::Dev)?;
    let mut cases = compiled_cases();
    if let Some(seed) = seed {
        cases.env("OXTILE_SEED", seed.to_string());
    }
    status(cases.env("OXTILE_KERNEL", kernel).args(["emulated::"]))
}

/// `bench [FILTER...]`: the arguments go to the benchmark program as they are.
pub fn bench(arguments: &mut Parser) -> Result<ExitCode> {
    let arguments: Vec<_> = arguments.raw_args()?.collect();
    kernels::shipped()?;
    status(program(build("oxtile-benches", Profile::Release)?).args(arguments))
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
    let path = build("oxtile", Profile::Dev)?;
    let oxtile = || program(&path);
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
