//! `oxtile launch`.

use std::{ffi::OsString, time::Duration};

use oxtile::comm::bootstrap::MOST_RANKS;

use super::{
    Request, UsageError,
    help::LAUNCH_HELP,
    words::{Word, Words},
};

/// The longest wait that makes sense, in seconds: an hour.
const LONGEST_WAIT: f64 = 3600.0;

/// `oxtile launch`.
#[derive(Debug, PartialEq)]
pub struct Launch {
    /// How many ranks.
    pub ranks: u32,
    /// How long ranks have to end when they are asked to.
    pub grace: Duration,
    /// How long their last output waits for a reader that takes nothing.
    pub drain: Duration,
    /// Print a line also when all went well.
    pub verbose: bool,
    /// What each rank runs.
    pub program: OsString,
    /// Its arguments.
    pub arguments: Vec<OsString>,
}

pub(super) fn parse(words: &mut Words<'_>) -> Result<Request, UsageError> {
    let (mut ranks, mut grace, mut drain, mut verbose) = (None, Duration::from_secs(5), Duration::from_secs(60), false);
    let program = loop {
        match words.next()? {
            None => break None,
            Some(Word::Help) => return Ok(Request::Help(LAUNCH_HELP)),
            Some(Word::Value(program)) => break Some(program),
            Some(Word::Flag(flag)) if flag == "n" || flag == "ranks" => ranks = Some(ranks_of(words)?),
            Some(Word::Flag(flag)) if flag == "grace" => grace = wait_of(words, "--grace")?,
            Some(Word::Flag(flag)) if flag == "drain" => drain = wait_of(words, "--drain")?,
            Some(Word::Flag(flag)) if flag == "verbose" => verbose = true,
            Some(other) => return Err(words.unexpected(&other)),
        }
    };
    let ranks = words.required(ranks, "-n RANKS")?;
    let program = words.required(program, "PROGRAM")?;
    // What follows the program's name is the program's.
    let arguments = words.rest()?;
    Ok(Request::Launch(Launch { ranks, grace, drain, verbose, program, arguments }))
}

fn ranks_of(words: &mut Words<'_>) -> Result<u32, UsageError> {
    words.number("-n", &format!("a number from 1 to {MOST_RANKS}"), |ranks| (1..=MOST_RANKS).contains(ranks))
}

fn wait_of(words: &mut Words<'_>, flag: &str) -> Result<Duration, UsageError> {
    let expected = format!("a number of seconds from 0 to {LONGEST_WAIT}");
    words.number(flag, &expected, |wait| (0.0..=LONGEST_WAIT).contains(wait)).map(Duration::from_secs_f64)
}
