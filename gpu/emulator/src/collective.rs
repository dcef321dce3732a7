//! Collectives over fragments that lie in the registers of a warp's or warpgroup's threads: the last thread to
//! come computes for all. Matrix instructions are built on it.

use crate::fault::{FaultKind, Involved};
use crate::order::Group;
use crate::site::Site;
use crate::thread::{Thread, Waiting};
use crate::warp::same;
use std::any::TypeId;

/// Threads gathered so far for a [`collective`](crate::device::collective).
pub(crate) struct Gathering {
    group: Group,
    first: u32,
    kind: TypeId,
    site: Site,
    fragments: Vec<(u32, *mut ())>,
}

impl Gathering {
    /// Whether a thread that comes with `group` belongs here, or should: threads of both wait for each other.
    fn concerns(&self, thread: &Thread, group: Group) -> bool {
        let warp = thread.number & !31;
        match (self.group, group) {
            (Group::Warp(mine), Group::Warp(theirs)) => self.first == warp && mine & theirs != 0,
            (Group::Warpgroup, Group::Warpgroup) => self.first == thread.number & !127,
            (Group::Warp(mine), Group::Warpgroup) => self.first == warp && mine >> thread.lane() & 1 != 0,
            (Group::Warpgroup, Group::Warp(theirs)) => self.fragments.iter().any(|f| f.0 & !31 == warp && theirs >> (f.0 % 32) & 1 != 0),
        }
    }
}

/// A rendezvous that computes over every thread's fragment.
pub(crate) fn meet<T: 'static>(thread: &Thread, group: Group, fragment: &mut T, compute: impl FnOnce(&mut [&mut T]), site: Site) {
    let block = thread.block();
    let (first, members, whole) = match group {
        Group::Warp(mask) => {
            if mask >> thread.lane() & 1 == 0 || mask & !block.warp(thread).alive.get() != 0 {
                thread.fail(
                    FaultKind::Divergence,
                    site,
                    format!("a collective of mask {mask:#010x} in which lane {} or an exited lane takes part", thread.lane()),
                    "name exactly the lanes that call it",
                );
            }
            (thread.number & !31, mask.count_ones(), mask == block.warp(thread).alive.get())
        }
        Group::Warpgroup => (thread.number & !127, 128, true),
    };
    let mut gatherings = block.gatherings.borrow_mut();
    let at = gatherings.iter().position(|gathering| gathering.concerns(thread, group));
    let at = at.unwrap_or_else(|| {
        gatherings.push(Gathering { group, first, kind: TypeId::of::<T>(), site, fragments: Vec::with_capacity(128) });
        gatherings.len() - 1
    });
    let found = &mut gatherings[at];
    if found.group != group || !same(Some(found.site), site) || found.kind != TypeId::of::<T>() {
        let mut fault = thread.fault(
            FaultKind::Divergence,
            site,
            format!("threads {} and {} meet different collectives", thread.number, found.fragments[0].0),
            "let all threads of the group reach the same line",
        );
        fault.involved.push(Involved { location: found.site, action: format!("thread {}", found.fragments[0].0) });
        thread.stop(fault);
    }
    found.fragments.push((thread.number, std::ptr::from_mut(fragment).cast()));
    if (found.fragments.len() as u32) < members {
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
    let mut gathered = gatherings.swap_remove(at);
    drop(gatherings);
    gathered.fragments.sort_unstable_by_key(|f| f.0);
    // SAFETY: each pointer came from a distinct `&mut T` (the type ids agree) of a thread that is suspended
    // in this function until it is made ready below, or of this one.
    let mut fragments: Vec<&mut T> = gathered.fragments.iter().map(|&(_, p)| unsafe { &mut *p.cast::<T>() }).collect();
    compute(&mut fragments);
    for &(number, _) in gathered.fragments.iter().filter(|f| f.0 != thread.number) {
        block.make_ready(number);
    }
    if whole {
        thread.meetings.met();
    }
}
