//! The order in which a pass by traded heads makes its work, and on which streams.

use std::iter;
use std::sync::{Mutex, MutexGuard};

use oxtile_tile::launch::BufferAccess;

use super::carrier::Carrier;
use super::core::check_captures;
use super::lane::Trade;
use super::memory::note;
use crate::runtime::runtime::lock;
use crate::runtime::{Result, Stream};

/// What carries heads, for the passes of an operation.
pub(super) struct Trading<'t> {
    pub trade: Trade,
    pub carrier: Carrier<'t>,
    /// Carries heads.
    pub comm: Stream,
    /// Held while a pass is enqueued: passes share the memory of their groups.
    turn: Mutex<()>,
}

/// Some of the heads of each rank, which are traded together.
pub(super) trait HeadGroup {
    /// Its memory of all tokens, to be written.
    fn accesses(&self) -> Vec<BufferAccess<'_>>;
}

impl<'t> Trading<'t> {
    pub fn new(stream: &Stream, trade: Trade, carrier: Carrier<'t>) -> Result<Self> {
        Ok(Self { trade, carrier, comm: stream.device().urgent_stream()?, turn: Mutex::default() })
    }

    /// The streams that carry heads.
    pub fn streams(&self) -> impl Iterator<Item = &Stream> {
        iter::once(&self.comm).chain(self.carrier.stream())
    }

    /// Held by what uses the memory of groups.
    pub fn lock(&self) -> MutexGuard<'_, ()> {
        lock(&self.turn)
    }

    /// Begins a pass: what carries heads comes after the caller's work so far, also on memory whose uses the runtime does not know. What the pass writes on the caller's
    /// stream it has then used last there, so that it waits for no heads that are on their way.
    pub fn begin(&self, stream: &Stream, groups: &[impl HeadGroup]) -> Result<MutexGuard<'_, ()>> {
        let turn = self.lock();
        self.streams().try_for_each(|comm| check_captures(stream, comm))?;
        let lanes: Vec<_> = groups.iter().flat_map(HeadGroup::accesses).collect();
        note(stream, &lanes)?;
        let begun = stream.mark()?;
        if let Some(within) = self.carrier.stream() {
            within.wait(&begun)?;
            // The results of the pass before are unpacked there: others may put some again after what this rank gives now.
            self.comm.wait(&within.mark()?)?;
        }
        self.comm.wait(&begun)?;
        Ok(turn)
    }

    /// Gives the heads of each group, attends, and takes the results: the heads of the next group travel before the results of this one.
    pub fn in_turn(
        &self,
        stream: &Stream,
        groups: &[impl HeadGroup],
        give: impl Fn(usize) -> Result<()>,
        mut attend: impl FnMut(usize) -> Result<()>,
        mut take: impl FnMut(usize) -> Result<()>,
    ) -> Result<()> {
        if let Some(first) = groups.first() {
            give(0)?;
            note(stream, &first.accesses())?;
        }
        for at in 0..groups.len() {
            let next = groups.get(at + 1);
            next.map_or(Ok(()), |_| give(at + 1))?;
            attend(at)?;
            // Before the results are on their way, for which the next group does not wait.
            next.map_or(Ok(()), |next| note(stream, &next.accesses()))?;
            take(at)?;
        }
        Ok(())
    }

    /// Ends a pass: the caller's work comes after all of it.
    pub fn end(&self, stream: &Stream) -> Result<()> {
        self.streams().try_for_each(|comm| stream.wait(&comm.mark()?))
    }
}
