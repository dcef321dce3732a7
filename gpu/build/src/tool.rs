//! Running other programs.

use std::{
    env,
    path::PathBuf,
    process::{Command, Output},
};

use crate::Error;

/// Runs a command and returns what it wrote to its standard output.
pub(crate) fn output(what: &str, command: &mut Command) -> Result<String, Error> {
    let output = run(what, command)?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs a command; an error status is an error that shows everything it wrote.
pub(crate) fn run(what: &str, command: &mut Command) -> Result<Output, Error> {
    let spawned = command.output();
    let output = spawned.map_err(|source| Error::Spawn { program: command.get_program().to_string_lossy().into_owned(), source })?;
    if output.status.success() {
        return Ok(output);
    }
    let text = [&output.stderr, &output.stdout].map(|bytes| String::from_utf8_lossy(bytes).into_owned()).concat();
    let words = std::iter::once(command.get_program()).chain(command.get_args()).map(|word| word.to_string_lossy());
    Err(Error::Failed { what: what.into(), command: words.collect::<Vec<_>>().join(" "), output: text })
}

/// A word as a shell takes it for one.
pub(crate) fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "_-./=:,@%+".contains(c);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

/// The program of this name in PATH.
pub(crate) fn in_path(program: &str) -> Option<PathBuf> {
    env::split_paths(&env::var_os("PATH")?).map(|folder| folder.join(program)).find(|path| path.is_file())
}

/// Whether a program of this name is in PATH.
pub(crate) fn exists(program: &str) -> bool {
    in_path(program).is_some()
}
