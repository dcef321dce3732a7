//! `neighbours`: Oxtile for Rust's other GPU libraries, cudarc and candle, built and tested.

use std::{
    env,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use anyhow::{Context, Result, ensure};
use lexopt::{Arg, Parser};

use crate::{kernels, root, say, target, wheel};

/// The program for a GPU, an example of `oxtile-cudarc`.
const GPU_PROGRAM: &str = "gpu_check";

/// `neighbours [--gpu]`.
pub fn run(arguments: &mut Parser) -> Result<ExitCode> {
    let mut gpu = false;
    while let Some(argument) = arguments.next()? {
        match argument {
            Arg::Long("gpu") => gpu = true,
            other => return Err(other.unexpected().into()),
        }
    }
    if gpu {
        let folder = for_gpu()?;
        println!("{}: on the GPU machine: OXTILE_KERNELS=kernels ./{GPU_PROGRAM}", folder.display());
        return Ok(ExitCode::SUCCESS);
    }
    Ok(if tests()? { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Tests the crates, and their sources.
pub fn checked() -> Result<bool> {
    let lints = ["--quiet", "--locked", "--all-targets"];
    let fmt = succeeds(cargo("fmt").args(["--all", "--check"]))?;
    let clippy = succeeds(cargo("clippy").args(lints).args(["--workspace", "--", "-D", "warnings"]))?;
    say("candle's feature `cuda`, type-checked with a stand-in for nvcc");
    let cuda = ["-p", "oxtile-candle", "--no-default-features", "--features", "cuda", "--", "-D", "warnings"];
    let cuda = succeeds(without_nvcc(cargo("clippy").args(lints).args(cuda))?)?;
    Ok(tests()? && fmt && clippy && cuda)
}

fn tests() -> Result<bool> {
    say("the tests of oxtile-cudarc and oxtile-candle");
    succeeds(cargo("test").args(["--quiet", "--locked", "--workspace"]))
}

/// Everything of the crates, below the target directory.
fn folder() -> PathBuf {
    target().join("neighbours")
}

/// Cargo in their workspace, which has a lock file and features of its own.
fn cargo(command: &str) -> Command {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(root().join("neighbours")).arg(command).env("CARGO_TARGET_DIR", folder());
    cargo
}

/// Puts the stand-in for nvcc first in the path.
fn without_nvcc(cargo: &mut Command) -> Result<&mut Command> {
    let path = with_first(&root().join("neighbours/no-nvcc"), env::var_os("PATH"))?;
    // A folder of its own: what it makes does not link.
    Ok(cargo.env("PATH", path).env("CUDA_COMPUTE_CAP", "90").env("CARGO_TARGET_DIR", folder().join("no-nvcc")))
}

fn with_first(first: &Path, path: Option<OsString>) -> Result<OsString> {
    let others = path.iter().flat_map(env::split_paths);
    Ok(env::join_paths([first.to_owned()].into_iter().chain(others))?)
}

/// Makes a folder for a machine with a GPU and without Rust: the program and the kernels.
fn for_gpu() -> Result<PathBuf> {
    ensure!(succeeds(cargo("build").args(["--locked", "-p", "oxtile-cudarc", "--example", GPU_PROGRAM]))?, "{GPU_PROGRAM} does not build");
    let to = folder().join("gpu");
    wheel::strip(&kernels::shipped()?, &to.join("kernels"))?;
    let program = folder().join("debug/examples").join(GPU_PROGRAM);
    fs::copy(&program, to.join(GPU_PROGRAM)).with_context(|| format!("cannot copy {}", program.display()))?;
    Ok(to)
}

fn succeeds(command: &mut Command) -> Result<bool> {
    Ok(command.status().with_context(|| format!("cannot run {:?}", command.get_program()))?.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stand_in_goes_first() {
        let path = with_first(Path::new("/here"), Some("/usr/bin:/bin".into())).unwrap();
        assert_eq!(path, OsString::from("/here:/usr/bin:/bin"));
        assert_eq!(with_first(Path::new("/here"), None).unwrap(), OsString::from("/here"));
    }
}
