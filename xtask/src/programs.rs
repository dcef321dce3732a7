//! Runs the project's programs on the kernels built here.

use std::{
    path::{Path, PathBuf},
    process::{Command, ExitCode, ExitStatus, Stdio},
    time::{Instant, SystemTime},
};

use anyhow::{Context, Result, ensure};
use lexopt::{Arg, Parser};

use crate::{
    cargo, commit, kernels, machine,
    replacement::{self, Cases, Replacement},
    root, say, target,
};

/// The seed of the checkpoint that `demo` makes.
const DEMO_SEED: &str = "22700000";

/// The families that `demo` launches, if there is a GPU.
const DEMO_FAMILIES: [&str; 2] = ["amax", "mxfp8"];

/// The crates that take longest to optimise, for a run of seconds.
const UNOPTIMISED: [&str; 3] = ["oxtile-kernels", "oxtile", "oxtile-cli"];

/// The case binary's exit status where it cannot load kernels that were compiled after it.
pub const UNLOADABLE: i32 = 75;

/// How a program is compiled.
#[derive(Clone, Copy)]
enum Profile {
    Dev,
    /// As `Dev`, but for the crates in [`UNOPTIMISED`].
    Quick,
    Release,
}

impl Profile {
    /// Cargo's options.
    fn options(self) -> Vec<String> {
        match self {
            Self::Dev => Vec::new(),
            Self::Quick => UNOPTIMISED.iter().map(|name| format!("--config=profile.dev.package.{name}.opt-level=0")).collect(),
            Self::Release => vec!["--release".into()],
        }
    }

    /// The folder of programs in the target directory.
    fn folder(self) -> &'static str {
        match self {
            Self::Dev | Self::Quick => "debug",
            Self::Release => "release",
        }
    }
}

/// Builds a program and gives its path.
fn build(binary: &str, profile: Profile) -> Result<PathBuf> {
    compile(binary, profile)?;
    Ok(target().join(profile.folder()).join(binary))
}

/// Compiles a program and gives what cargo says of it, in JSON. The whole workspace's features are asked for, as `cargo test --workspace` asks: what
/// either of them compiled, the other does not compile again.
fn compile(binary: &str, profile: Profile) -> Result<String> {
    say(&format!("cargo: {binary}, a minute or more the first time"));
    let start = Instant::now();
    let mut cargo = cargo(["build", "--workspace", "--message-format=json-render-diagnostics", "--bin", binary]);
    if matches!(profile, Profile::Dev) {
        // With this program, as all tests are compiled: what it shares with proc macros is else compiled once more, and with them all that uses those.
        cargo.args(["--bin", "xtask"]);
    }
    cargo.args(profile.options()).env("OXTILE_COMMIT", commit()).stderr(Stdio::inherit());
    let output = cargo.output().context("cannot run cargo")?;
    ensure!(output.status.success(), "{binary} does not compile: see above");
    took(start);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Says how long a step took that a person waited for.
fn took(start: Instant) {
    let seconds = start.elapsed().as_secs();
    if seconds > 0 {
        say(&format!("  {seconds} s"));
    }
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
    Ok(exit_code(status))
}

fn exit_code(status: ExitStatus) -> ExitCode {
    if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs the emulated cases of the kernels whose names begin so, under one seed if it is given. Only what the edit asks for is compiled.
pub fn emulated_cases(kernel: &str, seed: Option<u64>) -> Result<ExitCode> {
    let run = |replacement: Option<&Replacement>| {
        let mut cases = compiled_cases();
        cases.env("OXTILE_KERNEL", kernel).args(["emulated::"]).envs(seed.map(|seed| ("OXTILE_SEED", seed.to_string())));
        cases.envs(replacement.into_iter().flat_map(Replacement::environment));
        cases.status().context("cannot run the case binary")
    };
    let start = Instant::now();
    let outdated = match replacement::cases_of(kernel)? {
        Cases::Current => return run(None).map(exit_code),
        Cases::Replaced(replacement) => {
            took(start);
            let status = run(Some(&replacement))?;
            if status.code() != Some(UNLOADABLE) {
                return Ok(exit_code(status));
            }
            "the kernel needs a function that it lacks, or a case launches another kernel that has changed: see above".into()
        }
        Cases::Outdated(why) => why,
    };
    say(&format!("the whole case binary is compiled: {outdated}"));
    let start = SystemTime::now();
    let said = compile("oxtile-tests", Profile::Dev)?;
    let tile = said.split('"').find(|path| path.contains("/liboxtile_tile-") && path.ends_with(".rlib"));
    replacement::compiled(Path::new(tile.context("cargo does not say where oxtile-tile is")?), start)?;
    run(None).map(exit_code)
}

/// `bench [FILTER...]`: the arguments go to the benchmark program as they are.
pub fn bench(arguments: &mut Parser) -> Result<ExitCode> {
    let arguments: Vec<_> = arguments.raw_args()?.collect();
    match machine::gpu_arch() {
        Some(_) => {
            let start = Instant::now();
            // The benchmarks have kernels of every family.
            kernels::shipped()?;
            took(start);
        }
        None => say("no GPU: the CPU emulator runs the kernels, and none is compiled for a GPU"),
    }
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
    match machine::gpu_arch() {
        Some(arch) => {
            let start = Instant::now();
            say(&format!("kernels of {} for the GPU", DEMO_FAMILIES.join(" and ")));
            kernels::families(&DEMO_FAMILIES, arch)?;
            took(start);
        }
        None => say("no GPU: the CPU emulator runs the kernels, and none is compiled for a GPU"),
    }
    let folder = target().join("demo");
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let made = folder.join("checkpoint.safetensors");
    let path = build("oxtile", Profile::Quick)?;
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
    let start = Instant::now();
    let quantized = status(oxtile().args(["quantize", "--format", "mxfp8", "--input"]).arg(input).arg("--output").arg(output))?;
    took(start);
    Ok(quantized)
}

/// A path as one would type it here.
fn short(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).display().to_string()
}
