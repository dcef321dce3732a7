//! `oxtile timeline`.

use std::path::PathBuf;

use clap::{ArgGroup, Args};

/// `oxtile timeline`.
#[derive(Args, Debug, PartialEq)]
#[command(after_help = MORE, group = ArgGroup::new("target").args(["svg", "merged"]).required(true).multiple(true))]
pub struct Timeline {
    /// The recordings: one a rank
    #[arg(value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,
    /// Draw them: a lane a stream, a box a piece of work, waits pale; boxes show more under the pointer
    #[arg(long, value_name = "OUT.svg")]
    pub svg: Option<PathBuf>,
    /// Write one file of all, for Perfetto (ui.perfetto.dev) or chrome://tracing
    #[arg(long, value_name = "OUT.json")]
    pub merged: Option<PathBuf>,
}

const MORE: &str = "\
One of --svg and --merged is needed, or both. A program on Oxtile that runs with OXTILE_TRACE=FILE records its streams, GPUs' or
emulated; a process that a launcher gave a rank (RANK, or as mpirun and srun set it) inserts that into the name: FILE.json of rank
3 is FILE.rank3.json. Several files are ranks of one run, aligned by the host's clock. Times are microseconds of the GPUs, or steps
of the virtual cluster's scheduler, which are not times.

Examples:
  OXTILE_TRACE=trace.json oxtile launch -n 4 -- ./train --steps 3
  oxtile timeline trace.rank*.json --svg trace.svg";

impl Timeline {
    pub(super) fn check(&self) -> Result<(), String> {
        if self.svg == self.merged {
            return Err("--svg and --merged name one file: give each its own".to_owned());
        }
        Ok(())
    }
}
