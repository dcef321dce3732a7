//! An all-reduced product bound to its operands, and one call of it.

use std::fmt;

use oxtile_kernels::sum_parts::Summed;
use oxtile_tile::launch::DeviceView;

use super::mailbox::{ReduceOperands, Sum};
use super::{GemmAllReduce, OneShot};
use crate::gemm::GemmConfig;
use crate::overlap::scattered::ScatterCall;
use crate::runtime::{Bound, Buffer, Result, Stream};

/// An all-reduced product bound to its operands. Made by [`GemmAllReduce::bind`].
pub struct ReducedProduct<'a, T: ReduceOperands<O>, O: Summed> {
    of: &'a GemmAllReduce<T, O>,
    result: Buffer<O>,
    by: By<'a, T, O>,
}

pub(super) enum By<'a, T: ReduceOperands<O>, O: Summed> {
    Scattered(ScatterCall<'a, T, O>),
    OneShot { product: Bound<'a>, of: &'a OneShot<T, O>, bias: Option<DeviceView<'a, O>> },
}

impl<'a, T: ReduceOperands<O>, O: Summed> ReducedProduct<'a, T, O> {
    pub(super) fn new(of: &'a GemmAllReduce<T, O>, result: Buffer<O>, by: By<'a, T, O>) -> Self {
        Self { of, result, by }
    }

    /// The result, `[m, n]`, for kernels that are launched after a [call](Self::run) and before the next one of any operation on the memory.
    pub fn result(&self) -> DeviceView<'_, O> {
        self.result.view()
    }

    /// The result as a buffer of the memory, to copy it.
    pub fn buffer(&self) -> &Buffer<O> {
        &self.result
    }

    /// Multiplies, and sums over all members, after the work on `compute` so far: the operands are written by then, and the result of the call before was read. Nothing is waited for on the host. The result is there after
    /// the work that this enqueues on `compute`. May be captured, together with the stream of the memory's copies but for [`AllReduceMethod::OneShot`](super::AllReduceMethod::OneShot).
    ///
    /// Every member calls it. One that does not come is named by the next [ticket](crate::symmetric::Arena::ticket).
    ///
    /// # Errors
    /// As [`Bound::run`](crate::Bound::run); what ended the arena.
    pub fn run(&mut self, compute: &Stream) -> Result<()> {
        const WHAT: &str = "ReducedProduct::run";
        let Self { of, result, by } = self;
        let (product, made, bias) = match by {
            By::Scattered(call) => return call.run(compute, WHAT),
            By::OneShot { product, of, bias } => (product, of, *bias),
        };
        let (memory, parts) = (&of.memory.0, &of.memory.parts().0);
        parts.arena.glance()?;
        result.check_stream(compute, WHAT)?;
        let config = GemmConfig { n: of.config.sizes.n, alpha: of.config.alpha, activation: of.config.activation, ..GemmConfig::default() };
        let done = product.run(compute).and_then(|()| {
            let sum = Sum { part: made.part.view(), sum: result.view_mut(), config, bias };
            memory.mailbox.sum(parts, compute, &*made.kernel, sum)
        });
        parts.arena.or_abort(compute, WHAT, done)
    }
}

impl<T: ReduceOperands<O>, O: Summed> fmt::Debug for ReducedProduct<'_, T, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReducedProduct").field("of", self.of).finish_non_exhaustive()
    }
}
