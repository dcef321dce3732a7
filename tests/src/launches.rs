//! Which cases launch a kernel: what one run notes, the next one chooses by.
//!
//! | variable | meaning |
//! |---|---|
//! | `OXTILE_LAUNCHES=FILE` | note there which kernels each case launches: a line a case, its name, a tab, the kernels |
//! | `OXTILE_KERNEL=NAME` | run the cases of the kernels whose names begin so alone: those that are noted to launch one, and those of its family of which nothing is noted. Where no note has the kernel, all of its family but those of other number formats |

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::{env, fs, io};

use oxtile_tile::launch::{KernelFamily, KernelInfo};

/// The kernels that each case launched in this run.
static LAUNCHES: Mutex<Launches> = Mutex::new(BTreeMap::new());

type Launches = BTreeMap<String, BTreeSet<String>>;

/// The file of notes.
fn file() -> Option<PathBuf> {
    env::var_os("OXTILE_LAUNCHES").map(PathBuf::from)
}

/// Whether launches are to be noted.
pub fn wanted() -> bool {
    file().is_some()
}

/// Notes what a case launched.
pub fn note(case: &str, kernels: &BTreeSet<String>) {
    let mut launches = LAUNCHES.lock().unwrap_or_else(PoisonError::into_inner);
    launches.entry(case.to_owned()).or_default().extend(kernels.iter().cloned());
}

/// Writes the notes of this run over those of earlier runs.
///
/// # Errors
/// The file, which cannot be written.
pub fn finish() -> Result<(), String> {
    let Some(path) = file() else { return Ok(()) };
    let mut all = read(&path);
    all.extend(LAUNCHES.lock().unwrap_or_else(PoisonError::into_inner).clone());
    write(&path, &all).map_err(|error| format!("{}: {error}", path.display()))
}

fn read(path: &Path) -> Launches {
    let words = |kernels: &str| kernels.split(' ').filter(|name| !name.is_empty()).map(str::to_owned).collect();
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines().filter_map(|line| line.split_once('\t')).map(|(case, kernels)| (case.to_owned(), words(kernels))).collect()
}

fn write(path: &Path, launches: &Launches) -> io::Result<()> {
    let line =
        |(case, kernels): (&String, &BTreeSet<String>)| format!("{case}\t{}\n", kernels.iter().cloned().collect::<Vec<_>>().join(" "));
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    // Another run may write at the same time: one of them is the last.
    let own = path.with_extension(std::process::id().to_string());
    fs::write(&own, launches.iter().map(line).collect::<String>())?;
    fs::rename(own, path)
}

/// The cases of the kernels that `OXTILE_KERNEL` names; all where it is not set.
pub struct Selection(Option<Kernel>);

struct Kernel {
    name: String,
    families: BTreeSet<String>,
    /// Number formats of other kernels.
    lacking: BTreeSet<&'static str>,
    noted: Launches,
}

impl Selection {
    /// What the environment asks for.
    ///
    /// # Errors
    /// No kernel's name begins so.
    pub fn from_environment() -> Result<Self, String> {
        let Ok(name) = env::var("OXTILE_KERNEL") else { return Ok(Self(None)) };
        let noted = file().map(|path| read(&path)).unwrap_or_default();
        // A kernel that is new or was renamed is in no note: then notes say nothing.
        let is_noted = noted.values().flatten().any(|kernel| kernel.starts_with(&name));
        let noted = if is_noted { noted } else { Launches::new() };
        let lacking = formats_lacking(instances().map(|info| info.name), &name);
        Ok(Self(Some(Kernel { families: families_of(&name)?, lacking, name, noted })))
    }

    /// Whether a case is one of them.
    pub fn has(&self, case: &str) -> bool {
        let is_replaced = env::var_os("OXTILE_REPLACEMENT").is_some();
        self.0
            .as_ref()
            .is_none_or(|Kernel { name, families, lacking, noted }| belongs(case, noted.get(case), name, (families, lacking), is_replaced))
    }
}

/// A case that was noted without kernels may launch some now, unless host code is as it was: where kernels are replaced.
fn belongs(
    case: &str,
    noted: Option<&BTreeSet<String>>,
    kernel: &str,
    (families, lacking): (&BTreeSet<String>, &BTreeSet<&str>),
    is_replaced: bool,
) -> bool {
    match noted {
        Some(kernels) if !kernels.is_empty() => kernels.iter().any(|launched| launched.starts_with(kernel)),
        Some(_) if is_replaced => false,
        _ => families.iter().any(|family| case.starts_with(family)) && !case.split("::").any(|word| lacking.contains(word)),
    }
}

/// The number formats that names of kernels and of cases have: of elements, and of codes.
const FORMATS: [&[&str]; 2] = [&["f32", "bf16", "f16"], &["e4m3", "e5m2"]];

/// The formats that none of the kernels has whose names begin so, where any has another of the same kind.
fn formats_lacking<'n>(names: impl Iterator<Item = &'n str>, kernel: &str) -> BTreeSet<&'static str> {
    let words: BTreeSet<_> = names.filter(|name| name.starts_with(kernel)).flat_map(|name| name.split("__").skip(1)).collect();
    let named = FORMATS.iter().filter(|formats| formats.iter().any(|format| words.contains(format)));
    let lacking = named.flat_map(|formats| formats.iter()).filter(|format| !words.contains(*format));
    lacking.copied().collect()
}

/// All kernels that cases launch.
fn instances() -> impl Iterator<Item = &'static KernelInfo> {
    oxtile_kernels::KERNELS.iter().chain(oxtile_conformance::KERNELS).flat_map(|family| family.instances)
}

/// How the cases of a kernel's family begin; a conformance kernel has cases of its own name.
fn families_of(name: &str) -> Result<BTreeSet<String>, String> {
    let instances = |kernels: &'static [KernelFamily]| kernels.iter().flat_map(|family| family.instances);
    let named = |info: &&KernelInfo| info.name.starts_with(name);
    let shipped = instances(oxtile_kernels::KERNELS).filter(named).map(|info| info.family.to_owned());
    let conformance = instances(oxtile_conformance::KERNELS).filter(named).map(|info| format!("conformance::{}", info.name));
    let found: BTreeSet<_> = shipped.chain(conformance).collect();
    if !found.is_empty() {
        return Ok(found);
    }
    let names = oxtile_kernels::KERNELS.iter().chain(oxtile_conformance::KERNELS).map(|family| family.name);
    Err(format!("no kernel begins with `{name}`; there are: {}", names.collect::<Vec<_>>().join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_choose_and_families_where_there_are_none() {
        let kernels = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<BTreeSet<_>>();
        let families = kernels(&["mxfp8"]);
        let lacking = BTreeSet::from(["f32", "f16"]);
        let belongs = |case, noted: Option<&[&str]>| {
            belongs(case, noted.map(kernels).as_ref(), "mxfp8_cast_rows__bf16", (&families, &lacking), false)
        };
        assert!(belongs("quantized_gemm::mxfp8", Some(&["gemm__bf16", "mxfp8_cast_rows__bf16__e4m3"])));
        assert!(!belongs("mxfp8::fused", Some(&["mxfp8_cast_fused__bf16"])));
        assert!(belongs("mxfp8::new", None) && !belongs("nvfp4::new", None));
        assert!(belongs("mxfp8::cast::bf16::1x32", None) && !belongs("mxfp8::cast::f32::1x32", None));
    }

    #[test]
    fn formats_of_other_kernels_are_left_out() {
        let names = ["mxfp8_cast_rows__bf16__e4m3", "mxfp8_cast_rows__bf16__e5m2", "sum_parts__f32__bf16", "sum_parts__f32__f16", "fill"];
        let lacking = |kernel| formats_lacking(names.into_iter(), kernel).into_iter().collect::<Vec<_>>();
        assert_eq!(lacking("mxfp8_cast_rows__bf16__e4m3"), ["e5m2", "f16", "f32"]);
        assert_eq!(lacking("mxfp8_cast_rows__bf16"), ["f16", "f32"]);
        // A kernel may have several of one kind.
        assert!(lacking("sum_parts__f32").is_empty() && lacking("sum_parts").is_empty() && lacking("fill").is_empty());
        assert_eq!(lacking("sum_parts__f32__bf16"), ["f16"]);
    }

    #[test]
    fn notes_are_read_as_they_were_written() {
        let path = env::temp_dir().join(format!("oxtile-launches-{}.tsv", std::process::id()));
        let launches = Launches::from([
            ("amax::f32".into(), BTreeSet::from(["amax__f32".into(), "amax__bf16".into()])),
            ("none".into(), BTreeSet::new()),
        ]);
        write(&path, &launches).unwrap();
        let found = read(&path);
        fs::remove_file(&path).unwrap();
        assert_eq!(found["amax::f32"], launches["amax::f32"]);
        let none =
            |is_replaced| belongs("none", found.get("none"), "amax", (&BTreeSet::from(["none".into()]), &BTreeSet::new()), is_replaced);
        assert!(none(false) && !none(true));
    }

    #[test]
    fn a_kernel_that_is_not_there_is_refused_by_name() {
        assert!(families_of("amax__bf16").unwrap().contains("amax"));
        assert!(families_of("no_such").unwrap_err().contains("amax"));
    }
}
