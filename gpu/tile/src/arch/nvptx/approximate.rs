//! Approximated functions.

use core::arch::asm;

use super::Nvptx;
use crate::arch::Approximate;

macro_rules! functions {
    ($($name:ident => $op:literal;)*) => {
        impl Approximate for Nvptx { $(
            #[inline(always)]
            fn $name(x: f32) -> f32 {
                let y: f32;
                // SAFETY: reads and writes its operands only.
                unsafe { asm!(concat!($op, " {0}, {1};"), out(reg32) y, in(reg32) x, options(pure, nomem, nostack)) };
                y
            }
        )* }
    };
}

functions! {
    exp2 => "ex2.approx.ftz.f32";
    log2 => "lg2.approx.ftz.f32";
    reciprocal => "rcp.approx.ftz.f32";
    rsqrt => "rsqrt.approx.ftz.f32";
    sqrt => "sqrt.approx.ftz.f32";
}
