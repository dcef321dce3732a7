//! `oxtile new`.

use std::path::PathBuf;

use super::{
    Request, UsageError,
    help::NEW_HELP,
    words::{Word, Words},
};

/// `oxtile new`.
#[derive(Debug, PartialEq)]
pub struct New {
    /// The name of the crate.
    pub name: String,
    /// Its folder; by default one of its name, here.
    pub path: Option<PathBuf>,
    /// The checkout of Oxtile that it depends on.
    pub oxtile: Option<PathBuf>,
}

pub(super) fn parse(words: &mut Words<'_>) -> Result<Request, UsageError> {
    let (mut name, mut path, mut oxtile) = (None, None, None);
    while let Some(word) = words.next()? {
        match &word {
            Word::Help => return Ok(Request::Help(NEW_HELP)),
            Word::Value(value) if name.is_none() => name = Some(value.to_string_lossy().into_owned()),
            Word::Value(_) => return Err(words.unexpected(&word)),
            Word::Flag(flag) => match flag.as_str() {
                "path" => path = Some(words.path("--path")?),
                "oxtile" => oxtile = Some(words.path("--oxtile")?),
                _ => return Err(words.unexpected(&word)),
            },
        }
    }
    let name = words.required(name, "NAME")?;
    Ok(Request::New(New { name, path, oxtile }))
}
