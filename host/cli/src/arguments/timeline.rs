//! `oxtile timeline`.

use std::path::PathBuf;

use super::{
    Request, UsageError,
    help::TIMELINE_HELP,
    words::{Word, Words},
};

/// `oxtile timeline`.
#[derive(Debug, PartialEq)]
pub struct Timeline {
    /// The recordings.
    pub files: Vec<PathBuf>,
    /// The picture to be drawn, if any.
    pub svg: Option<PathBuf>,
    /// The file that holds them all, to be written, if any.
    pub merged: Option<PathBuf>,
}

pub(super) fn parse(words: &mut Words<'_>) -> Result<Request, UsageError> {
    let (mut files, mut svg, mut merged) = (Vec::new(), None, None);
    while let Some(word) = words.next()? {
        match word {
            Word::Help => return Ok(Request::Help(TIMELINE_HELP)),
            Word::Value(value) => files.push(value.into()),
            Word::Flag(ref flag) => match flag.as_str() {
                "svg" => svg = Some(words.path("--svg")?),
                "merged" => merged = Some(words.path("--merged")?),
                _ => return Err(words.unexpected(&word)),
            },
        }
    }
    if files.is_empty() {
        return Err(words.error("FILE is missing"));
    }
    if svg.is_none() && merged.is_none() {
        return Err(words.error("--svg OUT or --merged OUT is missing"));
    }
    if svg == merged {
        return Err(words.error("--svg and --merged name one file"));
    }
    Ok(Request::Timeline(Timeline { files, svg, merged }))
}
