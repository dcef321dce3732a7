//! `oxtile build`: the kernels of any crate, compiled for the GPU by `oxtile-build`.

use std::{
    fmt,
    time::{Duration, Instant},
};

use oxtile_build::{Build, Builder};

use crate::{
    arguments,
    text::{Align, Table, seconds},
};

/// A finished build, for people.
#[derive(Debug)]
pub struct Report {
    build: Build,
    elapsed: Duration,
}

/// Compiles, checks and assembles; the steps are told on standard error.
///
/// # Errors
/// Whatever keeps the kernels from being built, or from being used as they are.
pub fn run(request: &arguments::Build) -> Result<Report, oxtile_build::Error> {
    let begin = Instant::now();
    let mut builder = Builder::new(&request.manifest).checked(request.checked).on_step(|step| eprintln!("{step}"));
    for arch in &request.archs {
        builder = builder.arch(arch.clone());
    }
    if let Some(family) = &request.family {
        builder = builder.family(family);
    }
    if let Some(folder) = &request.out_dir {
        builder = builder.out_dir(folder);
    }
    Ok(Report { build: builder.build()?, elapsed: begin.elapsed() })
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
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
        write!(f, "{table}")?;
        for note in &self.build.notes {
            writeln!(f, "note    {note}")?;
        }
        writeln!(f, "\noutput  {}", self.build.out_dir.display())?;
        writeln!(f, "time    {}", seconds(self.elapsed.as_secs_f64()))
    }
}
