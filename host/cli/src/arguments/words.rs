//! One word after another, and the values that options take.

use std::{ffi::OsString, path::PathBuf, str::FromStr};

use lexopt::{Arg, Parser, ValueExt};

use super::{Request, UsageError};

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
    /// The options so far.
    pub seen: Vec<String>,
}

/// Options that may come several times.
const REPEATED: [&str; 4] = ["input of join", "inputs of join", "arch of build", "help"];
/// The most letters in which a word and what was meant differ.
const MOST_LETTERS: usize = 2;

impl Words<'_> {
    /// The next word.
    pub fn next(&mut self) -> Result<Option<Word>, UsageError> {
        let command = self.command;
        let word = self.parser.next().map_err(|error| UsageError { command, reason: error.to_string() })?;
        let word = word.map(|word| match word {
            Arg::Short('h') | Arg::Long("help") => Word::Help,
            Arg::Short('V') => Word::Flag("version".into()),
            Arg::Short('i') => Word::Flag("input".into()),
            Arg::Short('o') => Word::Flag("output".into()),
            Arg::Short(other) => Word::Flag(other.into()),
            Arg::Long(flag) => Word::Flag(flag.into()),
            Arg::Value(value) => Word::Value(value),
        });
        match &word {
            Some(Word::Value(value)) if value.is_empty() => return Err(self.error("\"\" names nothing: leave it out, or name a file")),
            Some(Word::Flag(flag)) => {
                let is_repeated = REPEATED.contains(&&*format!("{flag} of {}", command.unwrap_or_default()));
                if self.seen.contains(flag) && !is_repeated {
                    return Err(self.error(format!("{} is given twice: leave one of them out", shown(flag))));
                }
                self.seen.push(flag.clone());
            }
            _ => {}
        }
        Ok(word)
    }

    /// An error of this command.
    pub fn error(&self, reason: impl Into<String>) -> UsageError {
        UsageError { command: self.command, reason: reason.into() }
    }

    /// The error for a word that has no place here.
    pub fn unexpected(&self, word: &Word) -> UsageError {
        let shown = match word {
            Word::Help => "--help".into(),
            Word::Flag(flag) => shown(flag),
            Word::Value(value) => return self.error(format!("unexpected argument {:?}", value.to_string_lossy())),
        };
        let options = options(self.command);
        let words: Vec<&str> = options.iter().map(String::as_str).collect();
        self.error(format!("unexpected argument {shown:?}{}", meant(&shown, &words, "options")))
    }

    /// An option's value as a file's name.
    fn file(&self, flag: &str, value: &OsString) -> Result<PathBuf, UsageError> {
        let text = value.to_string_lossy();
        if value.is_empty() {
            return Err(self.error(format!("{flag} \"\" names no file")));
        }
        if text.starts_with("--") {
            return Err(
                self.error(format!("{flag} is followed by {text:?}, which is an option: name a file (./{text} for one of this name)"))
            );
        }
        Ok(value.into())
    }

    /// The option's value as a path, which is not empty.
    pub fn path(&mut self, flag: &str) -> Result<PathBuf, UsageError> {
        let value = self.parser.value().map_err(|error| self.error(error.to_string()))?;
        self.file(flag, &value)
    }

    /// The option's values, up to the next option, as paths, which are not empty.
    pub fn paths(&mut self, flag: &str) -> Result<Vec<PathBuf>, UsageError> {
        let command = self.command;
        let values = self.parser.values().map_err(|error| UsageError { command, reason: error.to_string() })?;
        let values: Vec<_> = values.collect();
        values.iter().map(|value| self.file(flag, value)).collect()
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

/// An option as it is typed.
fn shown(flag: &str) -> String {
    if flag.chars().count() == 1 { format!("-{flag}") } else { format!("--{flag}") }
}

/// The options that the help of a command names.
fn options(command: Option<&str>) -> Vec<String> {
    let Ok(Request::Help(text)) = super::parse(command.into_iter().chain(["--help"])) else { return Vec::new() };
    let is_part = |c: char| c.is_ascii_lowercase() || c == '-';
    let mut options: Vec<String> = text
        .match_indices("--")
        .filter(|(at, _)| !text[..*at].ends_with(is_part))
        .map(|(at, _)| text[at..].chars().take_while(|c| is_part(*c)).collect::<String>())
        .filter(|option| option.len() > 3)
        .collect();
    options.sort();
    options.dedup();
    options
}

/// What was meant by a word, or all that it could be.
pub fn meant(word: &str, choices: &[&str], what: &str) -> String {
    let near = choices.iter().map(|choice| (letters(word, choice), choice)).min();
    match near {
        Some((letters, choice)) if letters <= MOST_LETTERS => format!("; did you mean {choice}?"),
        Some(_) => format!("; the {what} are {}", choices.join(", ")),
        None => String::new(),
    }
}

/// In how many letters two words differ: how many are changed, left out, added, or in each other's place.
fn letters(a: &str, b: &str) -> usize {
    let [a, b] = [a, b].map(|word| word.chars().take(64).collect::<Vec<_>>());
    let mut rows = vec![(0..=b.len()).collect::<Vec<_>>()];
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let mut least = (rows[i - 1][j] + 1).min(row[j - 1] + 1).min(rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]));
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                least = least.min(rows[i - 2][j - 2] + 1);
            }
            row.push(least);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}
