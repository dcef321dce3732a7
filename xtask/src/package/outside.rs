//! Programs outside the workspace, as a user would have them: they depend on the unpacked packages and on what the registry has, and on nothing of this checkout.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use anyhow::{Context, Result, ensure};

use super::Package;
use crate::{root, say, target};

/// The program that finds every kernel inside itself. It has no emulator.
const FIND: &str = include_str!("outside/find.rs");

/// The page of the crate, whose program trains attention: a user's first.
const PAGE: &str = "host/README.md";

const WORKSPACE: &str = "[workspace]\nresolver = \"3\"\nmembers = [\"attend\", \"find\"]\n\n\
                         # As the crate's page advises.\n[profile.dev.package]\ncorosensei = { opt-level = 3 }\noxtile-emulator = { opt-level = 3 }\n\
                         oxtile-tile = { opt-level = 3 }\n\n[profile.dev]\ndebug = false\n\n[patch.crates-io]\n";

/// Builds and runs the programs, and installs `oxtile`.
pub fn run(packages: &[Package]) -> Result<()> {
    let folder = target().join("packages/outside");
    write_programs(&folder, packages)?;
    let start = Instant::now();
    // The features of each program alone.
    outside(&folder, &["run", "--quiet", "--package", "attend"])?;
    say(&format!("attention with gradients from the packages alone ({:.0} s)", start.elapsed().as_secs_f64()));
    let start = Instant::now();
    outside(&folder, &["run", "--quiet", "--package", "find"])?;
    say(&format!("every kernel inside a program ({:.0} s)", start.elapsed().as_secs_f64()));
    let start = Instant::now();
    install(&folder, packages)?;
    say(&format!("cargo install oxtile-cli ({:.0} s)", start.elapsed().as_secs_f64()));
    Ok(())
}

/// Lays the programs out, with the versions of dependencies that the workspace is tested with.
fn write_programs(folder: &Path, packages: &[Package]) -> Result<()> {
    let write = |place: &str, text: &str| {
        let path = folder.join(place);
        let written = fs::create_dir_all(path.parent().unwrap_or(folder)).and_then(|()| fs::write(&path, text));
        written.with_context(|| format!("cannot write {}", path.display()))
    };
    let page = root().join(PAGE);
    let text = fs::read_to_string(&page).with_context(|| format!("cannot read {}", page.display()))?;
    let program = block(&text, "rust").with_context(|| format!("{} has no program", page.display()))?;
    let patches: String = packages.iter().map(|package| patch(package, "\n")).collect();
    write("Cargo.toml", &format!("{WORKSPACE}{patches}"))?;
    fs::copy(root().join("Cargo.lock"), folder.join("Cargo.lock")).context("cannot copy Cargo.lock")?;
    let version = env!("CARGO_PKG_VERSION");
    let manifest = |name: &str, options: &str| {
        let package = format!("[package]\nname = \"{name}\"\nversion = \"1.0.0\"\nedition = \"2024\"\n\n[dependencies]\n");
        format!("{package}oxtile = {{ version = \"{version}\"{options} }}\n")
    };
    write("attend/Cargo.toml", &manifest("attend", ""))?;
    write("attend/src/main.rs", program)?;
    let without_emulator = ", default-features = false, features = [\"cuda-13000\", \"sm80\", \"sm90a\", \"sm100a\"]";
    write("find/Cargo.toml", &manifest("find", without_emulator))?;
    write("find/src/main.rs", FIND)
}

/// A line of a table of patches, or of an option of cargo.
fn patch(package: &Package, end: &str) -> String {
    format!("{}.path = {:?}{end}", package.name, package.folder)
}

/// The first block of a page in a language.
fn block<'a>(page: &'a str, language: &str) -> Option<&'a str> {
    page.split_once(&format!("```{language}\n"))?.1.split_once("```").map(|(block, _)| block)
}

/// Cargo in the folder outside, with nothing of this build around it.
fn outside(folder: &Path, arguments: &[&str]) -> Result<()> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(folder).args(arguments).env("CARGO_TARGET_DIR", folder.join("target"));
    forget(&mut cargo);
    let status = cargo.status().context("cannot run cargo")?;
    ensure!(status.success(), "outside the workspace `cargo {}` failed in {}: see above", arguments.join(" "), folder.display());
    Ok(())
}

/// Takes this workspace's variables from a command: kernels of the checkout, and what cargo set for this program.
fn forget(command: &mut Command) {
    let ours = |name: &str| name.starts_with("OXTILE_") || name.starts_with("CARGO_PKG_") || name == "CARGO_MANIFEST_DIR";
    let names = std::env::vars_os().map(|(name, _)| name).filter(|name| name.to_str().is_some_and(ours));
    names.for_each(|name| _ = command.env_remove(name));
}

/// Installs `oxtile` and asks it what it has: the kernels are inside.
fn install(folder: &Path, packages: &[Package]) -> Result<()> {
    let cli = packages.iter().find(|package| package.name == "oxtile-cli").context("there is no package of oxtile-cli")?;
    let installed = folder.join("installed");
    let to = |path: &Path| path.to_string_lossy().into_owned();
    let patches: Vec<_> = packages.iter().map(|package| format!("patch.crates-io.{}", patch(package, ""))).collect();
    let mut arguments: Vec<String> = ["install", "--quiet", "--debug", "--force", "--path"].map(str::to_owned).into();
    arguments.extend([to(&cli.folder), "--root".into(), to(&installed)]);
    patches.into_iter().for_each(|patch| arguments.extend(["--config".into(), patch]));
    outside(folder, &arguments.iter().map(String::as_str).collect::<Vec<_>>())?;
    let program: PathBuf = installed.join("bin/oxtile");
    let mut doctor = Command::new(&program);
    forget(doctor.arg("doctor"));
    let output = doctor.output().with_context(|| format!("cannot run {}", program.display()))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let kernels = text.lines().find(|line| line.contains("(inside this program)"));
    println!("{}", kernels.with_context(|| format!("the installed oxtile has no kernels inside:\n{text}"))?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_of_the_crate_has_a_program() {
        let page = fs::read_to_string(root().join(PAGE)).unwrap();
        let program = block(&page, "rust").unwrap();
        assert!(program.contains("fn main()") && program.contains("AttentionBackward"), "{program}");
        assert_eq!(block("no program", "rust"), None);
    }

    #[test]
    fn programs_depend_on_the_packages_alone() {
        let folder = tempfile::tempdir().unwrap();
        let packages = [Package { name: "oxtile", bytes: 1, folder: "/unpacked/oxtile-0.1.0".into() }];
        write_programs(folder.path(), &packages).unwrap();
        let text = |place: &str| fs::read_to_string(folder.path().join(place)).unwrap();
        assert!(text("Cargo.toml").ends_with("[patch.crates-io]\noxtile.path = \"/unpacked/oxtile-0.1.0\"\n"), "{}", text("Cargo.toml"));
        assert!(text("attend/Cargo.toml").ends_with("[dependencies]\noxtile = { version = \"0.1.0\" }\n"), "{}", text("attend/Cargo.toml"));
        let checkout = root().display().to_string();
        for place in ["Cargo.toml", "attend/Cargo.toml", "attend/src/main.rs", "find/Cargo.toml", "find/src/main.rs"] {
            assert!(!text(place).contains(&checkout), "{place}");
        }
    }
}
