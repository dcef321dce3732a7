//! What the case binary was last compiled from.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    path::{Path, PathBuf},
    process::Command,
    time::SystemTime,
};

use anyhow::{Context, Result};

use super::{
    functions::Outline,
    host::{self, Names},
};
use crate::{root, target};

/// The case binary and what it was compiled from.
pub struct Record {
    /// Times and lengths of the program and of `oxtile-tile`.
    programs: [String; 2],
    /// `oxtile-tile` as the program was linked with it.
    pub tile: PathBuf,
    /// The compiler and its flags.
    compiler: String,
    files: BTreeMap<PathBuf, Source>,
}

/// A source file, below the root.
struct Source {
    hash: String,
    /// Of a file of kernels: the hash of what host code sees of it, and its functions that host code runs.
    outline: Option<(String, BTreeSet<String>)>,
}

/// What has changed since.
pub enum Change {
    /// Bodies of device functions in these files, or nothing; with the hash of each.
    Bodies(BTreeMap<PathBuf, String>),
    /// More: the case binary is compiled. Why.
    More(String),
}

impl Record {
    /// What was written; `None` if nothing was, or of another program than the one that lies there.
    pub fn read() -> Option<Self> {
        let text = fs::read_to_string(path()).ok()?;
        let mut record = Self { programs: Default::default(), tile: PathBuf::new(), compiler: String::new(), files: BTreeMap::new() };
        for line in text.lines() {
            match *line.split('\t').collect::<Vec<_>>() {
                ["program", stamp] => record.programs[0] = stamp.into(),
                ["tile", stamp, path] => (record.programs[1], record.tile) = (stamp.into(), path.into()),
                ["compiler", hash] => record.compiler = hash.into(),
                ["source", hash, outline, host, path] => {
                    let host = || host.split(' ').map(str::to_owned).collect();
                    let outline = (!outline.is_empty()).then(|| (outline.into(), host()));
                    drop(record.files.insert(path.into(), Source { hash: hash.into(), outline }));
                }
                _ => return None,
            }
        }
        let programs = [stamp(&program()).ok()?, stamp(&record.tile).ok()?];
        (programs == record.programs && compiler().ok()? == record.compiler).then_some(record)
    }

    /// Notes what cargo has just compiled; nothing if a source is younger than `start`, when cargo was called.
    pub fn write(tile: &Path, start: SystemTime) -> Result<()> {
        let listed = program().with_extension("d");
        let listed = fs::read_to_string(&listed).with_context(|| format!("cannot read {}", listed.display()))?;
        // `program: file file ..`; a space within a path has a backslash.
        let files = listed.split_once(": ").map_or("", |(_, files)| files.trim_end()).replace("\\ ", "\0");
        let manifests = ["", "gpu/", "gpu/emulator/", "gpu/macros/", "gpu/tile/", "host/", "tests/", "tests/conformance/", "tests/oracle/"];
        let manifests = manifests.map(|folder| format!("{folder}Cargo.toml"));
        let manifests = manifests.into_iter().chain([".cargo/config.toml", "Cargo.lock"].map(str::to_owned));
        let paths = files.split(' ').map(|path| PathBuf::from(path.replace('\0', " "))).chain(manifests.map(|path| root().join(path)));
        // What build scripts wrote is made of sources.
        let paths = paths.filter(|path| path.is_file() && !path.starts_with(target()));
        let (mut texts, mut outlines) = (BTreeMap::new(), BTreeMap::new());
        let mut names = Names::default();
        for path in paths {
            if fs::metadata(&path)?.modified()? > start {
                let _ = fs::remove_file(self::path());
                return Ok(());
            }
            let text = String::from_utf8_lossy(&fs::read(&path)?).into_owned();
            let path = path.strip_prefix(root()).unwrap_or(&path).to_owned();
            if is_of_kernels(&path) {
                outlines.insert(path.clone(), Outline::of(&text).with_context(|| path.display().to_string())?);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                names.add(&text);
            }
            texts.insert(path, text);
        }
        let host = host::functions(outlines.values(), &names);
        let host: BTreeMap<_, _> = outlines.keys().zip(host).collect();
        let (program, of_tile) = (stamp(&program())?, stamp(tile)?);
        let mut record = format!("program\t{program}\ntile\t{of_tile}\t{}\ncompiler\t{}\n", tile.display(), compiler()?);
        for (path, text) in &texts {
            let seen =
                outlines.get(path).map(|outline| (hash(&outline.with_bodies(&host[path])), Vec::from_iter(host[path].iter().cloned())));
            let (outline, host) = seen.unwrap_or_default();
            record.push_str(&format!("source\t{}\t{outline}\t{}\t{}\n", hash(text), host.join(" "), path.display()));
        }
        fs::create_dir_all(self::path().parent().expect("a folder of the target directory"))?;
        fs::write(self::path(), record).with_context(|| format!("cannot write {}", self::path().display()))
    }

    pub fn change(&self) -> Change {
        let mut bodies = BTreeMap::new();
        for (path, source) in &self.files {
            let shown = path.display();
            let Ok(text) = fs::read(root().join(path)) else { return Change::More(format!("{shown} is gone")) };
            let text = String::from_utf8_lossy(&text);
            if hash(&text) == source.hash {
                continue;
            }
            match (&source.outline, Outline::of(&text)) {
                (None, _) => return Change::More(format!("{shown} has changed")),
                (Some((outline, host)), Ok(now)) if hash(&now.with_bodies(host)) == *outline => {
                    drop(bodies.insert(path.clone(), hash(&text)))
                }
                _ => return Change::More(format!("{shown} has changed in what host code sees")),
            }
        }
        Change::Bodies(bodies)
    }
}

fn is_of_kernels(path: &Path) -> bool {
    path.starts_with("gpu/src")
}

fn path() -> PathBuf {
    target().join("oxtile/replacement/sources.tsv")
}

/// The case binary.
fn program() -> PathBuf {
    target().join("debug/oxtile-tests")
}

fn stamp(path: &Path) -> Result<String> {
    let metadata = fs::metadata(path)?;
    let time = metadata.modified()?.duration_since(SystemTime::UNIX_EPOCH)?;
    Ok(format!("{} {}", time.as_nanos(), metadata.len()))
}

fn hash(text: &str) -> String {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

/// The compiler, and what changes its output from outside.
fn compiler() -> Result<String> {
    let rustc = Command::new("rustc").arg("-vV").current_dir(root()).output().context("cannot run rustc")?;
    let flags = |name: &str| name.ends_with("RUSTFLAGS") || name.starts_with("CARGO_PROFILE_");
    let flags: Vec<_> = std::env::vars().filter(|(name, _)| flags(name)).collect();
    Ok(hash(&format!("{}{flags:?}", String::from_utf8_lossy(&rustc.stdout))))
}
