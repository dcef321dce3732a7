//! `oxtile doctor`.

use super::{
    Request, UsageError,
    help::DOCTOR_HELP,
    words::{Word, Words},
};

/// `oxtile doctor`.
#[derive(Debug, PartialEq)]
pub struct Doctor {
    /// JSON instead of lines.
    pub json: bool,
}

pub(super) fn parse(words: &mut Words<'_>) -> Result<Request, UsageError> {
    let mut json = false;
    while let Some(word) = words.next()? {
        match word {
            Word::Help => return Ok(Request::Help(DOCTOR_HELP)),
            Word::Flag(flag) if flag == "json" => json = true,
            other => return Err(words.unexpected(&other)),
        }
    }
    Ok(Request::Doctor(Doctor { json }))
}
