//! An operation on given memory.

use std::fmt;

use super::error::Result;
use super::stream::Stream;

/// An operation on given memory, such as a multiplication of given matrices: ready to be enqueued any number of times, in a graph's capture
/// too.
pub struct Bound<'a>(Box<Operation<'a>>);

type Operation<'a> = dyn FnMut(&Stream) -> Result<()> + Send + 'a;

impl<'a> Bound<'a> {
    /// What `run` enqueues.
    pub(crate) fn new(run: impl FnMut(&Stream) -> Result<()> + Send + 'a) -> Self {
        Self(Box::new(run))
    }

    /// Operations one after the other; of none, nothing is enqueued.
    pub(crate) fn in_turn(mut operations: Vec<Self>) -> Self {
        Self::new(move |stream| operations.iter_mut().try_for_each(|operation| operation.run(stream)))
    }

    /// Enqueues the operation. What an earlier part enqueued stays enqueued if a later one fails.
    ///
    /// # Errors
    /// As [`Loaded::launch`](super::Loaded::launch); an error of the library that the operation calls.
    pub fn run(&mut self, stream: &Stream) -> Result<()> {
        (self.0)(stream)
    }
}

impl fmt::Debug for Bound<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bound").finish_non_exhaustive()
    }
}
