//! What checked runs of a kernel on the emulator have shown of its memory and its pipelines, as a file.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{fs, io};

use serde::{Deserialize, Serialize};

/// What the launches of a kernel have shown, for `oxtile explain`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelRecord {
    /// The kernel's entry.
    pub kernel: String,
    /// How many launches are in the sums of `lines`.
    pub launches: u64,
    /// Blocks of the longest launch, which the rest is of.
    pub blocks: u64,
    /// Threads of a block.
    pub threads: u32,
    /// Bytes of shared memory of a block.
    pub shared_bytes: u32,
    /// Steps of the scheduler that the longest launch took.
    pub steps: u64,
    /// Memory requests by source line.
    pub lines: Vec<LineRecord>,
    /// The type of the shared memory's layout.
    pub layout: Option<String>,
    /// Its fields.
    pub fields: Vec<FieldRecord>,
    /// Boxes that tensor maps copied.
    pub boxes: Vec<BoxRecord>,
    /// Phases of the first block's mbarriers.
    pub phases: Vec<PhaseRecord>,
}

/// The memory requests of warps at a source line.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LineRecord {
    /// The source file.
    pub file: String,
    /// The line.
    pub line: u32,
    /// What is done there: `shared_read`, `shared_write`, `global_read` or `global_write`.
    pub operation: String,
    /// Requests, one a warp and instruction.
    pub requests: u64,
    /// Wavefronts of shared memory, or sectors of 32 bytes of global memory.
    pub transactions: u64,
    /// The fewest that could move the same bytes.
    pub ideal: u64,
}

/// A field of the shared memory's layout.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FieldRecord {
    /// Its name.
    pub name: String,
    /// Its offset.
    pub offset: u32,
    /// Its bytes, with the gap after it.
    pub bytes: u32,
}

/// A box that a tensor map copies to or from shared memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BoxRecord {
    /// Where it begins.
    pub place: String,
    /// Elements in each dimension, innermost first.
    pub dimensions: Vec<u32>,
    /// Bytes an element.
    pub element_bytes: u32,
    /// Bytes of the swizzle's span, 0 without swizzle.
    pub swizzle: u32,
}

/// A phase of an mbarrier, in steps of the scheduler.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PhaseRecord {
    /// The mbarrier.
    pub mbarrier: String,
    /// Its offset.
    pub offset: u32,
    /// The phase, from 0.
    pub phase: u64,
    /// When it ended.
    pub ended: Option<u64>,
    /// When its first and its last copy came.
    pub copies: Option<[u64; 2]>,
    /// By warp, when its first and its last thread arrived.
    pub arrivals: BTreeMap<u32, [u64; 2]>,
    /// By warp, from when to when it waited.
    pub waits: BTreeMap<u32, [u64; 2]>,
}

impl KernelRecord {
    /// The file of a kernel's record in a folder.
    pub fn file(folder: &Path, kernel: &str) -> PathBuf {
        folder.join(format!("{kernel}.json"))
    }

    /// Reads a record.
    ///
    /// # Errors
    /// A file that cannot be read, or that holds something else.
    pub fn read(file: &Path) -> io::Result<Self> {
        serde_json::from_str(&fs::read_to_string(file)?).map_err(io::Error::from)
    }

    /// Writes the record to its file in a folder, whole or not at all.
    pub(crate) fn write(&self, folder: &Path) -> io::Result<()> {
        fs::create_dir_all(folder)?;
        let file = Self::file(folder, &self.kernel);
        let new = file.with_extension(format!("{}.new", std::process::id()));
        fs::write(&new, serde_json::to_string_pretty(self)?)?;
        fs::rename(new, file)
    }

    /// Adds another launch.
    pub(crate) fn add(&mut self, launch: Self) {
        let mut lines = std::mem::take(&mut self.lines);
        for line in &launch.lines {
            match lines.iter_mut().find(|known| (&known.file, known.line, &known.operation) == (&line.file, line.line, &line.operation)) {
                Some(known) => {
                    known.requests += line.requests;
                    known.transactions += line.transactions;
                    known.ideal += line.ideal;
                }
                None => lines.push(line.clone()),
            }
        }
        let launches = self.launches + launch.launches;
        let longest = if launch.steps > self.steps { launch } else { std::mem::take(self) };
        *self = Self { launches, lines, ..longest };
    }
}
