//! One hash of everything a kernel crate's PTX is made from, so that stale PTX is noticed.
//!
//! The build writes it into the manifest; a kernel crate's build script compiles it into the program that will load the
//! PTX. It covers the manifest, build script and `src/` of the crate and of its path dependencies, what these manifests
//! inherit from their workspace, the profiles and patches of the workspace's root, and the compiler's flags. Hidden files and editors' backups are no sources. Dependencies
//! from a registry are covered by the version requirement in the manifest. Dependencies only the host has
//! (`[target.'cfg(not(target_arch = "nvptx64"))'.dependencies]`) are left out. A package of a registry holds the hash ([`crate::stamp`]).

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, fs, io,
    path::{Component, Path, PathBuf},
};

use sha2::{Digest, Sha256};
use toml::{Table, Value};

use crate::{recipe, stamp};

/// A file of the kernel crate or of one of its path dependencies could not be read.
#[derive(Debug)]
pub enum SourceHashError {
    /// A file or folder is not readable.
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A `Cargo.toml` is not as cargo wants it.
    Manifest {
        /// The manifest.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
}

// By hand, since a kernel crate's build script should not have to compile a derive macro.
impl fmt::Display for SourceHashError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Read { path, source } => write!(f, "cannot read {} for the source hash of the kernels: {source}", path.display()),
            Self::Manifest { path, why } => write!(f, "{}: {why}", path.display()),
        }
    }
}

impl std::error::Error for SourceHashError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Read { source, .. } => Some(source),
            Self::Manifest { .. } => None,
        }
    }
}

pub(crate) type Result<T> = std::result::Result<T, SourceHashError>;

/// The hash of the kernel crate in `folder` as 64 hexadecimal digits.
pub fn source_hash(folder: impl AsRef<Path>) -> Result<String> {
    let mut hash = Sha256::new();
    let flags = [recipe::CODEGEN_FLAGS.join(" "), recipe::PROFILE.join(" "), recipe::CRATE_FLAGS.join(" ")];
    flags.iter().chain(&of_root(folder.as_ref())?).for_each(|text| add(&mut hash, text.as_bytes()));
    for (name, package) in packages(folder.as_ref())? {
        add(&mut hash, inherited(&package)?.as_bytes());
        for path in files(&package)? {
            add_file(&mut hash, &name, &package, &path)?;
        }
    }
    Ok(hex(&hash.finalize()))
}

/// The manifests of the kernel crate in `folder` and of its path dependencies, each with what it inherits, and what cargo reads in the
/// workspace's root.
#[cfg(feature = "compile")]
pub(crate) fn manifests(folder: &Path) -> Result<Vec<String>> {
    let packages = packages(folder)?;
    let manifests = packages.values().map(|package| Ok(inherited(package)? + &read(&package.join("Cargo.toml"))?));
    manifests.chain(of_root(folder)?.into_iter().map(Ok)).collect()
}

/// The hash of a package's own build script and sources, without its manifest, which cargo rewrites in packages.
pub(crate) fn own_sources(package: &Path) -> Result<String> {
    let mut hash = Sha256::new();
    for path in files(package)?.iter().filter(|path| !path.ends_with("Cargo.toml")) {
        add_file(&mut hash, "", package, path)?;
    }
    Ok(hex(&hash.finalize()))
}

/// Adds the place of a file in its package, so that the hash is the same wherever the sources lie, and its content.
fn add_file(hash: &mut Sha256, name: &str, package: &Path, path: &Path) -> Result<()> {
    let place = path.strip_prefix(package).unwrap_or(path).to_string_lossy().replace('\\', "/");
    add(hash, format!("{name}/{place}").as_bytes());
    add(hash, read(path)?.as_bytes());
    Ok(())
}

/// What the build script of the kernel crate in `folder` prints: it sets `OXTILE_SOURCE_HASH` for `env!` and runs again when
/// a source changes.
///
/// ```no_run
/// // build.rs of a crate with kernels
/// let folder = std::env::var("CARGO_MANIFEST_DIR").unwrap();
/// print!("{}", oxtile_build::source_hash::cargo_directives(folder).unwrap());
/// ```
/// While the kernels themselves are compiled for the GPU, which needs the hash of no file, it prints a word in its place.
///
/// The folder is asked for when the script runs (`env!` would name the first checkout in a copy of it), and sources are named from it on.
pub fn cargo_directives(folder: impl AsRef<Path>) -> Result<String> {
    let is_for_gpu = std::env::var("TARGET").is_ok_and(|target| target == recipe::TARGET);
    directives(folder.as_ref(), is_for_gpu && std::env::var_os(recipe::NESTED).is_some())
}

fn directives(folder: &Path, nested: bool) -> Result<String> {
    let again = format!("cargo::rerun-if-env-changed={}\n", recipe::NESTED);
    if nested {
        return Ok(again + "cargo::rustc-env=OXTILE_SOURCE_HASH=of-the-program\n");
    }
    if let Some(hash) = stamp::stamped(folder)? {
        let watched = format!("cargo::rerun-if-changed={}\ncargo::rerun-if-changed=src\n", stamp::FILE);
        return Ok(again + &format!("cargo::rustc-env=OXTILE_SOURCE_HASH={hash}\n{watched}"));
    }
    let whole = whole(folder)?;
    let mut text = again + &format!("cargo::rustc-env=OXTILE_SOURCE_HASH={}\n", source_hash(folder)?);
    let (mut watched, mut roots) = (Vec::new(), BTreeSet::new());
    for package in packages(folder)?.into_values() {
        watched.extend(["Cargo.toml", "build.rs", "src"].map(|name| package.join(name)).into_iter().filter(|path| path.exists()));
        let root = workspace(&package)?.map(|(root, _)| root);
        roots.extend(root.filter(|root| *root != package).map(|root| root.join("Cargo.toml")));
    }
    watched.extend(roots);
    // A workspace's root may be a package that is watched itself.
    let mut seen = BTreeSet::new();
    watched.retain(|path| seen.insert(path.clone()));
    watched.iter().for_each(|path| text.push_str(&format!("cargo::rerun-if-changed={}\n", from(&whole, path).display())));
    Ok(text)
}

/// A path as it reads from a folder, both absolute and without links: of a copy of both it names the copy.
fn from(folder: &Path, path: &Path) -> PathBuf {
    let shared = folder.components().zip(path.components()).take_while(|(a, b)| a == b).count();
    let up = folder.components().skip(shared).map(|_| Component::ParentDir);
    up.chain(path.components().skip(shared)).collect()
}

/// The hash of some texts, each with its length, as hexadecimal digits.
#[cfg(feature = "compile")]
pub(crate) fn hex_digest<'a>(texts: impl IntoIterator<Item = &'a str>) -> String {
    let mut hash = Sha256::new();
    texts.into_iter().for_each(|text| add(&mut hash, text.as_bytes()));
    hex(&hash.finalize())
}

fn add(hash: &mut Sha256, bytes: &[u8]) {
    hash.update((bytes.len() as u64).to_le_bytes());
    hash.update(bytes);
}

fn hex(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The crate in `folder` and its path dependencies, direct and indirect, by name.
fn packages(folder: &Path) -> Result<BTreeMap<String, PathBuf>> {
    let (mut packages, mut waiting) = (BTreeMap::new(), vec![folder.to_owned()]);
    while let Some(folder) = waiting.pop() {
        let folder = whole(&folder)?;
        let path = folder.join("Cargo.toml");
        let manifest = parse(&path)?;
        let name = manifest.get("package").and_then(|package| package.get("name")).and_then(Value::as_str);
        let name = name.ok_or_else(|| SourceHashError::Manifest { path: path.clone(), why: "there is no `package.name`".into() })?;
        if packages.insert(name.to_owned(), folder.clone()).is_none() {
            waiting.extend(path_dependencies(&manifest, &folder)?);
        }
    }
    Ok(packages)
}

fn path_dependencies(manifest: &Table, folder: &Path) -> Result<Vec<PathBuf>> {
    let of_targets = manifest.get("target").and_then(Value::as_table).into_iter().flatten();
    let for_device = of_targets.filter(|(condition, _)| !condition.replace(' ', "").contains("not(target_arch=\"nvptx64\")"));
    let tables = for_device.filter_map(|(_, target)| target.get("dependencies")).chain(manifest.get("dependencies"));
    let mut folders = Vec::new();
    for (name, dependency) in tables.filter_map(Value::as_table).flatten() {
        if dependency.get("workspace").is_some() {
            folders.extend(workspace_dependency(name, folder)?);
        } else if let Some(path) = dependency.get("path").and_then(Value::as_str) {
            folders.push(folder.join(path));
        }
    }
    Ok(folders)
}

/// The folder of `name.workspace = true`, if the workspace gives a path for it.
fn workspace_dependency(name: &str, folder: &Path) -> Result<Option<PathBuf>> {
    let Some((root, workspace)) = workspace(folder)? else { return Ok(None) };
    let dependency = workspace.get("dependencies").and_then(|dependencies| dependencies.get(name));
    Ok(dependency.and_then(|dependency| dependency.get("path")?.as_str()).map(|path| root.join(path)))
}

/// The nearest workspace at or above a folder: where it is and its table.
fn workspace(folder: &Path) -> Result<Option<(PathBuf, Value)>> {
    for root in folder.ancestors() {
        let path = root.join("Cargo.toml");
        if path.exists()
            && let Some(workspace) = parse(&path)?.remove("workspace")
        {
            return Ok(Some((root.to_owned(), workspace)));
        }
    }
    Ok(None)
}

/// What a package takes from its workspace and changes its code: the edition, versions and features of dependencies.
fn inherited(package: &Path) -> Result<String> {
    let manifest = parse(&package.join("Cargo.toml"))?;
    let is_inherited = |value: &Value| value.get("workspace").is_some();
    let mut text = String::new();
    let mut add = |table: &str, name: &str| -> Result<()> {
        let workspace = workspace(package)?.and_then(|(_, workspace)| Some(format!("{:?}", workspace.get(table)?.get(name)?)));
        text.push_str(&format!("{table}.{name} = {}\n", workspace.unwrap_or_default()));
        Ok(())
    };
    if manifest.get("package").and_then(|package| package.get("edition")).is_some_and(is_inherited) {
        add("package", "edition")?;
    }
    for (name, _) in manifest.get("dependencies").and_then(Value::as_table).into_iter().flatten().filter(|(_, value)| is_inherited(value)) {
        add("dependencies", name)?;
    }
    Ok(text)
}

/// The tables that cargo reads in the root of the kernel crate's workspace alone and that change device code, each as a text. A crate that
/// is the root itself has them in its manifest.
fn of_root(folder: &Path) -> Result<Vec<String>> {
    let folder = whole(folder)?;
    let Some((root, _)) = workspace(&folder)?.filter(|(root, _)| *root != folder) else { return Ok(Vec::new()) };
    let manifest = parse(&root.join("Cargo.toml"))?;
    let profile = |name: &str| manifest.get("profile").and_then(|profiles| profiles.get(name));
    let tables = [("profile.release", profile("release")), ("profile.ptx", profile("ptx")), ("patch", manifest.get("patch"))];
    Ok(tables.into_iter().filter_map(|(name, table)| Some(format!("{name} = {:?}\n", table?))).collect())
}

/// A folder by its absolute path without links.
fn whole(folder: &Path) -> Result<PathBuf> {
    folder.canonicalize().map_err(|source| SourceHashError::Read { path: folder.to_owned(), source })
}

fn parse(path: &Path) -> Result<Table> {
    read(path)?.parse().map_err(|error| SourceHashError::Manifest { path: path.into(), why: format!("{error}") })
}

/// Text with line ends as they are in version control, so that a checkout on another system hashes alike.
fn read(path: &Path) -> Result<String> {
    let bytes = fs::read(path).map_err(|source| SourceHashError::Read { path: path.into(), source })?;
    Ok(String::from_utf8_lossy(&bytes).replace("\r\n", "\n"))
}

/// The manifest, build script and sources of a package in a fixed order.
fn files(package: &Path) -> Result<Vec<PathBuf>> {
    let mut files: Vec<PathBuf> =
        ["Cargo.toml", "build.rs"].map(|name| package.join(name)).into_iter().filter(|path| path.exists()).collect();
    let mut folders = vec![package.join("src")];
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(&folder).and_then(|entries| entries.collect::<io::Result<Vec<_>>>());
        for entry in entries.map_err(|source| SourceHashError::Read { path: folder.clone(), source })? {
            let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
            if name.starts_with(['.', '#']) || name.ends_with('~') {
                continue;
            }
            if path.is_dir() { folders.push(path) } else { files.push(path) }
        }
    }
    files.sort();
    Ok(files)
}
