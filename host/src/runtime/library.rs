//! Where compiled kernels are found.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use oxtile_tile::launch::KernelInfo;
use serde::Deserialize;

use super::architecture::{Architecture, number, wanted};
use super::error::{Error, Result};
use super::facts::Facts;
use super::pack::{self, Cubin, INSIDE, Pack};

/// The places with the compiled kernels of a program: folders, which have for each Cargo package a folder with its `manifest.json`, PTX
/// and cubins, as `cargo xtask build-ptx` or `oxtile build` write them; and packs inside the program.
///
/// The first of these places that holds the package is taken:
/// 1. the folders given explicitly ([`CudaOptions::kernels`](super::CudaOptions::kernels)),
/// 2. those in the variable `OXTILE_KERNELS` (separated as `PATH` is),
/// 3. packs inside the program: those given ([`CudaOptions::packs`](super::CudaOptions::packs)), then those of the features `sm80`, `sm90a` and `sm100a`. In a
///    checkout of Oxtile these features hold none,
/// 4. `kernels/` beside the executable,
/// 5. `oxtile/kernels/` in a folder above the executable: cargo's target folder, so that `cargo run` works.
///
/// Kernels of other sources than the program's are refused, and those of a program that knows no hash of its sources, which cannot tell. The
/// variable `OXTILE_STALE_KERNELS=1` lets both in.
#[derive(Clone, Debug, Default)]
pub struct KernelLibrary {
    explicit: Vec<PathBuf>,
    packs: Vec<&'static Pack>,
    takes_stale: bool,
}

/// Where the kernels of a package are.
#[derive(Clone, Debug)]
pub enum KernelPlace {
    /// The folder of the package.
    Folder(PathBuf),
    /// Inside the program: how many kernels there are for each architecture.
    Program(Vec<(String, usize)>),
}

/// The features of this library that hold kernels, with their architectures.
const FEATURES: [(&str, &str); 3] = [("sm80", "sm_80"), ("sm90a", "sm_90a"), ("sm100a", "sm_100a")];

/// The variable that lets kernels in whose sources may be others than the program's.
const STALE: &str = "OXTILE_STALE_KERNELS";

/// Whether this process has taken such kernels.
static TOOK_STALE: AtomicBool = AtomicBool::new(false);

/// A compiled kernel that runs on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelImage {
    /// The file, or where in the program it lies.
    pub path: PathBuf,
    /// Whether it is PTX, which the driver compiles, rather than a cubin.
    pub is_ptx: bool,
    /// The image itself, if it is inside the program.
    cubin: Option<Cubin>,
}

impl KernelImage {
    /// The image.
    ///
    /// # Errors
    /// [`Error::KernelFile`] if the file cannot be read.
    pub fn bytes(&self) -> Result<Cow<'static, [u8]>> {
        match self.cubin {
            Some(Cubin(bytes)) => Ok(bytes.into()),
            None => {
                fs::read(&self.path).map(Cow::Owned).map_err(|error| Error::KernelFile { path: self.path.clone(), why: error.to_string() })
            }
        }
    }
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
    /// The usual places, after these folders.
    pub fn new(explicit: Vec<PathBuf>) -> Self {
        Self { explicit, ..Self::default() }
    }

    /// Adds packs inside the program, `include_bytes!` of what `oxtile-pack` writes. They come before those of the features.
    ///
    /// # Errors
    /// [`Error::KernelFile`] for one that is no pack, is truncated or damaged, or has a version that this program does not read.
    pub fn holding(mut self, packs: &[&'static [u8]]) -> Result<Self> {
        for bytes in packs {
            self.packs.push(pack::read(bytes).map_err(|why| Error::KernelFile { path: INSIDE.into(), why })?);
        }
        Ok(self)
    }

    /// Lets in kernels whose sources may be others than the program's, as `OXTILE_STALE_KERNELS=1` does. Launch facts that differ
    /// are refused all the same.
    pub fn stale(self) -> Self {
        Self { takes_stale: true, ..self }
    }

    /// Whether this process has taken kernels whose sources may be others than the program's. From then on no kernel [begins early](KernelInfo::begins_early): code of an
    /// older build may not wait for the launches ahead.
    pub fn took_stale() -> bool {
        TOOK_STALE.load(Ordering::Relaxed)
    }

    /// The folders, in the order they are looked through.
    pub fn folders(&self) -> Vec<PathBuf> {
        [self.named_folders(), near_folders()].concat()
    }

    /// The folders that a person named: they come before the packs.
    fn named_folders(&self) -> Vec<PathBuf> {
        let mut folders = self.explicit.clone();
        if let Some(list) = env::var_os("OXTILE_KERNELS") {
            folders.extend(env::split_paths(&list).filter(|path| !path.as_os_str().is_empty()));
        }
        folders
    }

    /// All packs, those given first.
    fn packs(&self) -> Result<Vec<&'static Pack>> {
        Ok([&self.packs, pack::built_in()?].concat())
    }

    /// The packs of a package: those given, or, if none of these holds it, those inside.
    fn packs_of(&self, package: &str) -> Result<Vec<&'static Pack>> {
        let of_package = |packs: Vec<&'static Pack>| packs.into_iter().filter(|pack| pack.package() == package).collect::<Vec<_>>();
        match of_package(self.packs.clone()) {
            given if given.is_empty() => Ok(of_package(pack::built_in()?.to_vec())),
            given => Ok(given),
        }
    }

    /// Where the kernels of a package are, if anywhere.
    ///
    /// # Errors
    /// [`Error::KernelFile`] for a damaged pack.
    pub fn locate(&self, package: &str) -> Result<Option<KernelPlace>> {
        let holds = |folder: &PathBuf| folder.join("manifest.json").is_file();
        let first = |folders: Vec<PathBuf>| folders.into_iter().map(|folder| folder.join(package)).find(holds);
        if let Some(folder) = first(self.named_folders()) {
            return Ok(Some(KernelPlace::Folder(folder)));
        }
        let packs = self.packs_of(package)?;
        if packs.is_empty() {
            return Ok(first(near_folders()).map(KernelPlace::Folder));
        }
        Ok(Some(KernelPlace::Program(packs.iter().map(|pack| (pack.architecture().to_owned(), pack.len())).collect())))
    }

    /// Whether there is any kernel that runs on a device of this compute capability; if not, why.
    ///
    /// # Errors
    /// A sentence with the command that mends it, which names no kernel.
    pub fn check_any(&self, capability: (u32, u32)) -> Result<(), String> {
        let packages = self.folders().into_iter().filter_map(|folder| fs::read_dir(folder).ok()).flatten().flatten();
        let manifests: Vec<_> = packages.filter_map(|package| Manifest::read(&package.path().join("manifest.json")).ok()).collect();
        let entries = || manifests.iter().flat_map(|manifest| manifest.kernels.values());
        let packs = self.packs().map_err(|error| error.to_string())?;
        let runs =
            |pack: &&Pack| Architecture::parse(pack.architecture()).is_some_and(|architecture| architecture.cubin_runs_on(capability));
        if entries().any(|entry| !entry.images(Path::new(""), capability).is_empty()) || packs.iter().any(runs) {
            return Ok(());
        }
        let of_packs = packs.iter().map(|pack| pack.architecture());
        let found: BTreeSet<_> = entries().flat_map(|entry| entry.architectures.keys().map(String::as_str)).chain(of_packs).collect();
        let arch = wanted(capability);
        let own = format!("`oxtile build --arch {arch}` in the folder of a crate of your own");
        let mend = match packs.is_empty() {
            false => format!("{}, or run {own}", other_kernels(packs.iter().any(|pack| OWN.contains(&pack.package())), capability)),
            true => format!("run `cargo xtask build-ptx --arch {arch}`, or {own}"),
        };
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
        match self.locate(info.package)? {
            None => Err(Error::NoKernels { package: info.package, kernel: info.name, searched: self.folders() }),
            Some(KernelPlace::Folder(folder)) => self.find_in_folder(&folder, info, capability),
            Some(KernelPlace::Program(_)) => self.find_in_packs(&self.packs_of(info.package)?, info, capability),
        }
    }

    fn find_in_folder(&self, folder: &Path, info: &KernelInfo, capability: (u32, u32)) -> Result<Vec<KernelImage>> {
        let path = folder.join("manifest.json");
        let manifest = Manifest::read(&path)?;
        self.check_hash(info, &manifest.source_hash, &path)?;
        let Some(entry) = manifest.kernels.get(info.name) else {
            return Err(Error::UnknownKernel { kernel: info.name, manifest: path });
        };
        entry.facts().check(info, &path)?;
        let images = entry.images(folder, capability);
        if images.is_empty() {
            let mend = format!("run {}", build_command(info.package, &format!(" --arch {}", wanted(capability))));
            return Err(wrong_architecture(info, entry.architectures.keys().cloned(), capability, mend));
        }
        Ok(images)
    }

    /// Every pack is held to the program's sources and launch facts, that of another GPU too.
    fn find_in_packs(&self, packs: &[&'static Pack], info: &KernelInfo, capability: (u32, u32)) -> Result<Vec<KernelImage>> {
        for pack in packs {
            self.check_hash(info, pack.source_hash(), &pack.path())?;
            pack.facts(info.name).map_or(Ok(()), |facts| facts.check(info, &pack.path()))?;
        }
        let architecture = |pack: &Pack| Architecture::parse(pack.architecture());
        let runs = |pack: &&&'static Pack| architecture(pack).is_some_and(|architecture| architecture.cubin_runs_on(capability));
        let having: Vec<_> = packs.iter().filter(|pack| pack.has(info.name)).collect();
        let best = having.iter().copied().filter(runs).max_by_key(|pack| architecture(pack).map(|a| (a.number, a.variant)));
        match (best, packs.first()) {
            (Some(pack), _) => {
                let image = KernelImage { path: pack.path().join(info.name), is_ptx: false, cubin: Some(pack.cubin(info)?) };
                Ok(vec![image])
            }
            (None, Some(first)) if having.is_empty() => Err(Error::UnknownKernel { kernel: info.name, manifest: first.path() }),
            (None, _) => {
                let mend = other_kernels(OWN.contains(&info.package), capability);
                Err(wrong_architecture(info, having.iter().map(|pack| pack.architecture().to_owned()), capability, mend))
            }
        }
    }

    /// Fails unless the kernels are of the program's sources.
    fn check_hash(&self, info: &KernelInfo, found: &str, manifest: &Path) -> Result<()> {
        if *info.source_hash == found {
            return Ok(());
        }
        if self.takes_stale || env::var_os(STALE).is_some_and(|value| value == "1") {
            TOOK_STALE.store(true, Ordering::Relaxed);
            return Ok(());
        }
        let (manifest, expected, found) = (manifest.to_owned(), (*info.source_hash).to_owned(), found.to_owned());
        Err(match expected.is_empty() {
            true => Error::UnhashedKernels { package: info.package, kernel: info.name },
            false => Error::StaleKernels { manifest, expected, found },
        })
    }
}

/// The folders that lie near the executable.
fn near_folders() -> Vec<PathBuf> {
    let Ok(executable) = env::current_exe() else { return Vec::new() };
    let beside = executable.parent().map(|folder| folder.join("kernels"));
    let above = executable.ancestors().skip(1).map(|above| above.join("oxtile").join("kernels")).filter(|folder| folder.is_dir());
    beside.into_iter().chain(above).collect()
}

/// The feature of this library that holds kernels for a device.
fn feature(capability: (u32, u32)) -> Option<&'static str> {
    let runs = |name: &str| Architecture::parse(name).is_some_and(|architecture| architecture.cubin_runs_on(capability));
    FEATURES.iter().find(|(_, architecture)| runs(architecture)).map(|(feature, _)| *feature)
}

/// What mends packs of which none runs on a device; whether they hold Oxtile's own kernels.
fn other_kernels(are_own: bool, capability: (u32, u32)) -> String {
    let folder = format!("name a folder with kernels for {} in OXTILE_KERNELS", wanted(capability));
    match feature(capability).filter(|_| are_own) {
        Some(feature) => format!("enable the feature `{feature}` of `oxtile`, or {folder}"),
        None => folder,
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

/// What else a person can do who has no kernels of a package.
pub(super) fn or_feature(package: &str) -> &'static str {
    match package == OWN[0] {
        true => {
            " in a checkout of Oxtile, enable a feature of `oxtile` that holds them (sm80, sm90a, sm100a) where it comes from a registry"
        }
        false => "",
    }
}

/// What mends kernels that are not those of the program.
pub(super) fn mend(manifest: &Path) -> String {
    match manifest.starts_with(INSIDE) {
        true => {
            "take `oxtile` and the crates that it depends on of one release, unedited, or name a folder of kernels in OXTILE_KERNELS".into()
        }
        false => format!("run {}", build_command(&package_of(manifest), "")),
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
    fn facts(&self) -> Facts<'_> {
        let Self { threads, cluster, shared_bytes, parameters, words, .. } = self;
        Facts { threads: threads[0], cluster: *cluster, shared_bytes: *shared_bytes, parameters, words: *words }
    }

    fn images(&self, folder: &Path, capability: (u32, u32)) -> Vec<KernelImage> {
        let mut architectures: Vec<_> =
            self.architectures.iter().filter_map(|(name, files)| Some((Architecture::parse(name)?, files))).collect();
        // The newest first, and of one number the one with the most features.
        architectures.sort_by_key(|(architecture, _)| std::cmp::Reverse((architecture.number, architecture.variant)));
        let cubins = architectures.iter().filter(|(a, _)| a.cubin_runs_on(capability));
        let cubins = cubins.filter_map(|(_, files)| files.cubin.as_ref().filter(|file| !file.is_empty())).map(|file| (file, false));
        let ptx = architectures.iter().filter(|(a, _)| a.ptx_runs_on(capability)).map(|(_, files)| (&files.ptx, true));
        cubins.chain(ptx).map(|(file, is_ptx)| KernelImage { path: folder.join(file), is_ptx, cubin: None }).collect()
    }
}

fn wrong_architecture(info: &KernelInfo, found: impl Iterator<Item = String>, capability: (u32, u32), mend: String) -> Error {
    Error::WrongArchitecture { kernel: info.name, device: number(capability), found: found.collect(), mend }
}
