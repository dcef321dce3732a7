//! Operations of a warp.

use crate::{
    collective,
    order::{Group, ReduceOp, ShuffleMode, VoteMode},
    thread::acting,
    warp::Kind,
};
use std::panic::Location;

/// Waits for the lanes of `mask` and orders their memory accesses (`bar.warp.sync`).
#[track_caller]
#[inline]
pub fn warp_sync(mask: u32) {
    let Some(thread) = acting() else { return };
    if thread.worker().performs("warp_sync", Location::caller()) {
        thread.block().warp(thread).meet(thread, mask, Kind::Sync, 0, 0, Location::caller());
    }
}

/// `shfl.sync`: `clamp` is the PTX operand c, the clamp value in bits 0..5, the segment mask in bits 8..13.
#[track_caller]
#[inline]
pub fn shuffle(mask: u32, mode: ShuffleMode, value: u32, lane_argument: u32, clamp: u32) -> u32 {
    let Some(thread) = acting() else { return value };
    let argument = lane_argument & 31 | clamp << 8;
    thread.block().warp(thread).meet(thread, mask, Kind::Shuffle(mode), value, argument, Location::caller())
}

/// `vote.sync` over the lanes of `mask`.
#[track_caller]
#[inline]
pub fn vote(mask: u32, mode: VoteMode, predicate: bool) -> u32 {
    let Some(thread) = acting() else { return 0 };
    thread.block().warp(thread).meet(thread, mask, Kind::Vote(mode), u32::from(predicate), 0, Location::caller())
}

/// `redux.sync` over the lanes of `mask`.
#[track_caller]
#[inline]
pub fn reduce(mask: u32, op: ReduceOp, value: u32) -> u32 {
    let Some(thread) = acting() else { return value };
    thread.block().warp(thread).meet(thread, mask, Kind::Reduce(op), value, 0, Location::caller())
}

/// `match.any.sync`: the lanes of `mask` whose value equals this lane's.
#[track_caller]
#[inline]
pub fn match_any(mask: u32, value: u32) -> u32 {
    let Some(thread) = acting() else { return 0 };
    thread.block().warp(thread).meet(thread, mask, Kind::MatchAny, value, 0, Location::caller())
}

/// A rendezvous of `group` at one call site: the last thread to come runs `compute` over all fragments, in
/// thread order; then all go on. `ldmatrix`, `mma` and `wgmma` are built on it. Orders no memory.
#[track_caller]
#[inline]
pub fn collective<T: 'static>(group: Group, fragment: &mut T, compute: impl FnOnce(&mut [&mut T])) {
    let Some(thread) = acting() else { return };
    collective::meet(thread, group, fragment, compute, Location::caller());
}
