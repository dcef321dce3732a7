//! What the backward pass reads and writes.

use oxtile_tile::launch::{DeviceView, DeviceViewMut};

use super::config::{AttentionConfig, GradientOutput, Sink};
use super::tensors::Inputs;
use crate::runtime::{Error, Result};

/// What the backward pass reads: `out` and its log-sum-exp may be those of more keys than these are, as in a step of a ring
/// of ranks; the gradients of the steps then add up to those of all keys.
pub struct BackwardInputs<'a, T> {
    /// What the forward pass reads. Sequences do not share rows.
    pub forward: Inputs<'a, T>,
    /// The result of the forward pass.
    pub out: DeviceView<'a, T>,
    /// The log-sum-exp of the forward pass.
    pub log_sum_exp: DeviceView<'a, f32>,
    /// The gradient of the result.
    pub grad_out: DeviceView<'a, T>,
}

/// What a [step](super::AttentionBackward::step) of the backward pass reads: as [`BackwardInputs`], with the prepared row sums
/// in place of the result.
pub struct BackwardStep<'a, T> {
    /// What the forward pass reads. Sequences do not share rows.
    pub forward: Inputs<'a, T>,
    /// The row sums of `O dO`, laid out as the log-sum-exp, as [`prepare`](super::AttentionBackward::prepare) writes them.
    pub deltas: DeviceView<'a, f32>,
    /// The log-sum-exp of the forward pass.
    pub log_sum_exp: DeviceView<'a, f32>,
    /// The gradient of the result.
    pub grad_out: DeviceView<'a, T>,
}

/// What the backward pass writes: gradients of the shapes of their tensors.
///
/// Rows between sequences become zeros if their [`Padding`](super::Padding) is zeroed; sums are left as they are there.
pub struct Gradients<'a, T> {
    /// The gradient of the queries.
    pub q: GradientTarget<'a, T>,
    /// The gradient of the keys.
    pub k: GradientTarget<'a, T>,
    /// The gradient of the values.
    pub v: GradientTarget<'a, T>,
    /// The gradient of the sink, `[heads]`, if that is [learnable](Sink::Learnable) and the gradient is wanted. It is written, never added
    /// to, and complete: of the steps of a ring one asks for it.
    pub sink: Option<DeviceViewMut<'a, f32>>,
}

/// Where a gradient goes.
pub enum GradientTarget<'a, T> {
    /// As [`GradientOutput::Rounded`].
    Rounded(DeviceViewMut<'a, T>),
    /// As [`GradientOutput::Added`].
    Added(DeviceViewMut<'a, f32>),
}

/// Tensors of queries, keys and values, or none.
pub(super) type Three<'a, T> = Option<[DeviceViewMut<'a, T>; 3]>;

impl<'a, T> Gradients<'a, T> {
    /// Gradients of the inputs' type.
    pub fn new(q: DeviceViewMut<'a, T>, k: DeviceViewMut<'a, T>, v: DeviceViewMut<'a, T>) -> Self {
        Self { q: GradientTarget::Rounded(q), k: GradientTarget::Rounded(k), v: GradientTarget::Rounded(v), sink: None }
    }

    /// Sums that the gradients are added to.
    pub fn added(q: DeviceViewMut<'a, f32>, k: DeviceViewMut<'a, f32>, v: DeviceViewMut<'a, f32>) -> Self {
        Self { q: GradientTarget::Added(q), k: GradientTarget::Added(k), v: GradientTarget::Added(v), sink: None }
    }

    /// Lengths as configured, and what the configuration asks for.
    pub(super) fn check(&self, config: &AttentionConfig) -> Result<()> {
        let [q, k, v] = config.lengths()?;
        self.q.check("AttentionBackward, gradients of q", q, config.gradients)?;
        self.k.check("AttentionBackward, gradients of k", k, config.gradients)?;
        self.v.check("AttentionBackward, gradients of v", v, config.gradients)?;
        let Some(sink) = &self.sink else { return Ok(()) };
        if config.sink != Sink::Learnable {
            let why = format!("the configuration's sink is {:?}, which has none: leave it out", config.sink);
            return Err(Error::Invalid { what: "AttentionBackward, gradients of sink", why });
        }
        Error::check_length("AttentionBackward, gradients of sink", config.heads, sink.len())
    }

    /// The tensors of queries, keys and values, all [checked](Self::check) to be rounded or all to be added to.
    pub(super) fn split(self) -> (Three<'a, T>, Three<'a, f32>) {
        match (self.q, self.k, self.v) {
            (GradientTarget::Rounded(q), GradientTarget::Rounded(k), GradientTarget::Rounded(v)) => (Some([q, k, v]), None),
            (GradientTarget::Added(q), GradientTarget::Added(k), GradientTarget::Added(v)) => (None, Some([q, k, v])),
            _ => unreachable!("gradients are checked before they are bound"),
        }
    }
}

impl<T> GradientTarget<'_, T> {
    fn check(&self, what: &'static str, length: u64, wanted: GradientOutput) -> Result<()> {
        let (given, found) = match self {
            Self::Rounded(view) => (GradientOutput::Rounded, view.len()),
            Self::Added(view) => (GradientOutput::Added, view.len()),
        };
        if given != wanted {
            let why = format!("the configuration's gradients are {wanted:?}, the tensor given is {given:?}");
            return Err(Error::Invalid { what, why });
        }
        Error::check_length(what, length, found)
    }
}
