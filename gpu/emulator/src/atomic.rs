//! What an atomic operation does to a word (PTX ISA, "atom").

use crate::order::{AtomicOp, AtomicOrder, Scope, Space};

/// An atomic read-modify-write, but for its address.
#[derive(Clone, Copy, Debug)]
pub struct Atomic {
    /// What it does to the word.
    pub op: AtomicOp,
    /// Bytes of the word: 4 or 8.
    pub width: u8,
    /// What the word is combined with, or replaced by.
    pub operand: u64,
    /// What [`AtomicOp::CompareAndSwap`] replaces.
    pub compare: u64,
    /// What it orders.
    pub order: AtomicOrder,
    /// The threads that it is atomic for.
    pub scope: Scope,
}

impl Atomic {
    /// One that orders nothing, at the scope of the device.
    #[must_use]
    pub const fn relaxed(op: AtomicOp, width: u8, operand: u64) -> Self {
        Self { op, width, operand, compare: 0, order: AtomicOrder::Relaxed, scope: Scope::Device }
    }

    /// Whether it releases, and whether it acquires.
    pub(crate) fn edges(&self) -> (bool, bool) {
        match self.order {
            AtomicOrder::Relaxed => (false, false),
            AtomicOrder::Acquire => (false, true),
            AtomicOrder::Release => (true, false),
            AtomicOrder::AcquireRelease => (true, true),
        }
    }

    /// What memory holds afterwards.
    pub(crate) fn apply(&self, space: Space, old: u64) -> u64 {
        let wide = self.width == 8;
        let signed = |value: u64| if wide { value as i64 } else { i64::from(value as u32 as i32) };
        let mask = if wide { u64::MAX } else { 0xffff_ffff };
        let operand = self.operand & mask;
        let new = match self.op {
            AtomicOp::Add => old.wrapping_add(operand),
            AtomicOp::AddF32 => {
                let [old, operand] = [old, operand].map(|bits| f32::from_bits(bits as u32));
                let sum = if space == Space::Global { add_in_global_memory(old, operand) } else { old + operand };
                sum.to_bits().into()
            }
            AtomicOp::Min => old.min(operand),
            AtomicOp::Max => old.max(operand),
            AtomicOp::MinSigned => signed(old).min(signed(operand)) as u64,
            AtomicOp::MaxSigned => signed(old).max(signed(operand)) as u64,
            AtomicOp::And => old & operand,
            AtomicOp::Or => old | operand,
            AtomicOp::Xor => old ^ operand,
            AtomicOp::Exchange => operand,
            AtomicOp::CompareAndSwap => {
                if old == self.compare & mask {
                    operand
                } else {
                    old
                }
            }
        };
        new & mask
    }
}

/// The sum that global memory computes: subnormal addends and sums are zeros of their sign. Atomics on shared memory keep
/// them (PTX ISA, "atom" and "cp.reduce.async.bulk": `.add.f32`).
pub(crate) fn add_in_global_memory(a: f32, b: f32) -> f32 {
    let flushed = |x: f32| if x.is_subnormal() { 0.0_f32.copysign(x) } else { x };
    flushed(flushed(a) + flushed(b))
}
