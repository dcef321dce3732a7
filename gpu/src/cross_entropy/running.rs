//! What a thread knows of its row of logits so far.

#![allow(clippy::needless_range_loop, reason = "an iterator leaves an array in local memory")]

use core::f32::consts::LOG2_E;

use oxtile_tile::prelude::*;

use super::reading::{Group, Reading};

/// e to the `x`.
#[inline(always)]
pub(super) fn power(x: f32) -> f32 {
    num::exp2(x * LOG2_E)
}

/// What a thread knows of its logits so far.
pub(super) struct Running {
    pub maximum: f32,
    /// Of exponentials relative to the maximum.
    pub sum: f32,
    /// Of the logits.
    pub total: f32,
}

/// What a maximum starts from.
const LOWEST: f32 = -1e30;

impl Running {
    /// Before the first logit.
    pub const NOTHING: Self = Self { maximum: LOWEST, sum: 0.0, total: 0.0 };

    #[inline(always)]
    pub fn join<R: Reading>(mut self, logits: &Group, with_total: bool) -> Self {
        let before = self.maximum;
        for piece in 0..R::UNROLL {
            self.maximum = logits[piece].iter().fold(self.maximum, |maximum, &x| num::max(maximum, x));
        }
        self.sum *= power(before - self.maximum);
        for piece in 0..R::UNROLL {
            self.sum = logits[piece].iter().fold(self.sum, |sum, &x| sum + power(x - self.maximum));
            if with_total {
                // What is after the end of the row is -Inf, and counts for nothing here.
                self.total = logits[piece].iter().fold(self.total, |total, &x| if x == f32::NEG_INFINITY { total } else { total + x });
            }
        }
        self
    }
}
