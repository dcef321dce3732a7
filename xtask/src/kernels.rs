//! `build-ptx`: compile the kernels, check them, print what they take.

use std::{process::ExitCode, time::Instant};

use anyhow::Result;
use lexopt::{Arg, Parser, ValueExt};
use oxtile_build::{Arch, Build, Builder, Kernel};

use crate::{machine, root, say};

/// Options shared by the commands that compile kernels.
fn builder(arguments: &mut Parser) -> Result<Builder<'static>> {
    let mut builder = Builder::new(root().join("gpu")).on_step(say);
    while let Some(argument) = arguments.next()? {
        match argument {
            Arg::Long("arch") => {
                for name in arguments.value()?.string()?.split(',') {
                    builder = builder.arch(name.trim().parse::<Arch>()?);
                }
            }
            Arg::Long("family") => builder = builder.family(arguments.value()?.string()?),
            Arg::Long("accept") => builder = builder.accept(true),
            Arg::Long("checked") => builder = builder.checked(true),
            other => return Err(other.unexpected().into()),
        }
    }
    Ok(builder)
}

/// `build-ptx [--arch A,B] [--family F] [--accept]`.
pub fn build_ptx(arguments: &mut Parser) -> Result<ExitCode> {
    let builder = builder(arguments)?;
    machine::ready()?;
    let start = Instant::now();
    let seen = builder.inspect()?;
    table(&seen);
    let build = builder.build()?;
    println!("{} kernels in {} ({:.1} s)", build.kernels.len(), build.out_dir.display(), start.elapsed().as_secs_f64());
    Ok(ExitCode::SUCCESS)
}

/// Compiles the kernels for the default architecture, if their sources changed.
pub fn ensure() -> Result<Build> {
    machine::ready()?;
    Ok(Builder::new(root().join("gpu")).on_step(say).build()?)
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
