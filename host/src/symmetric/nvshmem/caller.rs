//! A deadline for calls that have none: the thread that makes them.

use std::sync::Mutex;
use std::sync::mpsc::{Sender, channel, sync_channel};
use std::thread;
use std::time::Duration;

use crate::runtime::{Error, Result, lock};

/// The one thread that calls a library. A call that does not return in time is left to it, and no other is made.
pub(super) struct Caller {
    calls: Sender<Box<dyn FnOnce() + Send>>,
    /// The call that did not return. Locked while a call is made.
    failure: Mutex<Option<Error>>,
}

impl Caller {
    /// # Errors
    /// [`Error::Invalid`] if the system has no thread.
    pub fn start() -> Result<Self> {
        let (calls, inbox) = channel::<Box<dyn FnOnce() + Send>>();
        let run = move || inbox.into_iter().for_each(|call| call());
        let none = |error| Error::Invalid { what: "NVSHMEM", why: format!("there is no thread for its calls: {error}") };
        thread::Builder::new().name("nvshmem".into()).spawn(run).map_err(none)?;
        Ok(Self { calls, failure: Mutex::default() })
    }

    /// Makes a call, and waits for it at most for the deadline.
    ///
    /// # Errors
    /// [`Error::Deadline`], for this call and all after it.
    pub fn call<R: Send + 'static>(&self, what: &'static str, limit: Duration, call: impl FnOnce() -> R + Send + 'static) -> Result<R> {
        let mut failure = lock(&self.failure);
        if let Some(error) = &*failure {
            return Err(error.clone());
        }
        let (answer, result) = sync_channel(1);
        let sent = self.calls.send(Box::new(move || _ = answer.send(call())));
        if let Some(result) = sent.ok().and_then(|()| result.recv_timeout(limit).ok()) {
            return Ok(result);
        }
        let mend = "a rank did not come to the same call: see which one ended or is elsewhere; NVSHMEM is of no more use in this process";
        Err(failure.insert(Error::Deadline { what: what.to_owned(), limit, mend }).clone())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_call_that_does_not_return_is_the_last() {
        let caller = Caller::start().unwrap();
        assert_eq!(caller.call("nvshmem_one", Duration::from_secs(10), || 1).unwrap(), 1);
        let (start, limit) = (Instant::now(), Duration::from_millis(30));
        let (_never, wait) = channel::<()>();
        let error = caller.call("nvshmem_malloc", limit, move || wait.recv()).unwrap_err();
        assert!(matches!(&error, Error::Deadline { .. }) && error.to_string().starts_with("nvshmem_malloc"), "{error}");
        let after = caller.call("nvshmem_two", Duration::from_secs(10), || panic!("it is not made")).map(|()| 0).unwrap_err();
        assert_eq!(after.to_string(), error.to_string());
        assert!(start.elapsed() < Duration::from_secs(5));
    }
}
