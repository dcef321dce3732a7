//! Runs rustc on a kernel crate, for one family or all.

use std::{
    collections::BTreeSet,
    env, fs, io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{self, Command},
    slice, thread,
};

use crate::{
    Arch, Error, Toolchain, recipe,
    source_hash::{self, hex_digest},
    tool,
};

/// What cargo says of the kernel crate.
#[derive(Clone, Debug)]
pub(crate) struct Project {
    pub package: String,
    pub manifest: PathBuf,
    /// The folder of the crate.
    pub folder: PathBuf,
    pub workspace: PathBuf,
    /// The target directory of its workspace.
    pub target: PathBuf,
    /// The folders of the crates that it depends on by path.
    pub neighbours: Vec<PathBuf>,
    /// Whether the crate says that each of its families is a cargo feature (`family-features = true` below `[package.metadata.oxtile]`): it is then
    /// compiled a family at a time, in two halves, with that feature alone. Cargo compiles none again whose files are as they were, and the machine code of
    /// one does not depend on the others.
    pub divided: bool,
}

impl Project {
    pub fn of(manifest: &Path, toolchain: &Toolchain) -> Result<Self, Error> {
        let manifest = match manifest.is_dir() {
            true => manifest.join("Cargo.toml"),
            false => manifest.to_owned(),
        };
        if !manifest.exists() {
            let mend = "run it in the crate's folder, or name that by --manifest-path".into();
            return Err(Error::Missing { what: format!("there is no {}", manifest.display()), mend });
        }
        let manifest = manifest.canonicalize().map_err(Error::file("read", &manifest))?;
        let mut cargo = cargo(toolchain);
        cargo.args(["metadata", "--no-deps", "--format-version", "1", "--manifest-path"]).arg(&manifest);
        let json: serde_json::Value = serde_json::from_str(&tool::output("reading the manifest", &mut cargo)?)
            .map_err(|error| Error::content(&manifest, format!("cargo metadata: {error}")))?;
        let packages = json["packages"].as_array().into_iter().flatten();
        let package = packages.into_iter().find(|package| package["manifest_path"].as_str().map(Path::new) == Some(&manifest));
        let dependencies = package.and_then(|package| package["dependencies"].as_array()).into_iter().flatten();
        let neighbours = dependencies.filter_map(|dependency| dependency["path"].as_str()).map(PathBuf::from).collect();
        let name = package.and_then(|package| package["name"].as_str());
        let name = name.ok_or_else(|| Error::content(&manifest, "this manifest has no [package]; name the kernel crate's own"))?;
        let folder_of = |key: &str| PathBuf::from(json[key].as_str().unwrap_or_default());
        let project = Self {
            package: name.into(),
            folder: manifest.parent().unwrap_or(Path::new("/")).into(),
            workspace: folder_of("workspace_root"),
            target: folder_of("target_directory"),
            neighbours,
            divided: package.is_some_and(|package| package["metadata"]["oxtile"]["family-features"] == true),
            manifest,
        };
        if let Some(family) = project.family_without(|family| package.is_some_and(|package| package["features"].get(family).is_some()))? {
            let why =
                format!("`family-features` says that each family of kernels is a feature, and `{family}` is none: add it to [features]");
            return Err(Error::content(&project.manifest, why));
        }
        Ok(project)
    }

    /// Whether these are Oxtile's own kernels, which have commands of their own.
    fn is_oxtiles(&self) -> bool {
        self.workspace.join("xtask/src/kernels.rs").is_file()
    }

    /// The command that builds these kernels, for a person who is where they are.
    pub fn build_command(&self) -> String {
        match self.is_oxtiles() {
            true => "cargo xtask build-ptx".into(),
            false => format!("oxtile build --manifest-path {}", tool::quoted(&self.manifest.to_string_lossy())),
        }
    }

    /// Where the source lines are found of what instances of a function do.
    pub fn lines_hint(&self, function: &str) -> String {
        match self.is_oxtiles() {
            true => format!("`cargo xtask kernel {function}` names the lines"),
            false => "a build with --line-tables names the lines".into(),
        }
    }

    /// The versions of the dependencies.
    pub fn lock(&self) -> String {
        fs::read_to_string(self.workspace.join("Cargo.lock")).unwrap_or_default()
    }

    /// A target directory of device code, which nothing else uses.
    fn cargo_target(&self) -> PathBuf {
        self.cargo_target_of(None)
    }

    /// The same for [half](Compiled::half) of the families: cargo locks a target directory while it compiles.
    fn cargo_target_of(&self, half: Option<usize>) -> PathBuf {
        self.target.join(if half == Some(1) { "ptx/cargo-half" } else { "ptx/cargo" })
    }

    /// Where rustc's output and what was measured on it are kept. It lies in cargo's target directory and is of one
    /// compiler, since cargo compiles nothing again that it remembers having compiled.
    pub fn folder_for_ptx(&self, toolchain: &Toolchain) -> PathBuf {
        self.folder_for_half(None, toolchain)
    }

    fn folder_for_half(&self, half: Option<usize>, toolchain: &Toolchain) -> PathBuf {
        self.cargo_target_of(half).join("emitted").join(&self.package).join(&hex_digest([toolchain.version.as_str()])[..16])
    }

    /// The families of the crate: the first component below `src/` of every file that has a `#[kernel]`, without `.rs`.
    pub fn families(&self) -> Result<Vec<String>, Error> {
        let (root, mut families) = (self.folder.join("src"), BTreeSet::new());
        let mut folders = vec![root.clone()];
        while let Some(folder) = folders.pop() {
            let entries = fs::read_dir(&folder).and_then(|entries| entries.collect::<io::Result<Vec<_>>>());
            for path in entries.map_err(Error::file("read", &folder))?.into_iter().map(|entry| entry.path()) {
                if path.is_dir() {
                    folders.push(path);
                } else if path.extension().is_some_and(|extension| extension == "rs") {
                    let text = fs::read_to_string(&path).map_err(Error::file("read", &path))?;
                    let first = path.strip_prefix(&root).ok().and_then(|place| place.components().next());
                    let stem = first.and_then(|first| Path::new(first.as_os_str()).file_stem()?.to_str());
                    families.extend(stem.filter(|_| has_kernel(&text)).map(|stem| self.family_of(stem)));
                }
            }
        }
        Ok(families.into_iter().collect())
    }

    /// A family that is no feature, where each should be one.
    fn family_without(&self, has: impl Fn(&str) -> bool) -> Result<Option<String>, Error> {
        let families = if self.divided { self.families()? } else { Vec::new() };
        Ok(families.into_iter().find(|family| !has(family)))
    }

    /// What is compiled by one run of rustc each, in lists whose runs go side by side: halves of each family, or a few kernels by name in one run.
    pub fn runs<'f>(&self, families: &'f [String], kernels: &'f [String]) -> Vec<Vec<Compiled<'f>>> {
        match self.divided && kernels.is_empty() {
            true => HALVES
                .map(|half| {
                    families.iter().map(|family| Compiled { families: slice::from_ref(family), kernels, half: Some(half) }).collect()
                })
                .to_vec(),
            false => vec![vec![Compiled { families, kernels, half: None }]],
        }
    }

    /// As `#[kernel]` names it: kernels in `lib.rs` or `main.rs` belong to a family with the name of the package.
    fn family_of(&self, stem: &str) -> String {
        match stem {
            "lib" | "main" => self.package.replace('-', "_"),
            stem => stem.to_owned(),
        }
    }
}

/// The halves of a family, as `#[kernel]` numbers them.
const HALVES: [usize; 2] = [0, 1];

/// What one run of rustc compiles.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Compiled<'f> {
    pub families: &'f [String],
    /// These kernels of theirs alone, if any are named.
    pub kernels: &'f [String],
    /// This half of the families alone.
    pub half: Option<usize>,
}

/// Whether a source file has the attribute `#[kernel]`, `#[kernel(...)]` or a path that ends in it.
fn has_kernel(source: &str) -> bool {
    let code = source.lines().map(|line| line.split("//").next().unwrap_or_default());
    let attributes = code.flat_map(|line| line.split("#[").skip(1));
    let mut paths = attributes.map(|attribute| attribute.split(['(', ']']).next().unwrap_or_default().trim());
    paths.any(|path| path.rsplit("::").next() == Some("kernel"))
}

/// How a build differs from the one that is shipped.
#[derive(Clone, Copy, Default, PartialEq)]
pub(crate) struct Variant {
    /// Machine code knows its source lines.
    pub line_tables: bool,
    /// Device views check their bounds.
    pub checked: bool,
}

impl Variant {
    /// Keeps the files of the variants apart.
    pub fn suffix(self) -> &'static str {
        match (self.line_tables, self.checked) {
            (false, false) => "",
            (true, false) => "-lines",
            (false, true) => "-checked",
            (true, true) => "-checked-lines",
        }
    }

    /// The flags of every crate, but for the architecture.
    pub fn flags(self) -> Vec<String> {
        let checked = self.checked.then_some("--cfg=oxtile_checked");
        recipe::CODEGEN_FLAGS.into_iter().chain(checked).map(str::to_owned).collect()
    }
}

/// One family or several as an error text names them.
pub(crate) fn described(families: &[String]) -> String {
    match families {
        [family] => format!("family `{family}`"),
        families => format!("{} families", families.len()),
    }
}

/// Compiles for one architecture by one run of rustc. Returns the PTX as it writes it.
pub(crate) fn compile(
    project: &Project,
    compiled: Compiled<'_>,
    arch: &Arch,
    toolchain: &Toolchain,
    variant: Variant,
) -> Result<String, Error> {
    let Compiled { families, kernels, half } = compiled;
    let (folder, target) = (project.folder_for_half(half, toolchain), project.cargo_target_of(half));
    let name = match (families, kernels) {
        ([family], []) => half.map_or_else(|| family.clone(), |half| format!("{family}.{half}")),
        // Cargo compiles no set of families or kernels again that it remembers, so that each has a file of its own.
        _ => hex_digest(families.iter().chain(kernels).map(String::as_str))[..16].to_owned(),
    };
    // Cargo remembers what it compiled by manifests, versions and flags, and leaves a file alone whose sources are those of that time: each of
    // these units has a file of its own, or one would be read that another wrote.
    let unit = unit_hash(project, variant)?;
    let output = folder.join(format!("{name}-{unit}.{arch}{}.ptx", variant.suffix()));
    fs::create_dir_all(&folder).map_err(Error::file("create", &folder))?;
    let mut cargo = cargo(toolchain);
    cargo.args(["rustc", "--quiet", "--lib", "--crate-type=cdylib", "--profile=ptx", "-Zbuild-std=core", "--target", recipe::TARGET]);
    // By content, as the source hash is: a file that was copied with its time may be new and look old.
    cargo.arg("-Zchecksum-freshness");
    cargo.arg("--manifest-path").arg(&project.manifest).arg("--target-dir").arg(&target);
    if project.divided {
        cargo.args(["--no-default-features", "--features", &families.join(",")]);
    }
    recipe::PROFILE.iter().for_each(|setting| _ = cargo.args(["--config", setting]));
    if variant.line_tables {
        cargo.args(["--config", "profile.ptx.debug=\"line-tables-only\""]);
    }
    // Without the word, cargo keeps the state of one set of features alone for a library that other programs load.
    cargo.env("__CARGO_DEFAULT_LIB_METADATA", "oxtile").env("CARGO_BUILD_BUILD_DIR", &target);
    cargo.arg("--").arg(format!("--emit=asm={}", output.display())).arg(format!("-Clinker={}", linker(project)?.display()));
    cargo.args(recipe::CRATE_FLAGS);
    let (of_what, names) = if kernels.is_empty() { ("family", families) } else { ("kernel", kernels) };
    names.iter().for_each(|name| _ = cargo.args(["--cfg", &format!("oxtile_{of_what}=\"{name}\"")]));
    HALVES
        .into_iter()
        .filter(|other| half.is_some_and(|half| half != *other))
        .for_each(|other| _ = cargo.args(["--cfg", &format!("oxtile_without=\"{other}\"")]));
    let flags = [variant.flags(), vec![format!("-Ctarget-cpu={arch}")]].concat();
    cargo.env("CARGO_ENCODED_RUSTFLAGS", flags.join("\u{1f}"));
    let what = format!("compiling {} for {arch}", described(families));
    tool::run(&what, &mut cargo).map_err(with_std_mend)?;
    if !output.exists() {
        forget(&target)?;
        tool::run(&what, &mut cargo).map_err(with_std_mend)?;
    }
    fs::read_to_string(&output).map_err(Error::file("read", &output))
}

/// All but the sources that cargo tells its units apart by.
fn unit_hash(project: &Project, variant: Variant) -> Result<String, Error> {
    let manifests = source_hash::manifests(&project.folder)?;
    let flags = [variant.flags().join(" "), recipe::PROFILE.join(" "), recipe::CRATE_FLAGS.join(" "), project.lock()];
    let texts = flags.iter().chain(&manifests).map(String::as_str);
    Ok(hex_digest(texts)[..16].to_owned())
}

/// What rustc runs as its linker: nothing is linked, but cargo compiles again whatever left no file under the library's name.
fn linker(project: &Project) -> Result<PathBuf, Error> {
    const LEAVES_AN_EMPTY_FILE: &str = "#!/bin/sh\nwhile [ $# -gt 1 ]; do\n    [ \"$1\" = -o ] && : >\"$2\"\n    shift\ndone\n";
    let path = project.cargo_target().join("no-linker.sh");
    if fs::read_to_string(&path).ok().as_deref() != Some(LEAVES_AN_EMPTY_FILE) {
        // By a name of this thread, so that none runs what is half written.
        let written = path.with_extension(format!("{}{:?}", process::id(), thread::current().id()));
        fs::write(&written, LEAVES_AN_EMPTY_FILE).map_err(Error::file("write", &written))?;
        fs::set_permissions(&written, fs::Permissions::from_mode(0o755)).map_err(Error::file("make executable", &written))?;
        fs::rename(&written, &path).map_err(Error::file("rename", &path))?;
    }
    Ok(path)
}

/// Takes those files away, where PTX is gone that cargo remembers having compiled.
fn forget(target: &Path) -> Result<(), Error> {
    let folder = target.join(recipe::TARGET).join("ptx/deps");
    let left = fs::read_dir(&folder).into_iter().flatten().flatten().map(|entry| entry.path());
    for path in left.filter(|path| path.extension().is_some_and(|extension| extension == "ptx")) {
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(Error::file("remove", &path)(error)),
            _ => {}
        }
    }
    Ok(())
}

/// Names of std that rustc does not find without it, as its errors have them.
const OF_STD: [&str; 11] = ["std", "Vec", "Box", "String", "vec", "format", "print", "println", "eprint", "eprintln", "dbg"];

/// What to write instead of the names of std.
const STD_MEND: &str = "\n  mend: the GPU has no std: take `num::sqrt`, `num::exp` and the like in place of methods of `f32` (a trait that rustc names for them cannot be imported), arrays in \
                        place of `Vec`; what a kernel may use: docs/kernels.md";

/// A failed run of rustc, with the mend if a name of std is missing: the same code compiles for the host.
fn with_std_mend(error: Error) -> Error {
    let Error::Failed { what, command, output } = error else { return error };
    let is_of_std = |line: &str| {
        let names = || OF_STD.iter().any(|name| line.contains(&format!("`{name}` in this scope")));
        line.contains("unresolved import `std")
            || ["f32", "f64"].iter().any(|number| line.contains(&format!(" found for type `{number}`")))
            || names()
    };
    let mend = if output.lines().any(is_of_std) { STD_MEND } else { "" };
    Error::Failed { what, command, output: output.trim_end().to_owned() + mend }
}

/// The toolchain's cargo, free of what a surrounding cargo or build script has set.
pub(crate) fn cargo(toolchain: &Toolchain) -> Command {
    let mut cargo = Command::new(&toolchain.cargo);
    let inherited =
        ["RUSTFLAGS", "RUSTC_WRAPPER", "RUSTC_WORKSPACE_WRAPPER", "CARGO_BUILD_TARGET", "TARGET", "MAKEFLAGS", "CARGO_MAKEFLAGS"];
    inherited.iter().for_each(|name| _ = cargo.env_remove(name));
    // Profiles by variables would be in no hash.
    let profiles = env::vars_os().map(|(name, _)| name).filter(|name| name.to_string_lossy().starts_with("CARGO_PROFILE_"));
    profiles.for_each(|name| _ = cargo.env_remove(name));
    cargo.env("RUSTC", &toolchain.rustc).env("RUSTC_BOOTSTRAP", "1").env(recipe::NESTED, "1").env("CARGO_TERM_COLOR", "never");
    cargo
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_are_compiled_in_halves_and_named_kernels_at_once() {
        let (families, kernels) = (["a".to_owned(), "b".to_owned()], ["a__x".to_owned()]);
        let mut project = Project {
            package: "own".into(),
            manifest: PathBuf::new(),
            folder: PathBuf::new(),
            workspace: PathBuf::new(),
            target: PathBuf::new(),
            neighbours: Vec::new(),
            divided: true,
        };
        let runs = |project: &Project, kernels: &[String]| -> Vec<Vec<(usize, Option<usize>)>> {
            let list = |list: Vec<Compiled<'_>>| list.into_iter().map(|run| (run.families.len(), run.half)).collect();
            project.runs(&families, kernels).into_iter().map(list).collect()
        };
        assert_eq!(runs(&project, &[]), [[(1, Some(0)); 2], [(1, Some(1)); 2]]);
        assert_eq!(runs(&project, &kernels), [[(2, None)]]);
        project.divided = false;
        assert_eq!(runs(&project, &[]), [[(2, None)]]);
        assert_ne!(project.cargo_target_of(Some(0)), project.cargo_target_of(Some(1)));
    }

    #[test]
    fn commands_are_those_of_the_workspace() {
        let root = tempfile::tempdir().unwrap();
        let project = |folder: &str| Project {
            package: "own".into(),
            manifest: Path::new(folder).join("Cargo.toml"),
            folder: folder.into(),
            workspace: root.path().into(),
            target: root.path().join("target"),
            neighbours: Vec::new(),
            divided: false,
        };
        assert_eq!(project("/a/b-c_1.0").build_command(), "oxtile build --manifest-path /a/b-c_1.0/Cargo.toml");
        assert_eq!(project("/a/it's here").build_command(), r"oxtile build --manifest-path '/a/it'\''s here/Cargo.toml'");
        assert_eq!(project("/a").lines_hint("conv"), "a build with --line-tables names the lines");
        fs::create_dir_all(root.path().join("xtask/src")).unwrap();
        fs::write(root.path().join("xtask/src/kernels.rs"), "").unwrap();
        assert_eq!(project("/a b").build_command(), "cargo xtask build-ptx");
        assert_eq!(project("/a b").lines_hint("conv"), "`cargo xtask kernel conv` names the lines");
    }

    #[test]
    fn cargo_gets_no_profile_from_the_environment() {
        const VARIABLE: &str = "CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS";
        if env::var_os(VARIABLE).is_some() {
            let cargo = cargo(&Toolchain::in_path());
            assert!(cargo.get_envs().any(|(name, value)| name == VARIABLE && value.is_none()), "{cargo:?}");
            return;
        }
        // Another process: the variable is of all its threads.
        let mut child = Command::new(env::current_exe().unwrap());
        child.args(["--exact", "compile::tests::cargo_gets_no_profile_from_the_environment"]);
        let output = child.env(VARIABLE, "true").output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"));
    }

    #[test]
    fn kernels_are_found_by_their_attribute() {
        for source in [
            "#[kernel]\nfn f() {}",
            "  #[kernel(threads = 128)]",
            "#[oxtile_tile::kernel(requires = sm_90a)]",
            "#[inline] #[kernel] fn f() {}",
        ] {
            assert!(has_kernel(source), "{source}");
        }
        for source in ["// #[kernel]", "#[kernels]", "#[derive(kernel)]", "let kernel = 1;"] {
            assert!(!has_kernel(source), "{source}");
        }
    }
}
