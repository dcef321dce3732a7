//! `oxtile completions`: a script that completes commands and options in a shell.

use crate::arguments::{self, command_line};

/// The script, for the shell to read at its start.
pub fn script(request: &arguments::Completions) -> String {
    let mut script = Vec::new();
    clap_complete::generate(request.shell, &mut command_line(), "oxtile", &mut script);
    String::from_utf8(script).expect("a script is text")
}
