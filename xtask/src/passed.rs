//! What the kernels passed with: `gpu/passed.toml`.
//!
//! Whether kernels compile, assemble and keep to their ratchet depends on nothing but the sources, the flags, the compiler and ptxas. So the file holds a line
//! for each crate of kernels with these. A checkout with the same is not checked again: that takes eight minutes of processor time for sm_90a and six for
//! the others. `cargo xtask build-ptx --accept`, and with `--portable` for the other architectures, check and write the lines; `test --long` checks
//! whatever they hold.

use std::{collections::BTreeMap, fs, path::PathBuf};

use anyhow::{Context, Result};
use oxtile_build::source_hash;

use crate::{kernels::CRATES, machine, root};

/// The file, below the root.
const FILE: &str = "gpu/passed.toml";

/// A part of the file: architectures that are checked together.
#[derive(Clone, Copy)]
pub struct Part {
    pub name: &'static str,
    pub archs: &'static [&'static str],
}

/// The architecture that the kernels are tuned for.
pub const TUNED: Part = Part { name: "tuned", archs: &["sm_90a"] };

impl Part {
    /// Whether a crate of kernels passed as it is now.
    pub fn has(self, folder: &str) -> Result<bool> {
        let line = self.line(folder)?;
        Ok(parts().get(self.name).is_some_and(|lines| lines.contains(&line)))
    }

    /// What is said where it did.
    pub fn reason(self, folder: &str) -> String {
        format!("{folder}: passed with the same sources, compiler and ptxas ({FILE})")
    }

    /// Notes that all crates passed as they are now.
    pub fn accept(self) -> Result<()> {
        let lines = CRATES.iter().map(|folder| self.line(folder)).collect::<Result<Vec<_>>>()?;
        let mut parts = parts();
        parts.insert(self.name.into(), lines);
        let text = |(name, lines): (String, Vec<String>)| format!("\n[{name}]\n{}\n", lines.join("\n"));
        let head =
            "# The kernels passed with these; `cargo xtask build-ptx --accept` and `cargo xtask build-ptx --portable --accept` write it.\n";
        let text = head.chars().chain(parts.into_iter().map(text).collect::<String>().chars()).collect::<String>();
        fs::write(path(), text).with_context(|| format!("cannot write {FILE}"))
    }

    /// All that the result of a crate depends on. The hash of its sources is also that of the flags.
    fn line(self, folder: &str) -> Result<String> {
        let (toolchain, tools) = machine::ready()?;
        let sources = source_hash(root().join(folder))?;
        Ok(format!("{folder:?} = \"{sources}, {}, ptxas {}, {}\"", toolchain.version, tools.release, self.archs.join(", ")))
    }
}

fn path() -> PathBuf {
    root().join(FILE)
}

/// The lines of each part; none if the file is not there.
fn parts() -> BTreeMap<String, Vec<String>> {
    let text = fs::read_to_string(path()).unwrap_or_default();
    let mut parts = BTreeMap::new();
    for part in text.split("\n[").skip(1) {
        let mut lines = part.lines();
        let name = lines.next().unwrap_or_default().trim_end_matches(']').to_owned();
        parts.insert(name, lines.filter(|line| !line.is_empty()).map(str::to_owned).collect());
    }
    parts
}
