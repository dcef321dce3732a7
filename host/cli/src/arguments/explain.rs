//! `oxtile explain`.

use std::path::PathBuf;

use clap::{Args, builder::NonEmptyStringValueParser};

/// `oxtile explain`.
#[derive(Args, Debug, PartialEq)]
#[command(after_help = MORE)]
pub struct Explain {
    /// The kernel's entry, or how the names of several begin
    #[arg(value_name = "KERNEL", value_parser = NonEmptyStringValueParser::new())]
    pub kernel: String,
    /// What runs have shown, as OXTILE_EXPLAIN=FOLDER had it written
    #[arg(long, value_name = "FOLDER", default_value = "target/oxtile/explain")]
    pub records: PathBuf,
    /// Compiled kernels, as oxtile build writes them
    #[arg(long, value_name = "FOLDER", default_value = "target/oxtile/kernels")]
    pub kernels: PathBuf,
    /// Draw there: KERNEL.box1.svg, how a box of a tensor map lies in shared memory, and KERNEL.stages.svg, phases of
    /// mbarriers over time
    #[arg(long, value_name = "FOLDER", verbatim_doc_comment)]
    pub svg: Option<PathBuf>,
}

const MORE: &str = "\
Registers and occupancy are those of compiled kernels. Bank conflicts and uncoalesced accesses by source line, fields of shared
memory, boxes and phases are those of runs: of any test that launches the kernel on a checked runtime. Times of phases are steps
of the emulator's scheduler.

Examples:
  OXTILE_EXPLAIN=target/oxtile/explain cargo test && oxtile explain attention_forward
  oxtile explain scale__f32 --svg pictures";
