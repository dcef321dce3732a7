//! What is computed, checked as a whole before anything is loaded.

use std::fmt::Display;

use oxtile_kernels::attention::MOST_PARTS;

use super::heads::Side;
use crate::runtime::{Error, Result};
use crate::tensor::Strided;

/// What is computed. `..AttentionConfig::default()` completes it: one batch of one head, whose queries see all keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionConfig {
    /// How sequences lie in the tensors.
    pub layout: Layout,
    /// Sequences.
    pub batches: u64,
    /// Rows of `Q` and of the output in each sequence; of the whole tensor if [packed](Layout::Packed).
    pub queries: u64,
    /// Rows of `K` and `V` in each sequence; of the whole tensor if packed.
    pub keys: u64,
    /// Heads of `Q` and of the output.
    pub heads: u64,
    /// Heads of `K` and `V`, of which `heads` is a multiple.
    pub key_heads: u64,
    /// Elements of a row of a head of `Q` and `K`: a multiple of 8 up to 256.
    pub head_size: u64,
    /// Elements of a row of a head of `V` and of the output: a multiple of 8 up to 256; `head_size` if none.
    pub value_size: Option<u64>,
    /// Which keys a query sees.
    pub mask: Mask,
    /// Which of those are near enough.
    pub window: Window,
    /// Factor of the scores, from 1e-20 to 1e8; `head_size` to the power -1/2 if none. Scores are `f32`, before and after the factor:
    /// finite ones below -1e30 count as masked; overflow gives NaN.
    pub scale: Option<f32>,
    /// `c` in `c tanh(score / c)`, which replaces scaled scores, from 1e-20 to 1000; none leaves them as they are. The error of a capped score
    /// grows with the cap, as the kernels' hyperbolic tangent is right to about 1e-7.
    pub soft_cap: Option<f32>,
    /// What the softmax counts beside the keys.
    pub sink: Sink,
    /// Where the result goes.
    pub output: Output,
    /// Whether packed sequences come with [diagonals](super::Sequences::diagonals) of their own.
    pub diagonals: bool,
    /// Whether each head's largest scaled score is an output too.
    pub max_logit: bool,
    /// Which kernels may be taken.
    pub kernels: Kernels,
    /// Parts into which the keys of dense tensors are divided in the forward pass, a block for each part of each tile of queries: from 1, undivided,
    /// to 32; none chooses the number for the device.
    ///
    /// More than one takes `4 * key_parts * batches * heads * queries * (value_size + 1)` bytes on the device, which
    /// [`Attention::bind`](super::Attention::bind) allocates: results of the parts and their log-sum-exps, in `f32`. The last bits of results
    /// depend on the number of parts, and so, if none is given, on the device. They are the same in every run.
    pub key_parts: Option<u64>,
    /// Where the gradients of the backward pass go.
    pub gradients: GradientOutput,
}

/// Where the gradients of the backward pass go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GradientOutput {
    /// To tensors of the inputs' type, rounded.
    #[default]
    Rounded,
    /// They are added to `f32` tensors: a step of a ring of ranks.
    Added,
}

/// Which kernels may be taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kernels {
    /// The device's fastest.
    #[default]
    Fastest,
    /// Those that run on any GPU from sm_80 on.
    Portable,
}

/// How sequences lie in tensors that are given as plain views: without gaps. [`Heads`](crate::tensor::Heads) have strides of their own; the kernels
/// with options and the portable ones then take batches that are rows apart (`Bshd`), or neighbours in a row (`Sbhd`). The log-sum-exp is always a
/// plain view, without gaps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Layout {
    /// `[batches, rows, heads, size]`; the log-sum-exp is `[batches, heads, rows]`.
    #[default]
    Bshd,
    /// `[rows, batches, heads, size]`; the log-sum-exp is `[batches, heads, rows]`.
    Sbhd,
    /// `[rows, heads, size]`, sequences one after the other as [`Sequences`](super::Sequences) say (thd); the log-sum-exp is
    /// `[heads, rows]`.
    Packed,
}

/// Which keys a query sees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mask {
    /// All.
    #[default]
    Full,
    /// Query `i` sees keys up to `i`.
    CausalTopLeft,
    /// Query `i` sees keys up to `i + keys - queries`: the last query sees all.
    CausalBottomRight,
}

/// Keys a query sees on either side of the diagonal aligned bottom-right, in each sequence: query `i` sees keys from `i + keys -
/// queries - left` to `i + keys - queries + right`, if the [`Mask`] leaves them. None is no bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Window {
    /// Keys before the diagonal.
    pub left: Option<u64>,
    /// Keys after it.
    pub right: Option<u64>,
}

/// What the softmax counts beside the keys, without a value: the probabilities of a row then sum to less than 1.
///
/// The log-sum-exp counts it too. Each launch counts it: of the steps of a ring ([`Output::Merged`]) exactly one has the sink, the others have
/// [`Sink::None`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sink {
    /// Nothing.
    #[default]
    None,
    /// A score of 0 ("softmax off by one").
    OffByOne,
    /// A score of its own for each head, given with the tensors.
    Learnable,
}

/// Where the result goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Output {
    /// To a tensor of the inputs' type, rounded.
    #[default]
    Rounded,
    /// Into a running result: an `f32` tensor and its log-sum-exp, which become those of the keys seen before and now
    /// together. A row whose log-sum-exp is -inf counts as zeros, whatever is there. A step of a ring of ranks, of which exactly one has the
    /// [`Sink`], if there is one.
    Merged,
    /// The same as the first step: nothing of the running result is read, and all of it is written.
    First,
    /// The same as the last step: the running `f32` tensor is only read, and the result goes to a tensor of the inputs' type, rounded.
    Last,
}

/// The numbers of rows, heads and sequences are below this.
pub(super) const LIMIT: u64 = 1 << 30;
/// The least factor of scores, and the least cap: their ratios stay normal numbers.
const SMALLEST: f32 = 1e-20;
/// The largest factor of scores: times the score from which on keys count as masked it is finite.
const LARGEST_SCALE: f32 = 1e8;
/// The largest cap: with a larger one the error of a capped score would be seen in the log-sum-exp.
const LARGEST_CAP: f32 = 1000.0;
/// The largest size of a head.
const LARGEST_SIZE: u64 = 256;

impl Default for AttentionConfig {
    fn default() -> Self {
        Self {
            layout: Layout::Bshd,
            batches: 1,
            queries: 0,
            keys: 0,
            heads: 1,
            key_heads: 1,
            head_size: 0,
            value_size: None,
            mask: Mask::Full,
            window: Window::default(),
            scale: None,
            soft_cap: None,
            sink: Sink::None,
            output: Output::Rounded,
            diagonals: false,
            max_logit: false,
            kernels: Kernels::Fastest,
            key_parts: None,
            gradients: GradientOutput::Rounded,
        }
    }
}

/// An error that names a field of the configuration and what it may be.
pub(super) fn refuse<T>(field: &'static str, value: impl Display, allowed: impl Display) -> Result<T> {
    Err(Error::Invalid { what: "AttentionConfig", why: format!("{field} is {value}: {allowed}") })
}

impl AttentionConfig {
    /// Checks every field, and those that depend on each other.
    ///
    /// # Errors
    /// [`Error::Invalid`] that names the field and what it may be.
    pub fn validate(&self) -> Result<()> {
        let sizes = [
            ("batches", self.batches),
            ("queries", self.queries),
            ("keys", self.keys),
            ("heads", self.heads),
            ("key_heads", self.key_heads),
        ];
        if let Some((field, size)) = sizes.into_iter().find(|(_, size)| *size >= LIMIT) {
            return refuse(field, size, format!("at most {}", LIMIT - 1));
        }
        if self.key_heads == 0 {
            return refuse("key_heads", 0, "at least 1, even without query heads");
        }
        if !self.heads.is_multiple_of(self.key_heads) {
            return refuse("key_heads", self.key_heads, format!("a divisor of heads, which is {}", self.heads));
        }
        for (field, size) in [("head_size", self.head_size), ("value_size", self.value_size())] {
            if size == 0 || size > LARGEST_SIZE || !size.is_multiple_of(8) {
                return refuse(field, size, format!("a multiple of 8 up to {LARGEST_SIZE}"));
            }
        }
        for (field, bound) in [("window.left", self.window.left), ("window.right", self.window.right)] {
            if let Some(bound) = bound.filter(|bound| *bound >= LIMIT) {
                return refuse(field, bound, format!("at most {}, or none for no bound", LIMIT - 1));
            }
        }
        if self.diagonals && self.layout != Layout::Packed {
            return refuse("diagonals", true, "false unless the layout is Packed: dense tensors have no sequences");
        }
        if let Some(parts) = self.key_parts.filter(|parts| !(1..=u64::from(MOST_PARTS)).contains(parts)) {
            return refuse("key_parts", parts, format!("from 1 to {MOST_PARTS}, or none"));
        }
        if let Some(scale) = self.scale.filter(|scale| !(SMALLEST..=LARGEST_SCALE).contains(scale)) {
            return refuse("scale", scale, format!("from {SMALLEST:e} to {LARGEST_SCALE:e}, or none for 1 / sqrt(head_size)"));
        }
        match self.soft_cap.filter(|cap| !(SMALLEST..=LARGEST_CAP).contains(cap)) {
            Some(cap) => refuse("soft_cap", cap, format!("from {SMALLEST:e} to {LARGEST_CAP}, or none for the scores as they are")),
            None => Ok(()),
        }
    }

    /// Elements of a row of a head of `V`.
    pub fn value_size(&self) -> u64 {
        self.value_size.unwrap_or(self.head_size)
    }

    /// The factor of the scores.
    pub fn scale(&self) -> f64 {
        self.scale.map_or_else(|| (self.head_size as f64).powf(-0.5), f64::from)
    }

    /// Query heads that share a key head.
    pub(super) fn group(&self) -> u64 {
        self.heads / self.key_heads
    }

    /// Rows of tensors of `Q`, and of `K`.
    pub(super) fn rows(&self) -> [u64; 2] {
        match self.layout {
            Layout::Packed => [self.queries, self.keys],
            Layout::Bshd | Layout::Sbhd => [self.batches * self.queries, self.batches * self.keys],
        }
    }

    /// Whether there is no result.
    pub(super) fn is_output_empty(&self) -> bool {
        [self.batches, self.queries, self.heads].contains(&0)
    }

    /// Whether there is neither a result nor a gradient.
    pub(super) fn is_empty(&self) -> bool {
        self.is_output_empty() && [self.batches, self.keys, self.key_heads].contains(&0)
    }

    /// Refuses more rows, of queries and of keys, than kernels count that address all sequences of a tensor as one.
    pub(super) fn check_rows(&self, most_keys: u64) -> Result<()> {
        let [queries, keys] = self.rows();
        for (field, rows, all, most) in [("queries", self.queries, queries, LIMIT - 1), ("keys", self.keys, keys, most_keys)] {
            if self.layout != Layout::Sbhd && all > most {
                return refuse(
                    field,
                    rows,
                    format!("with batches, which is {}, at most {most} rows: attend to fewer at a time", self.batches),
                );
            }
            if rows > most {
                return refuse(field, rows, format!("at most {most}"));
            }
        }
        Ok(())
    }

    /// A tensor without gaps, with rows of heads of `size` elements.
    pub(super) fn whole(&self, side: Side, size: u64) -> Strided<4> {
        let [rows, heads] = match side {
            Side::Queries => [self.queries, self.heads],
            Side::Keys => [self.keys, self.key_heads],
        };
        match self.layout {
            Layout::Packed => Strided::dense([1, rows, heads, size]),
            Layout::Bshd => Strided::dense([self.batches, rows, heads, size]),
            Layout::Sbhd => Strided::sbhd([self.batches, rows, heads, size]),
        }
    }

    /// `Q`, `K` and `V` without gaps.
    pub(crate) fn whole_inputs(&self) -> [Strided<4>; 3] {
        [self.whole(Side::Queries, self.head_size), self.whole(Side::Keys, self.head_size), self.whole(Side::Keys, self.value_size())]
    }

    /// The result without gaps.
    pub(crate) fn whole_result(&self) -> Strided<4> {
        self.whole(Side::Queries, self.value_size())
    }
}
