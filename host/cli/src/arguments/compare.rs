//! `oxtile compare`.

use std::path::PathBuf;

use super::{
    Request, UsageError,
    help::COMPARE_HELP,
    words::{Word, Words},
};

/// `oxtile compare`.
#[derive(Debug, PartialEq)]
pub struct Compare {
    /// The file that counts as right.
    pub reference: PathBuf,
    /// The file that is measured against it.
    pub other: PathBuf,
    /// The largest relative error of a tensor that is no failure; none is any.
    pub max_relative: Option<f64>,
    /// JSON instead of tables.
    pub json: bool,
}

pub(super) fn parse(words: &mut Words<'_>) -> Result<Request, UsageError> {
    let (mut files, mut max_relative, mut json) = (Vec::new(), None, false);
    while let Some(word) = words.next()? {
        match word {
            Word::Help => return Ok(Request::Help(COMPARE_HELP)),
            Word::Value(file) if files.len() < 2 => files.push(PathBuf::from(file)),
            Word::Flag(flag) if flag == "json" => json = true,
            Word::Flag(flag) if flag == "max-relative" => max_relative = Some(bound(words)?),
            other => return Err(words.unexpected(&other)),
        }
    }
    let mut files = files.into_iter();
    let (reference, other) = (words.required(files.next(), "REFERENCE")?, words.required(files.next(), "OTHER")?);
    Ok(Request::Compare(Compare { reference, other, max_relative, json }))
}

fn bound(words: &mut Words<'_>) -> Result<f64, UsageError> {
    words.number("--max-relative", "a number from 0 on", |bound| *bound >= 0.0)
}
