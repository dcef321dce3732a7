//! Warp-wide operations: a rendezvous of the lanes of a mask at one source line.

use crate::fault::{Fault, FaultKind, Involved};
use crate::order::{ReduceOp, ShuffleMode, VoteMode};
use crate::site::Site;
use crate::thread::{Thread, Waiting};
use std::cell::Cell;

/// What the lanes of a rendezvous do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Sync,
    Shuffle(ShuffleMode),
    Vote(VoteMode),
    Reduce(ReduceOp),
    MatchAny,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Sync => "warp_sync",
            Self::Shuffle(_) => "shuffle",
            Self::Vote(_) => "vote",
            Self::Reduce(_) => "reduce",
            Self::MatchAny => "match_any",
        }
    }
}

/// Lanes gathered so far for one operation.
struct Rendezvous {
    /// The lane that came first.
    opener: u8,
    mask: Cell<u32>,
    arrived: Cell<u32>,
    kind: Cell<Kind>,
    site: Cell<Option<Site>>,
}

impl Rendezvous {
    fn new(opener: usize) -> Self {
        Self { opener: opener as u8, mask: Cell::new(0), arrived: Cell::new(0), kind: Cell::new(Kind::Sync), site: Cell::new(None) }
    }
}

pub(crate) struct Warp {
    /// Lanes that can be resumed.
    pub ready: Cell<u32>,
    /// Lanes that have not ended.
    pub alive: Cell<u32>,
    /// Lanes that wait in a rendezvous, and the lane that opened it, whose number it has.
    waiting: Cell<u32>,
    opener: [Cell<u8>; 32],
    rendezvous: [Rendezvous; 32],
    /// What each lane brought to its operation.
    values: [Cell<u32>; 32],
    arguments: [Cell<u32>; 32],
    /// What it takes: a lane reads its result before it can arrive anywhere else.
    results: [Cell<u32>; 32],
}

impl Warp {
    pub fn new(lanes: u32) -> Self {
        let all = u32::MAX >> (32 - lanes);
        Self {
            ready: Cell::new(all),
            alive: Cell::new(all),
            waiting: Cell::new(0),
            opener: [const { Cell::new(0) }; 32],
            rendezvous: std::array::from_fn(Rendezvous::new),
            values: [const { Cell::new(0) }; 32],
            arguments: [const { Cell::new(0) }; 32],
            results: [const { Cell::new(0) }; 32],
        }
    }

    /// What a waiting lane waits in.
    #[inline(always)]
    fn of(&self, lane: usize) -> &Rendezvous {
        &self.rendezvous[usize::from(self.opener[lane].get())]
    }

    pub fn exit(&self, thread: &Thread) {
        let bit = 1 << thread.lane();
        self.alive.set(self.alive.get() & !bit);
        if let Some(slot) = lanes(self.waiting.get()).map(|lane| self.of(lane)).find(|slot| slot.mask.get() & bit != 0) {
            let site = slot.site.get().expect("set with the first arrival");
            thread.worker().set_fault(exited(thread, slot.kind.get(), slot.mask.get(), bit, site));
        }
    }

    pub fn describe(&self, mask: u32) -> String {
        match lanes(self.waiting.get() & mask).map(|lane| self.of(lane)).find(|slot| slot.mask.get() == mask) {
            Some(slot) => {
                let missing = mask & !slot.arrived.get();
                format!("{} of mask {mask:#010x}, lanes {missing:#010x} missing", slot.kind.get().name())
            }
            None => format!("a warp collective of mask {mask:#010x}"),
        }
    }

    /// The rendezvous that this lane joins or opens. Masks in flight may overlap: lanes of one may first meet in another.
    #[inline(always)]
    fn slot(&self, thread: &Thread, mask: u32, kind: Kind, site: Site) -> &Rendezvous {
        let bit = 1 << thread.lane();
        if mask & bit == 0 {
            unnamed(thread, mask, kind, site);
        }
        if mask & !self.alive.get() != 0 {
            left(thread, kind, mask, mask & !self.alive.get(), site);
        }
        for lane in lanes(self.waiting.get() & mask) {
            let slot = self.of(lane);
            if slot.mask.get() == mask && slot.kind.get() == kind && same(slot.site.get(), site) {
                return slot;
            }
            // A lane that this one is about to wait for waits for this one elsewhere.
            if slot.mask.get() & bit != 0 {
                diverged(thread, slot, mask, kind, site);
            }
        }
        let slot = &self.rendezvous[thread.lane() as usize];
        slot.mask.set(mask);
        slot.arrived.set(0);
        slot.kind.set(kind);
        slot.site.set(Some(site));
        slot
    }

    /// Arrives with a value; returns this lane's result when all lanes of the mask have arrived.
    #[inline(always)]
    pub fn meet(&self, thread: &Thread, mask: u32, kind: Kind, value: u32, argument: u32, site: Site) -> u32 {
        let lane = thread.lane() as usize;
        let whole = mask == self.alive.get();
        let slot = self.slot(thread, mask, kind, site);
        self.values[lane].set(value);
        self.arguments[lane].set(argument);
        slot.arrived.set(slot.arrived.get() | 1 << lane);
        if slot.arrived.get() == mask {
            self.complete(thread, mask, kind, site);
            self.waiting.set(self.waiting.get() & !mask);
            self.ready.set(self.ready.get() | mask & !(1 << lane));
        } else {
            self.waiting.set(self.waiting.get() | 1 << lane);
            self.opener[lane].set(slot.opener);
            thread.suspend(Waiting::Rendezvous { mask }, site);
        }
        if whole {
            thread.meetings.met();
        }
        self.results[lane].get()
    }

    /// What the last lane does for all. Not inlined: the other lanes wait in [`meet`](Self::meet), and their frames stay small.
    #[inline(never)]
    fn complete(&self, thread: &Thread, mask: u32, kind: Kind, site: Site) {
        match kind {
            Kind::Sync => {
                if let Some(detector) = thread.detector() {
                    let first = thread.number & !31;
                    detector.meet(lanes(mask).map(|lane| first + lane as u32));
                }
            }
            Kind::Shuffle(mode) => self.shuffle(thread, mask, mode, site),
            Kind::Vote(mode) => self.all(mask, vote(mask, mode, |lane| self.values[lane].get() != 0)),
            Kind::Reduce(op) => {
                let total = lanes(mask).map(|lane| self.values[lane].get()).reduce(|a, b| combine(op, a, b));
                self.all(mask, total.expect("a mask names its caller"));
            }
            Kind::MatchAny => {
                for lane in lanes(mask) {
                    let equal = lanes(mask).filter(|&other| self.values[other].get() == self.values[lane].get());
                    self.results[lane].set(equal.fold(0, |bits, other| bits | 1 << other));
                }
            }
        }
    }

    fn all(&self, mask: u32, value: u32) {
        lanes(mask).for_each(|lane| self.results[lane].set(value));
    }

    fn shuffle(&self, thread: &Thread, mask: u32, mode: ShuffleMode, site: Site) {
        for lane in lanes(mask) {
            let argument = self.arguments[lane].get();
            let source = shuffle_source(mode, lane as u32, argument & 31, argument >> 8);
            if mask >> source & 1 == 0 {
                thread.fail(
                    FaultKind::Divergence,
                    site,
                    format!("shuffle of mask {mask:#010x}: lane {lane} reads lane {source}, which takes no part"),
                    "name the source lane in the mask, or clamp the shuffle to the lanes that take part",
                );
            }
            self.results[lane].set(self.values[source as usize].get());
        }
    }
}

/// Source lane of `shfl.sync` (PTX ISA, pseudo-code of shfl.sync): `clamp` holds c.
#[inline(always)]
fn shuffle_source(mode: ShuffleMode, lane: u32, argument: u32, clamp: u32) -> u32 {
    let segment = clamp >> 8 & 31;
    let bound = lane & segment | clamp & 31 & !segment;
    let (source, valid) = match mode {
        ShuffleMode::Up => (lane.wrapping_sub(argument), lane as i32 - argument as i32 >= bound as i32),
        ShuffleMode::Down => (lane + argument, lane + argument <= bound),
        ShuffleMode::Butterfly => (lane ^ argument, lane ^ argument <= bound),
        ShuffleMode::Index => {
            let source = lane & segment | argument & !segment;
            (source, source <= bound)
        }
    };
    if valid { source } else { lane }
}

pub(crate) fn lanes(mask: u32) -> impl Iterator<Item = usize> + Clone {
    let mut rest = mask;
    std::iter::from_fn(move || {
        (rest != 0).then(|| {
            let lane = rest.trailing_zeros() as usize;
            rest &= rest - 1;
            lane
        })
    })
}

fn vote(mask: u32, mode: VoteMode, holds: impl Fn(usize) -> bool) -> u32 {
    let ballot = lanes(mask).filter(|&lane| holds(lane)).fold(0, |bits, lane| bits | 1 << lane);
    match mode {
        VoteMode::Any => u32::from(ballot != 0),
        VoteMode::All => u32::from(ballot == mask),
        VoteMode::Ballot => ballot,
        VoteMode::Uniform => u32::from(ballot == mask || ballot == 0),
    }
}

fn combine(op: ReduceOp, a: u32, b: u32) -> u32 {
    match op {
        ReduceOp::Add => a.wrapping_add(b),
        ReduceOp::Min => a.min(b),
        ReduceOp::Max => a.max(b),
        ReduceOp::MinSigned => (a as i32).min(b as i32) as u32,
        ReduceOp::MaxSigned => (a as i32).max(b as i32) as u32,
        ReduceOp::And => a & b,
        ReduceOp::Or => a | b,
        ReduceOp::Xor => a ^ b,
    }
}

/// Whether two sites are one source line; the compiler may make two constants of one location.
#[inline(always)]
pub(crate) fn same(a: Option<Site>, b: Site) -> bool {
    a.is_some_and(|a| std::ptr::eq(a, b) || a == b)
}

#[cold]
fn diverged(thread: &Thread, slot: &Rendezvous, mask: u32, kind: Kind, site: Site) -> ! {
    let other = slot.site.get().expect("set with the first arrival");
    let first = slot.arrived.get().trailing_zeros();
    let mut fault = thread.fault(
        FaultKind::Divergence,
        site,
        format!("lanes {} and {first} of warp {} meet different collectives", thread.lane(), thread.warp_number()),
        "let all lanes named in the mask reach the same line, with the same mask",
    );
    fault.involved[0].action = format!("lane {}: {} of mask {mask:#010x}", thread.lane(), kind.name());
    let action = format!("lanes {:#010x}: {} of mask {:#010x}", slot.arrived.get(), slot.kind.get().name(), slot.mask.get());
    fault.involved.push(Involved { location: other, action });
    thread.stop(fault)
}

#[cold]
fn unnamed(thread: &Thread, mask: u32, kind: Kind, site: Site) -> ! {
    thread.fail(
        FaultKind::Divergence,
        site,
        format!("{} of mask {mask:#010x} by lane {}, which the mask does not name", kind.name(), thread.lane()),
        "name every calling lane in the mask",
    )
}

#[cold]
fn left(thread: &Thread, kind: Kind, mask: u32, gone: u32, site: Site) -> ! {
    thread.stop(exited(thread, kind, mask, gone, site))
}

fn exited(thread: &Thread, kind: Kind, mask: u32, gone: u32, site: Site) -> Fault {
    thread.fault(
        FaultKind::Divergence,
        site,
        format!("{} of mask {mask:#010x} names lanes {gone:#010x} of warp {}, which have exited", kind.name(), thread.warp_number()),
        "let every lane stay until the last collective that names it, or name only the lanes still running",
    )
}
