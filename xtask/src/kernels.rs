//! `build-ptx`: compile the kernels, check them, print what they take.

use std::{path::PathBuf, process::ExitCode, time::Instant};

use anyhow::Result;
use lexopt::{Arg, Parser, ValueExt};
use oxtile_build::{Arch, Build, Builder, Kernel};

use crate::{
    machine,
    passed::{self, TUNED},
    portable, root, say,
};

/// The crates with kernels: those that are shipped, and those that hold the emulator to the GPU.
pub const CRATES: [&str; 2] = ["gpu", "tests/conformance"];

#[derive(Default)]
struct Options {
    archs: Vec<Arch>,
    family: Option<String>,
    crates: Vec<PathBuf>,
    checked: bool,
    accept: bool,
    portable: bool,
}

impl Options {
    fn parse(arguments: &mut Parser) -> Result<Self> {
        let mut options = Self::default();
        while let Some(argument) = arguments.next()? {
            match argument {
                Arg::Long("arch") => {
                    let names = arguments.value()?.string()?;
                    options.archs = names.split(',').map(|name| name.trim().parse()).collect::<Result<_, _>>()?;
                }
                Arg::Long("family") => options.family = Some(arguments.value()?.string()?),
                Arg::Long("crate") => options.crates.push(std::path::absolute(arguments.value()?)?),
                Arg::Long("checked") => options.checked = true,
                Arg::Long("accept") => options.accept = true,
                Arg::Long("portable") => options.portable = true,
                other => return Err(other.unexpected().into()),
            }
        }
        if options.crates.is_empty() {
            // A family is one of the shipped kernels' unless another crate is named.
            let crates = if options.family.is_some() { &CRATES[..1] } else { &CRATES[..] };
            options.crates = crates.iter().map(|folder| root().join(folder)).collect();
        }
        Ok(options)
    }

    /// Whether all kernels are built, as they are shipped.
    fn is_of_all(&self) -> bool {
        self.archs.is_empty()
            && self.family.is_none()
            && !self.checked
            && CRATES.iter().all(|folder| self.crates.contains(&root().join(folder)))
    }

    fn builder(&self, folder: &PathBuf) -> Builder<'static> {
        // The ratchet is of the default architecture unless another is asked for, whatever GPU is here.
        let builder = match self.archs.is_empty() && self.accept {
            true => builder(folder),
            false => for_archs(folder, &self.archs),
        };
        let builder = builder.checked(self.checked).accept(self.accept && folder.join("ratchet").exists());
        match &self.family {
            Some(family) => builder.family(family),
            None => builder,
        }
    }
}

/// A build of the kernels of one crate that tells its steps.
pub fn builder(folder: impl Into<PathBuf>) -> Builder<'static> {
    Builder::new(folder).on_step(say)
}

/// A build for these architectures; without any, for the default one and that of the GPU in this machine.
pub fn for_archs(folder: impl Into<PathBuf>, archs: &[Arch]) -> Builder<'static> {
    let default = || Some(Arch::hopper()).into_iter().chain(machine::gpu_arch().filter(|arch| *arch != Arch::hopper()));
    let archs = if archs.is_empty() { default().collect() } else { archs.to_vec() };
    archs.into_iter().fold(builder(folder), Builder::arch)
}

/// `build-ptx [--arch A,B] [--family F] [--crate FOLDER] [--checked] [--accept]`, or `build-ptx --portable [--accept]`.
pub fn build_ptx(arguments: &mut Parser) -> Result<ExitCode> {
    let options = Options::parse(arguments)?;
    if options.portable {
        return Ok(if portable::check(portable::Extent::Anew { accept: options.accept })? { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    }
    machine::ready()?;
    let sources = passed::sources()?;
    for folder in &options.crates {
        let start = Instant::now();
        let build = match options.builder(folder).build() {
            Ok(build) => build,
            // The table is printed even where the kernels may not be used: it shows what to mend.
            Err(error) => {
                table(&options.builder(folder).inspect()?);
                return Err(error.into());
            }
        };
        table(&build);
        println!("{} kernels in {} ({:.1} s)", build.kernels.len(), build.out_dir.display(), start.elapsed().as_secs_f64());
        if let Some(kernels) = build.out_dir.parent().filter(|_| options.checked) {
            println!("programs load them with OXTILE_KERNELS={}", kernels.display());
        }
        println!();
    }
    if options.accept && options.is_of_all() {
        TUNED.accept(&sources)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The shipped kernels; compiled where their sources changed.
pub fn shipped() -> Result<Build> {
    machine::ready()?;
    Ok(for_archs(root().join(CRATES[0]), &[]).build()?)
}

/// These families of the shipped kernels for one architecture.
pub fn families(names: &[&str], arch: Arch) -> Result<Build> {
    machine::ready()?;
    let builder = builder(root().join(CRATES[0])).arch(arch);
    Ok(names.iter().fold(builder, |builder, name| builder.family(*name)).build()?)
}

/// All kernels; compiled where their sources changed.
pub fn all() -> Result<Vec<Build>> {
    machine::ready()?;
    CRATES.iter().map(|folder| Ok(for_archs(root().join(folder), &[]).build()?)).collect()
}

/// Whether all kernels pass. Where they run on no GPU, those that passed as they are now are not compiled.
pub fn pass() -> Result<bool> {
    for folder in CRATES {
        if machine::gpu_arch().is_none() && TUNED.has(folder)? {
            say(&TUNED.reason(folder));
        } else {
            for_archs(root().join(folder), &[]).build()?;
            if machine::gpu_arch().is_none() {
                say("note: `cargo xtask build-ptx --accept` lets the next run skip this");
            }
        }
    }
    Ok(true)
}

fn table(build: &Build) {
    let width = build.kernels.iter().map(|kernel| kernel.meta.name.len()).max().unwrap_or(0).max(6);
    println!("{:width$}  {:7}  {:>9}  {:>12}  {:>6}  operations", "kernel", "arch", "registers", "instructions", "shared");
    for kernel in &build.kernels {
        let Kernel { meta, arch, usage, operations, .. } = kernel;
        let operations: Vec<String> = operations.iter().map(|(name, count)| format!("{name} {count}")).collect();
        let shared = meta.shared + usage.static_shared;
        let [registers, instructions] = [usage.registers, usage.instructions];
        println!("{:width$}  {arch:7}  {registers:>9}  {instructions:>12}  {shared:>6}  {}", meta.name, operations.join(", "));
    }
    build.notes.iter().for_each(|note| println!("note: {note}"));
}
