//! `oxtile doctor`.

use clap::Args;

/// `oxtile doctor`.
#[derive(Args, Debug, PartialEq)]
#[command(after_help = MORE)]
pub struct Doctor {
    /// Print one JSON document instead of lines
    #[arg(long)]
    pub json: bool,
}

const MORE: &str = "\
driver     NVIDIA's driver, and the newest CUDA that it is for
gpu        each GPU, its compute capability and memory
nccl       the NCCL library that ranks on GPUs use, and its version; nvshmem: NVSHMEM's host library
symmetric  the back ends of memory that ranks share: which can be used here, and why not the others
kernels    the compiled kernels: for which architectures, and whether they are those of this program
launch     what a launcher has told this process (RANK, WORLD_SIZE, ...)

Each line begins with ok, absent or BROKEN. Nothing is needed for the emulator. The status is 0 unless something is broken: there, or
named by a variable, and not working.

Examples:
  oxtile doctor
  oxtile launch -n 2 -- oxtile doctor";
