//! The Rust compiler for device code: rustc with the sources of `core` beside it.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{Error, recipe::PINNED_RELEASE, tool};

/// The variable that names a rustc to use instead of the pinned one: the path of the program itself, not of a rustup proxy.
pub const OVERRIDE: &str = "OXTILE_RUSTC";

const MEND: &str = "run `cargo xtask setup` in an Oxtile checkout, or `rustup toolchain install 1.95.0 --component rust-src`, \
                    or on Debian `apt-get install rustc-web cargo-web rust-web-src`, or name a rustc that has rust-src in OXTILE_RUSTC";

/// A compiler that can build device code.
#[derive(Clone, Debug)]
pub struct Toolchain {
    /// The compiler.
    pub rustc: PathBuf,
    /// The cargo that belongs to it.
    pub cargo: PathBuf,
    /// Its release, `1.95.0`.
    pub release: String,
    /// The whole of `rustc --version`.
    pub version: String,
}

impl Toolchain {
    /// Finds a compiler with `rust-src`: `OXTILE_RUSTC`, else rustup's toolchain of the pinned release, else any other
    /// rustc installed, pinned release first.
    pub fn find() -> Result<Self, Error> {
        if let Some(rustc) = env::var_os(OVERRIDE) {
            return Self::at(Path::new(&rustc));
        }
        let mut found: Vec<_> = candidates().iter().filter_map(|rustc| Self::at(rustc).ok()).collect();
        found.sort_by_key(|toolchain| !toolchain.is_pinned());
        found.into_iter().next().ok_or_else(|| Error::Missing {
            what: format!("no rustc {PINNED_RELEASE} with the component rust-src (nor any other rustc with it)"),
            mend: MEND.into(),
        })
    }

    /// What is in PATH, to ask cargo by: it may have no `rust-src`.
    pub(crate) fn in_path() -> Self {
        Self { rustc: "rustc".into(), cargo: "cargo".into(), release: String::new(), version: String::new() }
    }

    /// Every compiler found that can build device code, the pinned one first.
    pub fn all() -> Vec<Self> {
        let mut found: Vec<Self> = Vec::new();
        let named = env::var_os(OVERRIDE).map(PathBuf::from);
        for rustc in named.into_iter().chain(candidates()) {
            if let Ok(toolchain) = Self::at(&rustc)
                && found.iter().all(|other| other.version != toolchain.version)
            {
                found.push(toolchain);
            }
        }
        found.sort_by_key(|toolchain| !toolchain.is_pinned());
        found
    }

    /// The compiler at a path; an error if it does not run or lacks `rust-src`.
    pub fn at(rustc: &Path) -> Result<Self, Error> {
        let verbose = tool::output("asking rustc for its version", Command::new(rustc).arg("-vV"))?;
        let sysroot = PathBuf::from(tool::output("asking rustc for its sysroot", Command::new(rustc).args(["--print", "sysroot"]))?.trim());
        let version = verbose.lines().next().unwrap_or_default().to_owned();
        if !sysroot.join("lib/rustlib/src/rust/library/core/Cargo.toml").exists() {
            return Err(Error::Missing {
                what: format!("{} ({version}) lacks the component rust-src", rustc.display()),
                mend: MEND.into(),
            });
        }
        let release = verbose.lines().find_map(|line| line.strip_prefix("release: ")).unwrap_or_default().to_owned();
        let beside = |program: &str| Some(sysroot.join("bin").join(program)).filter(|path| path.exists());
        Ok(Self {
            rustc: beside("rustc").unwrap_or_else(|| rustc.into()),
            cargo: beside("cargo").unwrap_or_else(|| "cargo".into()),
            release,
            version,
        })
    }

    /// Whether this is the release that the ratchet describes.
    pub fn is_pinned(&self) -> bool {
        self.release == PINNED_RELEASE
    }

    /// Makes a compiler ready if none is: `rust-src` or the whole pinned toolchain by rustup, else, as root on Debian,
    /// its packages. `say` hears what is done.
    pub fn setup(say: &dyn Fn(&str)) -> Result<Self, Error> {
        let found = Self::find();
        if env::var_os(OVERRIDE).is_some() || found.as_ref().is_ok_and(|toolchain| toolchain.is_pinned() || !tool::exists("rustup")) {
            return found;
        }
        match (install(say), found) {
            // Another release does as well, but for the ratchet.
            (Err(error), Ok(other)) => {
                say(&format!("rustc {PINNED_RELEASE} could not be installed, {} is used: {error}", other.version));
                Ok(other)
            }
            (installed, _) => installed.and_then(|()| Self::find()),
        }
    }
}

/// Installs the pinned compiler with rustup, or the distribution's. Without either there is nothing to do.
fn install(say: &dyn Fn(&str)) -> Result<(), Error> {
    if tool::exists("rustup") {
        say(&format!("rustup: installing rustc {PINNED_RELEASE} with rust-src"));
        // rustup's stable may be the pinned release already; then only its sources are missing.
        let arguments: &[&str] = match stable_is_pinned() {
            true => &["component", "add", "rust-src", "--toolchain", "stable"],
            false => &["toolchain", "install", PINNED_RELEASE, "--profile", "minimal", "--component", "rust-src", "--no-self-update"],
        };
        tool::output("installing the compiler", Command::new("rustup").args(arguments))?;
    } else if tool::exists("apt-get") {
        say("apt-get: installing rustc-web, cargo-web and rust-web-src");
        tool::output("updating the package list (this needs root)", Command::new("apt-get").args(["update", "-qq"]))?;
        let packages = ["install", "-y", "-qq", "rustc-web", "cargo-web", "rust-web-src"];
        tool::output("installing the compiler (this needs root)", Command::new("apt-get").args(packages))?;
    }
    Ok(())
}

fn stable_is_pinned() -> bool {
    tool::output("asking rustup", Command::new("rustup").args(["run", "stable", "rustc", "--version"]))
        .is_ok_and(|version| version.starts_with(&format!("rustc {PINNED_RELEASE} ")))
}

/// The compilers of rustup's toolchains, then the one in PATH, then the distribution's.
fn candidates() -> Vec<PathBuf> {
    let home = env::var_os("RUSTUP_HOME").map(PathBuf::from).or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".rustup")));
    let toolchains = home.and_then(|home| home.join("toolchains").read_dir().ok());
    let mut paths: Vec<_> = toolchains.into_iter().flatten().flatten().map(|entry| entry.path().join("bin/rustc")).collect();
    paths.sort();
    paths.extend(tool::in_path("rustc"));
    paths.push("/usr/bin/rustc".into());
    paths.retain(|path| path.exists());
    paths
}
