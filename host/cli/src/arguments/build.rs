//! `oxtile build`.

use std::path::PathBuf;

use clap::Args;
use oxtile_build::Arch;

/// `oxtile build`.
#[derive(Args, Debug, PartialEq)]
#[command(after_help = MORE)]
pub struct Build {
    /// Cargo.toml of the crate that holds the kernels
    #[arg(long = "manifest-path", value_name = "FILE", default_value = "Cargo.toml")]
    pub manifest: PathBuf,
    /// Architectures by ptxas's names, as sm_80, sm_90a, sm_100a, sm_120a (default: sm_90a)
    #[arg(long = "arch", value_name = "ARCH,...", value_delimiter = ',', value_parser = arch)]
    pub archs: Vec<Arch>,
    /// Build the kernels of one family, a module of the crate, alone (default: all)
    #[arg(long)]
    pub family: Option<String>,
    /// Where manifest.json, PTX and cubins go (default: target/oxtile/kernels/PACKAGE)
    #[arg(long, value_name = "FOLDER")]
    pub out_dir: Option<PathBuf>,
    /// Compile bounds checks in
    #[arg(long)]
    pub checked: bool,
    /// Keep line tables, by which Nsight Compute shows the kernels' source lines
    #[arg(long)]
    pub line_tables: bool,
    /// Write registers, instructions and collectives into ratchet/ beside Cargo.toml; later builds are held to them
    /// (default: compare, where there is such a folder)
    #[arg(long, verbatim_doc_comment)]
    pub accept: bool,
}

const MORE: &str = "\
The table of kernels is printed also where they may not be used, for which standard error has the reasons and the status is 1.

Examples:
  oxtile build --arch sm_90a
  oxtile build --manifest-path kernels/Cargo.toml --arch sm_80,sm_90a --accept";

/// An architecture by its name.
fn arch(text: &str) -> Result<Arch, String> {
    text.trim().parse::<Arch>().map_err(|error| error.to_string())
}
