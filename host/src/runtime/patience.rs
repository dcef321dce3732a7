//! How a host waits.

use std::time::{Duration, Instant};

use super::error::{Error, Result};

/// For so long a wait looks again and again: what is done by then is seen at once.
const SPIN: Duration = Duration::from_micros(200);
/// For so long it lets other threads run in between.
const YIELD: Duration = Duration::from_millis(5);
/// And then sleeps, for a hundredth of what it has waited at most.
const SLEEP: Duration = Duration::from_micros(50);

/// Waits until `done`, at most for the limit. Returns whether it is done, which is checked once more after the limit.
pub(crate) fn wait_until(limit: Duration, mut done: impl FnMut() -> Result<bool>) -> Result<bool> {
    let start = Instant::now();
    loop {
        let waited = start.elapsed();
        if done()? {
            return Ok(true);
        }
        if waited >= limit {
            return Ok(false);
        }
        if waited < SPIN {
            std::hint::spin_loop();
        } else if waited < YIELD {
            std::thread::yield_now();
        } else {
            std::thread::sleep(SLEEP.min(limit - waited));
        }
    }
}

/// So much later; a limit that no clock reaches is a year.
pub(crate) fn after(limit: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(limit).unwrap_or(now + Duration::from_secs(365 * 24 * 3600))
}

/// The deadline in `OXTILE_DEADLINE`, in seconds.
pub(crate) fn from_environment() -> Result<Option<Duration>> {
    std::env::var("OXTILE_DEADLINE").ok().map(|text| parse(&text)).transpose()
}

fn parse(text: &str) -> Result<Duration> {
    let seconds = text.trim().parse::<f64>().ok().filter(|seconds| *seconds > 0.0);
    let duration = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    duration.ok_or_else(|| Error::Invalid {
        what: "OXTILE_DEADLINE",
        why: format!("`{text}` is not a number of seconds above 0: leave it out for no deadline"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_done_soon_is_seen_without_a_sleep() {
        // Far less than a sleep's, however many looks it takes.
        let (start, mut looks) = (Instant::now(), 0);
        let done = wait_until(Duration::from_secs(10), || {
            looks += 1;
            Ok(looks > 100)
        });
        assert!(done.unwrap() && start.elapsed() < Duration::from_secs(2));
        assert_eq!(looks, 101);
    }

    #[test]
    fn a_long_wait_sleeps_and_ends_by_its_limit() {
        let (start, mut looks, limit) = (Instant::now(), 0_u32, Duration::from_millis(60));
        let done = wait_until(limit, || {
            looks += u32::from(start.elapsed() > Duration::from_millis(10));
            Ok(false)
        });
        assert!(!done.unwrap() && start.elapsed() >= limit && start.elapsed() < Duration::from_secs(2));
        assert!(looks <= 1001, "{looks} looks in 50 ms of sleeps of 50 us");
        assert!(wait_until(Duration::ZERO, || Ok(true)).unwrap(), "what is done is done, however late");
        assert!(wait_until(limit, || Err(Error::SeenBefore)).is_err());
    }

    #[test]
    fn no_limit_is_too_long() {
        assert!(after(Duration::MAX) > after(Duration::from_secs(3600)));
    }

    #[test]
    fn the_variable_is_a_number_of_seconds() {
        assert_eq!(parse(" 1.5 ").unwrap(), Duration::from_millis(1500));
        for text in ["", "0", "-1", "nan", "inf", "1e300", "soon"] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.starts_with(&format!("OXTILE_DEADLINE: `{text}` is not")), "{error}");
        }
    }
}
