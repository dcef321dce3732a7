//! One kernel for the emulator without its host code: an edit of a device function compiles the kernels that it is part of, as a library, and the case
//! binary of the last build runs them in place of its own (`oxtile_emulator::replacement`).
//!
//! That holds as long as host code is what it was. So the case binary is compiled where anything else has changed: a file of another crate, or in a file
//! of kernels a constant, a type, a signature, or the body of a function that host code may run.
//!
//! | file | what it holds |
//! |---|---|
//! | `record` | what the case binary was last compiled from, and what has changed since |
//! | `functions`, `host` | the functions of a file of kernels, and which of them host code runs |

mod functions;
mod host;
mod record;

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::SystemTime,
};

use anyhow::{Context, Result, ensure};

use self::record::{Change, Record};
use crate::{kernel, root, say, target};

/// A library of kernels as the case binary gets it, by the variables that [`environment`](Self::environment) gives. Its file is removed in the end.
pub struct Replacement {
    /// None where no kernel of the cases has changed, as far as is known.
    library: Option<PathBuf>,
    kernels: BTreeSet<String>,
    /// The families that an edit has changed: their other kernels are not run.
    changed: BTreeSet<String>,
}

impl Replacement {
    pub fn environment(&self) -> [(&'static str, OsString); 3] {
        let list = |names: &BTreeSet<String>| Vec::from_iter(names.iter().map(String::as_str)).join(",").into();
        [
            ("OXTILE_REPLACEMENT", self.library.clone().unwrap_or_default().into()),
            ("OXTILE_REPLACED", list(&self.kernels)),
            ("OXTILE_CHANGED", list(&self.changed)),
        ]
    }
}

impl Drop for Replacement {
    fn drop(&mut self) {
        self.library.iter().for_each(|library| _ = fs::remove_file(library));
    }
}

/// What runs the cases of a kernel as its source is now.
pub enum Cases {
    /// The case binary as it lies there.
    Current,
    /// The case binary, with these kernels in place of its own.
    Replaced(Replacement),
    /// It has to be compiled. Why.
    Outdated(String),
}

/// Notes what cargo has just compiled, when it was called, and where it put `oxtile-tile`.
pub fn compiled(tile: &Path, start: SystemTime) -> Result<()> {
    Record::write(tile, start)
}

/// Looks at what has changed, and compiles the kernels of the cases of `name` alone if that suffices.
pub fn cases_of(name: &str) -> Result<Cases> {
    let Some(record) = Record::read() else { return Ok(Cases::Outdated("it was not compiled by this command yet".into())) };
    let files = match record.change() {
        Change::More(why) => return Ok(Cases::Outdated(why)),
        Change::Bodies(files) if files.is_empty() => return Ok(Cases::Current),
        Change::Bodies(files) => files,
    };
    if std::env::vars_os().any(|(name, _)| name.to_string_lossy().ends_with("RUSTFLAGS")) {
        return Ok(Cases::Outdated("there are flags for rustc in a variable".into()));
    }
    let launched = launched_with(name);
    if launched.is_empty() {
        return Ok(Cases::Outdated(format!("no run has noted yet which cases launch `{name}`")));
    }
    let families = Families::read()?;
    let (known, conformance) = (kernel::known(&root().join("gpu"))?, kernel::known(&root().join("tests/conformance"))?);
    let is_changed = |family: &str| {
        let whole = families.whole(family);
        files.keys().any(|file| families.of(file).is_none_or(|family| whole.contains(family)))
    };
    let (mut features, mut kernels) = (BTreeSet::new(), BTreeSet::new());
    for kernel in launched {
        match known.get(&kernel) {
            Some(family) if is_changed(family) => {
                features.extend(families.whole(family));
                kernels.insert(kernel);
            }
            None if !conformance.contains_key(&kernel) => return Ok(Cases::Outdated(format!("`{kernel}` is in no ratchet yet"))),
            _ => {}
        }
    }
    let changed = families.0.keys().filter(|family| is_changed(family)).cloned().collect();
    if kernels.is_empty() {
        return Ok(Cases::Replaced(Replacement { library: None, kernels, changed }));
    }
    let shown = Vec::from_iter(kernels.iter().take(3).map(String::as_str)).join(", ");
    let more = kernels.len().checked_sub(4).map_or(String::new(), |more| format!(" and {} more", more + 1));
    say(&format!("rustc: {shown}{more} for the emulator; host code is as it was"));
    let library = compile(Path::new("gpu/src/lib.rs"), &record.tile, &features, &kernels)?;
    let replacement = Replacement { library: Some(library), kernels, changed };
    Ok(match record.change() {
        Change::Bodies(now) if now == files => Cases::Replaced(replacement),
        _ => Cases::Outdated("a source was edited while the kernel was compiled".into()),
    })
}

/// The kernels that the cases of a kernel launch, as an earlier run noted it.
fn launched_with(name: &str) -> BTreeSet<String> {
    let noted = fs::read_to_string(target().join("oxtile/launches.tsv")).unwrap_or_default();
    let cases = noted.lines().filter_map(|line| line.split_once('\t')).map(|(_, kernels)| kernels.split(' '));
    cases.filter(|kernels| kernels.clone().any(|kernel| kernel.starts_with(name))).flatten().map(str::to_owned).collect()
}

/// The families of kernels and the families whose functions they call: the features of their crate.
struct Families(BTreeMap<String, Vec<String>>);

impl Families {
    fn read() -> Result<Self> {
        let path = root().join("gpu/Cargo.toml");
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let manifest: toml::Table = text.parse().with_context(|| path.display().to_string())?;
        let features = manifest.get("features").and_then(toml::Value::as_table).context("gpu/Cargo.toml has no features")?;
        let names =
            |value: &toml::Value| value.as_array().into_iter().flatten().filter_map(|name| Some(name.as_str()?.to_owned())).collect();
        Ok(Self(features.iter().map(|(name, value)| (name.clone(), names(value))).collect()))
    }

    /// The family of a file; `None` where several share it.
    fn of(&self, file: &Path) -> Option<&str> {
        let first = file.strip_prefix("gpu/src").ok()?.components().next()?;
        let name = Path::new(first.as_os_str()).file_stem()?.to_str()?;
        self.0.get_key_value(name).map(|(name, _)| name.as_str())
    }

    /// A family with all whose functions it calls.
    fn whole(&self, family: &str) -> BTreeSet<String> {
        let mut whole = BTreeSet::new();
        let mut open = vec![family];
        while let Some(family) = open.pop() {
            if whole.insert(family.to_owned()) {
                open.extend(self.0.get(family).into_iter().flatten().map(String::as_str));
            }
        }
        whole
    }
}

/// Compiles kernels of a crate as the dev profile does, with this `oxtile-tile`, to a library whose other functions are the case binary's.
fn compile(source: &Path, tile: &Path, features: &BTreeSet<String>, kernels: &BTreeSet<String>) -> Result<PathBuf> {
    let folder = target().join("oxtile/replacement");
    fs::create_dir_all(&folder)?;
    clear(&folder)?;
    // A name of its own: another process may be here too.
    let [objects, library] = ["rlib", "so"].map(|kind| folder.join(format!("{}.{kind}", std::process::id())));
    let mut rustc = Command::new("rustc");
    rustc.current_dir(root()).args(["--crate-name=oxtile_kernels", "--edition=2024", "--crate-type=lib"]).arg(source);
    // Some units, for a core each.
    rustc.args(["-Copt-level=3", "-Ccodegen-units=8", "-Cdebug-assertions=on", "-Cmetadata=replacement", "--cap-lints=allow"]);
    rustc.arg(format!("--emit=link={}", objects.display())).arg("--cfg=oxtile_replacement");
    let features = features.iter().map(String::as_str).chain(["emulator"]);
    rustc.args(features.map(|feature| format!("--cfg=feature=\"{feature}\"")));
    rustc.args(kernels.iter().map(|kernel| format!("--cfg=oxtile_kernel=\"{kernel}\"")));
    rustc.arg(format!("--extern=oxtile_tile={}", tile.display()));
    rustc.arg("-L").arg(format!("dependency={}", tile.parent().expect("it lies in a folder").display()));
    // What cargo and the build script set. The hash is of no use to the emulator.
    rustc.envs([("CARGO_PKG_NAME", "oxtile-kernels"), ("OXTILE_SOURCE_HASH", "of a replacement")]);
    let status = rustc.status().context("cannot run rustc")?;
    ensure!(status.success(), "the kernel does not compile: see above");
    let mut linker = Command::new("cc");
    linker.args(["-shared", "-Wl,-z,noexecstack,--whole-archive"]).arg(&objects).arg("-Wl,--no-whole-archive").arg("-o").arg(&library);
    let status = linker.status().context("cannot run cc, the linker");
    fs::remove_file(objects)?;
    ensure!(status?.success(), "cc cannot link the kernel: see above; `cargo run -p oxtile-tests` takes the whole case binary");
    Ok(library)
}

/// Removes what processes that ended early left there.
fn clear(folder: &Path) -> Result<()> {
    for file in fs::read_dir(folder)? {
        let path = file?.path();
        let process = path.file_stem().and_then(|stem| stem.to_str()).filter(|stem| stem.bytes().all(|byte| byte.is_ascii_digit()));
        if process.is_some_and(|process| !Path::new("/proc").join(process).exists()) {
            let _ = fs::remove_file(path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::programs::{UNLOADABLE, compiled_cases};

    /// What the cases of copies give with a kernel of this source in place of their own.
    fn cases_of_copies(source: &Path) -> bool {
        let names = |name: &str| BTreeSet::from([name.to_owned()]);
        let found = fs::read_dir(target().join("debug/deps")).unwrap().map(|file| file.unwrap().path());
        let is_tile =
            |path: &PathBuf| path.to_string_lossy().contains("/liboxtile_tile-") && path.extension().is_some_and(|kind| kind == "rlib");
        // Builds with other features leave others there, of which the case binary has no function.
        for tile in found.filter(is_tile) {
            let library = compile(source, &tile, &names("copy"), &names("copy_words")).unwrap();
            let mut replacement = Replacement { library: Some(library), kernels: names("copy_words"), changed: names("copy") };
            let run = |replacement: &Replacement, cases: &str| {
                let mut program = compiled_cases();
                program
                    .env_remove("OXTILE_LAUNCHES")
                    .envs(replacement.environment())
                    .arg(cases)
                    .output()
                    .expect("`cargo test --workspace` compiles it")
            };
            let found = run(&replacement, "emulated::small::copy_words");
            if found.status.code() == Some(UNLOADABLE) {
                continue;
            }
            // Where a kernel of a changed family is launched that the library does not have, and where it lacks one that was asked for.
            replacement.changed = names("fill");
            let unchanged = run(&replacement, "emulated::small::fill_rows");
            assert_eq!(unchanged.status.code(), Some(UNLOADABLE), "{}", String::from_utf8_lossy(&unchanged.stderr));
            replacement.kernels = names("no_such");
            assert_eq!(run(&replacement, "emulated::small::copy_words").status.code(), Some(UNLOADABLE));
            let wrong = String::from_utf8_lossy(&found.stdout).contains("target[0] is");
            assert_eq!(found.status.success(), !wrong, "{found:?}");
            return !wrong;
        }
        panic!("no build of oxtile-tile is that of the case binary: `cargo test --workspace` compiles both");
    }

    #[test]
    fn the_case_binary_runs_the_kernel_of_the_library() {
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("lib.rs");
        let head = "#![no_std]\n#[path = \"copy.rs\"]\npub mod copy;\noxtile_tile::source_hash!();\n";
        fs::write(&source, head).unwrap();
        let kernel = fs::read_to_string(root().join("gpu/src/copy.rs")).unwrap();
        let wrong = kernel.replace("target.store(i, source.load(i))", "target.store(i, source.load(i) ^ 1)");
        assert_ne!(kernel, wrong);
        for (text, is_right) in [(kernel, true), (wrong, false)] {
            fs::write(folder.path().join("copy.rs"), text).unwrap();
            assert_eq!(cases_of_copies(&source), is_right);
        }
    }

    #[test]
    fn a_kernel_is_made_of_its_family_and_those_that_it_calls() {
        let families = Families::read().unwrap();
        assert_eq!(families.of(Path::new("gpu/src/mxfp8/cast_rows.rs")), Some("mxfp8"));
        assert_eq!(families.of(Path::new("gpu/src/copy.rs")), Some("copy"));
        assert_eq!(families.of(Path::new("gpu/src/matrix.rs")), None);
        assert!(families.whole("thd").contains("attention") && !families.whole("copy").contains("attention"));
    }
}
