//! The stream sanitizer: which operation used which bytes, and whether something orders the uses.
//!
//! Every operation has a time in its queue, every queue a vector clock. A use of bytes is checked against the earlier uses of the
//! same bytes that still matter: if one of the two writes, the earlier one's time must be known to the later one's clock. That does
//! not depend on which came first, so that nearly every seed reports a missing edge, not only one that runs into it.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::panic::Location;

use oxtile_emulator::{Found, Memory};

use super::clock::Clock;
use super::extent::Extent;
use super::race::{RaceKind, StreamRace, StreamUse};
use crate::runtime::backend::Caller;

/// What an operation does to bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Read,
    Write,
    Free,
    /// A write of a signal word, which is what orders others.
    SignalWrite,
    SignalWait,
}

impl Kind {
    /// Whether two uses must be ordered.
    fn conflicts(self, other: Self) -> bool {
        let reads = |kind| matches!(kind, Self::Read | Self::SignalWait);
        let signals = |kind| matches!(kind, Self::SignalWrite | Self::SignalWait);
        let is_signal = signals(self) && signals(other) && (reads(self) || reads(other));
        !(reads(self) && reads(other) || is_signal)
    }

    fn race(self, other: Self) -> RaceKind {
        match (self, other) {
            (Self::Free, _) => RaceKind::UsedAfterFree,
            (_, Self::Free) => RaceKind::FreedInUse,
            (Self::SignalWrite, Self::SignalWrite) => RaceKind::Signal,
            _ => RaceKind::Unordered,
        }
    }
}

/// A use of bytes by an operation.
pub(super) struct Access {
    pub extent: Extent,
    pub kind: Kind,
    /// Whose address it is: those of the host and of devices may be the same.
    pub on_host: bool,
    pub what: Cow<'static, str>,
}

/// The operation that uses bytes.
pub(super) struct Actor<'a> {
    pub queue: u64,
    pub device: u32,
    pub caller: Option<Caller>,
    pub clock: &'a Clock,
}

/// A write of another stream that a launch does not know.
pub(super) struct UnknownWrite {
    pub queue: u64,
    pub time: u64,
    pub extent: Extent,
    pub site: &'static Location<'static>,
}

struct Record {
    extent: Extent,
    /// Of a launch under way: whether it is ordered with others shows at its end.
    is_open: bool,
    /// What was known to it, of a use beside a launch under way, and of a launch that was under way.
    known: Option<Clock>,
    kind: Kind,
    queue: u64,
    time: u64,
    by: StreamUse,
}

impl Record {
    fn is_known_to(&self, clock: &Clock) -> bool {
        self.time <= clock.of(self.queue)
    }

    /// Whether the two must be ordered.
    fn may_race(&self, other: &Self) -> bool {
        self.queue != other.queue && self.kind.conflicts(other.kind) && self.extent.overlap(&other.extent).is_some()
    }

    /// Whether a new use makes this one superfluous: what races with this one races with the new one.
    fn is_covered_by(&self, new: &Self, clock: &Clock) -> bool {
        let is_same = new.kind == Kind::Write || new.kind == self.kind;
        is_same && self.is_known_to(clock) && new.extent.covers(&self.extent)
    }
}

/// Uses of one allocation, or of the host's memory.
#[derive(Default)]
struct Shadow {
    name: String,
    device: u32,
    start: u64,
    records: Vec<Record>,
}

/// More records than this are thinned out by what the host has waited for.
const MANY: usize = 256;

#[derive(Default)]
pub(super) struct Sanitizer {
    seed: u64,
    live: BTreeMap<u64, Shadow>,
    /// Freed memory that nothing was allocated over, with its end.
    freed: BTreeMap<u64, (u64, Shadow)>,
}

impl Sanitizer {
    pub fn new(seed: u64) -> Self {
        Self { seed, ..Self::default() }
    }

    /// Checks a use and remembers it.
    pub fn access(&mut self, memory: &Memory, host: &Clock, access: Access, actor: &Actor<'_>) -> Result<(), Box<StreamRace>> {
        if access.extent.is_empty() {
            return Ok(());
        }
        let (on_host, frees) = (access.on_host, access.kind == Kind::Free);
        let new = record(access, actor);
        if on_host {
            return self.on_host(new, host, actor);
        }
        let Some(found) = memory.find(new.extent.start()) else { return self.outside(&new) };
        let (seed, start) = (self.seed, new.extent.start() - found.offset);
        let shadow = self.shadow(&found, &new);
        shadow.check(&new, actor.clock, seed)?;
        if frees {
            let mut shadow = self.live.remove(&start).unwrap_or_default();
            shadow.records = vec![new];
            self.freed.insert(start, (start + found.bytes, shadow));
        } else {
            shadow.remember(new, actor.clock, host);
        }
        Ok(())
    }

    /// As [`access`](Self::access), of a launch that goes on beside other streams. What it is ordered with shows at its [end](Self::end); returns the
    /// writes that it does not know yet.
    pub fn begin(
        &mut self,
        memory: &Memory,
        host: &Clock,
        access: Access,
        actor: &Actor<'_>,
    ) -> Result<Vec<UnknownWrite>, Box<StreamRace>> {
        if matches!(access.kind, Kind::SignalWait | Kind::SignalWrite) {
            return self.access(memory, host, access, actor).map(|()| Vec::new());
        }
        let new = Record { is_open: true, ..record(access, actor) };
        let Some(found) = memory.find(new.extent.start()) else { return self.outside(&new).map(|()| Vec::new()) };
        let shadow = self.shadow(&found, &new);
        let is_unknown = |old: &&Record| {
            let is_done = old.kind == Kind::Write && !old.is_open;
            is_done && old.queue != new.queue && !old.is_known_to(actor.clock) && old.extent.overlap(&new.extent).is_some()
        };
        let unknown = |old: &Record| {
            let site = old.by.at.unwrap_or(Location::caller());
            UnknownWrite { queue: old.queue, time: old.time, extent: old.extent, site }
        };
        let unknown = shadow.records.iter().filter(is_unknown).map(unknown).collect();
        shadow.records.push(new);
        Ok(unknown)
    }

    /// The launch is over, and has learnt what the actor's clock has: checks its access against all that came before and meanwhile.
    pub fn end(&mut self, memory: &Memory, access: Access, actor: &Actor<'_>, is_checked: bool) -> Result<(), Box<StreamRace>> {
        let new = record(access, actor);
        let Some(found) = memory.find(new.extent.start()) else { return Ok(()) };
        let (seed, shadow) = (self.seed, self.shadow(&found, &new));
        let is_own = |old: &Record| old.is_open && old.queue == new.queue && old.extent == new.extent;
        if !is_checked {
            // It was let go by poison: what it waited for may come later.
            shadow.records.retain(|old| !is_own(old));
            return Ok(());
        }
        shadow.records.iter_mut().filter(|old| is_own(old)).for_each(|old| {
            old.is_open = false;
            old.known = Some(actor.clock.clone());
        });
        let knows_it = |old: &Record| old.known.as_ref().is_some_and(|known| new.is_known_to(known));
        let races = |old: &&Record| !old.is_open && old.may_race(&new) && !old.is_known_to(actor.clock) && !knows_it(old);
        match shadow.records.iter().find(races) {
            Some(old) => Err(shadow.report(old, &new, seed)),
            None => Ok(()),
        }
    }

    /// The shadow of the allocation that a record lies in.
    fn shadow(&mut self, found: &Found, new: &Record) -> &mut Shadow {
        let start = new.extent.start() - found.offset;
        let name = || Shadow { name: found.name.clone(), device: found.device, start, records: Vec::new() };
        self.live.entry(start).or_insert_with(name)
    }

    /// Memory that is gone; what was never there is an error of the use itself.
    fn outside(&self, new: &Record) -> Result<(), Box<StreamRace>> {
        let first = new.extent.start();
        match self.freed.range(..=first).next_back() {
            Some((_, (end, shadow))) if first < *end => {
                shadow.records.first().map_or(Ok(()), |free| Err(shadow.report(free, new, self.seed)))
            }
            _ => Ok(()),
        }
    }

    /// The host's memory may serve something else once the host has waited for its uses.
    fn on_host(&mut self, new: Record, host: &Clock, actor: &Actor<'_>) -> Result<(), Box<StreamRace>> {
        let shadow = self.live.entry(0).or_insert_with(|| Shadow { name: "host memory".to_owned(), ..Shadow::default() });
        shadow.check(&new, actor.clock, self.seed)?;
        shadow.records.retain(|record| !record.is_known_to(host));
        if new.kind == Kind::Free {
            shadow.records.retain(|record| record.extent.overlap(&new.extent).is_none());
        } else {
            shadow.remember(new, actor.clock, host);
        }
        Ok(())
    }

    /// Memory that was gone belongs to a new allocation.
    pub fn allocate(&mut self, start: u64, bytes: u64) {
        self.freed.retain(|old, (end, _)| *end <= start || start + bytes <= *old);
        self.live.remove(&start);
    }
}

/// The record of a use.
fn record(access: Access, actor: &Actor<'_>) -> Record {
    Record {
        extent: access.extent,
        is_open: false,
        known: None,
        kind: access.kind,
        queue: actor.queue,
        time: actor.clock.of(actor.queue),
        by: StreamUse { what: access.what.into_owned(), stream: actor.queue, device: actor.device, at: actor.caller },
    }
}

impl Shadow {
    fn check(&self, new: &Record, clock: &Clock, seed: u64) -> Result<(), Box<StreamRace>> {
        let races = |old: &&Record| {
            // Of a launch under way that is not known yet: it may be going to know this use.
            let is_put_off = old.is_open && new.kind != Kind::Free;
            !is_put_off && !old.is_known_to(clock) && old.may_race(new)
        };
        self.records.iter().find(races).map_or(Ok(()), |old| Err(self.report(old, new, seed)))
    }

    fn report(&self, old: &Record, new: &Record, seed: u64) -> Box<StreamRace> {
        let both = old.extent.overlap(&new.extent).unwrap_or(self.start..self.start);
        Box::new(StreamRace {
            kind: old.kind.race(new.kind),
            memory: self.name.clone(),
            device: self.device,
            offset: both.start.saturating_sub(self.start),
            bytes: both.end - both.start,
            first: old.by.clone(),
            second: new.by.clone(),
            seed,
        })
    }

    fn remember(&mut self, new: Record, clock: &Clock, host: &Clock) {
        let known = self.records.iter().any(|old| old.is_open).then(|| clock.clone());
        let new = Record { known, ..new };
        self.records.retain(|old| !old.is_covered_by(&new, clock));
        if self.records.len() >= MANY {
            self.records.retain(|old| old.is_open || !old.is_known_to(host));
        }
        self.records.push(new);
    }
}
