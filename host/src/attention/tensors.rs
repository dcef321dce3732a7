//! What is read and written.

use oxtile_tile::launch::{DeviceView, DeviceViewMut};

use super::config::{AttentionConfig, Layout, Output, Sink};
use super::forward::AttentionElement;
use crate::runtime::{Bound, Buffer, Error, Result, Stream};
use crate::tensor::{Heads, HeadsMut, Strided};

/// What attention reads. A tensor is [`Heads`], or a plain view: one without gaps, of the configuration's layout.
pub struct Inputs<'a, T> {
    /// Queries.
    pub q: Heads<'a, T>,
    /// Keys.
    pub k: Heads<'a, T>,
    /// Values.
    pub v: Heads<'a, T>,
    /// Where the sequences lie, if [packed](Layout::Packed).
    pub sequences: Option<Sequences<'a>>,
    /// A score for each query head, if the sink is [learnable](Sink::Learnable).
    pub sink: Option<DeviceView<'a, f32>>,
    /// What an element is worth, if the elements are [scaled](AttentionElement::IS_SCALED).
    pub scales: Option<Scales<'a>>,
}

/// What an element of each input is worth: one positive number for the tensor, or one for each of its heads. A head's is that of all batches, and
/// of all sequences of [packed](Layout::Packed) tensors: scale `h` is that of the elements `[row, h, ..]` of every row.
///
/// Probabilities are rounded to e4m3 too, sums are `f32`, the result is bf16.
///
/// ```
/// use oxtile::attention::{Attention, AttentionConfig, Inputs, Outputs, Scales};
/// use oxtile::num::{bf16, e4m3};
/// use oxtile::{Buffer, Result, Runtime};
///
/// # fn main() -> Result<()> {
/// let runtime = Runtime::checked(1)?; // or Runtime::cuda()
/// let stream = runtime.device(0)?.stream()?;
/// let config = AttentionConfig { queries: 2, keys: 2, head_size: 64, ..AttentionConfig::default() };
///
/// let (zero, one, three) = (e4m3::from_bits(0), e4m3::from_bits(0x38), e4m3::from_bits(0x44));
/// let (q, v) = (vec![zero; 2 * 64], [[one; 64], [three; 64]]);
/// let (q, v) = (Buffer::from_slice(&stream, &q)?, Buffer::from_slice(&stream, v.as_flattened())?);
/// let (unit, half) = (Buffer::from_slice(&stream, &[1.0_f32])?, Buffer::from_slice(&stream, &[0.5_f32])?);
/// let scales = Some(Scales { q: unit.view(), k: unit.view(), v: half.view() });
/// let inputs = Inputs { scales, ..Inputs::new(q.view(), q.view(), v.view()) };
/// let mut out = Buffer::<bf16>::zeros(&stream, 2 * 64)?;
/// let mut log_sum_exp = Buffer::<f32>::zeros(&stream, 2)?;
/// Attention::new(&runtime, config)?.forward(&stream, inputs, Outputs::new(out.view_mut(), log_sum_exp.view_mut()))?;
///
/// let out: Vec<half::bf16> = out.to_vec_as(&stream)?;
/// assert_eq!(out[0].to_f32(), 1.0);
/// # Ok(()) }
/// ```
#[derive(Clone, Copy)]
pub struct Scales<'a> {
    /// The scales of the queries: 1 or `heads`.
    pub q: DeviceView<'a, f32>,
    /// The scales of the keys: 1 or `key_heads`.
    pub k: DeviceView<'a, f32>,
    /// The scales of the values: 1 or `key_heads`.
    pub v: DeviceView<'a, f32>,
}

/// The sequences of packed tensors: arrays of `batches + 1` elements on the device, which the host does not read.
///
/// Sequence `b` has `cu_seqlens_q[b + 1] - cu_seqlens_q[b]` queries from row `cu_seqlens_q_padded[b]` on. Offsets need neither
/// begin at 0 nor rise: sequences may share keys. What they place beyond the tensors is left out.
#[derive(Clone, Copy)]
pub struct Sequences<'a> {
    /// Sums of the queries of the sequences before, from any number on: a sequence's length is the difference of two.
    pub cu_seqlens_q: DeviceView<'a, u32>,
    /// Sums of the keys of the sequences before.
    pub cu_seqlens_kv: DeviceView<'a, u32>,
    /// Where the queries of each sequence begin; `cu_seqlens_q` if none.
    pub cu_seqlens_q_padded: Option<DeviceView<'a, u32>>,
    /// Where the keys of each sequence begin; `cu_seqlens_kv` if none.
    pub cu_seqlens_kv_padded: Option<DeviceView<'a, u32>>,
    /// The key that query 0 of each sequence is aligned with, `batches` elements, from which windows and bottom-right masks count: for
    /// sequences that are cut at an end, as those of a step of a ring. Without it the last query is aligned with the last key. Given if the
    /// [configuration](AttentionConfig::diagonals) asks for it.
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
    Rounded(HeadsMut<'a, T>),
    /// As [`Output::Merged`] or [`Output::First`], with the log-sum-exp.
    Merged(HeadsMut<'a, f32>),
    /// As [`Output::Last`], with the log-sum-exp.
    Last {
        /// The running result of the steps before.
        running: Heads<'a, f32>,
        /// The result, of the same strides.
        out: HeadsMut<'a, T>,
    },
}

impl<'a, T> Target<'a, T> {
    /// Where a rounded result goes.
    pub(super) fn rounded(self) -> Result<HeadsMut<'a, T>> {
        match self {
            Self::Rounded(out) => Ok(out),
            Self::Merged(_) | Self::Last { .. } => {
                Err(Error::Invalid { what: "Attention, out", why: "this kernel rounds its result".to_owned() })
            }
        }
    }

    /// Shape and strides.
    pub(super) fn layout(&self) -> Strided<4> {
        match self {
            Self::Rounded(out) | Self::Last { out, .. } => out.layout(),
            Self::Merged(running) => running.layout(),
        }
    }
}

impl<'a, T> Inputs<'a, T> {
    /// Tensors of a dense layout, without a sink and scales.
    pub fn new(q: impl Into<Heads<'a, T>>, k: impl Into<Heads<'a, T>>, v: impl Into<Heads<'a, T>>) -> Self {
        Self { q: q.into(), k: k.into(), v: v.into(), sequences: None, sink: None, scales: None }
    }

    /// Tensors of the shapes that are configured, with what the configuration and the elements ask for.
    pub(super) fn shaped(self, config: &AttentionConfig) -> Result<Self>
    where
        T: AttentionElement,
    {
        let [q, k, v] = config.whole_inputs();
        let (q, k, v) = (self.q.shaped("Attention, q", q)?, self.k.shaped("Attention, k", k)?, self.v.shaped("Attention, v", v)?);
        check_given("sink", "the configuration", config.sink == Sink::Learnable, self.sink.is_some())?;
        check_given("sequences", "the configuration", config.layout == Layout::Packed, self.sequences.is_some())?;
        check_given("scales", "the element type", T::IS_SCALED, self.scales.is_some())?;
        if let Some(sink) = self.sink {
            Error::check_length("Attention, sink", config.heads, sink.len())?;
        }
        self.scales.map_or(Ok(()), |scales| scales.check(config))?;
        self.sequences.map_or(Ok(()), |sequences| sequences.check(config))?;
        Ok(Self { q, k, v, ..self })
    }
}

impl Scales<'_> {
    fn check(&self, config: &AttentionConfig) -> Result<()> {
        let (heads, key_heads) = (config.heads, config.key_heads);
        let scales = [
            ("Attention, scales.q", self.q, heads),
            ("Attention, scales.k", self.k, key_heads),
            ("Attention, scales.v", self.v, key_heads),
        ];
        let mut several = scales.into_iter().filter(|(_, scales, _)| scales.len() != 1);
        several.try_for_each(|(what, scales, heads)| Error::check_length(what, heads, scales.len()))
    }
}

impl<'a> Sequences<'a> {
    /// Sequences without padding: each ends where the next one begins.
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

    fn check(&self, config: &AttentionConfig) -> Result<()> {
        let ends = config.batches + 1;
        Error::check_length("Attention, cu_seqlens_q", ends, self.cu_seqlens_q.len())?;
        Error::check_length("Attention, cu_seqlens_kv", ends, self.cu_seqlens_kv.len())?;
        Error::check_length("Attention, cu_seqlens_q_padded", ends, self.query_offsets().len())?;
        Error::check_length("Attention, cu_seqlens_kv_padded", ends, self.key_offsets().len())?;
        check_given("diagonals", "the configuration", config.diagonals, self.diagonals.is_some())?;
        self.diagonals.map_or(Ok(()), |diagonals| Error::check_length("Attention, diagonals", config.batches, diagonals.len()))
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
    pub fn new(out: impl Into<HeadsMut<'a, T>>, log_sum_exp: DeviceViewMut<'a, f32>) -> Self {
        Self { out: Target::Rounded(out.into()), log_sum_exp, max_logit: None }
    }

    /// A running result and its log-sum-exp.
    pub fn merged(out: impl Into<HeadsMut<'a, f32>>, log_sum_exp: DeviceViewMut<'a, f32>) -> Self {
        Self { out: Target::Merged(out.into()), log_sum_exp, max_logit: None }
    }

    /// The last step of a ring: the running result of those before, where the result goes, and the running log-sum-exp, which
    /// becomes the result's.
    pub fn last(running: impl Into<Heads<'a, f32>>, out: impl Into<HeadsMut<'a, T>>, log_sum_exp: DeviceViewMut<'a, f32>) -> Self {
        Self { out: Target::Last { running: running.into(), out: out.into() }, log_sum_exp, max_logit: None }
    }

    /// As [`Inputs::shaped`].
    pub(super) fn shaped(self, config: &AttentionConfig) -> Result<Self> {
        let rows = config.rows()[0];
        let (constructor, fits) = match config.output {
            Output::Rounded => ("new", matches!(self.out, Target::Rounded(_))),
            Output::Merged | Output::First => ("merged", matches!(self.out, Target::Merged(_))),
            Output::Last => ("last", matches!(self.out, Target::Last { .. })),
        };
        if !fits {
            let why = format!("the configuration's output is {:?}: give `Outputs::{constructor}`", config.output);
            return Err(Error::Invalid { what: "Attention, out", why });
        }
        let whole = config.whole_result();
        let out = match self.out {
            Target::Rounded(out) => Target::Rounded(out.shaped("Attention, out", whole)?),
            Target::Merged(running) => Target::Merged(running.shaped("Attention, out", whole)?),
            Target::Last { running, out } => {
                let (running, out) = (running.shaped("Attention, running", whole)?, out.shaped("Attention, out", whole)?);
                if !running.layout().lies_as(&out.layout()) {
                    let why = format!("strides are {:?}, those of the result {:?}: give both the same", running.strides(), out.strides());
                    return Err(Error::Invalid { what: "Attention, running", why });
                }
                Target::Last { running, out }
            }
        };
        Error::check_length("Attention, log_sum_exp", rows * config.heads, self.log_sum_exp.len())?;
        check_given("max_logit", "the configuration", config.max_logit, self.max_logit.is_some())?;
        self.max_logit.as_ref().map_or(Ok(()), |scores| Error::check_length("Attention, max_logit", config.heads, scores.len()))?;
        Ok(Self { out, ..self })
    }

    /// Binds an empty output: nothing is seen, so each head's largest score becomes -inf.
    pub(super) fn of_nothing(self, stream: &Stream) -> Result<Bound<'a>> {
        let Some(mut max_logit) = self.max_logit else { return Ok(Bound::in_turn(Vec::new())) };
        let none = Buffer::from_slice(stream, &vec![f32::NEG_INFINITY; max_logit.len() as usize])?;
        Ok(Bound::new(move |stream| none.copy_to_view(stream, &mut max_logit, "Attention", "max_logit")))
    }
}

fn check_given(field: &str, asks: &str, wanted: bool, given: bool) -> Result<()> {
    let why = match (wanted, given) {
        (true, false) => format!("{asks} asks for `{field}`, which is none: give it"),
        (false, true) => format!("`{field}` is given, which {asks} does not ask for: leave it out"),
        _ => return Ok(()),
    };
    Err(Error::Invalid { what: "Attention", why })
}
