//! Small sums over ranks in one launch a rank: each rank stores its part at every other one, waits for theirs, and adds all of them in the order of the ranks.
//!
//! A thread serves some vectors of the sum, by itself. It
//!
//! 1. stores its part of them in the [slots](oxtile_tile::slots) of this rank at every other one;
//! 2. waits until the same vectors of all other ranks have come here, and empties their slots;
//! 3. adds, in `f32` and in the order of the ranks, so that all ranks have the same bits; the factor, the bias and GELU come after the whole sum.
//!
//! Slots are taken in turn by the parity of the call. No flag tells a rank that a slot is empty. It stores to the slot again two calls later: by then it has the reader's part of the call between, which the reader sent after it had emptied the slot.
//! A *lane* is the vectors of a CUDA block. Its calls are counted in device memory, so that a graph's replay goes on where the last call ended.
//!
//! A part that does not come is NaN, and so is the sum. The lane is over from then on: its later sums are NaN too, without a wait. The host finds the verdict ([`Arrivals`]).
//!
//! Floor: latency, one crossing of the link; the bytes of a part go to every other rank.

#![allow(clippy::needless_range_loop, reason = "an iterator leaves an array in local memory")]

use oxtile_tile::arrivals::{Arrivals, Waits};
use oxtile_tile::global::GlobalTable;
use oxtile_tile::prelude::*;
use oxtile_tile::slots::Slots;

use crate::gemm::{Fusion, gelu_of};
use crate::sum_parts::Summed;

const THREADS: u32 = 512;
/// The most blocks: few, so that all are resident, and enough for a thread to have one vector of the largest sum.
pub const LANES: u32 = 32;
/// Elements of a vector.
pub const VECTOR: u32 = 8;
/// Parts that a thread waits for before it adds them.
const PARTS: usize = 4;
/// The calls of a lane that is over.
const OVER: u64 = u64::MAX;

#[derive(SharedStorage)]
struct Shared {
    /// 1 once a wait was not answered.
    is_over: SharedArray<u32, 1>,
}

/// Where parts arrive: at each rank `[source, 2, LANES, slot]`.
#[derive(Clone, Copy, Parameter)]
pub struct Mail<T: Pod + Float> {
    /// This rank's slots at each member, `[2, LANES, slot]`.
    pub slots: GlobalTable<T>,
    /// The slots of all members here.
    pub inbox: Slots<T>,
    /// The number of each member in the world, by which a verdict names it.
    pub ranks: Global<u32>,
    /// The calls of each lane so far, `[LANES]`.
    pub calls: GlobalMut<u64>,
    /// Elements of a lane's slots of a source: a multiple of 8.
    pub slot: u32,
    /// Vectors of a lane: at most `slot / 8`.
    pub each: u32,
    /// The number of this member.
    pub me: u32,
}

/// Writes the sum of all members' parts: of `[rows, columns]`, whole vectors of 8 a row. Every member launches it, with the same sizes. `waits` has a flag for each rank of the world, which nothing sets: a verdict names a rank by it.
///
/// The host orders the launches of a rank on one mailbox. A NaN may lose its sign.
#[kernel(threads = THREADS, grid = grid, shared = Shared)]
#[instances(T = [bf16, f16])]
pub fn all_reduce<T: Summed>(part: Global<T>, sum: GlobalMut<T>, columns: u32, mail: Mail<T>, waits: Waits, fusion: Fusion<T>) {
    let Mail { slots, inbox, ranks, calls, slot, each, me } = mail;
    let (lane, members, t, is_over) = (block::index()[0], slots.len() as u32, thread::index(), Shared::claim().is_over);
    let call = calls.load(lane.into());
    if t == 0 {
        is_over.store(0, (call == OVER).into());
    }
    block::sync();
    let first = lane * each;
    let end = (first + each).min((sum.len() / u64::from(VECTOR)) as u32);
    let in_slot = |vector: u32| u64::from(((call % 2) as u32 * LANES + lane) * slot + (vector - first) * VECTOR);

    let mut vector = first + t;
    while vector < end && call != OVER {
        let values = part.load_vector(u64::from(vector * VECTOR));
        let mut step = 1;
        while step < members {
            // No two ranks begin with the same one.
            let to = if me + step < members { me + step } else { me + step - members };
            let slots = slots.get(to.into());
            // SAFETY: the caller that launched the kernel lent the slots of this rank at each member.
            let slots = unsafe { Slots::<T>::from_raw_parts(slots.start(), slots.len()) };
            slots.send(in_slot(vector), values);
            step += 1;
        }
        vector += THREADS;
    }

    let (mut arrivals, of_source) = (Arrivals::new(waits), u64::from(2 * LANES * slot));
    let mut vector = first + t;
    while vector < end {
        let at = u64::from(vector * VECTOR);
        // -0 changes no sum.
        let (mut sums, mut source) = ([-0.0; VECTOR as usize], 0);
        while source < members {
            let sources: [u32; PARTS] = core::array::from_fn(|i| source + i as u32);
            let theirs = sources.map(|source| {
                let comes = source < members && source != me && call != OVER;
                comes.then(|| u64::from(source) * of_source + in_slot(vector))
            });
            let parts = inbox.receive(theirs, &mut arrivals, |i| ranks.load((source + i).into()));
            for i in 0..PARTS {
                let values = match sources[i] {
                    source if source == me => T::load_eight(&part, at),
                    source if source >= members => [-0.0; VECTOR as usize],
                    _ if call == OVER => [f32::NAN; VECTOR as usize],
                    _ => T::unpack(|_| parts[i]),
                };
                sums = core::array::from_fn(|of| sums[of] + values[of]);
            }
            source += PARTS as u32;
        }
        let column = vector * VECTOR % columns.max(VECTOR);
        T::store_eight(&sum, at, finish(&fusion, sums, column));
        vector += THREADS;
    }
    // All that store it store 1.
    if arrivals.is_over() {
        is_over.store(0, 1);
    }
    block::sync();
    if t == 0 {
        calls.store(lane.into(), if is_over.load(0) == 0 { call + 1 } else { OVER });
    }
}

/// What follows a sum of neighbours in a row, from `column` on.
#[inline(always)]
fn finish<T: Summed>(fusion: &Fusion<T>, sums: [f32; VECTOR as usize], column: u32) -> [f32; VECTOR as usize] {
    let mut values = sums;
    if fusion.alpha != 1.0 {
        values = values.map(|x| fusion.alpha * x);
    }
    if let Some(bias) = fusion.bias {
        let bias = T::load_eight(&bias, column.into());
        values = core::array::from_fn(|i| values[i] + bias[i]);
    }
    if fusion.gelu { values.map(gelu_of) } else { values }
}

fn grid<T: Summed>(args: &AllReduceArgs<'_, T>, device: &DeviceLimits) -> Result<Grid, LaunchError> {
    let AllReduceArgs { part, sum, columns, mail, fusion, .. } = args;
    let (members, slot, each) = (mail.slots.len(), u64::from(mail.slot), u64::from(mail.each));
    LaunchError::check_multiple("columns", VECTOR.into(), (*columns).into())?;
    LaunchError::check_multiple("sum", (*columns).max(VECTOR).into(), sum.len())?;
    LaunchError::check_length("part", sum.len(), part.len())?;
    LaunchError::check_multiple("mail.slot", VECTOR.into(), slot)?;
    LaunchError::check_length("mail.inbox", members * 2 * u64::from(LANES) * slot, mail.inbox.len())?;
    LaunchError::check_limit("mail.inbox", mail.inbox.len(), u32::MAX.into())?;
    LaunchError::check_length("mail.ranks", members, mail.ranks.len())?;
    LaunchError::check_length("mail.calls", LANES.into(), mail.calls.len())?;
    LaunchError::check_limit("mail.me", u64::from(mail.me) + 1, members)?;
    LaunchError::check_at_least("mail.each", 1, each)?;
    LaunchError::check_limit("mail.each", each, slot / u64::from(VECTOR))?;
    LaunchError::check_limit("fusion.beta", u64::from(fusion.beta != 0.0), 0)?;
    fusion.check((*columns).into())?;
    let bias = fusion.bias.map_or(0, |bias| bias.address());
    for (name, address) in [("part", part.address()), ("sum", sum.address()), ("mail.inbox", mail.inbox.address()), ("fusion.bias", bias)] {
        LaunchError::check_alignment(name, 16, address)?;
    }
    let lanes = (sum.len() / u64::from(VECTOR)).div_ceil(each.max(1));
    // Blocks wait for those of other ranks: none may be left for later.
    LaunchError::check_limit("mail.each", lanes, u64::from(LANES.min(device.multiprocessors)))?;
    Ok(Grid::x(lanes as u32))
}
