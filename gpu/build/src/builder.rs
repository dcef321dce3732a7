//! The build as a whole.

use std::{
    collections::{BTreeMap, BTreeSet},
    env, fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use serde::{Deserialize, Serialize};

use crate::{
    Arch, CudaTools, Error, Manifest, Toolchain, assemble,
    compile::{self, Project, Variant},
    lint::{self, Finding},
    manifest,
    ptx::{self, Meta},
    ratchet, recipe,
    source_hash::{hex_digest, source_hash},
};

/// One kernel built for one architecture.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Kernel {
    /// What `#[kernel]` says of it.
    pub meta: Meta,
    /// The architecture.
    pub arch: Arch,
    /// What it takes of a multiprocessor.
    pub usage: assemble::Usage,
    /// Collective and tensor operations in the PTX, by name.
    pub operations: BTreeMap<String, u32>,
    /// The PTX, launch bounds included.
    pub ptx: PathBuf,
    /// The cubin.
    pub cubin: PathBuf,
}

impl Kernel {
    pub(crate) fn file_name(&self, kind: &str) -> String {
        format!("{}.{}.{kind}", self.meta.name, self.arch)
    }
}

/// What a build found.
#[derive(Clone, Debug)]
pub struct Build {
    /// The kernels, by family, name and architecture.
    pub kernels: Vec<Kernel>,
    /// Why they may not be used; empty after [`Builder::build`].
    pub findings: Vec<Finding>,
    /// Notes: figures better than the ratchet's, or a ratchet that does not bind this compiler.
    pub notes: Vec<String>,
    /// The folder of `manifest.json`, PTX and cubins.
    pub out_dir: PathBuf,
    /// The hash of the sources.
    pub source_hash: String,
}

/// A build of one kernel crate, step by step.
///
/// It works for any crate that uses `#[kernel]`, inside a workspace or not, from a program or from the build script of the
/// crate that launches the kernels.
pub struct Builder<'a> {
    manifest: PathBuf,
    archs: Vec<Arch>,
    family: Option<String>,
    out_dir: Option<PathBuf>,
    ratchet: Option<PathBuf>,
    accept: bool,
    line_tables: bool,
    checked: bool,
    toolchain: Option<Toolchain>,
    tools: Option<CudaTools>,
    say: Box<dyn Fn(&str) + 'a>,
}

impl<'a> Builder<'a> {
    /// A build of the crate with this `Cargo.toml` (or in this folder) for `sm_90a`.
    pub fn new(manifest: impl Into<PathBuf>) -> Self {
        Self {
            manifest: manifest.into(),
            archs: Vec::new(),
            family: None,
            out_dir: None,
            ratchet: None,
            accept: false,
            line_tables: false,
            checked: false,
            toolchain: None,
            tools: None,
            say: Box::new(|_| ()),
        }
    }

    /// Adds an architecture; the first one replaces the default. Each is compiled on its own, since a kernel may have another
    /// body where the hardware has an instruction for it.
    pub fn arch(mut self, arch: Arch) -> Self {
        self.archs.push(arch);
        self
    }

    /// Builds one family only. The other families of the manifest stay if they were made from the same sources by the same tools.
    pub fn family(mut self, family: impl Into<String>) -> Self {
        self.family = Some(family.into());
        self
    }

    /// Where `manifest.json`, PTX and cubins go, instead of `target/oxtile/kernels/<package>` (`kernels-checked` for a checked build, which is
    /// loaded with `OXTILE_KERNELS=target/oxtile/kernels-checked`).
    pub fn out_dir(mut self, folder: impl Into<PathBuf>) -> Self {
        self.out_dir = Some(folder.into());
        self
    }

    /// The folder of the ratchet, instead of `ratchet/` beside the manifest. A crate without one is not held to any.
    pub fn ratchet(mut self, folder: impl Into<PathBuf>) -> Self {
        self.ratchet = Some(folder.into());
        self
    }

    /// Writes what is built into the ratchet instead of comparing.
    pub fn accept(mut self, accept: bool) -> Self {
        self.accept = accept;
        self
    }

    /// Keeps line tables, so that machine code can be shown with its source lines. The code may differ from the one without.
    pub fn line_tables(mut self, keep: bool) -> Self {
        self.line_tables = keep;
        self
    }

    /// Compiles the bounds checks of device views in (`--cfg oxtile_checked`). Such a build is held to no ratchet.
    pub fn checked(mut self, checked: bool) -> Self {
        self.checked = checked;
        self
    }

    /// Compiles with this toolchain instead of the one that [`Toolchain::find`] finds.
    pub fn toolchain(mut self, toolchain: Toolchain) -> Self {
        self.toolchain = Some(toolchain);
        self
    }

    /// Assembles with these tools instead of those that [`CudaTools::find`] finds from the crate's workspace or from here.
    pub fn tools(mut self, tools: CudaTools) -> Self {
        self.tools = Some(tools);
        self
    }

    /// Hears what is being done, one line a step.
    pub fn on_step(mut self, say: impl Fn(&str) + 'a) -> Self {
        self.say = Box::new(say);
        self
    }

    /// Builds, checks and writes the output folder. Nothing is written where a check fails.
    pub fn build(&self) -> Result<Build, Error> {
        let run = Run::new(self)?;
        let build = run.inspect()?;
        if !build.findings.is_empty() {
            return Err(Error::Lint(build.findings));
        }
        if self.accept {
            run.accept(&build.kernels)?;
        }
        run.write(build)
    }

    /// Builds and checks, but writes no output folder and returns the findings instead of failing on them.
    pub fn inspect(&self) -> Result<Build, Error> {
        Run::new(self)?.inspect()
    }
}

/// A builder with all that had to be looked up.
struct Run<'a> {
    builder: &'a Builder<'a>,
    toolchain: Toolchain,
    tools: CudaTools,
    project: Project,
    archs: Vec<Arch>,
    families: Vec<String>,
    source_hash: String,
}

/// What compiling and assembling gave, kept until a source changes.
#[derive(Serialize, Deserialize)]
struct Measured {
    key: String,
    kernels: Vec<Kernel>,
    unresolved: Vec<(String, Arch, Vec<String>)>,
}

impl<'a> Run<'a> {
    fn new(builder: &'a Builder<'a>) -> Result<Self, Error> {
        if env::var_os(compile::NESTED).is_some() {
            return Err(Error::Nested);
        }
        let toolchain = builder.toolchain.clone().map_or_else(Toolchain::find, Ok)?;
        let project = Project::of(&builder.manifest, &toolchain)?;
        let tools = builder.tools.clone().map_or_else(|| CudaTools::find(&project.workspace), Ok)?;
        let archs = if builder.archs.is_empty() { vec![Arch::hopper()] } else { builder.archs.clone() };
        let families = project.families()?;
        let families = match &builder.family {
            Some(family) if families.contains(family) => vec![family.clone()],
            Some(family) => {
                let why = format!("there is no family `{family}`; this crate has: {}", families.join(", "));
                return Err(Error::content(&project.manifest, why));
            }
            None => families,
        };
        let source_hash = source_hash(&project.folder)?;
        Ok(Self { builder, toolchain, tools, project, archs, families, source_hash })
    }

    fn inspect(&self) -> Result<Build, Error> {
        let Measured { kernels, unresolved, .. } = self.measure()?;
        let mut findings: Vec<Finding> = kernels.iter().flat_map(lint::check).collect();
        findings.extend(unresolved.iter().flat_map(|(kernel, arch, functions)| lint::unresolved(kernel, arch, functions)));
        let mut notes = Vec::new();
        self.hold_to_ratchet(&kernels, &mut findings, &mut notes)?;
        Ok(Build { kernels, findings, notes, out_dir: self.out_dir(), source_hash: self.source_hash.clone() })
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
        let (mut entries, mut unresolved, mut built) = (Vec::new(), Vec::new(), BTreeSet::new());
        let families = compile::described(&self.families);
        for arch in &self.archs {
            (self.builder.say)(&format!("rustc {}: {families} for {arch}", self.toolchain.release));
            let text = compile::compile(&self.project, &self.families, arch, &self.toolchain, self.variant())?;
            let found = ptx::split(&text).map_err(|why| Error::Ptx { families: families.clone(), why })?;
            for entry in found.into_iter().filter(|entry| entry.meta.requires.is_empty() || arch.satisfies(&entry.meta.requires)) {
                built.insert(entry.meta.family.clone());
                match entry.unresolved.is_empty() {
                    true => entries.push((entry, arch.clone())),
                    false => unresolved.push((entry.meta.name, arch.clone(), entry.unresolved)),
                }
            }
        }
        let archs = self.archs.iter().map(Arch::as_str).collect::<Vec<_>>().join(", ");
        for family in self.families.iter().filter(|family| !built.contains(*family)) {
            (self.builder.say)(&format!("family {family} has no kernel for {archs}"));
        }
        (self.builder.say)(&format!("ptxas {}: {} kernels", self.tools.release, entries.len()));
        if source_hash(&self.project.folder)? != self.source_hash {
            return Err(Error::content(&self.project.folder, "a source changed while it was compiled; build again"));
        }
        // Compiling may have written the lock file.
        let measured = Measured { key: self.key(), kernels: self.assemble(&entries)?, unresolved };
        let json = serde_json::to_string(&measured).map_err(|error| Error::content(&state, error))?;
        fs::write(&state, json).map_err(Error::file("write", &state))?;
        Ok(measured)
    }

    fn variant(&self) -> Variant {
        Variant { line_tables: self.builder.line_tables, checked: self.builder.checked }
    }

    /// What was asked for, besides the sources.
    fn asked(&self) -> String {
        let archs: Vec<&str> = self.archs.iter().map(Arch::as_str).collect();
        let (families, variant) = (self.families.join(","), self.variant().suffix());
        [&archs.join(","), &families, variant, &self.toolchain.version, &self.tools.release].join(" ")
    }

    /// All that the measured figures depend on.
    fn key(&self) -> String {
        hex_digest([assemble::FORMAT, &self.source_hash, &self.lock(), &self.asked()])
    }

    /// The versions of the dependencies.
    fn lock(&self) -> String {
        fs::read_to_string(self.project.workspace.join("Cargo.lock")).unwrap_or_default()
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
        if !folder.is_dir() || self.builder.accept || self.variant() != Variant::default() {
            return Ok(());
        }
        let scope = self.scope(&folder, kernels);
        let mut found = Vec::new();
        for family in &self.families {
            found.extend(scope.check(family, notes)?);
        }
        if self.builder.family.is_none() {
            found.extend(scope.strays(&self.families)?);
        }
        match self.ratchet_binds() {
            true => findings.extend(found),
            false => notes.extend(found.iter().map(|finding| format!("not binding for this compiler: {finding}"))),
        }
        Ok(())
    }

    fn accept(&self, kernels: &[Kernel]) -> Result<(), Error> {
        if !self.ratchet_binds() {
            let what = format!("the ratchet holds the figures of rustc {} and ptxas {}", recipe::PINNED_RELEASE, recipe::PINNED_PTXAS);
            return Err(Error::Missing { what, mend: "accept with these: `cargo xtask setup` installs them".into() });
        }
        self.scope(&self.ratchet(), kernels).accept(&self.families)
    }

    fn scope<'s>(&'s self, folder: &'s Path, kernels: &'s [Kernel]) -> ratchet::Scope<'s> {
        ratchet::Scope { folder, archs: &self.archs, kernels, alone: self.builder.family.is_some() }
    }

    fn out_dir(&self) -> PathBuf {
        let default = || self.project.target.join(format!("oxtile/kernels{}", self.variant().suffix())).join(&self.project.package);
        self.builder.out_dir.clone().unwrap_or_else(default)
    }

    /// Writes PTX, cubins and the manifest, and removes files whose kernel is gone.
    fn write(&self, build: Build) -> Result<Build, Error> {
        let folder = &build.out_dir;
        fs::create_dir_all(folder).map_err(Error::file("create", folder))?;
        let mut manifest = Manifest {
            package: self.project.package.clone(),
            source_hash: self.source_hash.clone(),
            dependencies: hex_digest([self.lock().as_str()]),
            compiler: self.toolchain.version.clone(),
            ptxas: self.tools.release.clone(),
            flags: self.variant().flags(),
            kernels: Default::default(),
        };
        if let Ok(old) = Manifest::read(folder) {
            manifest.keep(old, &self.families, &self.archs);
        }
        for kernel in &build.kernels {
            manifest.add(kernel);
            copy(&kernel.ptx, &folder.join(kernel.file_name("ptx")))?;
            copy(&kernel.cubin, &folder.join(kernel.file_name("cubin")))?;
        }
        manifest.write(folder)?;
        manifest::remove_strays(folder, &manifest)?;
        Ok(build)
    }
}

/// Copies a file unless the same bytes are there.
fn copy(from: &Path, to: &Path) -> Result<(), Error> {
    let bytes = fs::read(from).map_err(Error::file("read", from))?;
    if fs::read(to).is_ok_and(|old| old == bytes) {
        return Ok(());
    }
    fs::write(to, bytes).map_err(Error::file("write", to))
}
