//! The steps of a build.

use std::{
    collections::BTreeSet,
    env, fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
};

use serde::{Deserialize, Serialize};

use crate::{
    Arch, Build, Builder, CudaTools, Error, Kernel, Manifest, Toolchain, assemble, causes,
    compile::{self, Compiled, Project, Variant},
    dependencies, draft,
    lint::{self, Cause, Finding},
    manifest, output, own, ptx, ratchet, recipe,
    sass::Listing,
    source_hash::{hex_digest, source_hash},
};

/// A builder with all that had to be looked up.
#[derive(Clone)]
pub(crate) struct Run<'a> {
    builder: &'a Builder<'a>,
    toolchain: Toolchain,
    tools: CudaTools,
    pub project: Project,
    archs: Vec<Arch>,
    families: Vec<String>,
    /// These kernels of theirs alone, if any are named.
    kernels: Vec<String>,
    line_tables: bool,
    source_hash: String,
}

/// What compiling and assembling gave, kept until a source changes.
#[derive(Serialize, Deserialize)]
struct Measured {
    key: String,
    kernels: Vec<Kernel>,
    unresolved: Vec<Unresolved>,
}

/// A kernel that cannot be assembled.
#[derive(Serialize, Deserialize)]
struct Unresolved {
    kernel: String,
    family: String,
    arch: Arch,
    calls: Vec<Call>,
}

/// Its call of a function that is defined nowhere.
#[derive(Serialize, Deserialize)]
struct Call {
    function: String,
    /// Where, if it was compiled with line tables.
    lines: Vec<String>,
}

impl Unresolved {
    fn of(entry: ptx::Entry, arch: &Arch, folder: &Path) -> Self {
        let ptx::Entry { meta, text, unresolved } = entry;
        let call = |function: String| Call { lines: causes::call_lines(&text, &function, folder), function };
        Self { kernel: meta.name, family: meta.family, arch: arch.clone(), calls: unresolved.into_iter().map(call).collect() }
    }

    fn findings(&self) -> impl Iterator<Item = Finding> {
        self.calls.iter().map(|call| lint::unresolved(&self.kernel, &self.arch, &call.function))
    }
}

impl<'a> Run<'a> {
    pub fn new(builder: &'a Builder<'a>) -> Result<Self, Error> {
        if env::var_os(recipe::NESTED).is_some() {
            return Err(Error::Nested);
        }
        let toolchain = match builder.toolchain.clone().map_or_else(Toolchain::find, Ok) {
            Ok(toolchain) => toolchain,
            Err(missing) => {
                // What is wrong with the crate is told first: it needs no compiler to be seen, nor to be mended. That there is no cargo either is no news.
                let toolchain = Toolchain::in_path();
                return match Project::of(&builder.manifest, &toolchain).and_then(|project| dependencies::check(&project, &toolchain)) {
                    Err(wrong @ Error::NeedsStd(_)) => Err(wrong),
                    _ => Err(missing),
                };
            }
        };
        let project = Project::of(&builder.manifest, &toolchain)?;
        let near = [std::slice::from_ref(&project.workspace), &project.neighbours].concat();
        let tools = builder.tools.clone().map_or_else(|| CudaTools::find_near(&near), Ok)?;
        let mut archs = if builder.archs.is_empty() { vec![Arch::hopper()] } else { builder.archs.clone() };
        let mut seen = BTreeSet::new();
        archs.retain(|arch| seen.insert(arch.clone()));
        let families = project.families()?;
        if let Some(family) = builder.named.iter().find(|family| !families.contains(family)) {
            let why = format!("there is no family `{family}`; this crate has: {}", families.join(", "));
            return Err(Error::content(&project.manifest, why));
        }
        let families = match builder.named.is_empty() {
            true => families,
            false => families.into_iter().filter(|family| builder.named.contains(family)).collect(),
        };
        let source_hash = source_hash(&project.folder)?;
        let (kernels, line_tables) = (builder.kernels.clone(), builder.line_tables);
        Ok(Self { builder, toolchain, tools, project, archs, families, kernels, line_tables, source_hash })
    }

    pub fn inspect(&self) -> Result<Build, Error> {
        let Measured { kernels, unresolved, .. } = self.measure()?;
        let mut findings: Vec<Finding> = kernels.iter().flat_map(lint::check).collect();
        findings.extend(unresolved.iter().flat_map(Unresolved::findings));
        let mut notes = Vec::new();
        self.hold_to_ratchet(&kernels, &mut findings, &mut notes)?;
        notes.extend(self.notes(&kernels));
        Ok(Build { kernels, findings, notes, out_dir: self.out_dir(), source_hash: self.source_hash.clone() })
    }

    /// What a person should know who uses the kernels as they are.
    fn notes(&self, kernels: &[Kernel]) -> Vec<String> {
        let can_panic = kernels.iter().filter(|kernel| !kernel.panics.is_empty());
        let can_panic = can_panic.map(|kernel| {
            let place = match causes::panic_lines(kernel, &self.project.folder) {
                lines if lines.is_empty() => self.project.lines_hint(lint::function(&kernel.meta.name)),
                lines => format!("at {}", lines.join(", ")),
            };
            Finding::on(kernel, format!("{}; {place}", lint::describe_panics(&kernel.panics)))
        });
        let can_panic = lint::lines(&can_panic.collect::<Vec<_>>());
        let is_unhashed = kernels.iter().any(|kernel| kernel.meta.hashed == 0);
        let unhashed = is_unhashed.then(|| {
            format!(
                "{}: programs do not know the hash of these sources, so that none loads the kernels on a GPU: add `oxtile_tile::source_hash!();` to src/lib.rs and the build script that prints \
                 oxtile_build::source_hash::cargo_directives (docs/own-crate.md), or run with OXTILE_STALE_KERNELS=1",
                self.project.package
            )
        });
        can_panic.into_iter().chain(unhashed).collect()
    }

    /// The findings of a build with the source lines of their causes, from a build with line tables.
    pub fn located(&self, mut findings: Vec<Finding>) -> Vec<Finding> {
        let mut sought: Vec<&mut Finding> = findings.iter_mut().filter(|finding| finding.cause.is_some()).collect();
        // Compiled without its neighbours, a kernel may have no longer what was refused: then with its family.
        for alone in [true, false] {
            if sought.is_empty() {
                break;
            }
            // What is wrong is known without its line.
            let names: BTreeSet<_> = sought.iter().map(|finding| finding.kernel.clone()).collect();
            let Ok(measured) = self.with_lines(&names, alone).and_then(|twin| twin.measure()) else { continue };
            sought.retain_mut(|finding| !self.locate(finding, &measured));
            if self.line_tables {
                break;
            }
        }
        findings
    }

    /// Adds the source lines of a finding's cause, if the build with line tables has any.
    fn locate(&self, finding: &mut Finding, Measured { kernels, unresolved, .. }: &Measured) -> bool {
        let (Some(cause), folder) = (&finding.cause, &self.project.folder) else { return true };
        let kernel = kernels.iter().find(|kernel| finding.is_of(&kernel.meta.name, &kernel.arch));
        let listing = |kernel: &Kernel| Listing::of(&kernel.cubin, &self.tools).ok();
        let mut lines = kernel.map_or_else(Vec::new, |kernel| causes::lines(cause, kernel, || listing(kernel), folder));
        let calls = unresolved.iter().filter(|entry| finding.is_of(&entry.kernel, &entry.arch)).flat_map(|entry| &entry.calls);
        lines.extend(calls.filter(|call| *cause == Cause::Call(call.function.clone())).flat_map(|call| call.lines.clone()));
        if !lines.is_empty() {
            finding.why.push_str(&format!("; at {}", lines.join(", ")));
        }
        !lines.is_empty()
    }

    /// The same build with line tables, of these kernels `alone`, or of their families.
    fn with_lines(&self, names: &BTreeSet<String>, alone: bool) -> Result<Self, Error> {
        if self.line_tables {
            return Ok(self.clone());
        }
        (self.builder.say)("looking for the source lines of what must be mended");
        let Measured { kernels, unresolved, .. } = self.measure()?;
        let of_kernels = kernels.iter().map(|kernel| (&kernel.meta.name, &kernel.meta.family));
        let all = of_kernels.chain(unresolved.iter().map(|entry| (&entry.kernel, &entry.family)));
        let families: BTreeSet<_> = all.filter(|(name, _)| names.contains(*name)).map(|(_, family)| family.clone()).collect();
        let kernels = if alone { names.iter().cloned().collect() } else { self.kernels.clone() };
        Ok(Self { families: families.into_iter().collect(), kernels, line_tables: true, ..self.clone() })
    }

    /// Compiles and assembles, or takes the kernels of the last build of the same sources.
    fn measure(&self) -> Result<Measured, Error> {
        let name = format!("measured-{}.json", &hex_digest([self.asked().as_str()])[..16]);
        let state = self.project.folder_for_ptx(&self.toolchain).join(name);
        let key = self.key();
        let known = fs::read(&state).ok().and_then(|json| serde_json::from_slice::<Measured>(&json).ok());
        if let Some(known) =
            known.filter(|known| known.key == key && known.kernels.iter().all(|kernel| kernel.ptx.exists() && kernel.cubin.exists()))
        {
            return Ok(known);
        }
        dependencies::check(&self.project, &self.toolchain)?;
        let (mut entries, mut unresolved, mut built) = (Vec::new(), Vec::new(), BTreeSet::new());
        let mut owners = manifest::Owners::default();
        let families = match self.kernels.as_slice() {
            [] => compile::described(&self.families),
            [kernel] => format!("`{kernel}`"),
            kernels => format!("{} kernels", kernels.len()),
        };
        for arch in &self.archs {
            (self.builder.say)(&format!("rustc {}: {families} for {arch}", self.toolchain.release));
            let found = self.compile(arch)?;
            for entry in found.into_iter().filter(|entry| entry.meta.requires.is_empty() || arch.satisfies(&entry.meta.requires)) {
                owners.add(&entry.meta)?;
                built.insert(entry.meta.family.clone());
                match entry.unresolved.is_empty() {
                    true => entries.push((entry, arch.clone())),
                    false => unresolved.push(Unresolved::of(entry, arch, &self.project.folder)),
                }
            }
        }
        let archs = self.archs.iter().map(Arch::as_str).collect::<Vec<_>>().join(", ");
        let whole = self.families.iter().filter(|_| self.kernels.is_empty());
        for family in whole.filter(|family| !built.contains(*family)) {
            (self.builder.say)(&format!("family {family} has no kernel for {archs}"));
        }
        (self.builder.say)(&format!("ptxas {}: {} kernels", self.tools.release, entries.len()));
        if source_hash(&self.project.folder)? != self.source_hash {
            return Err(Error::content(&self.project.folder, "a source changed while it was compiled; build again"));
        }
        // Compiling may have written the lock file.
        let measured = Measured { key: self.key(), kernels: self.assemble(&entries)?, unresolved };
        let json = serde_json::to_string(&measured).map_err(|error| Error::content(&state, error))?;
        draft::write(&state, json)?;
        Ok(measured)
    }

    /// The entries for an architecture. Lists of runs go side by side; after one has failed, none begins.
    fn compile(&self, arch: &Arch) -> Result<Vec<ptx::Entry>, Error> {
        let (project, toolchain, variant, failed) = (&self.project, &self.toolchain, self.variant(), &AtomicBool::new(false));
        let run = |compiled: Compiled<'_>| {
            let text = compile::compile(project, compiled, arch, toolchain, variant)?;
            ptx::split(&text).map_err(|why| Error::Ptx { families: compile::described(compiled.families), why })
        };
        let one_after_another = |list: Vec<Compiled<'_>>| -> Result<Vec<ptx::Entry>, Error> {
            let mut entries = Vec::new();
            for compiled in list {
                if failed.load(Ordering::Relaxed) {
                    break;
                }
                entries.extend(run(compiled).inspect_err(|_| failed.store(true, Ordering::Relaxed))?);
            }
            Ok(entries)
        };
        let lists = self.project.runs(&self.families, &self.kernels);
        let compiled: Vec<_> = thread::scope(|scope| {
            let threads: Vec<_> = lists.into_iter().map(|list| scope.spawn(move || one_after_another(list))).collect();
            threads.into_iter().map(|thread| thread.join().expect("compiling does not panic")).collect()
        });
        let entries = compiled.into_iter().collect::<Result<Vec<_>, _>>()?.concat();
        match twice(entries.iter().map(|entry| [&*entry.meta.family, &*entry.meta.name])) {
            Some(kernel) => Err(Error::content(&self.project.manifest, in_both_halves(kernel))),
            None => Ok(entries),
        }
    }

    fn variant(&self) -> Variant {
        Variant { line_tables: self.line_tables, checked: self.builder.checked }
    }

    /// What was asked for, besides the sources.
    fn asked(&self) -> String {
        let archs: Vec<&str> = self.archs.iter().map(Arch::as_str).collect();
        let (families, kernels) = (self.families.join(","), self.kernels.join(","));
        [&archs.join(","), &families, &kernels, self.variant().suffix(), &self.toolchain.version, &self.tools.release].join(" ")
    }

    /// All that the measured figures depend on.
    fn key(&self) -> String {
        hex_digest([&own::measuring(), &self.source_hash, &self.project.lock(), &self.asked()].map(String::as_str))
    }

    /// Assembles the entries on all cores.
    fn assemble(&self, entries: &[(ptx::Entry, Arch)]) -> Result<Vec<Kernel>, Error> {
        let cache = self.project.target.join("ptx").join("cache");
        let (next, tools) = (AtomicUsize::new(0), &self.tools);
        let work = || {
            let mut done = Vec::new();
            while let Some((entry, arch)) = entries.get(next.fetch_add(1, Ordering::Relaxed)) {
                let assembled = assemble::assemble(&entry.text, arch, tools, &cache);
                done.push(assembled.map(|assembled| Kernel {
                    meta: entry.meta.clone(),
                    arch: arch.clone(),
                    usage: assembled.usage,
                    operations: ptx::count_operations(&entry.text),
                    panics: causes::panics(&entry.text),
                    ptx: assembled.ptx,
                    cubin: assembled.cubin,
                }));
            }
            done
        };
        let workers = thread::available_parallelism().map_or(1, |count| count.get());
        let results: Vec<_> = thread::scope(|scope| {
            let handles: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
            handles.into_iter().flat_map(|handle| handle.join().expect("assembling does not panic")).collect()
        });
        let mut kernels = results.into_iter().collect::<Result<Vec<_>, _>>()?;
        kernels.sort_by_cached_key(|kernel| (kernel.meta.family.clone(), kernel.meta.name.clone(), kernel.arch.clone()));
        Ok(kernels)
    }

    fn ratchet(&self) -> PathBuf {
        self.builder.ratchet.clone().unwrap_or_else(|| self.project.folder.join("ratchet"))
    }

    /// Whether the figures of the ratchet are those of these tools.
    fn ratchet_binds(&self) -> bool {
        self.toolchain.is_pinned() && self.tools.is_pinned()
    }

    fn hold_to_ratchet(&self, kernels: &[Kernel], findings: &mut Vec<Finding>, notes: &mut Vec<String>) -> Result<(), Error> {
        let folder = self.ratchet();
        if !folder.is_dir() || self.builder.accept || self.builder.checked {
            return Ok(());
        }
        let scope = self.scope(&folder, kernels);
        let mut found = Vec::new();
        for family in &self.families {
            found.extend(scope.check(family, notes)?);
        }
        if self.builder.named.is_empty() && self.kernels.is_empty() {
            found.extend(scope.strays(&self.families)?);
        }
        if !self.kernels.is_empty() {
            found.retain(|finding| self.kernels.contains(&finding.kernel));
        }
        match self.ratchet_binds() {
            true => findings.extend(found),
            false => notes.extend(found.iter().map(|finding| format!("not binding for this compiler: {finding}"))),
        }
        Ok(())
    }

    pub fn accept(&self, kernels: &[Kernel]) -> Result<(), Error> {
        if !self.ratchet_binds() {
            let what = format!("the ratchet holds the figures of rustc {} and ptxas {}", recipe::PINNED_RELEASE, recipe::PINNED_PTXAS);
            return Err(Error::Missing { what, mend: "accept with these: `cargo xtask setup` in an Oxtile checkout installs them".into() });
        }
        self.scope(&self.ratchet(), kernels).accept(&self.families)
    }

    /// The command that builds for those architectures whose figures were refused: `--accept` after it settles these.
    pub fn command_for(&self, findings: &[Finding]) -> String {
        let refused = |arch: &Arch| {
            findings.iter().filter(|finding| finding.acceptable).any(|finding| finding.arch.as_ref().is_none_or(|refused| refused == arch))
        };
        let archs: Vec<_> = self.archs.iter().filter(|arch| refused(arch)).map(Arch::as_str).collect();
        let command = self.project.build_command();
        match archs[..] {
            // The default.
            [] => command,
            [only] if only == Arch::hopper().as_str() => command,
            _ => format!("{command} --arch {}", archs.join(",")),
        }
    }

    fn scope<'s>(&'s self, folder: &'s Path, kernels: &'s [Kernel]) -> ratchet::Scope<'s> {
        let without_others = !self.builder.named.is_empty() && !self.project.divided;
        let alone = without_others || !self.kernels.is_empty() || self.line_tables;
        ratchet::Scope { folder, archs: &self.archs, kernels, alone, command: self.project.build_command() }
    }

    fn out_dir(&self) -> PathBuf {
        let default = || self.project.target.join(format!("oxtile/kernels{}", self.variant().suffix())).join(&self.project.package);
        self.builder.out_dir.clone().unwrap_or_else(default)
    }

    /// Writes PTX, cubins and the manifest, and removes files whose kernel is gone.
    pub fn write(&self, build: Build) -> Result<Build, Error> {
        let manifest = Manifest {
            package: self.project.package.clone(),
            source_hash: self.source_hash.clone(),
            dependencies: hex_digest([self.project.lock().as_str()]),
            compiler: self.toolchain.version.clone(),
            ptxas: self.tools.release.clone(),
            flags: self.variant().flags(),
            kernels: Default::default(),
        };
        output::write(&build, manifest, &self.families, &self.archs)?;
        Ok(build)
    }
}

/// The kernel that a family has twice, of families and kernels.
fn twice<'e>(mut kernels: impl Iterator<Item = [&'e str; 2]>) -> Option<&'e str> {
    let mut found = BTreeSet::new();
    kernels.find(|kernel| !found.insert(*kernel)).map(|[_, kernel]| kernel)
}

fn in_both_halves(kernel: &str) -> String {
    format!("`{kernel}` is in both halves of its family: the crate's `oxtile-tile` is older than this program; take both of one release")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_that_both_halves_have_is_told() {
        assert_eq!(
            twice([["one", "write"], ["two", "write"], ["one", "read"]].into_iter()),
            None,
            "families may have kernels of one name: another error tells that"
        );
        let kernel = twice([["one", "write"], ["one", "read"], ["one", "write"]].into_iter()).unwrap();
        let expected =
            "`write` is in both halves of its family: the crate's `oxtile-tile` is older than this program; take both of one release";
        assert_eq!(in_both_halves(kernel), expected);
    }
}
