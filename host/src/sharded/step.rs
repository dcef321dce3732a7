//! The two halves of a step: shards are written and published, then read.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, RwLockReadGuard};

use oxtile_tile::launch::DeviceViewMut;
use oxtile_tile::num::bf16;

use super::chain::{Chain, ChainPass};
use super::format::WeightFormat;
use super::layout::Entry;
use super::mode::Mode;
use super::pass::Pass;
use super::set::ShardSet;
use super::weight::WeightId;
use crate::runtime::memory::Owner;
use crate::runtime::stream::StreamInner;
use crate::runtime::{Error, HostElement, PinnedBuffer, Result, Stream};

/// The first half of a step: this rank's values may be written. Made by [`ShardSet::update`]. If it is dropped without [`publish`](Self::publish), the other ranks wait until the deadline of the arena.
#[must_use = "the other ranks wait for `publish`"]
pub struct Updating<'s, F: WeightFormat> {
    pub(super) set: &'s mut ShardSet<F>,
    pub(super) stream: Stream,
    /// The capture that it was begun in.
    pub(super) capture: Option<u64>,
}

impl<'s, F: WeightFormat> Updating<'s, F> {
    /// This rank's rows of matrix `expert` of a weight, `[own rows, columns]`, to be written before [`publish`](Self::publish), on any stream: what an optimizer writes as the rounded copy
    /// of its own values. What is not written stays as it was in the step before.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a weight of another set, or an expert that it does not have.
    pub fn master(&mut self, weight: WeightId, expert: u64) -> Result<DeviceViewMut<'_, bf16>> {
        const WHAT: &str = "Updating::master";
        let rank = self.set.member.rank();
        self.set.at(WHAT, weight)?;
        let Entry { weight, shards, masters, .. } = &mut self.set.entries[weight.index()];
        let own = shards.range(rank);
        let missing = || Error::Invalid {
            what: WHAT,
            why: format!("`{}` has {} matrices, none with the number {expert}", weight.name, weight.experts),
        };
        let values = masters.get_mut(expert as usize).ok_or_else(missing)?;
        Ok(values.view_mut().split_at((own.end - own.start) * weight.columns).0)
    }

    /// Writes [`master`](Self::master) from the host: to load a checkpoint. Does not wait for the stream.
    ///
    /// # Errors
    /// As [`master`](Self::master); [`Error::Length`] unless there are as many values; as [`Buffer::copy_from_pinned`](crate::Buffer::copy_from_pinned).
    pub fn write<H: HostElement<Device = bf16>>(&mut self, weight: WeightId, expert: u64, values: &[H]) -> Result<()> {
        Error::check_length("Updating::write", self.master(weight, expert)?.len(), values.len() as u64)?;
        let master = &self.set.entries[weight.index()].masters[expert as usize];
        // SAFETY: the first elements of the matrix, which `self` has for itself; the rest is padding.
        let mut own = unsafe { master.window::<bf16>(0, values.len() as u64) };
        own.copy_from_pinned(&self.stream, &PinnedBuffer::from_slice(&self.stream, values)?)
    }

    /// The set.
    pub fn set(&self) -> &ShardSet<F> {
        self.set
    }

    /// Casts this rank's values and tells the others; later work of the streams of chains starts when all ranks have published. Formats whose scales follow from the amax of the
    /// whole weight agree on those of all weights first. Does not wait on the host, and may be captured.
    ///
    /// # Errors
    /// [`Error::NotCapturable`] where the step was begun in another capture, or outside of this one; of the casts; what ended the arena; an error of the driver.
    pub fn publish(self) -> Result<Published<'s, F>> {
        let Self { set, stream, capture: begun } = self;
        if begun != stream.0.capture().map(|capture| capture.number) {
            let mend = "update and publish inside the same capture, or both outside";
            return Err(Error::NotCapturable { what: "half of a step", mend });
        }
        let cast = set.agree(&stream).and_then(|()| set.cast(&stream)).and_then(|()| set.tell(&stream));
        set.arena.or_abort(&stream, "Updating::publish", cast)?;
        tracing::trace!(weights = set.entries.len(), rank = set.member.rank().index(), "published");
        // What is captured is not done.
        let capture = stream.0.capture().map(|capture| capture.number);
        if capture.is_none() {
            set.readable.set(true);
        }
        Ok(Published { set, capture })
    }
}

/// The second half of a step: the shards of all ranks stay as they are. Made by [`Updating::publish`].
///
/// No [`Updating`] can be alive meanwhile:
///
/// ```compile_fail,E0499
/// use oxtile::sharded::{Bf16, ShardSet};
/// # use oxtile::{Result, Stream};
///
/// fn step(set: &mut ShardSet<Bf16>, stream: &Stream) -> Result<()> {
///     let published = set.update(stream)?.publish()?;
///     let updating = set.update(stream)?;
///     drop(published);
///     Ok(())
/// }
/// ```
pub struct Published<'s, F: WeightFormat> {
    pub(super) set: &'s ShardSet<F>,
    /// The number of the graph that holds the step; none where it was done at once.
    pub(super) capture: Option<u64>,
}

/// Whether the shards of a set may be pulled now. A graph that has a pass, and not its step, keeps it, and is refused while they may not.
#[derive(Default)]
pub(super) struct Readable(AtomicBool);

impl Readable {
    pub fn set(&self, is_readable: bool) {
        self.0.store(is_readable, Ordering::Release);
    }

    fn get(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

impl Owner for Readable {
    fn begin(&self) -> Result<Option<RwLockReadGuard<'_, ()>>> {
        if self.get() {
            return Ok(None);
        }
        let why = "it has a pass over weights, whose values are being written: replay it after Updating::publish".to_owned();
        Err(Error::NotReady { what: "Graph::replay".to_owned(), why })
    }

    fn used_on(&self, _: &Arc<StreamInner>) {}
}

impl<'s, F: WeightFormat> Published<'s, F> {
    /// The set.
    pub fn set(&self) -> &'s ShardSet<F> {
        self.set
    }

    /// The published shards of the set's last step, in a program that has let go of the value before: work that is captured apart from the step.
    ///
    /// # Errors
    /// [`Error::Invalid`] if no step was published, or the next one has begun. A step that was captured is not done before its graph is replayed, and does not count.
    pub fn of(set: &'s ShardSet<F>) -> Result<Self> {
        if set.readable.get() {
            return Ok(Self { set, capture: None });
        }
        let why = "nothing is published: call `update` and `publish` on all ranks first".to_owned();
        Err(Error::Invalid { what: "Published::of", why })
    }

    /// Begins a forward pass of a chain: its first weights are pulled.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a chain of another set, or a captured one outside of a capture; [`Error::NotCapturable`] if one of the chain's streams alone is captured, or the step in another graph than the pass; what ended the
    /// arena; an error of the driver.
    pub fn forward<'p, M: Mode>(&'p self, chain: &'p mut Chain<F, M>) -> Result<Pass<'p, F, M>> {
        Pass::begin(self, chain, ChainPass::Forward)
    }

    /// Begins a backward pass: the same weights in reverse order, by columns. Begin it before the work that comes between the passes is enqueued, as the loss: then its first weights
    /// arrive meanwhile.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn backward<'p, M: Mode>(&'p self, chain: &'p mut Chain<F, M>) -> Result<Pass<'p, F, M>> {
        Pass::begin(self, chain, ChainPass::Backward)
    }
}

impl<F: WeightFormat> fmt::Debug for Updating<'_, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Updating").field(&self.set).finish()
    }
}

impl<F: WeightFormat> fmt::Debug for Published<'_, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Published").field(&self.set).finish()
    }
}
