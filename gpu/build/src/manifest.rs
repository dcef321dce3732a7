//! `manifest.json`: what was built, for the program that loads it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use serde::{Deserialize, Serialize};

use crate::{Arch, Error, Kernel, assemble::Usage, draft, ptx::Meta};

/// The name of the file in the output folder.
pub const FILE: &str = "manifest.json";

/// What stands in `manifest.json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Manifest {
    /// The kernel crate.
    pub package: String,
    /// [`source_hash`](crate::source_hash()) of the crate when it was built.
    pub source_hash: String,
    /// A hash of `Cargo.lock`.
    #[serde(default)]
    pub dependencies: String,
    /// `rustc --version`.
    pub compiler: String,
    /// The release of ptxas.
    pub ptxas: String,
    /// The flags of the compiler.
    pub flags: Vec<String>,
    /// The kernels by name.
    pub kernels: BTreeMap<String, Entry>,
}

/// One kernel in the manifest.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Entry {
    /// Name, family, launch bounds, shared memory, parameters.
    #[serde(flatten)]
    pub meta: Meta,
    /// What was built of it, by architecture.
    pub architectures: BTreeMap<Arch, Files>,
}

/// One kernel on one architecture.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Files {
    /// The PTX, relative to the manifest.
    pub ptx: String,
    /// The cubin, relative to the manifest.
    pub cubin: String,
    /// What it takes of a multiprocessor.
    #[serde(flatten)]
    pub usage: Usage,
}

impl Manifest {
    /// Reads the manifest in a folder.
    pub fn read(folder: &Path) -> Result<Self, Error> {
        let path = folder.join(FILE);
        let text = fs::read_to_string(&path).map_err(Error::file("read", &path))?;
        serde_json::from_str(&text).map_err(|error| Error::content(&path, error))
    }

    /// Writes it so that a reader sees the old one or the new one, never half of one.
    pub fn write(&self, folder: &Path) -> Result<(), Error> {
        let path = folder.join(FILE);
        let text = serde_json::to_string_pretty(self).map_err(|error| Error::content(&path, error))?;
        draft::write(&path, text)
    }

    /// Takes over the entries of an older manifest that were made as this one is, except these families on these architectures,
    /// which were built again. Fails where a kernel of another family has the name of one of these, which were built.
    pub(crate) fn keep(&mut self, old: Manifest, families: &[String], archs: &[Arch], built: &[Kernel]) -> Result<(), Error> {
        let made = |manifest: &Manifest| {
            let Manifest { package, source_hash, dependencies, compiler, ptxas, flags, .. } = manifest.clone();
            (package, source_hash, dependencies, compiler, ptxas, flags)
        };
        if made(&old) != made(self) {
            return Ok(());
        }
        let mut owners = Owners::default();
        built.iter().try_for_each(|kernel| owners.add(&kernel.meta))?;
        for (name, mut entry) in old.kernels {
            entry.architectures.retain(|arch, _| !(families.contains(&entry.meta.family) && archs.contains(arch)));
            if !entry.architectures.is_empty() {
                owners.add(&entry.meta)?;
                self.kernels.insert(name, entry);
            }
        }
        Ok(())
    }

    pub(crate) fn add(&mut self, kernel: &Kernel) {
        let entry = self.kernels.entry(kernel.meta.name.clone());
        let entry = entry.or_insert_with(|| Entry { meta: kernel.meta.clone(), architectures: BTreeMap::new() });
        let [ptx, cubin] = ["ptx", "cubin"].map(|kind| kernel.file_name(kind));
        entry.architectures.insert(kernel.arch.clone(), Files { ptx, cubin, usage: kernel.usage.clone() });
    }
}

/// The family of each kernel. Programs find a kernel by its name alone.
#[derive(Default)]
pub(crate) struct Owners(BTreeMap<String, String>);

impl Owners {
    /// Fails if another family has a kernel of this name.
    pub fn add(&mut self, meta: &Meta) -> Result<(), Error> {
        let Meta { name, family, .. } = meta;
        match self.0.entry(name.clone()).or_insert_with(|| family.clone()) {
            owner if owner == family => Ok(()),
            owner => Err(Error::Twice { kernel: name.clone(), families: [owner.clone(), family.clone()] }),
        }
    }
}

/// Removes the PTX and cubins in a folder that its manifest does not name.
pub(crate) fn remove_strays(folder: &Path, manifest: &Manifest) -> Result<(), Error> {
    let files = manifest.kernels.values().flat_map(|entry| entry.architectures.values());
    let named: BTreeSet<&str> = files.flat_map(|files| [files.ptx.as_str(), files.cubin.as_str()]).collect();
    for entry in fs::read_dir(folder).map_err(Error::file("read", folder))?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if [".ptx", ".cubin"].iter().any(|kind| name.ends_with(kind)) && !named.contains(name.as_str()) {
            fs::remove_file(entry.path()).map_err(Error::file("remove", entry.path()))?;
        }
    }
    Ok(())
}
