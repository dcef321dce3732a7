//! Where compiled kernels are found.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use oxtile_tile::launch::KernelInfo;
use serde::Deserialize;

use super::error::{Error, Result};

/// The folders with the compiled kernels of a program: for each Cargo package a folder with its `manifest.json`, PTX
/// and cubins, as `cargo xtask build-ptx` or `oxtile build` write them.
///
/// The first of these folders that holds the package is taken:
/// 1. those given explicitly ([`CudaOptions::kernels`](super::CudaOptions::kernels)),
/// 2. those in the variable `OXTILE_KERNELS` (separated as `PATH` is),
/// 3. `kernels/` beside the executable,
/// 4. `oxtile/kernels/` in a folder above the executable: cargo's target folder, so that `cargo run` works.
///
/// Kernels of other sources than the program's are refused, and those of a program that knows no hash of its sources, which cannot tell. The
/// variable `OXTILE_STALE_KERNELS=1` lets both in.
#[derive(Clone, Debug, Default)]
pub struct KernelLibrary {
    explicit: Vec<PathBuf>,
    takes_stale: bool,
}

/// The variable that lets kernels in whose sources may be others than the program's.
const STALE: &str = "OXTILE_STALE_KERNELS";

/// A compiled kernel that runs on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelImage {
    /// The file.
    pub path: PathBuf,
    /// Whether it is PTX, which the driver compiles, rather than a cubin.
    pub is_ptx: bool,
}

/// The part of `manifest.json` that loading needs.
#[derive(Deserialize)]
struct Manifest {
    source_hash: String,
    kernels: BTreeMap<String, Entry>,
}

#[derive(Deserialize)]
struct Entry {
    threads: [u32; 3],
    cluster: u32,
    #[serde(rename = "shared")]
    shared_bytes: u32,
    #[serde(rename = "params")]
    parameters: Vec<String>,
    /// 0 in a manifest of an older build, which is stale.
    #[serde(default)]
    words: u32,
    architectures: BTreeMap<String, Files>,
}

#[derive(Deserialize)]
struct Files {
    ptx: String,
    cubin: Option<String>,
}

impl KernelLibrary {
    /// The usual folders, after these.
    pub fn new(explicit: Vec<PathBuf>) -> Self {
        Self { explicit, takes_stale: false }
    }

    /// Lets in kernels whose sources may be others than the program's, as `OXTILE_STALE_KERNELS=1` does. Launch facts that differ
    /// are refused all the same.
    pub fn stale(self) -> Self {
        Self { takes_stale: true, ..self }
    }

    /// The folders, in the order they are looked through.
    pub fn folders(&self) -> Vec<PathBuf> {
        let mut folders = self.explicit.clone();
        if let Some(list) = env::var_os("OXTILE_KERNELS") {
            folders.extend(env::split_paths(&list).filter(|path| !path.as_os_str().is_empty()));
        }
        if let Ok(executable) = env::current_exe() {
            folders.extend(executable.parent().map(|folder| folder.join("kernels")));
            folders.extend(executable.ancestors().skip(1).map(|above| above.join("oxtile").join("kernels")).filter(|f| f.is_dir()));
        }
        folders
    }

    /// Whether there is any kernel that runs on a device of this compute capability; if not, why.
    ///
    /// # Errors
    /// A sentence with the command that mends it, which names no kernel.
    pub fn check_any(&self, capability: (u32, u32)) -> Result<(), String> {
        let packages = self.folders().into_iter().filter_map(|folder| fs::read_dir(folder).ok()).flatten().flatten();
        let manifests: Vec<_> = packages.filter_map(|package| Manifest::read(&package.path().join("manifest.json")).ok()).collect();
        let entries = || manifests.iter().flat_map(|manifest| manifest.kernels.values());
        if entries().any(|entry| !entry.images(Path::new(""), capability).is_empty()) {
            return Ok(());
        }
        let found: BTreeSet<_> = entries().flat_map(|entry| entry.architectures.keys().map(String::as_str)).collect();
        let arch = wanted(capability);
        let mend =
            format!("run `cargo xtask build-ptx --arch {arch}`, or `oxtile build --arch {arch}` in the folder of a crate of your own");
        if found.is_empty() {
            return Err(format!("there are no compiled kernels: {mend}"));
        }
        let found = Vec::from_iter(found).join(", ");
        Err(format!("the compiled kernels are for {found}, none of which runs on sm_{}: {mend}", number(capability)))
    }

    /// The images of a kernel that run on a device of this compute capability, best first: cubins, then PTX.
    ///
    /// # Errors
    /// [`Error::NoKernels`], [`Error::KernelFile`], [`Error::StaleKernels`], [`Error::UnhashedKernels`], [`Error::UnknownKernel`],
    /// [`Error::KernelMismatch`] and [`Error::WrongArchitecture`], each with the command that mends it.
    pub fn find(&self, info: &KernelInfo, capability: (u32, u32)) -> Result<Vec<KernelImage>> {
        let folders = self.folders();
        let Some(folder) = folders.iter().map(|f| f.join(info.package)).find(|f| f.join("manifest.json").is_file()) else {
            return Err(Error::NoKernels { package: info.package, kernel: info.name, searched: folders });
        };
        let path = folder.join("manifest.json");
        let manifest = Manifest::read(&path)?;
        if *info.source_hash != manifest.source_hash && !self.takes_stale && env::var_os(STALE).is_none_or(|value| value != "1") {
            let (expected, found) = ((*info.source_hash).to_owned(), manifest.source_hash);
            return Err(match expected.is_empty() {
                true => Error::UnhashedKernels { package: info.package, kernel: info.name },
                false => Error::StaleKernels { manifest: path, expected, found },
            });
        }
        let Some(entry) = manifest.kernels.get(info.name) else {
            return Err(Error::UnknownKernel { kernel: info.name, manifest: path });
        };
        entry.check(info, &path)?;
        let images = entry.images(&folder, capability);
        if images.is_empty() { Err(wrong_architecture(info, entry, capability)) } else { Ok(images) }
    }
}

/// The packages whose kernels `cargo xtask` builds.
const OWN: [&str; 2] = ["oxtile-kernels", "oxtile-conformance"];

/// The command that builds a package's kernels, for a person who is where they are; `options` follow it.
pub(super) fn build_command(package: &str, options: &str) -> String {
    match OWN.contains(&package) {
        true => format!("`cargo xtask build-ptx{options}`"),
        false => format!("`oxtile build{options}` in the folder of `{package}`"),
    }
}

/// The package that a file of compiled kernels is of: each has a folder of its name.
pub(super) fn package_of(file: &Path) -> String {
    file.parent().and_then(Path::file_name).unwrap_or_default().to_string_lossy().into_owned()
}

impl Manifest {
    fn read(path: &Path) -> Result<Self> {
        let bad = |why: String| Error::KernelFile { path: path.to_owned(), why };
        let text = fs::read_to_string(path).map_err(|error| bad(error.to_string()))?;
        serde_json::from_str(&text).map_err(|error| bad(error.to_string()))
    }
}

impl Entry {
    /// Fails unless the kernel was compiled with the launch facts that this program has of it: ADR 6.
    fn check(&self, info: &KernelInfo, manifest: &Path) -> Result<()> {
        let numbers = [
            ("threads", info.threads, self.threads[0]),
            ("cluster", info.cluster, self.cluster),
            ("shared", info.shared_bytes, self.shared_bytes),
            ("words", info.words, self.words),
        ];
        let numbers = numbers.map(|(what, expected, found)| (what, expected.to_string(), found.to_string()));
        let parameters = ("parameters", info.parameters.join(", "), self.parameters.join(", "));
        match [parameters].into_iter().chain(numbers).find(|(_, expected, found)| expected != found) {
            None => Ok(()),
            Some((what, expected, found)) => {
                Err(Error::KernelMismatch { kernel: info.name, manifest: manifest.to_owned(), what, expected, found })
            }
        }
    }

    fn images(&self, folder: &Path, capability: (u32, u32)) -> Vec<KernelImage> {
        let mut architectures: Vec<_> =
            self.architectures.iter().filter_map(|(name, files)| Some((Architecture::parse(name)?, files))).collect();
        // The newest first, and of one number the one with the most features.
        architectures.sort_by_key(|(architecture, _)| std::cmp::Reverse((architecture.number, architecture.variant)));
        let cubins = architectures.iter().filter(|(a, _)| a.cubin_runs_on(capability));
        let cubins = cubins.filter_map(|(_, files)| files.cubin.as_ref().filter(|file| !file.is_empty())).map(|file| (file, false));
        let ptx = architectures.iter().filter(|(a, _)| a.ptx_runs_on(capability)).map(|(_, files)| (&files.ptx, true));
        cubins.chain(ptx).map(|(file, is_ptx)| KernelImage { path: folder.join(file), is_ptx }).collect()
    }
}

fn wrong_architecture(info: &KernelInfo, entry: &Entry, capability: (u32, u32)) -> Error {
    let found = entry.architectures.keys().cloned().collect();
    Error::WrongArchitecture { package: info.package, kernel: info.name, device: number(capability), wanted: wanted(capability), found }
}

/// 90 for 9.0.
const fn number((major, minor): (u32, u32)) -> u32 {
    major * 10 + minor
}

/// The architecture to build for, for a device of this compute capability.
fn wanted(capability: (u32, u32)) -> String {
    format!("sm_{}{}", number(capability), if capability.0 >= 9 { "a" } else { "" })
}

/// `sm_90a` and its like. CUDA C++ Programming Guide, "Compute Capabilities", feature set compiler targets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Architecture {
    number: u32,
    variant: Variant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Variant {
    /// `sm_90`: PTX runs on everything newer.
    Portable,
    /// `sm_100f`: runs on newer devices of the same major version.
    Family,
    /// `sm_90a`: runs there alone.
    Exact,
}

impl Architecture {
    fn parse(name: &str) -> Option<Self> {
        let name = name.strip_prefix("sm_")?;
        let (digits, variant) = match name.strip_suffix('a') {
            Some(digits) => (digits, Variant::Exact),
            None => name.strip_suffix('f').map_or((name, Variant::Portable), |digits| (digits, Variant::Family)),
        };
        Some(Self { number: digits.parse().ok()?, variant })
    }

    fn cubin_runs_on(self, (major, minor): (u32, u32)) -> bool {
        match self.variant {
            Variant::Exact => self.number == number((major, minor)),
            Variant::Family | Variant::Portable => self.number / 10 == major && self.number % 10 <= minor,
        }
    }

    fn ptx_runs_on(self, capability: (u32, u32)) -> bool {
        match self.variant {
            Variant::Portable => self.number <= number(capability),
            Variant::Exact | Variant::Family => self.cubin_runs_on(capability),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(name: &str, capability: (u32, u32)) -> (bool, bool) {
        let architecture = Architecture::parse(name).unwrap();
        (architecture.cubin_runs_on(capability), architecture.ptx_runs_on(capability))
    }

    #[test]
    fn architectures_run_where_the_driver_takes_them() {
        assert_eq!(runs("sm_90a", (9, 0)), (true, true));
        assert_eq!(runs("sm_90a", (10, 0)), (false, false));
        assert_eq!(runs("sm_80", (8, 6)), (true, true));
        assert_eq!(runs("sm_86", (8, 0)), (false, false));
        assert_eq!(runs("sm_80", (9, 0)), (false, true));
        assert_eq!(runs("sm_100f", (10, 3)), (true, true));
        assert_eq!(runs("sm_100f", (12, 0)), (false, false));
        assert_eq!(runs("sm_103a", (10, 0)), (false, false));
        assert_eq!(Architecture::parse("compute_90"), None);
    }
}
