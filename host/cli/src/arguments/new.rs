//! `oxtile new`.

use std::path::PathBuf;

use clap::Args;

/// `oxtile new`.
#[derive(Args, Debug, PartialEq)]
#[command(after_help = MORE)]
pub struct New {
    /// The crate's name
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Where the crate goes (default: NAME here)
    #[arg(long, value_name = "FOLDER")]
    pub path: Option<PathBuf>,
    /// The checkout of Oxtile that it depends on by path
    /// (default: the one that this program is of; without one the crate depends on the repository)
    #[arg(long, value_name = "FOLDER", verbatim_doc_comment)]
    pub oxtile: Option<PathBuf>,
}

const MORE: &str = "\
Then, in its folder: cargo test runs the kernel on the emulator, oxtile build compiles it for a GPU. docs/own-crate.md has the rest.

Examples:
  oxtile new my-kernels && cd my-kernels && cargo test";
