//! A command line that makes no sense, in one line.

use clap::{
    Command,
    error::{ContextKind, ContextValue, ErrorKind},
};

/// A command line that makes no sense.
#[derive(Debug, thiserror::Error)]
#[error("{reason}; `oxtile {}--help` shows the usage", .command.as_ref().map_or(String::new(), |command| format!("{command} ")))]
pub struct UsageError {
    command: Option<String>,
    reason: String,
}

impl UsageError {
    /// An error of the command that has this name, or of `oxtile` itself where none has.
    pub(super) fn new(line: &mut Command, name: &str, reason: String) -> Self {
        let command = line.find_subcommand(name).map(|command| command.get_name().to_owned()).filter(|name| name != "help");
        Self { command, reason }
    }

    /// What clap says, without the usage, and with all that could be meant where nothing is near.
    pub(super) fn of(error: &clap::Error, line: &mut Command, name: &str) -> Self {
        let mut reason = one_line(&error.render().to_string());
        let has = |kind| error.get(kind).is_some();
        let is_option = matches!(error.get(ContextKind::InvalidArg), Some(ContextValue::String(word)) if word.starts_with('-'));
        match error.kind() {
            ErrorKind::UnknownArgument if is_option && !has(ContextKind::SuggestedArg) => {
                reason.push_str(&format!("; the options are {}", options(line, name).join(", ")));
            }
            ErrorKind::InvalidSubcommand if !has(ContextKind::SuggestedSubcommand) => {
                let names: Vec<_> = line.get_subcommands().map(Command::get_name).collect();
                reason.push_str(&format!("; the commands are {}", names.join(", ")));
            }
            _ => {}
        }
        Self::new(line, name, reason)
    }
}

/// The options of a command, or of `oxtile` itself.
fn options(line: &mut Command, name: &str) -> Vec<String> {
    // Only then it has `--help`.
    line.build();
    let command = line.find_subcommand(name).unwrap_or(line);
    command.get_arguments().filter_map(|argument| argument.get_long()).map(|long| format!("--{long}")).collect()
}

/// The lines of an error of clap as one, up to the usage.
fn one_line(text: &str) -> String {
    let text = text.strip_prefix("error: ").unwrap_or(text);
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let mut joined = String::new();
    for line in lines.take_while(|line| !line.starts_with("Usage: ") && !line.starts_with("For more information")) {
        match line {
            _ if joined.is_empty() => {}
            tip if tip.starts_with("tip: ") => joined.push_str("; "),
            _ => joined.push(' '),
        }
        joined.push_str(line);
    }
    joined
}
