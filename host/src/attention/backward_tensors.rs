//! What the backward pass reads and writes.

use oxtile_tile::launch::{DeviceView, DeviceViewMut};

use super::config::{AttentionConfig, GradientOutput, Sink};
use super::heads::Rows;
use super::tensors::Inputs;
use crate::runtime::{Error, Result};
use crate::tensor::{Heads, HeadsMut, Strided};

/// What the backward pass reads: `out` and its log-sum-exp may be those of more keys than these are, as in a step of a ring
/// of ranks; the gradients of the steps then add up to those of all keys.
pub struct BackwardInputs<'a, T> {
    /// What the forward pass reads. Sequences do not share rows.
    pub forward: Inputs<'a, T>,
    /// The result of the forward pass.
    pub out: Heads<'a, T>,
    /// The log-sum-exp of the forward pass.
    pub log_sum_exp: DeviceView<'a, f32>,
    /// The gradient of the result.
    pub grad_out: Heads<'a, T>,
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
    pub grad_out: Heads<'a, T>,
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
    Rounded(HeadsMut<'a, T>),
    /// As [`GradientOutput::Added`].
    Added(HeadsMut<'a, f32>),
}

/// Tensors of queries, keys and values, or none.
pub(super) type Three<'a, T> = Option<[HeadsMut<'a, T>; 3]>;

impl<'a, T> Gradients<'a, T> {
    /// Gradients of the inputs' type.
    pub fn new(q: impl Into<HeadsMut<'a, T>>, k: impl Into<HeadsMut<'a, T>>, v: impl Into<HeadsMut<'a, T>>) -> Self {
        let (q, k, v) = (GradientTarget::Rounded(q.into()), GradientTarget::Rounded(k.into()), GradientTarget::Rounded(v.into()));
        Self { q, k, v, sink: None }
    }

    /// Sums that the gradients are added to.
    pub fn added(q: impl Into<HeadsMut<'a, f32>>, k: impl Into<HeadsMut<'a, f32>>, v: impl Into<HeadsMut<'a, f32>>) -> Self {
        let (q, k, v) = (GradientTarget::Added(q.into()), GradientTarget::Added(k.into()), GradientTarget::Added(v.into()));
        Self { q, k, v, sink: None }
    }

    /// Tensors of the shapes that are configured, with what the configuration asks for.
    pub(super) fn shaped(self, config: &AttentionConfig) -> Result<Self> {
        let [q, k, v] = config.whole_inputs();
        let [of_q, of_k, of_v] = GRADIENTS;
        let q = self.q.shaped(of_q, q, config.gradients)?;
        let k = self.k.shaped(of_k, k, config.gradients)?;
        let v = self.v.shaped(of_v, v, config.gradients)?;
        let shaped = Self { q, k, v, ..self };
        let Some(sink) = &shaped.sink else { return Ok(shaped) };
        if config.sink != Sink::Learnable {
            let why = format!("the configuration's sink is {:?}, which has none: leave it out", config.sink);
            return Err(Error::Invalid { what: "AttentionBackward, gradients of sink", why });
        }
        Error::check_length("AttentionBackward, gradients of sink", config.heads, sink.len())?;
        Ok(shaped)
    }

    /// The rows from one sequence of a dense layout to the next, of queries and of keys, in all that a step reads and writes: in rows of any
    /// strides, or in those that `given` and `target` say.
    pub(super) fn row_steps(
        &self,
        config: &AttentionConfig,
        inputs: &Inputs<'_, T>,
        grad_out: &Heads<'_, T>,
        [given, target]: [Rows; 2],
    ) -> Result<[u64; 2]> {
        let [of_q, of_k, of_v] = GRADIENTS;
        let (q, k, v, out) = (inputs.q.layout(), inputs.k.layout(), inputs.v.layout(), grad_out.layout());
        let queries = [("AttentionBackward, q", q, given), ("AttentionBackward, grad_out", out, given), (of_q, self.q.layout(), target)];
        let (k, v) = (("AttentionBackward, k", k, given), ("AttentionBackward, v", v, given));
        let keys = [k, v, (of_k, self.k.layout(), target), (of_v, self.v.layout(), target)];
        Ok([config.row_step(&queries)?, config.row_step(&keys)?])
    }

    /// The tensors of queries, keys and values, all [checked](Self::shaped) to be rounded or all to be added to.
    pub(super) fn split(self) -> (Three<'a, T>, Three<'a, f32>) {
        match (self.q, self.k, self.v) {
            (GradientTarget::Rounded(q), GradientTarget::Rounded(k), GradientTarget::Rounded(v)) => (Some([q, k, v]), None),
            (GradientTarget::Added(q), GradientTarget::Added(k), GradientTarget::Added(v)) => (None, Some([q, k, v])),
            _ => unreachable!("gradients are checked before they are bound"),
        }
    }
}

/// The names of the gradients of queries, keys and values.
pub(super) const GRADIENTS: [&str; 3] =
    ["AttentionBackward, gradients of q", "AttentionBackward, gradients of k", "AttentionBackward, gradients of v"];

impl<T> GradientTarget<'_, T> {
    fn shaped(self, what: &'static str, whole: Strided<4>, wanted: GradientOutput) -> Result<Self> {
        match (self, wanted) {
            (Self::Rounded(heads), GradientOutput::Rounded) => heads.shaped(what, whole).map(Self::Rounded),
            (Self::Added(heads), GradientOutput::Added) => heads.shaped(what, whole).map(Self::Added),
            (other, _) => {
                let given = if matches!(other, Self::Added(_)) { GradientOutput::Added } else { GradientOutput::Rounded };
                let why = format!("the configuration's gradients are {wanted:?}, the tensor given is {given:?}");
                Err(Error::Invalid { what, why })
            }
        }
    }

    fn layout(&self) -> Strided<4> {
        match self {
            Self::Rounded(heads) => heads.layout(),
            Self::Added(heads) => heads.layout(),
        }
    }
}
