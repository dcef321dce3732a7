//! `oxtile launch`.

use std::{ffi::OsString, time::Duration};

use super::{
    Request, UsageError,
    help::LAUNCH_HELP,
    words::{Word, Words},
};

/// As many processes as a host can be thought to carry.
const MOST_RANKS: u32 = 4096;
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
            Some(Word::Flag(flag)) if flag == "n" || flag == "ranks" => ranks = Some(ranks_of(words)?),
            Some(Word::Flag(flag)) if flag == "grace" => grace = grace_of(words)?,
            Some(Word::Flag(flag)) if flag == "verbose" => verbose = true,
            Some(other) => return Err(words.unexpected(&other)),
        }
    };
    let ranks = words.required(ranks, "-n RANKS")?;
    let program = words.required(program, "PROGRAM")?;
    // What follows the program's name is the program's.
    let arguments = words.rest()?;
    Ok(Request::Launch(Launch { ranks, grace: Duration::from_secs_f64(grace), verbose, program, arguments }))
}

fn ranks_of(words: &mut Words<'_>) -> Result<u32, UsageError> {
    words.number("-n", &format!("a number from 1 to {MOST_RANKS}"), |ranks| (1..=MOST_RANKS).contains(ranks))
}

fn grace_of(words: &mut Words<'_>) -> Result<f64, UsageError> {
    words.number("--grace", &format!("a number of seconds from 0 to {LONGEST_GRACE}"), |grace| (0.0..=LONGEST_GRACE).contains(grace))
}
