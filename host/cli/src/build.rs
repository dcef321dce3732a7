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

/// A finished build, for people.
#[derive(Debug)]
pub struct Report {
    build: Build,
    elapsed: Duration,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\noutput  {}", self.build.out_dir.display())?;
        writeln!(f, "time    {}", seconds(self.elapsed.as_secs_f64()))
    }
}
