//! What is read and written.

use oxtile_tile::launch::{DeviceView, DeviceViewMut};

use super::config::{AttentionConfig, Layout, Output, Sink};
use super::forward::BoundAttention;
use crate::runtime::{Buffer, Error, Result, Stream};

/// What attention reads.
pub struct Inputs<'a, T> {
    /// Queries.
    pub q: DeviceView<'a, T>,
    /// Keys.
    pub k: DeviceView<'a, T>,
    /// Values.
    pub v: DeviceView<'a, T>,
    /// Where the sequences lie, if [packed](Layout::Packed).
    pub sequences: Option<Sequences<'a>>,
    /// A score for each query head, if the sink is [learnable](Sink::Learnable).
    pub sink: Option<DeviceView<'a, f32>>,
}

/// The sequences of packed tensors: arrays of `batches + 1` elements on the device, which the host does not read.
///
/// Sequence `b` has `cu_seqlens_q[b + 1] - cu_seqlens_q[b]` queries from row `cu_seqlens_q_padded[b]` on. Offsets need neither
/// begin at 0 nor rise: sequences may share keys. What they place beyond the tensors is left out.
#[derive(Clone, Copy)]
pub struct Sequences<'a> {
    /// Sums of the queries of the sequences before.
    pub cu_seqlens_q: DeviceView<'a, u32>,
    /// Sums of the keys of the sequences before.
    pub cu_seqlens_kv: DeviceView<'a, u32>,
    /// Where the queries of each sequence begin; `cu_seqlens_q` if none.
    pub cu_seqlens_q_padded: Option<DeviceView<'a, u32>>,
    /// Where the keys of each sequence begin; `cu_seqlens_kv` if none.
    pub cu_seqlens_kv_padded: Option<DeviceView<'a, u32>>,
    /// The key that query 0 of each sequence is aligned with, `batches` elements, from which windows and bottom-right masks count: for
    /// sequences that are cut at an end, as those of a step of a ring. Without it the last query is aligned with the last key. Given if the
    /// [configuration](AttentionConfig::diagonals) says so.
    pub diagonals: Option<DeviceView<'a, i32>>,
    /// What becomes of rows between sequences.
    pub padding: Padding,
}

/// What becomes of the output's rows from the end of a sequence to the next offset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Padding {
    /// They become zeros, and -inf in the log-sum-exp; a merged result stays as it is. For offsets that rise: rows of another sequence
    /// in between would be lost.
    #[default]
    Zeroed,
    /// They stay as they are: others write them.
    Kept,
}

/// What attention writes.
pub struct Outputs<'a, T> {
    /// The result.
    pub out: Target<'a, T>,
    /// The natural logarithm of each row's sum of exponentials.
    pub log_sum_exp: DeviceViewMut<'a, f32>,
    /// Each head's largest scaled score, `[heads]`, over all sequences; -inf where nothing is seen. Given if the configuration
    /// asks for it.
    pub max_logit: Option<DeviceViewMut<'a, f32>>,
}

/// Where the result goes.
pub enum Target<'a, T> {
    /// As [`Output::Rounded`].
    Rounded(DeviceViewMut<'a, T>),
    /// As [`Output::Merged`] or [`Output::First`], with the log-sum-exp.
    Merged(DeviceViewMut<'a, f32>),
    /// As [`Output::Last`], with the log-sum-exp.
    Last {
        /// The running result of the steps before.
        running: DeviceView<'a, f32>,
        /// The result.
        out: DeviceViewMut<'a, T>,
    },
}

impl<'a, T> Target<'a, T> {
    /// Where a rounded result goes.
    pub(super) fn rounded(self) -> Result<DeviceViewMut<'a, T>> {
        match self {
            Self::Rounded(out) => Ok(out),
            Self::Merged(_) | Self::Last { .. } => {
                Err(Error::Invalid { what: "Attention, out", why: "this kernel rounds its result".to_owned() })
            }
        }
    }
}

impl<'a, T> Inputs<'a, T> {
    /// Tensors of a dense layout, without a sink.
    pub fn new(q: DeviceView<'a, T>, k: DeviceView<'a, T>, v: DeviceView<'a, T>) -> Self {
        Self { q, k, v, sequences: None, sink: None }
    }

    /// Lengths as configured, and what the configuration asks for.
    pub(super) fn check(&self, config: &AttentionConfig) -> Result<()> {
        let [q, k, v] = config.lengths()?;
        check_length("Attention, q", q, self.q.len())?;
        check_length("Attention, k", k, self.k.len())?;
        check_length("Attention, v", v, self.v.len())?;
        check_given("sink", config.sink == Sink::Learnable, self.sink.is_some())?;
        check_given("sequences", config.layout == Layout::Packed, self.sequences.is_some())?;
        if let Some(sink) = self.sink {
            check_length("Attention, sink", config.heads, sink.len())?;
        }
        let Some(sequences) = self.sequences else { return Ok(()) };
        check_length("Attention, cu_seqlens_q", config.batches + 1, sequences.cu_seqlens_q.len())?;
        check_length("Attention, cu_seqlens_kv", config.batches + 1, sequences.cu_seqlens_kv.len())?;
        check_length("Attention, cu_seqlens_q_padded", config.batches + 1, sequences.query_offsets().len())?;
        check_length("Attention, cu_seqlens_kv_padded", config.batches + 1, sequences.key_offsets().len())?;
        check_given("diagonals", config.diagonals, sequences.diagonals.is_some())?;
        sequences.diagonals.map_or(Ok(()), |diagonals| check_length("Attention, diagonals", config.batches, diagonals.len()))
    }
}

impl<'a> Sequences<'a> {
    /// Sequences without padding: as many queries, and keys, as lie between their offsets.
    pub fn new(cu_seqlens_q: DeviceView<'a, u32>, cu_seqlens_kv: DeviceView<'a, u32>) -> Self {
        Self {
            cu_seqlens_q,
            cu_seqlens_kv,
            cu_seqlens_q_padded: None,
            cu_seqlens_kv_padded: None,
            diagonals: None,
            padding: Padding::Zeroed,
        }
    }

    /// Where the queries begin.
    pub(super) fn query_offsets(&self) -> DeviceView<'a, u32> {
        self.cu_seqlens_q_padded.unwrap_or(self.cu_seqlens_q)
    }

    /// Where the keys begin.
    pub(super) fn key_offsets(&self) -> DeviceView<'a, u32> {
        self.cu_seqlens_kv_padded.unwrap_or(self.cu_seqlens_kv)
    }
}

impl<'a, T> Outputs<'a, T> {
    /// A rounded result and its log-sum-exp.
    pub fn new(out: DeviceViewMut<'a, T>, log_sum_exp: DeviceViewMut<'a, f32>) -> Self {
        Self { out: Target::Rounded(out), log_sum_exp, max_logit: None }
    }

    /// A running result and its log-sum-exp.
    pub fn merged(out: DeviceViewMut<'a, f32>, log_sum_exp: DeviceViewMut<'a, f32>) -> Self {
        Self { out: Target::Merged(out), log_sum_exp, max_logit: None }
    }

    /// The last step of a ring: the running result of those before, where the result goes, and the running log-sum-exp, which
    /// becomes the result's.
    pub fn last(running: DeviceView<'a, f32>, out: DeviceViewMut<'a, T>, log_sum_exp: DeviceViewMut<'a, f32>) -> Self {
        Self { out: Target::Last { running, out }, log_sum_exp, max_logit: None }
    }

    /// As [`Inputs::check`].
    pub(super) fn check(&self, config: &AttentionConfig) -> Result<()> {
        let rows = config.rows()[0];
        let constructor = match (config.output, &self.out) {
            (Output::Rounded, Target::Rounded(_)) | (Output::Merged | Output::First, Target::Merged(_)) => None,
            (Output::Last, Target::Last { .. }) => None,
            (Output::Rounded, _) => Some("new"),
            (Output::Merged | Output::First, _) => Some("merged"),
            (Output::Last, _) => Some("last"),
        };
        if let Some(constructor) = constructor {
            let why = format!("the configuration's output is {:?}: give `Outputs::{constructor}`", config.output);
            return Err(Error::Invalid { what: "Attention, out", why });
        }
        let elements = rows * config.heads * config.value_size();
        match &self.out {
            Target::Rounded(out) => check_length("Attention, out", elements, out.len())?,
            Target::Merged(running) => check_length("Attention, out", elements, running.len())?,
            Target::Last { running, out } => {
                check_length("Attention, running", elements, running.len())?;
                check_length("Attention, out", elements, out.len())?;
            }
        }
        check_length("Attention, log_sum_exp", rows * config.heads, self.log_sum_exp.len())?;
        check_given("max_logit", config.max_logit, self.max_logit.is_some())?;
        self.max_logit.as_ref().map_or(Ok(()), |max_logit| check_length("Attention, max_logit", config.heads, max_logit.len()))
    }

    /// What there is to do where the output is empty: nothing is seen, so each head's largest score becomes -inf.
    pub(super) fn of_nothing(self, stream: &Stream) -> Result<BoundAttention<'a>> {
        let Some(mut max_logit) = self.max_logit else { return Ok(BoundAttention::nothing()) };
        let none = Buffer::from_slice(stream, &vec![f32::NEG_INFINITY; max_logit.len() as usize])?;
        Ok(BoundAttention::new(move |stream| none.copy_to_view(stream, &mut max_logit, "Attention", "max_logit")))
    }
}

pub(super) fn check_length(what: &'static str, expected: u64, found: u64) -> Result<()> {
    if expected == found { Ok(()) } else { Err(Error::Length { what, expected, found }) }
}

fn check_given(field: &str, wanted: bool, given: bool) -> Result<()> {
    let why = match (wanted, given) {
        (true, false) => format!("the configuration asks for `{field}`, which is none: give it"),
        (false, true) => format!("`{field}` is given, which the configuration does not ask for: leave it out"),
        _ => return Ok(()),
    };
    Err(Error::Invalid { what: "Attention", why })
}
