//! `wheel`: the Python package, built and tested.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{self, Command, ExitCode},
    thread,
};

use anyhow::{Context, Result, bail, ensure};
use lexopt::{Arg, Parser};
use oxtile_build::{Build, CudaTools};

use crate::{kernels, root, say, target};

/// What the tests need, beside the wheel: a module, what pip installs for it, and the tests of it.
type Library = (&'static str, &'static str, &'static str);
const NUMPY: Library = ("numpy", "numpy>=2", "test_numpy.py");
const TORCH: Library = ("torch", "torch>=2.11", "test_torch.py");

/// `wheel [--no-test] [--torch]`.
pub fn run(arguments: &mut Parser) -> Result<ExitCode> {
    let (mut tested, mut libraries) = (true, vec![NUMPY]);
    while let Some(argument) = arguments.next()? {
        match argument {
            Arg::Long("no-test") => tested = false,
            Arg::Long("torch") => libraries.push(TORCH),
            other => return Err(other.unexpected().into()),
        }
    }
    let wheel = build()?;
    println!("{}: {:.1} MB", wheel.display(), fs::metadata(&wheel)?.len() as f64 / 1e6);
    if tested && !test(&wheel, &libraries)? {
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}

/// Builds the wheel and tests it, and its sources.
pub fn checked() -> Result<bool> {
    let fmt = cargo("fmt").arg("--check").status()?.success();
    let clippy = cargo("clippy").args(["--release", "--quiet", "--all-targets", "--", "-D", "warnings"]).status()?.success();
    Ok(test(&build()?, &[NUMPY, TORCH])? && fmt && clippy)
}

/// Everything of the wheel, below the target directory.
fn folder() -> PathBuf {
    target().join("wheel")
}

/// Cargo in the workspace of the Python module, which has a lock file and features of its own.
fn cargo(command: &str) -> Command {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(root().join("python")).arg(command).env("CARGO_TARGET_DIR", folder());
    cargo
}

/// Builds the wheel and returns its path.
fn build() -> Result<PathBuf> {
    say("cargo build --release of the Python module");
    let built = cargo("build").args(["--release", "--quiet", "--locked"]).status().context("cannot run cargo")?;
    ensure!(built.success(), "the Python module does not build");
    let compiled = kernels::shipped()?;
    let stripped = folder().join("kernels");
    strip(&compiled, &stripped)?;
    let out = folder().join("dist");
    fs::create_dir_all(&out).with_context(|| format!("cannot create {}", out.display()))?;
    let mut pack = Command::new("python3");
    pack.arg(root().join("python/pack.py")).arg(folder().join("release/lib_oxtile.so")).args([&stripped, &out]);
    let packed = pack.output().context("cannot run python3: install Python 3.10 or newer")?;
    ensure!(packed.status.success(), "the wheel could not be packed: {}", String::from_utf8_lossy(&packed.stderr));
    Ok(String::from_utf8_lossy(&packed.stdout).trim().into())
}

/// Assembles the kernels without line tables, which are most of a cubin. The machine code is the same. What is there of the same PTX stays.
pub fn strip(build: &Build, to: &Path) -> Result<()> {
    let package = to.join(build.out_dir.file_name().unwrap_or_default());
    fs::create_dir_all(&package).with_context(|| format!("cannot create {}", package.display()))?;
    let tools = CudaTools::find(&root())?;
    let names = |folder: &Path, extension: &str| -> Result<Vec<PathBuf>> {
        let entries = fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
        let paths = entries.map(|entry| entry.map(|entry| entry.path())).collect::<Result<Vec<_>, _>>()?;
        Ok(paths.into_iter().filter(|path| path.extension().is_some_and(|found| found == extension)).collect())
    };
    let sources = names(&build.out_dir, "ptx")?;
    let target_of = |ptx: &Path| package.join(ptx.with_extension("cubin").file_name().unwrap_or_default());
    for old in names(&package, "cubin")? {
        if !sources.iter().any(|ptx| target_of(ptx) == old) {
            fs::remove_file(&old).with_context(|| format!("cannot remove {}", old.display()))?;
        }
    }
    let time = |path: &Path| fs::metadata(path).and_then(|found| found.modified()).ok();
    let stale: Vec<_> =
        sources.iter().filter(|ptx| time(&target_of(ptx)).is_none_or(|made| time(ptx).is_none_or(|ptx| ptx > made))).collect();
    if !stale.is_empty() {
        say(&format!("ptxas without line tables: {} kernels", stale.len()));
    }
    let workers = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        let parts = stale.chunks(stale.len().div_ceil(workers).max(1));
        let assembling: Vec<_> =
            parts.map(|part| scope.spawn(|| part.iter().try_for_each(|ptx| assemble(&tools, ptx, &target_of(ptx))))).collect();
        assembling.into_iter().try_for_each(|worker| worker.join().expect("assembling does not panic"))
    })?;
    let manifest = build.out_dir.join("manifest.json");
    fs::copy(&manifest, package.join("manifest.json")).with_context(|| format!("cannot copy {}", manifest.display()))?;
    Ok(())
}

/// Assembles `NAME.ARCH.ptx`.
fn assemble(tools: &CudaTools, ptx: &Path, cubin: &Path) -> Result<()> {
    let stem = ptx.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let Some((_, arch)) = stem.rsplit_once('.') else { bail!("{} names no architecture", ptx.display()) };
    // Under a name of this process and renamed: one that ends early, or runs beside, leaves no half cubin that looks fresh.
    let draft = cubin.with_extension(format!("cubin-{}", process::id()));
    let output = Command::new(&tools.ptxas).arg(format!("-arch={arch}")).arg(ptx).arg("-o").arg(&draft).output();
    let output = output.with_context(|| format!("cannot run {}", tools.ptxas.display()))?;
    if !output.status.success() {
        let _ = fs::remove_file(&draft);
        bail!("{}: {}", ptx.display(), String::from_utf8_lossy(&output.stderr));
    }
    fs::rename(&draft, cubin).with_context(|| format!("cannot write {}", cubin.display()))
}

/// Installs the wheel into an environment of its own, with these libraries, and runs the tests that need no GPU.
fn test(wheel: &Path, libraries: &[Library]) -> Result<bool> {
    let environment = folder().join("venv");
    let python = environment.join("bin/python");
    if !python.exists() {
        let made = Command::new("python3").args(["-m", "venv"]).arg(&environment).status().context("cannot run python3")?;
        ensure!(made.success(), "python3 -m venv failed: install the venv module of Python 3");
    }
    let pip = |arguments: &[&str]| {
        Command::new(&python).args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]).args(arguments).status()
    };
    for (module, requirement, _) in libraries {
        let is_there = Command::new(&python).args(["-c", &format!("import {module}")]).output().is_ok_and(|output| output.status.success());
        ensure!(is_there || pip(&[requirement])?.success(), "pip could not install {requirement}");
    }
    let path = wheel.to_string_lossy();
    ensure!(pip(&["--force-reinstall", "--no-deps", "--no-index", &path])?.success(), "pip could not install {path}");
    let mut passed = true;
    for (module, _, tests) in libraries {
        say(&format!("the tests of the wheel with {module}"));
        // From a folder without the package's sources, so that the installed one is imported.
        let mut run = Command::new(&python);
        run.current_dir(folder()).arg(root().join("python/tests").join(tests));
        passed &= run.status().context("cannot run the tests")?.success();
    }
    Ok(passed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ptxas_that_fails_leaves_no_cubin() {
        let folder = tempfile::tempdir().unwrap();
        let [ptxas, ptx, cubin] = ["ptxas", "k.sm_90a.ptx", "k.sm_90a.cubin"].map(|name| folder.path().join(name));
        fs::write(&ptx, "").unwrap();
        let with = |status: u32| {
            let script = format!("#!/bin/sh\nfor out; do :; done\nprintf some >\"$out\"\nexit {status}\n");
            // By another process: a program is not run while one that another test starts has it open.
            let mut write = Command::new("sh");
            write.args(["-c", "printf %s \"$2\" >\"$1\" && chmod +x \"$1\"", "sh"]).arg(&ptxas).arg(script);
            assert!(write.status().unwrap().success());
            assemble(&CudaTools { ptxas: ptxas.clone(), nvdisasm: PathBuf::new(), release: String::new() }, &ptx, &cubin)
        };
        assert!(with(1).unwrap_err().to_string().starts_with(&format!("{}: ", ptx.display())));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "a half cubin looks fresh");
        with(0).unwrap();
        assert_eq!(fs::read(&cubin).unwrap(), b"some");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3);
    }
}
