//! The figures that each kernel was last accepted with: `ratchet/<family>.toml`, under version control, so that a change shows in review.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{
    Arch, Error, Kernel,
    lint::{Cause, Finding},
    recipe,
};

/// The accepted figures of one kernel on one architecture.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Accepted {
    /// Registers a thread: no more than these.
    pub registers: u32,
    /// Machine instructions: no more than these.
    pub instructions: u32,
    /// Collective and tensor operations in the PTX: exactly these.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub operations: BTreeMap<String, u32>,
}

/// The file of one family: kernel, then architecture.
type Family = BTreeMap<String, BTreeMap<Arch, Accepted>>;

/// A ratchet and what was built.
pub(crate) struct Scope<'a> {
    pub folder: &'a Path,
    /// The architectures built for: figures of others are left alone.
    pub archs: &'a [Arch],
    pub kernels: &'a [Kernel],
    /// Whether a family was compiled without the others: only the whole build's figures bind.
    pub alone: bool,
    /// The command that rewrites it.
    pub command: String,
}

/// How many instructions more than accepted a kernel may have that was compiled without the others, or with line tables. What it
/// shares with others LLVM sees called otherwise then (arguments that are always the same go into a function before it is inlined),
/// and orders a few values otherwise.
const fn slack(instructions: u32, alone: bool) -> u32 {
    if alone { instructions / 500 + 2 } else { 0 }
}

/// The accepted figures of a kernel, if the ratchet in this folder has any.
pub fn accepted(folder: &Path, kernel: &Kernel) -> Result<Option<Accepted>, Error> {
    let mut figures = read(&path(folder, &kernel.meta.family))?;
    Ok(figures.get_mut(&kernel.meta.name).and_then(|archs| archs.remove(&kernel.arch)))
}

/// The kernels that the ratchet in this folder has figures of, each with its family; none where there is no folder.
pub fn kernels(folder: &Path) -> Result<BTreeMap<String, String>, Error> {
    let mut kernels = BTreeMap::new();
    if !folder.is_dir() {
        return Ok(kernels);
    }
    for entry in fs::read_dir(folder).map_err(Error::file("read", folder))? {
        let path = entry.map_err(Error::file("read", folder))?.path();
        // Others may be backups of editors.
        if !is_of_family(&path) {
            continue;
        }
        let family = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        kernels.extend(read(&path)?.into_keys().map(|kernel| (kernel, family.clone())));
    }
    Ok(kernels)
}

fn path(folder: &Path, family: &str) -> PathBuf {
    folder.join(format!("{family}.toml"))
}

fn is_of_family(path: &Path) -> bool {
    path.extension().is_some_and(|kind| kind == "toml")
}

/// A family that has no file has nothing accepted.
fn read(path: &Path) -> Result<Family, Error> {
    if !path.exists() {
        return Ok(Family::new());
    }
    let text = fs::read_to_string(path).map_err(Error::file("read", path))?;
    toml::from_str(&text).map_err(|error| Error::content(path, error))
}

/// One line for each kernel and architecture, so that a difference shows its kernel.
fn lines(figures: &Family) -> Result<String, toml::ser::Error> {
    let mut text = String::new();
    for (kernel, archs) in figures {
        for (arch, accepted) in archs {
            text.push_str(&format!("{kernel}.{arch} = "));
            accepted.serialize(toml::ser::ValueSerializer::new(&mut text))?;
            text.push('\n');
        }
    }
    Ok(text)
}

impl Scope<'_> {
    fn built(&self, family: &str) -> impl Iterator<Item = &Kernel> {
        self.kernels.iter().filter(move |kernel| kernel.meta.family == family)
    }

    /// Rewrites the files of these families from what was built.
    pub fn accept(&self, families: &[String]) -> Result<(), Error> {
        fs::create_dir_all(self.folder).map_err(Error::file("create", self.folder))?;
        for family in families {
            let path = path(self.folder, family);
            let mut figures = read(&path)?;
            let before = figures.clone();
            figures.values_mut().for_each(|archs| archs.retain(|arch, _| !self.archs.contains(arch)));
            for kernel in self.built(family) {
                let accepted = before.get(&kernel.meta.name).and_then(|archs| archs.get(&kernel.arch));
                let now = accepted.map_or_else(|| Accepted::of(kernel), |accepted| accepted.renewed(kernel, self.alone));
                figures.entry(kernel.meta.name.clone()).or_default().insert(kernel.arch.clone(), now);
            }
            figures.retain(|_, archs| !archs.is_empty());
            let lines = lines(&figures).map_err(|error| Error::content(&path, error))?;
            let [rustc, ptxas] = [recipe::PINNED_RELEASE, recipe::PINNED_PTXAS];
            let command = &self.command;
            let text = format!("# Accepted with rustc {rustc} and ptxas {ptxas}; `{command} --accept` rewrites it.\n\n{lines}");
            fs::write(&path, text).map_err(Error::file("write", &path))?;
        }
        Ok(())
    }

    /// Compares what was built of a family with what is accepted; better figures go to `notes`.
    pub fn check(&self, family: &str, notes: &mut Vec<String>) -> Result<Vec<Finding>, Error> {
        let path = path(self.folder, family);
        let figures = read(&path)?;
        let place = path.display();
        if !path.exists() && self.built(family).next().is_some() {
            let why = format!("{place} does not exist: no figures of this family were accepted yet");
            return Ok(vec![Finding { acceptable: true, ..Finding::new(family, None, why) }]);
        }
        let mut findings = Vec::new();
        // Accepting for one architecture does not oblige to the others.
        let archs: BTreeSet<&Arch> = figures.values().flat_map(BTreeMap::keys).collect();
        for kernel in self.built(family) {
            match figures.get(&kernel.meta.name).and_then(|archs| archs.get(&kernel.arch)) {
                Some(accepted) => findings.extend(accepted.compare(kernel, &path, self.alone, notes)),
                None if archs.contains(&kernel.arch) => {
                    findings.push(Finding::on(kernel, format!("{place} holds no figures of this kernel")));
                }
                None => {}
            }
        }
        for (name, arch) in figures.iter().flat_map(|(name, archs)| archs.keys().map(move |arch| (name, arch))) {
            let gone = self.built(family).all(|kernel| kernel.meta.name != *name || kernel.arch != *arch);
            if gone && self.archs.contains(arch) {
                let why = format!("{place} holds figures of this kernel, but family `{family}` has it no longer");
                findings.push(Finding::new(name, Some(arch.clone()), why));
            }
        }
        findings.iter_mut().for_each(|finding| finding.acceptable = true);
        Ok(findings)
    }

    /// Files of families that the crate does not have.
    pub fn strays(&self, families: &[String]) -> Result<Vec<Finding>, Error> {
        let mut findings = Vec::new();
        for entry in fs::read_dir(self.folder).map_err(Error::file("read", self.folder))?.flatten() {
            let path = entry.path();
            let family = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            if is_of_family(&path) && !families.contains(&family) {
                findings.push(Finding::new(&family, None, format!("there is no such family; remove {}", path.display())));
            }
        }
        Ok(findings)
    }
}

impl Accepted {
    fn of(kernel: &Kernel) -> Self {
        let (usage, operations) = (&kernel.usage, kernel.operations.clone());
        Self { registers: usage.registers, instructions: usage.instructions, operations }
    }

    /// The figures to accept: those of the kernel, or these, if it differs by no more than compiling it alone may.
    fn renewed(&self, kernel: &Kernel, alone: bool) -> Self {
        let now = Self::of(kernel);
        let slack = slack(self.instructions, alone);
        let same = Self { instructions: self.instructions, ..now.clone() } == *self;
        if same && now.instructions.abs_diff(self.instructions) <= slack { self.clone() } else { now }
    }

    fn compare(&self, kernel: &Kernel, path: &Path, alone: bool, notes: &mut Vec<String>) -> Vec<Finding> {
        let (now, place) = (Self::of(kernel), path.display());
        let mut findings = Vec::new();
        let slack = slack(self.instructions, alone);
        for (what, now, accepted, slack) in
            [("registers", now.registers, self.registers, 0), ("instructions", now.instructions, self.instructions, slack)]
        {
            if now > accepted && now <= accepted + slack {
                let (name, arch) = (&kernel.meta.name, &kernel.arch);
                notes.push(format!("{name} on {arch}: {accepted} -> {now} {what}; of a family compiled alone that does not bind"));
            } else if now > accepted {
                findings.push(Finding::on(kernel, format!("{now} {what}, but {place} accepts no more than {accepted}")));
            } else if now < accepted {
                notes.push(format!("better: {} on {}: {accepted} -> {now} {what}", kernel.meta.name, kernel.arch));
            }
        }
        let operations: BTreeSet<_> = now.operations.keys().chain(self.operations.keys()).collect();
        for operation in operations {
            let [found, expected] = [&now, self].map(|figures| figures.operations.get(operation).copied().unwrap_or(0));
            if found != expected {
                let why =
                    format!("{found} `{operation}` operations in the PTX, {place} expects {expected}{}", hint(operation, found, expected));
                let finding = Finding::on(kernel, why);
                // One too few has no line.
                findings.push(if found > expected { finding.by(Cause::Operation(operation.clone())) } else { finding });
            }
        }
        findings
    }
}

fn hint(operation: &str, found: u32, expected: u32) -> &'static str {
    match found > expected && expected > 0 && operation != "mbarrier" {
        true => " (was a collective duplicated into the arms of a branch? Not every thread would then meet at the same one)",
        false => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{assemble::Usage, ptx::Meta};

    fn kernel(registers: u32, instructions: u32) -> Kernel {
        let meta = serde_json::json!({ "name": "kernel", "family": "family", "threads": [32, 1, 1] });
        Kernel {
            meta: serde_json::from_value::<Meta>(meta).unwrap(),
            arch: Arch::hopper(),
            usage: Usage { registers, instructions, ..Usage::default() },
            operations: BTreeMap::from([("bar".to_owned(), 1)]),
            panics: Vec::new(),
            ptx: PathBuf::new(),
            cubin: PathBuf::new(),
        }
    }

    #[test]
    fn a_family_alone_may_have_some_instructions_more_and_nothing_else() {
        let accepted = Accepted::of(&kernel(40, 2000));
        let findings = |kernel: &Kernel, alone| accepted.compare(kernel, Path::new("ratchet"), alone, &mut Vec::new()).len();
        assert_eq!(
            [(2000, true), (2006, true), (2007, true), (2001, false)].map(|(count, alone)| findings(&kernel(40, count), alone)),
            [0, 0, 1, 1]
        );
        assert_eq!(findings(&kernel(41, 2000), true), 1);
        let other = Kernel { operations: BTreeMap::new(), ..kernel(40, 2000) };
        assert_eq!(findings(&other, true), 1);
        let mut notes = Vec::new();
        accepted.compare(&kernel(40, 2003), Path::new("ratchet"), true, &mut notes);
        assert_eq!(notes, ["kernel on sm_90a: 2000 -> 2003 instructions; of a family compiled alone that does not bind"]);
    }

    #[test]
    fn other_files_in_the_folder_are_not_read() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("amax.toml"), "amax.sm_90a = { registers = 1, instructions = 1 }\n").unwrap();
        ["README.md", "amax.toml~", ".amax.toml.swp"].iter().for_each(|name| fs::write(folder.path().join(name), "[no toml").unwrap());
        assert_eq!(kernels(folder.path()).unwrap(), BTreeMap::from([("amax".to_owned(), "amax".to_owned())]));
    }

    #[test]
    fn accepting_a_family_alone_keeps_what_the_whole_build_gave() {
        let accepted = Accepted::of(&kernel(40, 2000));
        let renewed = |kernel: &Kernel, alone| accepted.renewed(kernel, alone).instructions;
        assert_eq!([1996, 2006, 2007].map(|count| renewed(&kernel(40, count), true)), [2000, 2000, 2007]);
        assert_eq!([1999, 2001].map(|count| renewed(&kernel(40, count), false)), [1999, 2001]);
        assert_eq!(renewed(&kernel(41, 2001), true), 2001);
    }
}
