//! The build as a whole.

use std::{collections::BTreeMap, path::PathBuf};

use serde::{Deserialize, Serialize};

use crate::{Arch, CudaTools, Error, Toolchain, assemble, lint::Finding, ptx::Meta, run::Run};

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
    /// The functions of `core::panicking` that it calls: checks that were left in.
    #[serde(default)]
    pub panics: Vec<String>,
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
    pub(crate) manifest: PathBuf,
    pub(crate) archs: Vec<Arch>,
    pub(crate) named: Vec<String>,
    pub(crate) kernels: Vec<String>,
    pub(crate) out_dir: Option<PathBuf>,
    pub(crate) ratchet: Option<PathBuf>,
    pub(crate) accept: bool,
    pub(crate) line_tables: bool,
    pub(crate) checked: bool,
    pub(crate) toolchain: Option<Toolchain>,
    pub(crate) tools: Option<CudaTools>,
    pub(crate) say: Box<dyn Fn(&str) + 'a>,
}

impl<'a> Builder<'a> {
    /// A build of the crate with this `Cargo.toml` (or in this folder) for `sm_90a`.
    pub fn new(manifest: impl Into<PathBuf>) -> Self {
        Self {
            manifest: manifest.into(),
            archs: Vec::new(),
            named: Vec::new(),
            kernels: Vec::new(),
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

    /// Builds this family only, or with each call one more. The other families of the manifest stay if they were made from the same sources by the
    /// same tools.
    pub fn family(mut self, family: impl Into<String>) -> Self {
        self.named.push(family.into());
        self
    }

    /// Compiles these kernels of the family alone, by the names of their instances, for [`inspect`](Self::inspect).
    pub fn kernels(mut self, names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.kernels = names.into_iter().map(Into::into).collect();
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

    /// Writes what is built into the ratchet instead of comparing. Not with [line tables](Self::line_tables) or [checks](Self::checked).
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

    /// Assembles with these tools instead of those that [`CudaTools::find`] finds from the crate's workspace, from the crates that it
    /// depends on by path, or from here.
    pub fn tools(mut self, tools: CudaTools) -> Self {
        self.tools = Some(tools);
        self
    }

    /// Hears what is being done, one line a step.
    pub fn on_step(mut self, say: impl Fn(&str) + 'a) -> Self {
        self.say = Box::new(say);
        self
    }

    /// Builds, checks and writes the output folder. Nothing is written where a check fails, nor where kernels are
    /// [named](Self::kernels): the folder holds whole families.
    pub fn build(&self) -> Result<Build, Error> {
        if !self.kernels.is_empty() {
            return Err(Error::content(&self.manifest, "kernels by name are inspected; build their whole family"));
        }
        let run = self.run()?;
        let build = run.inspect()?;
        if !build.findings.is_empty() {
            let command = run.command_for(&build.findings);
            return Err(Error::Lint { findings: run.located(build.findings), command });
        }
        if self.accept {
            run.accept(&build.kernels)?;
        }
        run.write(build)
    }

    /// Builds and checks, but writes no output folder and returns the findings instead of failing on them; with [line tables](Self::line_tables) each with
    /// the source lines of its cause.
    pub fn inspect(&self) -> Result<Build, Error> {
        let run = self.run()?;
        let mut build = run.inspect()?;
        if self.line_tables {
            build.findings = run.located(build.findings);
        }
        Ok(build)
    }

    /// Refuses what must not be accepted before minutes of compiling.
    fn run(&self) -> Result<Run<'_>, Error> {
        if self.accept && (self.line_tables || self.checked) {
            let what = if self.line_tables { "line tables" } else { "bounds checks" };
            let why = format!("figures with {what} are not those of what is shipped: accept without {what}");
            return Err(Error::content(&self.manifest, why));
        }
        Run::new(self)
    }
}
