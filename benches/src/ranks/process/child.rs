//! What the process of a rank does.

use std::process;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use oxtile::Runtime;
use oxtile::comm::HostRank;
use rustix::process::{Signal, set_parent_process_death_signal};

use super::{Begin, FromRank, Opened, ToRank};
use crate::ranks::Request;
use crate::ranks::gate::Gate;
use crate::ranks::workers::Seat;

/// How long ranks wait for one another to come.
const JOINING: Duration = Duration::from_secs(120);

/// Is a rank: does what its standard input asks for, until that says that there is no more.
///
/// # Errors
/// The first message is none; a panic.
pub fn serve_process() -> Result<()> {
    // A rank whose program has been killed must not keep its GPU.
    set_parent_process_death_signal(Some(Signal::KILL)).context("a rank cannot be ended with the program that started it")?;
    let mut first = String::new();
    std::io::stdin().read_line(&mut first)?;
    let begin = match serde_json::from_str(&first) {
        Ok(ToRank::Begin(begin)) => begin,
        Ok(other) => bail!("a rank begins with `begin`, not with {other:?}: start ranks by --ranks N"),
        Err(error) => bail!("the first line is no message ({error}): start ranks by --ranks N"),
    };
    let (requests, incoming) = sync_channel(1);
    let (openings, opened) = sync_channel(1);
    let (answers, results) = sync_channel(1);
    thread::spawn(move || listen(&requests, &openings));
    let serving = thread::spawn(move || match seat(&begin, Gate::of_process(opened)) {
        Ok(seat) => begin.errand.serve(seat, &incoming, &answers),
        // The answer to whatever is asked first.
        Err(error) => _ = answers.send(Err(error)),
    });
    for answer in results {
        FromRank::Answer(answer.map_err(|error| format!("{error:#}"))).send()?;
    }
    serving.join().map_err(|_| anyhow!("the rank panicked"))
}

/// Joins the other ranks.
fn seat(begin: &Begin, gate: Gate) -> Result<Seat> {
    let (environment, runtime) = (begin.environment()?, Runtime::cuda()?);
    let device = runtime.device(environment.local_rank)?;
    let rank = HostRank::connect(&environment, &device, JOINING)?;
    Ok(Seat { rank, runtime, id: Some(begin.id()?), emulated: None, gate: Arc::new(gate) })
}

/// Hands messages on.
fn listen(requests: &SyncSender<Request>, openings: &SyncSender<Opened>) {
    for line in std::io::stdin().lines().map_while(Result::ok) {
        // A rank that has failed reads no more: its program has the reason.
        match serde_json::from_str(&line) {
            Ok(ToRank::Work(request)) => _ = requests.send(request),
            Ok(ToRank::Opened(opened)) => _ = openings.send(opened),
            Ok(ToRank::End) => return,
            Ok(ToRank::Begin(_)) | Err(_) => break,
        }
    }
    // Nothing of a rank outlives the program that started it.
    process::exit(1);
}
