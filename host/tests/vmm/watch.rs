//! What the ranks of this process are doing, to be said when their time is over.

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use oxtile::comm::Rank;
use oxtile::{Error, Result, Stream};

/// The exit status of a process whose time is over.
pub const OVER: i32 = 4;

static DOING: Mutex<BTreeMap<u32, (String, Instant)>> = Mutex::new(BTreeMap::new());

/// What the rank does from now on.
pub fn doing(rank: Rank, what: impl Into<String>) {
    let mut all = DOING.lock().unwrap_or_else(PoisonError::into_inner);
    all.insert(rank.index(), (what.into(), Instant::now()));
}

/// Another limit for a program that is run by hand, in seconds: `OXTILE_TEST_LIMIT`.
pub fn given() -> Option<Duration> {
    std::env::var("OXTILE_TEST_LIMIT").ok()?.parse().ok().map(Duration::from_secs)
}

/// Ends this process after the limit, and says what each rank was at.
pub fn limit(limit: Duration) {
    thread::spawn(move || {
        thread::sleep(limit);
        let all = DOING.lock().unwrap_or_else(PoisonError::into_inner);
        let rank = |(rank, (what, since)): (&u32, &(String, Instant))| format!("rank {rank} for {:.1?} at `{what}`", since.elapsed());
        let ranks: Vec<_> = all.iter().map(rank).collect();
        println!("not done after {limit:?}: {}", if ranks.is_empty() { "no rank had begun".to_owned() } else { ranks.join("; ") });
        let _ = std::io::stdout().flush();
        // What runs at a proper exit may wait for the device that hangs.
        // SAFETY: `_exit` ends the process and touches no memory of it.
        unsafe { libc::_exit(OVER) };
    });
}

/// Waits for a stream, at most so long.
pub fn settle(stream: &Stream) -> Result<()> {
    const LIMIT: Duration = Duration::from_secs(20);
    let (end, begin) = (stream.record()?, Instant::now());
    while !end.is_done()? {
        if begin.elapsed() > LIMIT {
            let what = "the work of a rank's stream".to_owned();
            return Err(Error::Deadline { what, limit: LIMIT, mend: "see which rank did not signal" });
        }
        thread::yield_now();
    }
    Ok(())
}
