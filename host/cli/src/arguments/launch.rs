//! `oxtile launch`.

use std::{ffi::OsString, time::Duration};

use super::{
    Request, UsageError,
    help::LAUNCH_HELP,
    words::{Word, Words},
};

/// The longest grace that makes sense: an hour.
const LONGEST_GRACE: f64 = 3600.0;

/// `oxtile launch`.
#[derive(Debug, PartialEq)]
pub struct Launch {
    /// How many ranks.
    pub ranks: u32,
    /// How long ranks have to end when they are asked to.
    pub grace: Duration,
    /// Say also when all went well.
    pub verbose: bool,
    /// What each rank runs.
    pub program: OsString,
    /// Its arguments.
    pub arguments: Vec<OsString>,
}

pub(super) fn parse(words: &mut Words<'_>) -> Result<Request, UsageError> {
    let (mut ranks, mut grace, mut verbose) = (None, 5.0, false);
    let program = loop {
        match words.next()? {
            None => break None,
            Some(Word::Help) => return Ok(Request::Help(LAUNCH_HELP)),
            Some(Word::Value(program)) => break Some(program),
            Some(Word::Flag(flag)) if flag == "n" || flag == "ranks" => ranks = Some(words.number::<u32>("-n")?),
            Some(Word::Flag(flag)) if flag == "grace" => grace = words.number("--grace")?,
            Some(Word::Flag(flag)) if flag == "verbose" => verbose = true,
            Some(other) => return Err(words.unexpected(&other)),
        }
    };
    let ranks = words.required(ranks, "-n RANKS")?;
    if !(1..=4096).contains(&ranks) {
        return Err(words.error(format!("-n {ranks} is not a number from 1 to 4096")));
    }
    if !(0.0..=LONGEST_GRACE).contains(&grace) {
        return Err(words.error(format!("--grace {grace} is not a number of seconds from 0 to {LONGEST_GRACE}")));
    }
    let program = words.required(program, "PROGRAM")?;
    // What follows the program's name is the program's.
    let arguments = words.rest()?;
    Ok(Request::Launch(Launch { ranks, grace: Duration::from_secs_f64(grace), verbose, program, arguments }))
}
