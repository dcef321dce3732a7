//! All ranks' memory in one range of addresses.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use super::Driver;
use super::allocation::{Allocation, Mapping, Reservation};
use super::exchange::{Inbox, Lacking, send};
use super::record::{Failure, Record, Verdict, agree};
use crate::bootstrap::JobId;
use crate::comm::{Meeting, Rank};
use crate::rank::{Step, SymmetricError};
use crate::runtime::patience::after;
use crate::runtime::runtime::lock;
use crate::runtime::{Error, Result};

/// How a [`FlatView`] is opened; the same on every rank.
#[derive(Clone, Copy, Debug)]
pub struct FlatOptions {
    /// A rank's memory, rounded up to the granularity of its device.
    pub bytes: u64,
    /// A hash of its layout, compared before anything is mapped.
    pub layout: u64,
    /// Whether ranks may be on one device.
    pub share_devices: bool,
    /// How long it all may take.
    pub deadline: Duration,
}

/// One allocation a rank, all of them mapped one after another: rank `r`'s is at `base + r * stride`, on every rank at a base of its own.
/// Unmapped and released when dropped; the memory itself goes with the last rank that has it mapped.
pub struct FlatView {
    // In the order in which they are undone.
    mappings: Vec<Mapping>,
    reservation: Reservation,
    published: Published,
    stride: u64,
}

/// The notes of the two phases.
const PREPARED: &str = "prepared";
const MAPPED: &str = "mapped";

impl FlatView {
    /// Makes this rank's memory and maps that of all others: a collective of all ranks of the meeting. `clear` is called with this rank's
    /// address before any other rank can reach it.
    ///
    /// First every rank allocates and exports, and tells the others. When all have, and all fit, descriptors are exchanged and mapped. A failure of any rank
    /// before all have mapped is undone on every rank.
    ///
    /// # Errors
    /// [`SymmetricError::Step`] on every rank with the rank that failed or is gone, the step and the reason;
    /// [`SymmetricError::Missing`] with the ranks that did not come.
    pub fn open(driver: &Arc<dyn Driver>, meeting: &Meeting, options: FlatOptions, clear: impl FnOnce(u64) -> Result<()>) -> Result<Self> {
        let opening = Opening { driver, meeting, options, end: after(options.deadline) };
        opening.run(clear).inspect_err(|error| meeting.give_up(&error.to_string()))
    }

    /// The address of a rank's memory in this rank's view. From one rank's to the next one's is [`stride`](Self::stride).
    pub fn address(&self, rank: Rank) -> u64 {
        self.reservation.address + u64::from(rank.index()) * self.stride
    }

    /// The address of rank 0's memory in this rank's view, where the range of all begins.
    pub fn base(&self) -> u64 {
        self.reservation.address
    }

    /// The bytes of a rank's memory, which is the distance from one rank's to the next one's.
    pub fn stride(&self) -> u64 {
        self.stride
    }
}

/// A view that is being opened.
struct Opening<'a> {
    driver: &'a Arc<dyn Driver>,
    meeting: &'a Meeting,
    options: FlatOptions,
    end: Instant,
}

/// This rank's part, before any other rank's.
struct Prepared {
    own: Mapping,
    reservation: Reservation,
    published: Published,
    inbox: Inbox,
    record: Record,
}

impl Opening<'_> {
    fn run(&self, clear: impl FnOnce(u64) -> Result<()>) -> Result<FlatView> {
        let prepared = match self.prepare(clear) {
            Ok(prepared) => prepared,
            Err(failure) => return Err(self.tell(PREPARED, failure)),
        };
        self.meeting.publish(PREPARED, Verdict::Prepared(prepared.record.clone()).to_note())?;
        let verdicts = self.gather(PREPARED, Step::Prepare)?;
        let records: Vec<_> =
            verdicts.into_iter().filter_map(|v| if let Verdict::Prepared(record) = v { Some(record) } else { None }).collect();
        let peers = match agree(&records, self.options.share_devices).and_then(|()| self.map_peers(&prepared, &records)) {
            Ok(peers) => peers,
            Err(failure) => return Err(self.tell(MAPPED, failure)),
        };
        self.meeting.publish(MAPPED, Verdict::Mapped.to_note())?;
        self.gather(MAPPED, Step::Commit)?;
        let Prepared { own, reservation, published, record, .. } = prepared;
        let mappings = peers.into_iter().chain([own]).collect();
        Ok(FlatView { mappings, reservation, published, stride: record.bytes })
    }

    fn left(&self) -> Duration {
        self.end.saturating_duration_since(Instant::now())
    }

    fn failure(&self, step: Step) -> impl Fn(Error) -> Failure {
        let rank = self.meeting.rank();
        move |error| Failure::new(rank, step, error)
    }

    /// The steps that need no other rank.
    fn prepare(&self, clear: impl FnOnce(u64) -> Result<()>) -> Result<Prepared, Failure> {
        let (driver, world, me) = (self.driver, self.meeting.world().get(), self.meeting.rank());
        driver.check().map_err(self.failure(Step::Check))?;
        let device = driver.device().map_err(self.failure(Step::Check))?;
        let granularity = driver.granularity().map_err(self.failure(Step::Check))?;
        let bytes = self.options.bytes.max(1).checked_next_multiple_of(granularity);
        let whole = bytes.and_then(|bytes| bytes.checked_mul(world.into()));
        let (Some(bytes), Some(whole)) = (bytes, whole) else {
            return Err(Failure::new(me, Step::Create, format!("{} bytes on each of {world} ranks are too many", self.options.bytes)));
        };
        let allocation = Allocation::create(driver, bytes).map_err(self.failure(Step::Create))?;
        let reservation = Reservation::new(driver, whole).map_err(self.failure(Step::Reserve))?;
        let address = reservation.address + u64::from(me.index()) * bytes;
        let own = Mapping::new(driver, address, bytes, &allocation).map_err(self.failure(Step::Map))?;
        clear(address).map_err(self.failure(Step::Clear))?;
        let system = |error: std::io::Error| Failure::new(me, Step::Listen, error);
        let random = || JobId::random().map(|id| id.as_str().to_owned()).map_err(system);
        let (address, token) = (random()?, random()?);
        let inbox = Inbox::open(&address, &token).map_err(system)?;
        let (version, host, process) = Record::identity().map_err(system)?;
        let published = Published::new(&token, allocation);
        let layout = self.options.layout;
        let record = Record { version, world, host, process, device, bytes, granularity, layout, address, token };
        Ok(Prepared { own, reservation, published, inbox, record })
    }

    /// Sends this rank's descriptor to the other processes, takes theirs, and maps all.
    fn map_peers(&self, prepared: &Prepared, records: &[Record]) -> Result<Vec<Mapping>, Failure> {
        let (me, mine) = (self.meeting.rank(), &prepared.record);
        let others = || self.meeting.world().ranks().zip(records).filter(|(rank, _)| *rank != me);
        for (rank, record) in others() {
            let refused = |error| Failure::new(me, Step::Check, format!("it does not reach the device of {rank}: {error}"));
            self.driver.check_reaches(record.device).map_err(refused)?;
        }
        let is_far = |record: &Record| record.process != mine.process;
        if others().any(|(_, record)| is_far(record)) {
            let descriptor = self.driver.export(prepared.published.allocation.handle).map_err(self.failure(Step::Export))?;
            for (rank, record) in others().filter(|(_, record)| is_far(record)) {
                // The socket of a rank that is gone or has failed is closed: its note tells why.
                let failed = |error| {
                    self.look(rank, self.left()).err().unwrap_or_else(|| Failure::new(me, Step::Send, format!("to {rank}: {error}")))
                };
                send(&record.address, &record.token, me, &descriptor, self.end).map_err(failed)?;
            }
        }
        let far = others().filter(|(_, record)| is_far(record)).map(|(rank, _)| rank).collect();
        let lacking = |lacking| match lacking {
            Lacking::Told(failure) => failure,
            Lacking::Late(rank) => Failure::new(rank, Step::Receive, "its descriptor did not come in time"),
            Lacking::System(why) => Failure::new(me, Step::Receive, why),
        };
        let found = prepared.inbox.receive(far, self.end, |rank| self.look(rank, Duration::ZERO)).map_err(lacking)?;
        let mut descriptors: BTreeMap<_, _> = found.into_iter().collect();
        let map = |(rank, record): (Rank, &Record)| {
            let allocation = match descriptors.remove(&rank) {
                Some(descriptor) => Arc::new(Allocation::import(self.driver, descriptor).map_err(self.failure(Step::Import))?),
                None => published(&record.token).ok_or_else(|| self.look(rank, self.left()).err().unwrap_or_else(|| gave_back(rank)))?,
            };
            let address = prepared.reservation.address + u64::from(rank.index()) * mine.bytes;
            // The handle is not needed from here on: the mapping keeps the memory.
            Mapping::new(self.driver, address, mine.bytes, &allocation).map_err(self.failure(Step::Map))
        };
        others().map(map).collect()
    }

    /// Whether a rank that is waited for has failed or is gone, as far as is known.
    fn look(&self, rank: Rank, patience: Duration) -> Result<(), Failure> {
        match self.meeting.read(rank, MAPPED, patience) {
            Ok(note) => match Verdict::from_note(rank, &note) {
                Verdict::Failed(failure) => Err(failure),
                _ => Ok(()),
            },
            Err(Error::Symmetric(SymmetricError::Aborted { rank, why })) => Err(self.last_word(rank, Step::Commit, why)),
            Err(_) => Ok(()),
        }
    }

    /// Why a rank is gone: its own reason, if it gave one.
    fn last_word(&self, rank: Rank, step: Step, why: String) -> Failure {
        let said = self.meeting.read(rank, MAPPED, Duration::ZERO).ok().map(|note| Verdict::from_note(rank, &note));
        if let Some(Verdict::Failed(failure)) = said { failure } else { Failure::new(rank, step, why) }
    }

    /// Every rank's verdict of a phase, if all are good. A rank that is gone is reported as gone at `step`.
    fn gather(&self, phase: &str, step: Step) -> Result<Vec<Verdict>> {
        let (mut verdicts, mut failures, mut missing) = (Vec::new(), Vec::new(), Vec::new());
        for rank in self.meeting.world().ranks() {
            match self.meeting.read(rank, phase, self.left()) {
                Ok(note) => match Verdict::from_note(rank, &note) {
                    Verdict::Failed(failure) => failures.push((rank, failure)),
                    verdict => verdicts.push(verdict),
                },
                Err(Error::Symmetric(SymmetricError::Missing { .. })) => missing.push(rank),
                Err(Error::Symmetric(SymmetricError::Aborted { rank, why })) => failures.push((rank, self.last_word(rank, step, why))),
                Err(error) => return Err(error),
            }
        }
        // A rank's own reason comes before what others report of it.
        let first = failures.iter().position(|(rank, failure)| failure.rank == rank.index()).unwrap_or(0);
        if !failures.is_empty() {
            return Err(self.error(failures.swap_remove(first).1));
        }
        if !missing.is_empty() {
            if missing.contains(&self.meeting.rank()) {
                // This rank's own note has not come back: it is rank 0, which passes them on, that does not answer.
                missing = vec![Rank::ZERO];
            }
            // For the ranks whose deadline is a moment later: this rank may be gone by then.
            self.tell(MAPPED, Failure::new(missing[0], step, format!("it did not come within {:?}", self.options.deadline)));
            let error =
                SymmetricError::Missing { what: format!("{step} of symmetric memory"), ranks: missing, waited: self.options.deadline };
            return Err(error.into());
        }
        Ok(verdicts)
    }

    /// Tells the others of a failure.
    fn tell(&self, phase: &str, failure: Failure) -> Error {
        // Where that fails, the others see that this rank is gone.
        let _ = self.meeting.publish(phase, Verdict::Failed(failure.clone()).to_note());
        self.error(failure)
    }

    fn error(&self, failure: Failure) -> Error {
        failure.into_error(self.meeting.world().ranks()).into()
    }
}

fn gave_back(rank: Rank) -> Failure {
    Failure::new(rank, Step::Commit, "it gave its memory back")
}

/// The allocations of this process that other ranks of it may map, by the token of their rank's record.
static PUBLISHED: Mutex<BTreeMap<String, Weak<Allocation>>> = Mutex::new(BTreeMap::new());

fn published(token: &str) -> Option<Arc<Allocation>> {
    lock(&PUBLISHED).get(token)?.upgrade()
}

/// An allocation that ranks of this process find by a token, until this is dropped.
struct Published {
    token: String,
    allocation: Arc<Allocation>,
}

impl Published {
    fn new(token: &str, allocation: Allocation) -> Self {
        let (token, allocation) = (token.to_owned(), Arc::new(allocation));
        lock(&PUBLISHED).insert(token.clone(), Arc::downgrade(&allocation));
        Self { token, allocation }
    }
}

impl Drop for Published {
    fn drop(&mut self) {
        lock(&PUBLISHED).remove(&self.token);
    }
}

impl fmt::Debug for FlatView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("FlatView");
        debug.field("base", &self.reservation.address).field("stride", &self.stride).field("mappings", &self.mappings.len());
        debug.field("handle", &self.published.allocation.handle).finish()
    }
}
