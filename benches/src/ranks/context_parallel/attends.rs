//! What attends: an operation of all ranks, or attention on one GPU, bound to tensors; what a try of it writes, and how calls of it are timed.

use std::time::{Duration, Instant, SystemTime};

use anyhow::{Result, ensure};
use oxtile::attention::{Attention, AttentionBackward, BackwardInputs, Gradients, Inputs, Outputs};
use oxtile::context_parallel::{ContextParallel, ContextParallelFp8, Plan};
use oxtile::kernels::copy::CopyWords;
use oxtile::num::bf16;
use oxtile::runtime::{Bound, Kind, Loaded};
use oxtile::{Event, Stream};

use super::super::Times;
use super::tensors::{Place, Tensors, Views};
use super::{Direction, Passes};
use crate::peers::Check;

/// The relative error in L2 of a result in `bf16`, of other sums than those that it is compared with.
pub const TOLERANCE: f64 = 1e-2;
/// The same of 8 bits, whose probabilities have 3 bits after the first.
pub const TOLERANCE_FP8: f64 = 6e-2;

/// How long a call may take: one GPU attends to a million tokens for a minute. Less than ranks wait for one another.
const LONGEST: Duration = Duration::from_secs(90);

/// Values of the result and of the gradients of queries, keys and values.
pub type Sampled = [Vec<f32>; 4];

/// Attention of all ranks.
pub enum Operation<'t> {
    Bf16(Box<ContextParallel<'t, bf16>>),
    Fp8(Box<ContextParallelFp8<'t>>),
}

impl Operation<'_> {
    pub fn plan(&self) -> &Plan {
        match self {
            Self::Bf16(operation) => operation.plan(),
            Self::Fp8(operation) => operation.plan(),
        }
    }
}

/// What attends.
#[derive(Clone, Copy)]
pub enum Attends<'a, 't> {
    Ranks(&'a Operation<'t>),
    OneGpu(&'a Attention<bf16>, &'a AttentionBackward<bf16>),
}

impl Attends<'_, '_> {
    fn forward<'a>(self, stream: &Stream, (inputs, outputs): (Inputs<'a, bf16>, Outputs<'a, bf16>)) -> oxtile::Result<Bound<'a>>
    where
        Self: 'a,
    {
        match self {
            Self::Ranks(Operation::Bf16(operation)) => operation.bind_forward(stream, inputs, outputs),
            Self::Ranks(Operation::Fp8(operation)) => operation.bind_forward(stream, inputs, outputs),
            Self::OneGpu(attention, _) => attention.bind(stream, inputs, outputs),
        }
    }

    fn backward<'a>(self, stream: &Stream, (reads, gradients): (BackwardInputs<'a, bf16>, Gradients<'a, bf16>)) -> oxtile::Result<Bound<'a>>
    where
        Self: 'a,
    {
        match self {
            Self::Ranks(Operation::Bf16(operation)) => operation.bind_backward(stream, reads, gradients),
            Self::Ranks(Operation::Fp8(operation)) => operation.bind_backward(stream, reads, gradients),
            Self::OneGpu(_, attention) => attention.bind(stream, reads, gradients),
        }
    }

    /// Passes that are ready to run.
    pub fn bind<'a>(self, stream: &Stream, tensors: &'a mut Tensors, passes: Passes) -> oxtile::Result<Vec<Bound<'a>>>
    where
        Self: 'a,
    {
        let Views { forward, backward } = tensors.views(matches!(self, Self::OneGpu(..)));
        let mut bound = vec![self.forward(stream, forward)?];
        if passes == Passes::Both {
            bound.push(self.backward(stream, backward)?);
        }
        Ok(bound)
    }

    /// One pass alone: the backward pass reads the result that was [saved](Tensors::save).
    pub fn bind_one<'a>(self, stream: &Stream, tensors: &'a mut Tensors, pass: Direction) -> oxtile::Result<Bound<'a>>
    where
        Self: 'a,
    {
        let Views { forward, backward } = tensors.views(matches!(self, Self::OneGpu(..)));
        match pass {
            Direction::Forward => self.forward(stream, forward),
            Direction::Backward => self.backward(stream, backward),
        }
    }

    /// Runs both passes once, and samples what they wrote.
    pub fn attempt(self, stream: &Stream, tensors: &mut Tensors, copy: &Loaded<CopyWords>, at: &[Place]) -> Result<Sampled> {
        self.bind(stream, tensors, Passes::Forward)?.iter_mut().try_for_each(|pass| pass.run(stream))?;
        // Binding waits on the host: not for other ranks that have not come so far.
        wait(stream, &stream.record()?)?;
        tensors.save(stream)?;
        self.bind(stream, tensors, Passes::Both)?.iter_mut().try_for_each(|pass| pass.run(stream))?;
        wait(stream, &stream.record()?)?;
        tensors.sample(copy, stream, at)
    }
}

/// Times calls, if `is_warmed` after one that is not timed: ranks begin together, where it ends.
pub fn timed(stream: &Stream, calls: u64, is_warmed: bool, mut call: impl FnMut() -> Result<()>) -> Result<Times> {
    if is_warmed {
        call()?;
    }
    let (begin, start) = (Instant::now(), stream.record()?);
    (0..calls).try_for_each(|_| call())?;
    let end = stream.record()?;
    wait(stream, &end)?;
    let (took, ended) = (begin.elapsed(), SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?);
    let [wall, device] = [took, end.elapsed_since(&start)?].map(|time| time.as_secs_f64() * 1e3);
    Ok(Times { wall, device, ended: Some(ended), ..Times::default() })
}

/// Waits for a stream's work within the deadline, and sees its end within microseconds. On virtual GPUs a wait of the driver would end with an error where
/// another rank has not come so far, and their kernels need the processors.
pub fn wait(stream: &Stream, end: &Event) -> Result<()> {
    let (begin, is_virtual) = (Instant::now(), stream.device().runtime().kind() == Kind::Emulated);
    while !end.is_done()? {
        ensure!(begin.elapsed() < LONGEST, "work was not done after {LONGEST:?}");
        if is_virtual {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    Ok(())
}

/// Whether values are the expected ones, within the tolerance.
pub fn compare(found: &Sampled, expected: &Sampled, tolerance: f64) -> Check {
    let names = ["out", "the gradient of q", "the gradient of k", "the gradient of v"];
    let differs = names.into_iter().zip(found.iter().zip(expected)).filter_map(|(name, (found, expected))| {
        let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>();
        let error = squares(&mut found.iter().zip(expected).map(|(a, b)| f64::from(a - b)));
        let error = (error / squares(&mut expected.iter().map(|value| f64::from(*value))).max(f64::MIN_POSITIVE)).sqrt();
        (error.is_nan() || error > tolerance).then(|| format!("{name} of rank 0 is off by {error:.2e}, relative L2"))
    });
    let detail = differs.collect::<Vec<_>>().join("; ");
    Check { equal: detail.is_empty(), detail }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_is_named() {
        let of = |value: f32| [vec![1.0, 2.0], vec![3.0], vec![4.0], vec![value]];
        assert!(compare(&of(5.0), &of(5.0), TOLERANCE).equal);
        assert!(compare(&of(5.01), &of(5.0), TOLERANCE).equal);
        assert!(compare(&of(5.2), &of(5.0), TOLERANCE_FP8).equal);
        for wrong in [5.2, f32::NAN, 0.0] {
            let Check { equal, detail } = compare(&of(wrong), &of(5.0), TOLERANCE);
            assert!(!equal && detail.starts_with("the gradient of v of rank 0 is off by "), "{detail}");
        }
    }
}
