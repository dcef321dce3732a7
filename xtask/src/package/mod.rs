//! `package`: the crates as a registry gets them, with compiled kernels inside, and programs that have nothing else.
//!
//! | file | what it holds |
//! |---|---|
//! | `contents` | what a package must hold and may not; how large it may be |
//! | `outside` | programs outside the workspace, built from the packages alone |

mod contents;
mod outside;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    time::Instant,
};

use anyhow::{Context, Result, bail, ensure};
use lexopt::{Arg, Parser, ValueExt};
use oxtile_build::{Arch, stamp};

use crate::{cargo, machine, root, say, target};

/// The crates of a release with their folders, each after those that it depends on.
const CRATES: [(&str, &str); 11] = [
    ("oxtile-emulator", "gpu/emulator"),
    ("oxtile-macros", "gpu/macros"),
    ("oxtile-build", "gpu/build"),
    ("oxtile-doctor", "host/doctor"),
    ("oxtile-cubins-sm80", "gpu/cubins/sm_80"),
    ("oxtile-cubins-sm90a", "gpu/cubins/sm_90a"),
    ("oxtile-cubins-sm100a", "gpu/cubins/sm_100a"),
    ("oxtile-tile", "gpu/tile"),
    ("oxtile-kernels", "gpu"),
    ("oxtile", "host"),
    ("oxtile-cli", "host/cli"),
];

/// The crate with the kernels.
const KERNELS: &str = "gpu";

/// The crates with packs: `cubins/ARCH` beside the kernels.
const CUBINS: &str = "gpu/cubins";

/// A package that cargo made, unpacked.
struct Package {
    name: &'static str,
    /// What it takes in the registry.
    bytes: u64,
    folder: PathBuf,
}

/// `package [--arch A,B] [--check]`: `--check` builds and runs programs outside the workspace from the packages alone; with `--arch` only these packs are
/// built, and the others must be there, of the same sources. `package --verify` makes nothing, and says whether packs and hash are those of the sources.
pub fn make(arguments: &mut Parser) -> Result<ExitCode> {
    let (mut archs, mut check) = (architectures()?, false);
    while let Some(argument) = arguments.next()? {
        match argument {
            Arg::Long("arch") => {
                let names = arguments.value()?.string()?;
                archs = names.split(',').map(|name| name.trim().parse()).collect::<Result<_, _>>()?;
            }
            Arg::Long("check") => check = true,
            Arg::Long("verify") => {
                verify()?;
                return Ok(ExitCode::SUCCESS);
            }
            other => return Err(other.unexpected().into()),
        }
    }
    run(&archs, check)?;
    Ok(ExitCode::SUCCESS)
}

/// All packages and, if asked for, the programs outside.
pub fn run(archs: &[Arch], check: bool) -> Result<()> {
    let start = Instant::now();
    machine::ready()?;
    for arch in archs {
        pack(arch)?;
    }
    let stamp_file = root().join(KERNELS).join(stamp::FILE);
    let text = stamp::stamp(root().join(KERNELS)).with_context(|| format!("cannot stamp {}", stamp_file.display()))?;
    fs::write(&stamp_file, text).with_context(|| format!("cannot write {}", stamp_file.display()))?;
    verify()?;
    let packages = packages()?;
    println!("{:22} {:>9} {:>9}  files", "crate", "packed", "unpacked");
    for package in &packages {
        let contents = contents::check(package.name, &package.folder, package.bytes)?;
        println!("{:22} {:>9} {:>9}  {}", package.name, package.bytes, contents.bytes, contents.files);
    }
    println!("{:22} {:>9}", "all", packages.iter().map(|package| package.bytes).sum::<u64>());
    say(&format!("packages in {} ({:.0} s)", packed_folder().display(), start.elapsed().as_secs_f64()));
    if check {
        outside::run(&packages)?;
    }
    Ok(())
}

/// The architectures that there is a crate of packs for.
pub fn architectures() -> Result<Vec<Arch>> {
    let names = CRATES.iter().filter_map(|(_, folder)| folder.strip_prefix(CUBINS)?.strip_prefix('/'));
    Ok(names.map(str::parse).collect::<Result<_, _>>()?)
}

/// Builds the kernels for an architecture and packs them into their crate's folder.
fn pack(arch: &Arch) -> Result<()> {
    let to = pack_file(arch);
    ensure!(to.parent().is_some_and(Path::is_dir), "there is no crate of packs for {arch}: {}", to.display());
    let status = oxtile_pack().arg(root().join(KERNELS)).arg(arch.as_str()).arg(&to).status().context("cannot run cargo")?;
    ensure!(status.success(), "the kernels could not be packed for {arch}: see above");
    Ok(())
}

/// Refuses packs and a stamp that are not of the sources in this checkout.
fn verify() -> Result<()> {
    const MEND: &str = "run `cargo xtask package` again, with the sources left as they are";
    let sources = root().join(KERNELS);
    let (file, stamp) = (sources.join(stamp::FILE), stamp::stamp(&sources).context("cannot hash the sources of the kernels")?);
    let found = fs::read_to_string(&file).with_context(|| format!("cannot read {}: {MEND}", file.display()))?;
    ensure!(found == stamp, "{} is of other sources: {MEND}", file.display());
    let hash = stamp.lines().next().unwrap_or_default();
    for arch in architectures()? {
        let pack = pack_file(&arch);
        let mut cargo = oxtile_pack();
        let output = cargo.arg("--hash").arg(&pack).output().context("cannot run cargo")?;
        ensure!(output.status.success(), "{}: {}", pack.display(), String::from_utf8_lossy(&output.stderr).trim());
        let found = String::from_utf8_lossy(&output.stdout);
        ensure!(
            found.trim() == hash,
            "{} holds kernels of other sources: `cargo xtask package --arch {arch}` packs them again",
            pack.display()
        );
    }
    say("packs and hash are those of the sources");
    Ok(())
}

/// The program that writes and reads packs: this one would take ten seconds more to compile with a compressor.
fn oxtile_pack() -> Command {
    cargo(["run", "--quiet", "--package", "oxtile-build", "--features", "pack", "--bin", "oxtile-pack", "--"])
}

/// The pack of an architecture.
fn pack_file(arch: &Arch) -> PathBuf {
    root().join(CUBINS).join(arch.as_str()).join("kernels.pack")
}

/// Where cargo puts packages.
fn packed_folder() -> PathBuf {
    target().join("package")
}

/// Lets cargo make the packages, and unpacks them.
fn packages() -> Result<Vec<Package>> {
    say(&format!("cargo package: {} crates", CRATES.len()));
    // What is built from them is built outside. Packs are ignored by version control, which cargo takes for changes.
    let mut cargo = cargo(["package", "--quiet", "--no-verify", "--allow-dirty"]);
    CRATES.iter().for_each(|(name, _)| _ = cargo.args(["--package", name]));
    ensure!(cargo.status().context("cannot run cargo")?.success(), "cargo made no packages: see above");
    let unpacked = target().join("packages/unpacked");
    if unpacked.exists() {
        fs::remove_dir_all(&unpacked).with_context(|| format!("cannot empty {}", unpacked.display()))?;
    }
    fs::create_dir_all(&unpacked).with_context(|| format!("cannot create {}", unpacked.display()))?;
    CRATES.iter().map(|(name, _)| unpack(name, &unpacked)).collect()
}

fn unpack(name: &'static str, to: &Path) -> Result<Package> {
    let stem = format!("{name}-{}", env!("CARGO_PKG_VERSION"));
    let file = packed_folder().join(format!("{stem}.crate"));
    let bytes = fs::metadata(&file).with_context(|| format!("cannot read {}", file.display()))?.len();
    let mut tar = Command::new("tar");
    let status = tar.arg("-xzf").arg(&file).arg("-C").arg(to).status().context("cannot run tar")?;
    let folder = to.join(stem);
    if !status.success() || !folder.is_dir() {
        bail!("{} does not unpack to {}", file.display(), folder.display());
    }
    Ok(Package { name, bytes, folder })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest(folder: &str) -> String {
        fs::read_to_string(root().join(folder).join("Cargo.toml")).unwrap()
    }

    #[test]
    fn every_crate_is_published_or_says_that_it_is_not() {
        let workspace = manifest(".");
        let members = workspace.lines().find_map(|line| line.strip_prefix("members = [")).expect("one line of members");
        let mut published: Vec<_> =
            members.split('"').skip(1).step_by(2).filter(|folder| !manifest(folder).contains("publish = false")).collect();
        let mut listed = CRATES.map(|(_, folder)| folder);
        published.sort_unstable();
        listed.sort_unstable();
        assert_eq!(published, listed, "`publish = false`, or a place in CRATES");
        for (name, folder) in CRATES {
            assert!(manifest(folder).contains(&format!("name = \"{name}\"\n")), "{folder}");
        }
    }

    #[test]
    fn crates_come_after_what_they_depend_on() {
        for (index, (name, folder)) in CRATES.iter().enumerate() {
            let manifest = manifest(folder);
            let dependencies = manifest.split("[dev-dependencies]").next().unwrap();
            for (later, _) in CRATES.iter().skip(index + 1) {
                let names = |line: &&str| line.strip_prefix(later).is_some_and(|rest| rest.starts_with([' ', '.']));
                assert_eq!(dependencies.lines().find(names), None, "{name} comes before {later}");
            }
        }
    }

    #[test]
    fn the_only_addresses_of_manifests_are_those_of_docs_rs() {
        for (_, folder) in CRATES.iter().chain([&("", ".")]) {
            let manifest = manifest(folder);
            let mut addresses = manifest.split("https://").skip(1);
            assert!(addresses.all(|address| address.starts_with("docs.rs/")), "{folder}");
            assert!(!manifest.contains("repository"), "{folder}: the place does not exist");
        }
    }
}
