//! `oxtile build`: the kernels of any crate, compiled for the GPU by `oxtile-build`.

use std::{
    fmt,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use oxtile_build::{Build, Builder};

use crate::{
    arguments,
    text::{Align, Table, path, seconds},
};

/// The package that every crate of kernels depends on.
const DSL: &str = "oxtile-tile";

/// Compiled and assembled kernels that were not judged yet.
pub struct Job {
    builder: Builder<'static>,
    build: Build,
    begin: Instant,
}

impl Job {
    /// Compiles and assembles; the steps are told on standard error.
    ///
    /// # Errors
    /// Whatever keeps the kernels from being built.
    pub fn new(request: &arguments::Build) -> Result<Self, oxtile_build::Error> {
        let begin = Instant::now();
        check_kernels(&request.manifest)?;
        let builder = Builder::new(&request.manifest)
            .checked(request.checked)
            .line_tables(request.line_tables)
            .accept(request.accept)
            .on_step(|step| eprintln!("{step}"));
        let mut builder = request.archs.iter().cloned().fold(builder, Builder::arch);
        if let Some(family) = &request.family {
            builder = builder.family(family);
        }
        if let Some(folder) = &request.out_dir {
            builder = builder.out_dir(folder);
        }
        Ok(Self { build: builder.inspect()?, builder, begin })
    }

    /// What each kernel takes, and the notes, for people.
    pub fn table(&self) -> String {
        use Align::{Left, Right};
        let mut table =
            Table::new(&[("kernel", Left), ("architecture", Left), ("registers", Right), ("instructions", Right), ("shared bytes", Right)]);
        for kernel in &self.build.kernels {
            table.row([
                kernel.meta.name.clone(),
                kernel.arch.to_string(),
                kernel.usage.registers.to_string(),
                kernel.usage.instructions.to_string(),
                (kernel.meta.shared + kernel.usage.static_shared).to_string(),
            ]);
        }
        let notes = self.build.notes.iter().map(|note| format!("note    {note}\n"));
        std::iter::once(table.to_string()).chain(notes).collect()
    }

    /// Judges the kernels and writes the output folder.
    ///
    /// # Errors
    /// Why the kernels may not be used as they are.
    pub fn finish(self) -> Result<Report, oxtile_build::Error> {
        Ok(Report { build: self.builder.build()?, elapsed: self.begin.elapsed() })
    }
}

/// The part of cargo's metadata that says what a package depends on.
#[derive(serde::Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(serde::Deserialize)]
struct Package {
    manifest_path: PathBuf,
    dependencies: Vec<Dependency>,
}

#[derive(serde::Deserialize)]
struct Dependency {
    name: String,
}

/// Refuses a crate that cannot have kernels, before the minute that compiling the device's libraries takes. What cargo cannot read is the build's to report.
fn check_kernels(manifest: &Path) -> Result<(), oxtile_build::Error> {
    let cargo = std::env::var_os("CARGO").unwrap_or("cargo".into());
    let asked =
        Command::new(cargo).args(["metadata", "--no-deps", "--offline", "--format-version", "1", "--manifest-path"]).arg(manifest).output();
    let found =
        asked.ok().filter(|output| output.status.success()).and_then(|output| serde_json::from_slice::<Metadata>(&output.stdout).ok());
    let Some(Metadata { packages }) = found else { return Ok(()) };
    let this = manifest.canonicalize().unwrap_or_default();
    // A workspace's own manifest may be that of no package.
    let is_here = packages.iter().any(|package| package.manifest_path == this);
    let mut looked_at = packages.iter().filter(|package| !is_here || package.manifest_path == this);
    if looked_at.any(|package| package.dependencies.iter().any(|dependency| dependency.name == DSL)) {
        return Ok(());
    }
    let why = format!("this crate has no kernels: it does not depend on {DSL}; see `oxtile new`, which makes one that has");
    Err(oxtile_build::Error::Content { path: manifest.into(), why })
}

/// A finished build, for people.
#[derive(Debug)]
pub struct Report {
    build: Build,
    elapsed: Duration,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\noutput  {}", path(&self.build.out_dir))?;
        writeln!(f, "time    {}", seconds(self.elapsed.as_secs_f64()))
    }
}
