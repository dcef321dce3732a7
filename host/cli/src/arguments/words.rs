//! One word after another, and the values that options take.

use std::{ffi::OsString, path::PathBuf, str::FromStr};

use lexopt::{Arg, Parser, ValueExt};

use super::UsageError;

/// One word of the command line. `-h` and `--help` read the same everywhere.
pub enum Word {
    Help,
    Flag(String),
    Value(OsString),
}

/// The words of one command.
pub struct Words<'a> {
    pub parser: &'a mut Parser,
    pub command: Option<&'static str>,
}

impl Words<'_> {
    /// The next word.
    pub fn next(&mut self) -> Result<Option<Word>, UsageError> {
        let command = self.command;
        let word = self.parser.next().map_err(|error| UsageError { command, reason: error.to_string() })?;
        Ok(word.map(|word| match word {
            Arg::Short('h') | Arg::Long("help") => Word::Help,
            Arg::Short('V') => Word::Flag("version".into()),
            Arg::Short('i') => Word::Flag("input".into()),
            Arg::Short('o') => Word::Flag("output".into()),
            Arg::Short(other) => Word::Flag(other.into()),
            Arg::Long(flag) => Word::Flag(flag.into()),
            Arg::Value(value) => Word::Value(value),
        }))
    }

    /// An error of this command.
    pub fn error(&self, reason: impl Into<String>) -> UsageError {
        UsageError { command: self.command, reason: reason.into() }
    }

    /// The error for a word that has no place here.
    pub fn unexpected(&self, word: &Word) -> UsageError {
        let shown = match word {
            Word::Help => "--help".into(),
            Word::Flag(flag) => format!("--{flag}"),
            Word::Value(value) => value.to_string_lossy().into_owned(),
        };
        self.error(format!("unexpected argument {shown:?}"))
    }

    /// The option's value as a path, which is not empty.
    pub fn path(&mut self, flag: &str) -> Result<PathBuf, UsageError> {
        let value = self.parser.value().map_err(|error| self.error(error.to_string()))?;
        if value.is_empty() { Err(self.error(format!("{flag} \"\" names no file"))) } else { Ok(value.into()) }
    }

    /// The option's values, up to the next option, as paths, which are not empty.
    pub fn paths(&mut self, flag: &str) -> Result<Vec<PathBuf>, UsageError> {
        let command = self.command;
        let values = self.parser.values().map_err(|error| UsageError { command, reason: error.to_string() })?;
        let paths: Vec<PathBuf> = values.map(PathBuf::from).collect();
        match paths.iter().any(|path| path.as_os_str().is_empty()) {
            true => Err(self.error(format!("{flag} \"\" names no file"))),
            false => Ok(paths),
        }
    }

    /// The option's value as text.
    pub fn text(&mut self) -> Result<String, UsageError> {
        let value = self.parser.value().and_then(|value| value.string());
        value.map_err(|error| self.error(error.to_string()))
    }

    /// The option's value as a number that `is_good`; `expected` says which.
    pub fn number<T: FromStr>(&mut self, flag: &str, expected: &str, is_good: impl Fn(&T) -> bool) -> Result<T, UsageError> {
        let value = self.parser.value().map_err(|error| self.error(error.to_string()))?;
        let number = value.to_str().and_then(|text| text.parse().ok()).filter(is_good);
        number.ok_or_else(|| self.error(format!("{flag} {value:?} is not {expected}")))
    }

    /// The option's value as what random numbers are drawn from.
    pub fn seed(&mut self, flag: &str) -> Result<u64, UsageError> {
        self.number(flag, "a whole number from 0 to 18446744073709551615", |_| true)
    }

    /// The option's value as one of a few names.
    pub fn choice<T: Copy>(&mut self, flag: &str, choices: &[(&str, T)]) -> Result<T, UsageError> {
        let value = self.parser.value().map_err(|error| self.error(error.to_string()))?;
        let chosen = choices.iter().find(|(name, _)| value == *name).map(|&(_, choice)| choice);
        chosen.ok_or_else(|| {
            let names: Vec<_> = choices.iter().map(|&(name, _)| name).collect();
            self.error(format!("{flag} {value:?} is none of: {}", names.join(", ")))
        })
    }

    /// All words that are left, as they are.
    pub fn rest(&mut self) -> Result<Vec<OsString>, UsageError> {
        let command = self.command;
        let rest = self.parser.raw_args().map_err(|error| UsageError { command, reason: error.to_string() })?;
        Ok(rest.collect())
    }

    /// What must have been given.
    pub fn required<T>(&self, value: Option<T>, what: &str) -> Result<T, UsageError> {
        value.ok_or_else(|| self.error(format!("{what} is missing")))
    }
}
