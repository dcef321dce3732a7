//! `OXTILE_EXPLAIN=FOLDER`: what checked launches show of each kernel, in a file a kernel, for `oxtile explain`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Mutex;

use oxtile_emulator::{Launch, Report};

use crate::recording::{BoxRecord, FieldRecord, KernelRecord, LineRecord, PhaseRecord};
use crate::runtime::runtime::lock;

/// The variable that names the folder.
const VARIABLE: &str = "OXTILE_EXPLAIN";

/// What the launches of this process have shown, by folder and kernel.
static PROCESS: Mutex<BTreeMap<(PathBuf, String), KernelRecord>> = Mutex::new(BTreeMap::new());

/// What the launches of a virtual cluster show.
pub(super) struct Explanations {
    folder: PathBuf,
    /// The kernels launched so far.
    kernels: BTreeSet<String>,
}

impl Explanations {
    /// Those that the environment asks for.
    pub fn from_environment() -> Option<Self> {
        let folder = std::env::var_os(VARIABLE).filter(|folder| !folder.is_empty())?;
        Some(Self::new(folder.into()))
    }

    pub fn new(folder: PathBuf) -> Self {
        Self { folder, kernels: BTreeSet::new() }
    }

    /// A launch has ended well.
    pub fn add(&mut self, launch: &Launch, report: Report) {
        let (layout, fields) = report.shared.map_or((None, Vec::new()), |(layout, fields)| (Some(layout), fields));
        let record = KernelRecord {
            kernel: launch.kernel.clone(),
            launches: 1,
            blocks: launch.grid.iter().map(|&blocks| u64::from(blocks)).product(),
            threads: launch.block.iter().product(),
            shared_bytes: launch.shared_bytes,
            steps: report.steps,
            lines: report.lines.into_iter().map(line).collect(),
            layout,
            fields: fields.into_iter().map(|field| FieldRecord { name: field.name, offset: field.offset, bytes: field.bytes }).collect(),
            boxes: (report.boxes.into_iter())
                .map(|copy| BoxRecord {
                    place: copy.place,
                    dimensions: copy.dimensions,
                    element_bytes: copy.element_bytes,
                    swizzle: copy.swizzle,
                })
                .collect(),
            phases: report.phases.into_iter().map(phase).collect(),
        };
        self.kernels.insert(launch.kernel.clone());
        let mut process = lock(&PROCESS);
        process.entry((self.folder.clone(), launch.kernel.clone())).or_default().add(record);
    }
}

fn line(line: oxtile_emulator::LineCost) -> LineRecord {
    LineRecord {
        file: line.file,
        line: line.line,
        operation: line.operation.to_owned(),
        requests: line.requests,
        transactions: line.transactions,
        ideal: line.ideal,
    }
}

fn phase(phase: oxtile_emulator::Phase) -> PhaseRecord {
    PhaseRecord {
        mbarrier: phase.mbarrier,
        offset: phase.offset,
        phase: phase.phase,
        ended: phase.ended,
        copies: phase.copies,
        arrivals: phase.arrivals,
        waits: phase.waits,
    }
}

impl Drop for Explanations {
    /// Writes the files of the kernels that the cluster launched, of all launches of the process.
    fn drop(&mut self) {
        let process = lock(&PROCESS);
        for kernel in &self.kernels {
            if let Some(record) = process.get(&(self.folder.clone(), kernel.clone()))
                && let Err(error) = record.write(&self.folder)
            {
                tracing::warn!(%error, folder = %self.folder.display(), "{VARIABLE}: what kernel {kernel} shows was not written");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use oxtile_tile::prelude::*;

    use super::*;
    use crate::runtime::emulated::Script;
    use crate::runtime::{Buffer, Runtime};

    #[derive(SharedStorage)]
    struct Shared {
        rows: SharedArray<f32, 1024>,
        padded: SharedArray<f32, 1056>,
    }

    /// Writes columns of a matrix with rows of 32 numbers and of one with rows of 33, and reads every eighth number of `values`.
    #[kernel(threads = 32, grid = one_block, shared = Shared)]
    pub fn write_columns(values: GlobalMut<f32>) {
        let (shared, i) = (Shared::claim(), thread::index());
        shared.rows.store(32 * i, 1.0);
        shared.padded.store(33 * i, 1.0);
        values.store(8 * u64::from(i), 2.0);
    }

    fn one_block(_: &WriteColumnsArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
        Ok(Grid::x(1))
    }

    #[test]
    fn conflicts_and_scattered_accesses_are_recorded_by_line() {
        let folder = tempfile::tempdir().unwrap();
        // The last one repeats a run by its script, as the search for a shorter schedule does.
        for (seed, script) in [(0, None), (1, None), (2, None), (2, Some(Script::seeded()))] {
            let runtime = Runtime::checked(seed).unwrap();
            let cluster = runtime.0.backend.cluster().unwrap();
            lock(&cluster.state).explanations = Some(Explanations::new(folder.path().to_owned()));
            script.into_iter().for_each(|script| cluster.follow(script));
            let stream = runtime.device(0).unwrap().stream().unwrap();
            let mut values = Buffer::<f32>::zeros(&stream, 256).unwrap();
            let args = WriteColumnsArgs { values: values.view_mut() };
            runtime.load::<WriteColumns>().unwrap().launch(&stream, args).unwrap();
            stream.synchronize().unwrap();
        }
        let record = KernelRecord::read(&KernelRecord::file(folder.path(), "write_columns")).unwrap();
        assert_eq!((record.launches, record.blocks, record.threads, record.shared_bytes), (3, 1, 32, 8320));
        let fields: Vec<_> = record.fields.iter().map(|field| (field.name.as_str(), field.offset, field.bytes)).collect();
        assert_eq!((record.layout.as_deref(), &fields[..]), (Some("Shared"), &[("rows", 0, 4096), ("padded", 4096, 4224)][..]));
        let lines: Vec<_> =
            record.lines.iter().map(|line| (line.operation.as_str(), line.requests, line.transactions, line.ideal)).collect();
        assert_eq!(lines, [("shared_write", 3, 96, 3), ("shared_write", 3, 3, 3), ("global_write", 3, 96, 12)]);
        assert!(record.lines.iter().all(|line| line.file.ends_with("explain.rs")), "{:?}", record.lines);
    }
}
