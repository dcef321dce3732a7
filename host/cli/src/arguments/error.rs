//! A command line that makes no sense, in one line.

use std::ffi::OsString;

use clap::{
    Command, ValueHint,
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

    /// What clap says of these words, without the usage, and with all that could be meant where nothing is near.
    pub(super) fn of(error: &clap::Error, line: &mut Command, words: &[OsString]) -> Self {
        let name = words.first().and_then(|word| word.to_str()).unwrap_or_default();
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
        if let Some(word) = dashed_file(error, line, words) {
            reason.push_str(&format!("; if '{word}' is a file, write './{word}'"));
        }
        Self::new(line, name, reason)
    }
}

/// The word that clap took for options of one letter, of a command that takes a path, which the word may be: `-model.safetensors`.
fn dashed_file<'a>(error: &clap::Error, line: &mut Command, words: &'a [OsString]) -> Option<&'a str> {
    let Some(ContextValue::String(argument)) = error.get(ContextKind::InvalidArg) else { return None };
    let (name, rest) = words.split_first()?;
    let is_file = |word: &&str| word.len() > 2 && word.starts_with('-') && !word.starts_with("--");
    let words = || rest.iter().filter_map(|word| word.to_str());
    let word = match error.kind() {
        ErrorKind::UnknownArgument => words().find(|word| is_file(word) && word.starts_with(argument.as_str())),
        // The word after the option that has no value: `-i`, or `--input` of `--input <FILE>`.
        ErrorKind::InvalidValue => {
            let long = argument.split_whitespace().next();
            let command = line.find_subcommand(name)?;
            let option =
                command.get_arguments().find(|argument| argument.get_long().is_some_and(|name| long == Some(&format!("--{name}"))))?;
            let is_option = |word: &str| Some(word) == long || option.get_short().is_some_and(|short| word == format!("-{short}"));
            words().skip_while(|word| !is_option(word)).nth(1).filter(is_file)
        }
        _ => None,
    }?;
    let takes_path = |command: &Command| command.get_arguments().any(|argument| argument.get_value_hint() == ValueHint::AnyPath);
    line.find_subcommand(name).filter(|command| takes_path(command)).map(|_| word)
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
            // It names the first letter of a word alone.
            tip if tip.starts_with("tip: to pass '-") && !tip.starts_with("tip: to pass '--") => continue,
            tip if tip.starts_with("tip: ") => joined.push_str("; "),
            _ => joined.push(' '),
        }
        joined.push_str(line);
    }
    joined
}
