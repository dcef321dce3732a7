//! Matrix multiplication of a warp and of a warpgroup.

use crate::{
    format::Format,
    mma,
    thread::acting,
    wgmma::{self, Instruction, Left},
};
use std::panic::Location;

/// This lane's part of `A B` plus `sums` (`mma.m16n8k16` or `k32`, with fragments as PTX has them). The 32 lanes of a warp
/// call it together.
#[track_caller]
#[inline]
pub fn mma(format: Format, sums: [f32; 4], left: [u32; 4], right: [u32; 2]) -> [f32; 4] {
    let Some(thread) = acting() else { return sums };
    mma::multiply(thread, format, sums, left, right, Location::caller())
}

/// Names accumulators of this thread's warpgroup, before the first multiplication into them.
#[track_caller]
#[inline]
pub fn wgmma_ticket() -> u32 {
    let Some(thread) = acting() else { return 0 };
    wgmma::ticket(thread)
}

/// Orders register accesses before multiplications (`wgmma.fence`).
#[track_caller]
#[inline]
pub fn wgmma_fence() {
    let Some(thread) = acting() else { return };
    wgmma::fence(thread, Location::caller());
}

/// Closes this warpgroup's group of multiplications (`wgmma.commit_group`).
#[track_caller]
#[inline]
pub fn wgmma_commit() {
    let Some(thread) = acting() else { return };
    wgmma::commit(thread, Location::caller());
}

/// Waits until at most `pending` groups of multiplications are in flight (`wgmma.wait_group`).
#[track_caller]
#[inline]
pub fn wgmma_wait(pending: u32) {
    let Some(thread) = acting() else { return };
    wgmma::wait(thread, pending, Location::caller());
}

/// Multiplies into the accumulators of a ticket, from `addends` on if they are new to it, from zero if there are none
/// (`wgmma.mma_async`). The 128 threads of a warpgroup call it together. `right` is a matrix descriptor.
#[track_caller]
#[inline]
pub fn wgmma_multiply(instruction: &Instruction, ticket: u32, left: Left, right: u64, addends: Option<&[f32]>) {
    let Some(thread) = acting() else { return };
    wgmma::multiply(thread, instruction, ticket, left, right, addends, Location::caller());
}

/// This thread's accumulators of a ticket, whose multiplications were waited for.
#[track_caller]
#[inline]
pub fn wgmma_publish(ticket: u32, registers: &mut [f32]) {
    let Some(thread) = acting() else { return };
    wgmma::publish(thread, ticket, registers, Location::caller());
}
