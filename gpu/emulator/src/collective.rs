//! Collectives over fragments that lie in the registers of a warp's or warpgroup's threads: the last thread to
//! come computes for all. Matrix instructions are built on it.

use crate::fault::{FaultKind, Involved};
use crate::order::Group;
use crate::site::Site;
use crate::thread::{Thread, Waiting};
use crate::warp::same;
use std::any::TypeId;
use std::ptr;

/// Threads gathered so far for a [`collective`](crate::device::collective).
pub(crate) struct Gathering {
    group: Group,
    /// The first thread of the warp or warpgroup.
    first: u32,
    /// The thread that came first.
    opener: u32,
    kind: TypeId,
    site: Site,
    arrived: u32,
    /// The lanes that have come, by warps.
    lanes: [u32; 4],
    /// The threads' fragments, from the first thread's on; null where a thread has not come.
    fragments: Vec<*mut ()>,
}

impl Gathering {
    fn new(group: Group, opener: u32, kind: TypeId, site: Site) -> Self {
        let threads = match group {
            Group::Warp(_) => 32,
            Group::Warpgroup => 128,
        };
        Self {
            group,
            first: opener & !(threads - 1),
            opener,
            kind,
            site,
            arrived: 0,
            lanes: [0; 4],
            fragments: vec![ptr::null_mut(); threads as usize],
        }
    }

    /// Whether a thread that comes with `group` belongs here, or should: threads of both wait for each other.
    fn concerns(&self, thread: &Thread, group: Group) -> bool {
        let warp = thread.number & !31;
        match (self.group, group) {
            (Group::Warp(mine), Group::Warp(theirs)) => self.first == warp && mine & theirs != 0,
            (Group::Warpgroup, Group::Warpgroup) => self.first == thread.number & !127,
            (Group::Warp(mine), Group::Warpgroup) => self.first == warp && mine >> thread.lane() & 1 != 0,
            (Group::Warpgroup, Group::Warp(theirs)) => {
                self.first == thread.number & !127 && self.lanes[(thread.warp_number() % 4) as usize] & theirs != 0
            }
        }
    }

    /// The threads that have come, in their order.
    fn threads(&self) -> impl Iterator<Item = u32> {
        (self.first..).zip(&self.fragments).filter(|(_, fragment)| !fragment.is_null()).map(|(number, _)| number)
    }
}

/// A rendezvous that computes over every thread's fragment.
pub(crate) fn meet<T: 'static>(thread: &Thread, group: Group, fragment: &mut T, compute: impl FnOnce(&mut [&mut T]), site: Site) {
    let block = thread.block();
    let (members, whole) = match group {
        Group::Warp(mask) => {
            if mask >> thread.lane() & 1 == 0 || mask & !block.warp(thread).alive.get() != 0 {
                misnamed(thread, mask, site);
            }
            (mask.count_ones(), mask == block.warp(thread).alive.get())
        }
        Group::Warpgroup => (128, true),
    };
    let mut gatherings = block.gatherings.borrow_mut();
    let at = gatherings.iter().position(|gathering| gathering.concerns(thread, group));
    let at = at.unwrap_or_else(|| {
        gatherings.push(Gathering::new(group, thread.number, TypeId::of::<T>(), site));
        gatherings.len() - 1
    });
    let found = &mut gatherings[at];
    if found.group != group || !same(Some(found.site), site) || found.kind != TypeId::of::<T>() {
        diverged(thread, found, site);
    }
    found.fragments[(thread.number - found.first) as usize] = ptr::from_mut(fragment).cast();
    found.lanes[((thread.number - found.first) / 32) as usize] |= 1 << thread.lane();
    found.arrived += 1;
    if found.arrived < members {
        drop(gatherings);
        let waiting = match group {
            Group::Warp(mask) => Waiting::Rendezvous { mask },
            Group::Warpgroup => Waiting::Warpgroup,
        };
        thread.suspend(waiting, site);
        if whole {
            thread.meetings.met();
        }
        return;
    }
    let gathered = gatherings.swap_remove(at);
    drop(gatherings);
    complete(thread, &gathered, compute);
    if whole {
        thread.meetings.met();
    }
}

/// What the last thread does for all. Not inlined: the other threads wait in [`meet`], and their frames stay small.
#[inline(never)]
fn complete<T: 'static>(last: &Thread, gathered: &Gathering, compute: impl FnOnce(&mut [&mut T])) {
    let present = gathered.fragments.iter().copied().filter(|fragment| !fragment.is_null());
    // SAFETY: each pointer came from a distinct `&mut T` (the type ids agree) of a thread that is suspended
    // in `meet` until it is made ready below, or of this one.
    let mut fragments: Vec<&mut T> = present.map(|fragment| unsafe { &mut *fragment.cast::<T>() }).collect();
    compute(&mut fragments);
    gathered.threads().filter(|number| *number != last.number).for_each(|number| last.block().make_ready(number));
}

#[cold]
fn misnamed(thread: &Thread, mask: u32, site: Site) -> ! {
    thread.fail(
        FaultKind::Divergence,
        site,
        format!("a collective of mask {mask:#010x} in which lane {} or an exited lane takes part", thread.lane()),
        "name exactly the lanes that call it",
    )
}

#[cold]
fn diverged(thread: &Thread, found: &Gathering, site: Site) -> ! {
    let mut fault = thread.fault(
        FaultKind::Divergence,
        site,
        format!("threads {} and {} meet different collectives", thread.number, found.opener),
        "let all threads of the group reach the same line",
    );
    fault.involved.push(Involved { location: found.site, action: format!("thread {}", found.opener) });
    thread.stop(fault)
}
