//! `oxtile man`.

use std::path::PathBuf;

use clap::Args;

/// `oxtile man`.
#[derive(Args, Debug, PartialEq)]
#[command(after_help = MORE)]
pub struct Man {
    /// The command whose page is printed (default: that of oxtile itself)
    #[arg(value_name = "COMMAND", value_parser = command)]
    pub command: Option<String>,
    /// Write the pages of oxtile and all commands there: oxtile.1, oxtile-quantize.1 and so on
    #[arg(long, value_name = "FOLDER", conflicts_with = "command")]
    pub out_dir: Option<PathBuf>,
}

const MORE: &str = "\
Examples:
  oxtile man quantize | man -l -
  oxtile man --out-dir ~/.local/share/man/man1";

/// A command's name.
fn command(text: &str) -> Result<String, String> {
    let line = super::command_line();
    let names: Vec<_> = line.get_subcommands().map(clap::Command::get_name).collect();
    if names.contains(&text) { Ok(text.to_owned()) } else { Err(format!("the commands are {}", names.join(", "))) }
}
