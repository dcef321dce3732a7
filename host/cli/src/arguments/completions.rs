//! `oxtile completions`.

use clap::Args;
use clap_complete::Shell;

/// `oxtile completions`.
#[derive(Args, Debug, PartialEq)]
#[command(after_help = MORE)]
pub struct Completions {
    /// The shell
    #[arg(value_enum)]
    pub shell: Shell,
}

const MORE: &str = "\
Examples:
  oxtile completions bash > ~/.local/share/bash-completion/completions/oxtile
  oxtile completions zsh > ~/.zfunc/_oxtile            # with ~/.zfunc in fpath
  oxtile completions fish > ~/.config/fish/completions/oxtile.fish";
