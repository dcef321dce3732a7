//! `oxtile explain`: what a kernel takes of a multiprocessor, as it was compiled, and what checked runs on the emulator have shown of its memory and its pipelines.
//!
//! | file | what it holds |
//! |---|---|
//! | `occupancy` | blocks that a multiprocessor holds |
//! | `svg` | what the pictures share |
//! | `swizzle` | where a box's chunks lie |
//! | `stages` | phases of mbarriers over time |

mod occupancy;
mod stages;
mod svg;
mod swizzle;

use std::{
    collections::BTreeMap,
    fmt, fs,
    io::{self, Write as _},
    path::{Path, PathBuf},
};

use oxtile::timeline::{KernelRecord, LineRecord};
use oxtile_build::manifest::{Entry, Manifest};

use crate::{
    arguments,
    output::{Completed, Output},
    safetensors::WriteError,
    text::{Align, Table, bytes, count, path, printable},
};
use occupancy::{Block, Occupancy};

/// Source lines that are listed at most; those that cost the most more than they need come first.
const MOST_LINES: usize = 40;

/// Names of kernels that are listed at most.
const MOST_NAMES: usize = 24;

/// Why a kernel cannot be explained.
#[derive(Debug, thiserror::Error)]
pub enum ExplainError {
    /// Nothing is known of it.
    #[error(
        "nothing is known of a kernel whose name begins with `{}`: {} has {}, and {} no record of a run. Run `oxtile build` (in this repository `cargo xtask \
         build-ptx`), or a test that launches it on a checked runtime, with OXTILE_EXPLAIN={}",
        printable(kernel),
        path(kernels),
        others(compiled),
        path(records),
        path(records)
    )]
    Unknown {
        /// What was asked for.
        kernel: String,
        /// The folder of compiled kernels.
        kernels: PathBuf,
        /// The folder of records.
        records: PathBuf,
        /// The compiled ones, by their functions.
        compiled: Vec<String>,
    },
    /// A record that cannot be read.
    #[error("{}: {}: run the test again with OXTILE_EXPLAIN", path(.file), printable(&.error.to_string()))]
    Record {
        /// The file.
        file: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// A manifest that cannot be read.
    #[error(transparent)]
    Manifest(#[from] oxtile_build::Error),
    /// A folder for pictures that cannot be made.
    #[error("{}: {error}", path(.folder))]
    Folder {
        /// The folder.
        folder: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// A picture that cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// What is known of some kernels.
#[derive(Debug)]
pub struct Report {
    kernels: Vec<Kernel>,
}

/// What is known of one kernel.
#[derive(Debug, Default)]
struct Kernel {
    name: String,
    entry: Option<Entry>,
    record: Option<KernelRecord>,
    pictures: Vec<PathBuf>,
}

/// Looks for kernels by the beginning of their names, and draws what there is to draw, but for the names of the files.
///
/// # Errors
/// [`ExplainError`].
pub fn run(request: &arguments::Explain) -> Result<(Report, Vec<Completed>), ExplainError> {
    let (mut kernels, mut compiled) = (BTreeMap::<String, Kernel>::new(), Vec::new());
    for folder in manifests(&request.kernels) {
        for (name, entry) in Manifest::read(&folder)?.kernels {
            compiled.extend(name.split("__").next().map(str::to_owned));
            if name.starts_with(&request.kernel) {
                kernels.insert(name.clone(), Kernel { name, entry: Some(entry), ..Kernel::default() });
            }
        }
    }
    for file in records(&request.records, &request.kernel) {
        let record = KernelRecord::read(&file).map_err(|error| ExplainError::Record { file, error })?;
        let kernel = kernels.entry(record.kernel.clone()).or_default();
        (kernel.name, kernel.record) = (record.kernel.clone(), Some(record));
    }
    // A name that is whole means that kernel alone.
    if let Some(kernel) = kernels.remove(&request.kernel) {
        kernels = BTreeMap::from([(request.kernel.clone(), kernel)]);
    }
    if kernels.is_empty() {
        compiled.sort();
        compiled.dedup();
        let (kernel, kernels, records) = (request.kernel.clone(), request.kernels.clone(), request.records.clone());
        return Err(ExplainError::Unknown { kernel, kernels, records, compiled });
    }
    let mut kernels: Vec<Kernel> = kernels.into_values().collect();
    let mut completed = Vec::new();
    if let Some(folder) = &request.svg {
        fs::create_dir_all(folder).map_err(|error| ExplainError::Folder { folder: folder.clone(), error })?;
        for kernel in &mut kernels {
            let pictures = draw(folder, kernel)?;
            kernel.pictures = pictures.iter().map(|picture| picture.path().into()).collect();
            completed.extend(pictures);
        }
    }
    Ok((Report { kernels }, completed))
}

/// The kernels there are instead of the one that was asked for.
fn others(compiled: &[String]) -> String {
    match compiled {
        [] => "no compiled one".into(),
        all if all.len() > MOST_NAMES => format!("others ({}, ...)", printable(&all[..MOST_NAMES].join(", "))),
        all => format!("others ({})", printable(&all.join(", "))),
    }
}

/// The folders of a folder, or itself, that have a manifest.
fn manifests(folder: &Path) -> Vec<PathBuf> {
    let inside = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut found: Vec<_> =
        std::iter::once(folder.to_owned()).chain(inside).filter(|folder| folder.join("manifest.json").is_file()).collect();
    found.sort();
    found
}

/// The files of records of kernels whose names begin so.
fn records(folder: &Path, kernel: &str) -> Vec<PathBuf> {
    let files = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let is_record = |file: &PathBuf| {
        let name = file.file_name().and_then(|name| name.to_str());
        name.and_then(|name| name.strip_suffix(".json")).is_some_and(|name| name.starts_with(kernel))
    };
    let mut found: Vec<_> = files.filter(is_record).collect();
    found.sort();
    found
}

/// Draws the boxes and the pipeline of a kernel; returns the files.
fn draw(folder: &Path, kernel: &Kernel) -> Result<Vec<Completed>, WriteError> {
    let Some(record) = &kernel.record else { return Ok(Vec::new()) };
    let mut files = Vec::new();
    let mut write = |name: String, picture: &dyn fmt::Display| {
        let output = Output::create(&folder.join(name), &[])?;
        let written = output.file().write_all(picture.to_string().as_bytes());
        written.map_err(|error| output.error("write it", error))?;
        files.push(output.complete()?);
        Ok(())
    };
    // Boxes of one shape lie alike wherever they are.
    let mut shapes = Vec::new();
    for copy in &record.boxes {
        let shape = (&copy.dimensions, copy.element_bytes, copy.swizzle);
        if !shapes.contains(&shape) {
            shapes.push(shape);
            write(format!("{}.box{}.svg", record.kernel, shapes.len()), &swizzle::Picture { kernel: &record.kernel, copy })?;
        }
    }
    if !record.phases.is_empty() {
        write(format!("{}.stages.svg", record.kernel), &stages::Picture(record))?;
    }
    Ok(files)
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, kernel) in self.kernels.iter().enumerate() {
            if number > 0 {
                writeln!(f)?;
            }
            kernel.fmt(f)?;
        }
        Ok(())
    }
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "kernel  {}", printable(&self.name))?;
        match &self.entry {
            Some(entry) => compiled(f, entry)?,
            None => writeln!(f, "        not compiled: `oxtile build` tells registers and occupancy")?,
        }
        match &self.record {
            Some(record) => shown(f, record)?,
            None => writeln!(f, "        no record of a run: set OXTILE_EXPLAIN=FOLDER for a test that launches it on a checked runtime")?,
        }
        self.pictures.iter().try_for_each(|file| writeln!(f, "output  {}", path(file)))
    }
}

/// What a compiled kernel takes.
fn compiled(f: &mut fmt::Formatter<'_>, Entry { meta, architectures }: &Entry) -> fmt::Result {
    let threads: u32 = meta.threads.iter().product();
    writeln!(f, "block   {threads} threads, {} of shared memory, clusters of {}", bytes(meta.shared.into()), meta.cluster.max(1))?;
    for (arch, files) in architectures {
        let usage = &files.usage;
        write!(f, "{arch:<7} {} registers, {} instructions, {} bytes spilled", usage.registers, usage.instructions, usage.spills)?;
        let block = Block { threads, registers: usage.registers, shared_bytes: meta.shared + usage.static_shared };
        match Occupancy::of(&arch.to_string(), block) {
            Some(there) => writeln!(
                f,
                "; {} blocks a multiprocessor, {} of {} warps, limited by {}",
                there.blocks, there.warps, there.most_warps, there.limit
            )?,
            None => writeln!(f)?,
        }
    }
    Ok(())
}

/// What runs have shown.
fn shown(f: &mut fmt::Formatter<'_>, record: &KernelRecord) -> fmt::Result {
    use Align::{Left, Right};
    let KernelRecord { launches, blocks, threads, .. } = record;
    writeln!(f, "runs    {} launches on the emulator; the longest of {} blocks of {threads} threads", count(*launches), count(*blocks))?;
    if let Some(layout) = &record.layout {
        let mut table = Table::new(&[("field", Left), ("offset", Right), ("bytes", Right)]);
        let total = record.fields.iter().map(|field| field.offset + field.bytes).max().unwrap_or(0);
        for field in &record.fields {
            table.row([field.name.clone(), field.offset.to_string(), field.bytes.to_string()]);
        }
        write!(f, "\nshared memory, `{layout}`, {total} bytes\n{table}")?;
    }
    let lines = |operation: &str| -> Vec<&LineRecord> {
        let mut lines: Vec<_> = record.lines.iter().filter(|line| line.operation.starts_with(operation)).collect();
        // What costs the most beyond what it needs first; then by the source.
        lines.sort_by_key(|line| (std::cmp::Reverse(line.transactions.saturating_sub(line.ideal)), line.file.clone(), line.line));
        lines
    };
    for (operation, unit, title) in [
        ("shared", "wavefronts", "shared memory: a wavefront serves each of 32 banks once; more than needed are bank conflicts"),
        ("global", "sectors", "global memory: sectors of 32 bytes; more than needed are uncoalesced"),
    ] {
        let lines = lines(operation);
        if lines.is_empty() {
            continue;
        }
        let mut table =
            Table::new(&[("line", Left), ("operation", Left), ("requests", Right), (unit, Right), ("needed", Right), ("times", Right)]);
        for line in lines.iter().take(MOST_LINES) {
            let times = format!("{:.2}", line.transactions as f64 / line.ideal.max(1) as f64);
            let operation = line.operation.trim_start_matches("shared_").trim_start_matches("global_").to_owned();
            let place = format!("{}:{}", printable(&line.file), line.line);
            table.row([place, operation, line.requests.to_string(), line.transactions.to_string(), line.ideal.to_string(), times]);
        }
        write!(f, "\n{title}\n{table}")?;
        if lines.len() > MOST_LINES {
            writeln!(f, "        {} more lines, which cost less", lines.len() - MOST_LINES)?;
        }
    }
    if !record.boxes.is_empty() {
        let mut table = Table::new(&[("box", Left), ("elements", Left), ("bytes", Right), ("swizzle", Right)]);
        for copy in &record.boxes {
            let sizes: Vec<_> = copy.dimensions.iter().map(u32::to_string).collect();
            table.row([copy.place.clone(), sizes.join(" x "), copy.element_bytes.to_string(), copy.swizzle.to_string()]);
        }
        write!(f, "\nboxes of tensor maps; bytes of an element, bytes of the swizzle's span\n{table}")?;
    }
    Ok(())
}
