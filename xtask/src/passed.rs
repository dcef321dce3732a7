//! What the kernels passed with: `gpu/passed.toml`.
//!
//! Whether kernels compile, assemble and keep to their ratchet depends on nothing but their sources, the ratchet, `oxtile-build`, the compiler and ptxas. So the file holds a line
//! for each crate of kernels with these. A checkout with the same is not checked again: that takes five minutes of processor time for sm_90a and seven for
//! the others. `cargo xtask build-ptx --accept`, and with `--portable` for the other architectures, check and write the lines; `test --long` checks
//! whatever they hold.

use std::{
    collections::BTreeMap,
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use oxtile_build::source_hash;

use crate::{kernels::CRATES, machine, root};

/// The file, below the root.
const FILE: &str = "gpu/passed.toml";

/// A part of the file: architectures that are checked together.
#[derive(Clone, Copy)]
pub struct Part {
    pub name: &'static str,
    pub archs: &'static [&'static str],
    /// Whether the ratchet has figures of these.
    pub has_ratchet: bool,
}

/// The architecture that the kernels are tuned for.
pub const TUNED: Part = Part { name: "tuned", archs: &["sm_90a"], has_ratchet: true };

impl Part {
    /// Whether a crate of kernels passed as it is now.
    pub fn has(self, folder: &str) -> Result<bool> {
        let line = self.line(folder)?;
        Ok(parts(&fs::read_to_string(path()).unwrap_or_default()).get(self.name).is_some_and(|lines| lines.contains(&line)))
    }

    /// What is said where it did.
    pub fn reason(self, folder: &str) -> String {
        format!("{folder}: passed with the same sources, compiler and ptxas ({FILE})")
    }

    /// Notes that all crates passed, which were checked as [`sources`] were before.
    pub fn accept(self, checked: &[String]) -> Result<()> {
        ensure!(sources()? == checked, "kernels were edited while they were checked: run it again");
        let lines = CRATES.iter().map(|folder| self.line(folder)).collect::<Result<Vec<_>>>()?;
        let mut parts = parts(&fs::read_to_string(path()).unwrap_or_default());
        parts.insert(self.name.into(), lines);
        fs::write(path(), text(&parts)).with_context(|| format!("cannot write {FILE}"))
    }

    /// All that the result of a crate depends on. The hash of its sources is also that of the flags.
    fn line(self, folder: &str) -> Result<String> {
        let (toolchain, tools) = machine::ready()?;
        let ratchet = match self.has_ratchet {
            true => format!("ratchet {:016x}, ", ratchet(&root().join(folder).join("ratchet"))?),
            false => String::new(),
        };
        let (sources, archs) = (made_of(folder)?, self.archs.join(", "));
        Ok(format!("{folder:?} = \"{sources}, {ratchet}{}, ptxas {}, {archs}\"", toolchain.version, tools.release))
    }
}

/// The sources of all crates of kernels, as they are now.
pub fn sources() -> Result<Vec<String>> {
    CRATES.iter().map(|folder| made_of(folder)).collect()
}

/// The sources of a crate, and of what compiles and judges it.
fn made_of(folder: &str) -> Result<String> {
    let [kernels, build] = [folder, "gpu/build"].map(|folder| source_hash(root().join(folder)));
    Ok(format!("{}, oxtile-build {}", kernels?, build?))
}

/// A hash of the accepted figures.
fn ratchet(folder: &Path) -> Result<u64> {
    // A crate without it has no figures to keep to.
    let files = if folder.is_dir() { Some(fs::read_dir(folder)?) } else { None };
    let mut files = files.into_iter().flatten().map(|file| Ok(file?.path())).collect::<Result<Vec<_>>>()?;
    files.sort();
    let mut hasher = DefaultHasher::new();
    for path in files {
        (path.file_name(), fs::read(&path)?).hash(&mut hasher);
    }
    Ok(hasher.finish())
}

fn path() -> PathBuf {
    root().join(FILE)
}

const HEAD: &str =
    "# The kernels passed with these; `cargo xtask build-ptx --accept` and `cargo xtask build-ptx --portable --accept` write it.\n";

/// The file of these parts.
fn text(parts: &BTreeMap<String, Vec<String>>) -> String {
    let part = |(name, lines): (&String, &Vec<String>)| format!("\n[{name}]\n{}\n", lines.join("\n"));
    HEAD.to_owned() + &parts.iter().map(part).collect::<String>()
}

/// The lines of each part of a file.
fn parts(text: &str) -> BTreeMap<String, Vec<String>> {
    let mut parts = BTreeMap::<_, Vec<_>>::new();
    let mut name = String::new();
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        match line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            Some(part) => part.clone_into(&mut name),
            None => parts.entry(name.clone()).or_default().push(line.to_owned()),
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_written_beside_the_others() {
        let lines = |lines: &[&str]| lines.iter().map(|&line| line.to_owned()).collect::<Vec<_>>();
        let all = BTreeMap::from([("portable".to_owned(), lines(&["a = 1", "b = 2"])), ("tuned".to_owned(), lines(&["a = 3"]))]);
        assert_eq!(parts(&text(&all)), all);
        assert_eq!(parts(""), BTreeMap::new());
    }

    #[test]
    fn figures_that_were_edited_are_other_ones() {
        let folder = tempfile::tempdir().unwrap();
        let hash = |text: &str| {
            fs::write(folder.path().join("copy.toml"), text).unwrap();
            ratchet(folder.path()).unwrap()
        };
        assert_ne!(hash("registers = 16"), hash("registers = 32"));
        assert_eq!(hash("registers = 16"), hash("registers = 16"));
    }
}
