//! `bundle`: one folder that runs on a GPU machine without Rust.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
};

use anyhow::{Context, Result, bail, ensure};
use lexopt::Parser;

use crate::{cargo, commit, kernels, root, say, target};

/// What may travel to a GPU machine.
const LIMIT: u64 = 48 << 20;

/// The programs of the bundle: package and binary.
const PROGRAMS: [(&str, &str); 3] = [("oxtile-tests", "oxtile-tests"), ("oxtile-benches", "oxtile-benches"), ("oxtile-cli", "oxtile")];

/// The example of the host library whose step is measured.
const EXAMPLE: &str = "sharded_block";

/// `bundle`: builds in release, strips, copies, and fails if the folder is too large.
pub fn make(arguments: &mut Parser) -> Result<ExitCode> {
    if let Some(argument) = arguments.next()? {
        return Err(argument.unexpected().into());
    }
    let kernels = kernels::all()?;
    let folder = target().join("bundle");
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("cannot empty {}", folder.display()))?;
    }
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let binaries = folder.join("programs");
    fs::create_dir_all(&binaries).with_context(|| format!("cannot create {}", binaries.display()))?;
    for program in programs()? {
        copy(&program, &binaries)?;
    }
    for name in ["runtime", "nccl", "vmm"] {
        let program = host_program(&["test", "--no-run", "--test", name])?;
        let to = binaries.join(format!("{name}-tests"));
        fs::copy(program, &to).with_context(|| format!("cannot copy {}", to.display()))?;
    }
    let to = binaries.join(EXAMPLE);
    fs::copy(host_program(&["build", "--example", EXAMPLE])?, &to).with_context(|| format!("cannot copy {}", to.display()))?;
    for build in &kernels {
        // Where the programs look: `kernels/<package>` beside them.
        let package = folder.join("kernels").join(build.out_dir.file_name().unwrap_or_default());
        fs::create_dir_all(&package).with_context(|| format!("cannot create {}", package.display()))?;
        files(&build.out_dir, &["json", "ptx", "cubin"])?.iter().try_for_each(|file| copy(file, &package))?;
    }
    files(&root().join("benches/peers"), &["py"])?.iter().try_for_each(|file| copy(file, &folder))?;
    let note = folder.join("commit");
    fs::write(&note, commit()).with_context(|| format!("cannot write {}", note.display()))?;
    let script = folder.join("run.sh");
    fs::write(&script, include_str!("run.sh")).with_context(|| format!("cannot write {}", script.display()))?;
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
    ["programs", "kernels"].iter().try_for_each(|name| compress(&folder, name))?;
    let size = check_size(&folder)?;
    println!("{}: {:.1} MiB; on the GPU machine: ./run.sh", folder.display(), size as f64 / f64::from(1 << 20));
    Ok(ExitCode::SUCCESS)
}

/// Turns a folder of the bundle into an archive, which `run.sh` unpacks: programs shrink to a fifth, PTX and machine code to less.
fn compress(bundle: &Path, name: &str) -> Result<()> {
    let mut tar = Command::new("tar");
    // By all processors.
    tar.current_dir(bundle).env("XZ_OPT", "-T0").args(["-cJf", &format!("{name}.txz"), name]);
    let status = tar.status().context("cannot run tar")?;
    ensure!(status.success(), "tar could not compress {} (it takes xz: package xz-utils)", bundle.join(name).display());
    fs::remove_dir_all(bundle.join(name)).with_context(|| format!("cannot remove {}", bundle.join(name).display()))
}

/// Builds the programs in release without symbols and returns their paths.
fn programs() -> Result<Vec<PathBuf>> {
    say("cargo build --release of the test, benchmark and oxtile programs");
    let mut cargo = cargo(["build", "--release", "--quiet", "--config", "profile.release.strip=\"symbols\""]);
    PROGRAMS.iter().for_each(|(package, binary)| _ = cargo.args(["--package", package, "--bin", binary]));
    if !cargo.status().context("cannot run cargo")?.success() {
        bail!("the programs of the bundle do not build");
    }
    Ok(PROGRAMS.iter().map(|(_, binary)| target().join("release").join(binary)).collect())
}

/// Builds a test or an example of the host library that runs on GPUs, by a command of cargo, and returns the program's path: cargo names it, with a hash,
/// in its messages.
fn host_program(command: &[&str]) -> Result<PathBuf> {
    let mut cargo = cargo(command.iter().copied().chain(["--release", "--quiet", "--package", "oxtile"]));
    cargo.args(["--config", "profile.release.strip=\"symbols\"", "--message-format", "json"]).stderr(Stdio::inherit());
    let output = cargo.output().context("cannot run cargo")?;
    let messages = String::from_utf8_lossy(&output.stdout);
    let mut executable = messages.lines().filter_map(|line| line.split_once("\"executable\":\"")?.1.split_once('"')).map(|(path, _)| path);
    match executable.next_back() {
        Some(path) if output.status.success() => Ok(path.into()),
        _ => bail!("cargo {} does not build", command.join(" ")),
    }
}

/// The files of a folder with one of these extensions; none if there is no such folder.
fn files(folder: &Path, extensions: &[&str]) -> Result<Vec<PathBuf>> {
    if !folder.exists() {
        return Ok(Vec::new());
    }
    let entries = fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let paths: Vec<PathBuf> = entries.map(|entry| entry.map(|entry| entry.path())).collect::<Result<_, _>>()?;
    let wanted = |path: &PathBuf| path.extension().is_some_and(|extension| extensions.iter().any(|wanted| extension == *wanted));
    Ok(paths.into_iter().filter(wanted).collect())
}

fn copy(file: &Path, folder: &Path) -> Result<()> {
    let to = folder.join(file.file_name().unwrap_or_default());
    if to.exists() {
        bail!("two files of the bundle are called {}; rename one", to.display());
    }
    fs::copy(file, &to).with_context(|| format!("cannot copy {} to {}", file.display(), to.display()))?;
    Ok(())
}

/// The size of a folder in bytes; an error that names the largest files where it is over the limit.
fn check_size(folder: &Path) -> Result<u64> {
    let (mut sizes, mut folders) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            match entry.file_type()?.is_dir() {
                true => folders.push(entry.path()),
                false => sizes.push((entry.metadata()?.len(), entry.file_name().to_string_lossy().into_owned())),
            }
        }
    }
    let size = sizes.iter().map(|(size, _)| size).sum();
    if size > LIMIT {
        sizes.sort_unstable_by(|one, other| other.cmp(one));
        let largest: Vec<_> =
            sizes.iter().take(3).map(|(size, name)| format!("{name} {:.1} MiB", *size as f64 / f64::from(1 << 20))).collect();
        bail!("the bundle has {} bytes, {LIMIT} are allowed; the largest: {}", size, largest.join(", "));
    }
    Ok(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bundle_that_is_too_large_is_refused() {
        let folder = std::env::temp_dir().join(format!("oxtile-bundle-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let file = fs::File::create(folder.join("big")).unwrap();
        file.set_len(LIMIT).unwrap();
        assert_eq!(check_size(&folder).unwrap(), LIMIT);
        file.set_len(LIMIT + 1).unwrap();
        let error = check_size(&folder).unwrap_err().to_string();
        fs::remove_dir_all(&folder).unwrap();
        assert!(error.contains("the largest: big 48.0 MiB"), "{error}");
    }
}
