//! Development commands: `cargo xtask <command>`. A thin shell over oxtile-build and cargo; it links no kernel crate, so a
//! kernel that does not compile never keeps these commands from running.
//!
//! | file | what it holds |
//! |---|---|
//! | `machine` | `setup`, `doctor` |
//! | `kernels`, `kernel` | `build-ptx`; `kernel NAME` |
//! | `passed` | what the kernels passed with, so that the same are not checked again |
//! | `portable` | the kernels on other architectures than the one that they are tuned for |
//! | `suite`, `processor_time` | `test`, and the processor time that it took |
//! | `replacement` | one kernel for the emulator, without compiling its host code |
//! | `programs` | the project's programs on the kernels built here: `bench`, `demo` |
//! | `package` | `package`: the crates as a registry gets them, and programs built from them alone |
//! | `bundle` | `bundle`: a folder for a GPU machine without Rust |
//! | `wheel` | `wheel`: the Python package |
//! | `fuzz` | `fuzz`: the fuzz targets, for a minute |
//! | `neighbours` | `neighbours`: the crates for cudarc and candle |

mod bundle;
mod fuzz;
mod kernel;
mod kernels;
mod machine;
mod neighbours;
mod package;
mod passed;
mod portable;
mod processor_time;
mod programs;
mod replacement;
mod suite;
mod wheel;

use std::{
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use anyhow::{Result, bail};

const HELP: &str = "\
cargo xtask <command>

  setup                 make this machine ready: the pinned compiler with rust-src, rustfmt, clippy, ptxas, nvdisasm
  doctor                say what is there, and the mend for what is not
  build-ptx [--arch A,B] [--family F] [--crate FOLDER] [--checked] [--accept]
                        compile the kernels to PTX and cubins, by default for sm_90a and the GPU that is
                        here, and hold them to the ratchet beside them;
                        --accept rewrites the ratchet, --checked keeps the bounds checks in
  build-ptx --portable [--accept]
                        check them on other architectures, in no output; --accept: `test` skips it for these sources
  kernel NAME [--arch A] [--watch] [--emulate --seed N]
                        figures against the ratchet and the machine code of the hot loop of the kernels
                        whose name begins so; --watch again at every edit; --emulate runs their cases
  test [--long] [FILTER...]
                        format, clippy, build-ptx, every test that needs no GPU; --long: every number instead
                        of samples, 64 seeds a case instead of 1 or 2, all large shapes, sm_89 and sm_120a too (hours)
  bench [FILTER...]     the benchmarks (GPU)
  demo [--input FILE]   quantize a checkpoint, by default one it makes
  package [--arch A,B] [--check] | --verify
                        the crates as a registry gets them, with compiled kernels inside, in package/ of the
                        target directory; --check builds and runs programs from them alone (minutes);
                        --verify: are packs and hash there, and of these sources?
  bundle                everything a GPU machine needs, in bundle/ of the target directory
  wheel [--no-test] [--torch]
                        the Python package, in wheel/dist of the target directory, tested with NumPy, and with PyTorch on the CPU
  fuzz                  the fuzz targets of the parsers, for a minute together; of test --long too
  neighbours [--gpu]    the crates for cudarc and candle, tested on the emulator; --gpu: a program for a GPU
                        and its kernels, in neighbours/gpu of the target directory
";

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<ExitCode> {
    let mut arguments = lexopt::Parser::from_env();
    let command = match arguments.next()? {
        Some(lexopt::Arg::Value(command)) => command.to_string_lossy().into_owned(),
        Some(lexopt::Arg::Long("help") | lexopt::Arg::Short('h')) | None => {
            print!("{HELP}");
            return Ok(ExitCode::SUCCESS);
        }
        Some(other) => return Err(other.unexpected().into()),
    };
    match command.as_str() {
        "setup" => machine::setup(),
        "doctor" => machine::doctor(),
        "build-ptx" => kernels::build_ptx(&mut arguments),
        "kernel" => kernel::show(&mut arguments),
        "test" => suite::run(&mut arguments),
        "bench" => programs::bench(&mut arguments),
        "demo" => programs::demo(&mut arguments),
        "package" => package::make(&mut arguments),
        "bundle" => bundle::make(&mut arguments),
        "wheel" => wheel::run(&mut arguments),
        "fuzz" => fuzz::checked().map(|held| if held { ExitCode::SUCCESS } else { ExitCode::FAILURE }),
        "neighbours" => neighbours::run(&mut arguments),
        other => bail!("there is no command `{other}`\n\n{HELP}"),
    }
}

/// The root of the workspace.
fn root() -> PathBuf {
    let run = std::env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
    let program = std::env::current_exe().unwrap_or_default();
    root_of(run.as_deref(), &program, Path::new(env!("CARGO_MANIFEST_DIR")))
}

/// The checkout of a program that was compiled in the package folder `built`. In a copy of a checkout and its target folder cargo takes the program
/// for fresh: `cargo run` names the folder of the package in `run`, else the checkout is the one that the program lies in.
fn root_of(run: Option<&Path>, program: &Path, built: &Path) -> PathBuf {
    let above = run.and_then(Path::parent).into_iter().chain(program.ancestors().skip(1));
    let mut checkouts = above.filter(|folder| folder.join("xtask/Cargo.toml").is_file() && folder.join("gpu/tile").is_dir());
    checkouts.next().or(built.parent()).unwrap_or(built).into()
}

/// Cargo's target directory, wherever `CARGO_TARGET_DIR` or a configuration file puts it: this program lies in
/// `<target>/<profile>`.
fn target() -> PathBuf {
    let program = std::env::current_exe().ok();
    // A test of this program lies in `deps` of the profile's folder.
    let profile = |program: &'_ Path| program.ancestors().skip(1).find(|folder| !folder.ends_with("deps")).map(PathBuf::from);
    let profile = program.as_deref().and_then(profile);
    profile.as_deref().and_then(Path::parent).map_or_else(|| root().join("target"), PathBuf::from)
}

/// Cargo in the root of the workspace, with the target directory of this program.
fn cargo<'a>(arguments: impl IntoIterator<Item = &'a str>) -> Command {
    let mut cargo = Command::new(env!("CARGO"));
    // A relative CARGO_TARGET_DIR would mean another folder there.
    cargo.current_dir(root()).args(arguments).env("CARGO_TARGET_DIR", target());
    cargo
}

/// The commit of the working tree, marked where it has changes; `unknown` outside version control.
fn commit() -> String {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").current_dir(root()).args(arguments).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let changed = git(&["status", "--porcelain", "--untracked-files=no"]).is_some_and(|changes| !changes.is_empty());
    git(&["rev-parse", "HEAD"]).map_or("unknown".into(), |commit| commit + if changed { "-changed" } else { "" })
}

/// Tells what is being done.
fn say(step: &str) {
    eprintln!("  {step}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copied_checkout_works_on_itself() {
        let folder = tempfile::tempdir().unwrap();
        let [first, copy] = ["first", "copy"].map(|name| folder.path().join(name));
        for checkout in [&first, &copy] {
            std::fs::create_dir_all(checkout.join("gpu/tile")).unwrap();
            std::fs::create_dir_all(checkout.join("xtask")).unwrap();
            std::fs::write(checkout.join("xtask/Cargo.toml"), "").unwrap();
        }
        let (built, elsewhere) = (first.join("xtask"), Path::new("/target/debug/xtask"));
        assert_eq!(root_of(Some(&copy.join("xtask")), elsewhere, &built), copy);
        assert_eq!(root_of(None, &copy.join("target/debug/xtask"), &built), copy);
        // Another package's, as tests inherit it.
        assert_eq!(root_of(Some(Path::new("/other/package")), &copy.join("target/debug/xtask"), &built), copy);
        assert_eq!(root_of(None, elsewhere, &built), first);
    }
}
