//! Which kernel a configuration takes, and why.

use super::config::{AttentionConfig, Kernels, LIMIT, Layout, Mask, Output, Sink, Window, refuse};
use super::forward::AttentionElement;
use crate::choice::Choice;
use crate::runtime::{Error, Result};

/// Bytes of keys and values that are read by heads computed together: about half of an H200's L2 cache.
pub(super) const SECTION_BYTES: u64 = 32 << 20;

/// Keys of heads that are computed together in the forward pass, at most: with more, of small heads, a causal tile's keys come from the L2 cache
/// less often.
const SECTION_KEYS: u64 = 1 << 16;

/// A kernel among those of an element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub struct Key {
    /// Elements of a row of a head that its tiles have room for, of `Q` and of `V`.
    pub(super) sizes: [u64; 2],
    pub(super) kind: Kind,
}

/// What a kernel can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub enum Kind {
    /// Dense tensors, all keys.
    Full,
    /// Dense tensors, a causal mask.
    Causal,
    /// A step of a ring of dense tensors, all keys.
    RingFull,
    /// The same with a causal mask.
    RingCausal,
    /// Dense tensors, any of those masks, keys divided among blocks.
    Split,
    /// Packed sequences, all keys.
    Packed,
    /// Packed sequences, a causal mask.
    PackedCausal,
    /// A step of a ring of packed sequences, all keys.
    PackedRing,
    /// The same with a causal mask.
    PackedRingCausal,
    /// Everything.
    Options,
}

/// What is known of a kernel.
#[doc(hidden)]
pub struct Facts {
    pub(super) name: &'static str,
    /// Queries and keys of a step.
    pub(super) step: [u32; 2],
}

/// Sizes of heads that kernels have tiles for; smaller heads are padded with zeros on their way into shared memory.
const SIZES: [[u64; 2]; 4] = [[64, 64], [128, 128], [192, 128], [256, 256]];

/// Those of kernels of packed sequences alone.
const PACKED_SIZES: [[u64; 2]; 2] = [SIZES[0], SIZES[1]];

impl AttentionConfig {
    /// The kernel for elements of `T` on Hopper, or the portable one if [`kernels`](Self::kernels) says so: keys are divided only if
    /// [`key_parts`](Self::key_parts) says so.
    ///
    /// # Errors
    /// As [`validate`](Self::validate).
    pub fn choose<T: AttentionElement>(&self) -> Result<Choice> {
        if self.kernels == Kernels::Portable {
            return self.choose_portable::<T>();
        }
        self.validate()?;
        if self.parts() > 1 && self.needs_general() {
            return refuse("key_parts", self.parts(), format!("1 with {}", self.needs().join(", ")));
        }
        let key = self.key();
        let Some(Facts { name, step: [queries, keys] }) = T::facts(key) else {
            return Err(Error::Invalid { what: "AttentionConfig", why: format!("no kernel for {key:?}") });
        };
        let sequences = u128::from(self.batches);
        let [rows, heads] = self.rows_and_heads();
        let row_tiles = match self.layout {
            Layout::Packed => u128::from(rows.div_ceil(queries.into())) + sequences,
            Layout::Bshd | Layout::Sbhd => u128::from(rows.div_ceil(queries.into())) * sequences,
        };
        let tiles = row_tiles * u128::from(heads) * u128::from(self.parts());
        if tiles > i32::MAX as u128 {
            let why = format!("batches, heads and queries make {tiles} tiles of {queries} queries: at most {}", i32::MAX);
            return Err(Error::Invalid { what: "AttentionConfig", why });
        }
        if [self.batches, self.queries, self.heads].contains(&0) {
            return Ok(Choice { kernel: "", why: "the output is empty".to_owned() });
        }
        self.check_counts(key.kind)?;
        if key.kind == Kind::Options && [Output::First, Output::Last].contains(&self.output) {
            let needs: Vec<_> = self.needs().into_iter().filter(|need| !["layout", "output"].contains(need)).collect();
            let needs = if needs.is_empty() { "packed heads of more than 128 elements".to_owned() } else { needs.join(", ") };
            let why = format!("Rounded or Merged with {needs}: fill the log-sum-exp with -inf, merge every step, and round the sum");
            return refuse("output", format!("{:?}", self.output), why);
        }
        let ([d, v], [size, value_size]) = (key.sizes, [self.head_size, self.value_size()]);
        let masked = match (key.kind, self.needs()) {
            (Kind::Full, _) => "all keys".to_owned(),
            (Kind::Causal, _) => "causal".to_owned(),
            (Kind::RingFull, _) => "all keys, merged".to_owned(),
            (Kind::RingCausal, _) => "causal, merged".to_owned(),
            (Kind::Split, _) => format!("keys in {} parts for as many blocks, which another kernel puts together", self.parts()),
            (Kind::Packed, _) => "packed, all keys".to_owned(),
            (Kind::PackedCausal, _) => "packed, causal".to_owned(),
            (Kind::PackedRing, _) => "packed, all keys, merged".to_owned(),
            (Kind::PackedRingCausal, _) => "packed, causal, merged".to_owned(),
            (Kind::Options, needs) => format!("with options for {}", needs.join(", ")),
        };
        let padded = if [d, v] == [size, value_size] { String::new() } else { format!(" padded to {d} and {v}") };
        let folded = if self.folds() { format!(", {} heads that share keys as rows of one", self.group()) } else { String::new() };
        let why = format!("{queries} queries by {keys} keys on wgmma, heads of {size} and {value_size}{padded}, {masked}{folded}");
        Ok(Choice { kernel: name, why })
    }

    /// Refuses what a kernel would not count, where tiles are few enough.
    fn check_counts(&self, kind: Kind) -> Result<()> {
        let results = u128::from(self.batches) * u128::from(self.queries) * u128::from(self.heads);
        match kind {
            Kind::Options => self.check_rows(LIMIT - 1),
            Kind::Split if results > i32::MAX as u128 => {
                refuse("key_parts", self.parts(), format!("1 where batches, queries and heads make more than {} rows", i32::MAX))
            }
            _ => Ok(()),
        }
    }

    /// Its kernel; the configuration is valid.
    pub(super) fn key(&self) -> Key {
        let fits = |[d, v]: &[u64; 2]| self.head_size <= *d && self.value_size() <= *v;
        let sizes = SIZES.into_iter().find(fits).unwrap_or(SIZES[3]);
        let (causal, ring) = (self.mask != Mask::Full && !self.folds(), self.output != Output::Rounded);
        let packed = self.layout == Layout::Packed;
        let kind = match (packed, ring, causal) {
            _ if self.has_options() || packed && !PACKED_SIZES.contains(&sizes) => Kind::Options,
            _ if self.parts() > 1 => Kind::Split,
            (false, false, false) => Kind::Full,
            (false, false, true) => Kind::Causal,
            (false, true, false) => Kind::RingFull,
            (false, true, true) => Kind::RingCausal,
            (true, false, false) => Kind::Packed,
            (true, false, true) => Kind::PackedCausal,
            (true, true, false) => Kind::PackedRing,
            (true, true, true) => Kind::PackedRingCausal,
        };
        Key { sizes, kind }
    }

    /// Fields that take more than the kernels of dense full and causal attention have.
    fn needs(&self) -> Vec<&'static str> {
        let needs = [
            ("layout", self.layout == Layout::Packed),
            ("window", self.window != Window::default()),
            ("soft_cap", self.soft_cap.is_some()),
            ("sink", self.sink != Sink::None),
            ("output", self.output != Output::Rounded),
            ("max_logit", self.max_logit),
            ("diagonals", self.diagonals),
        ];
        needs.into_iter().filter(|(_, needed)| *needed).map(|(field, _)| field).collect()
    }

    /// Whether it takes more than layouts, masks and running results.
    fn has_options(&self) -> bool {
        self.needs().iter().any(|need| !["layout", "output"].contains(need))
    }

    /// Whether it takes more than the kernels of dense full and causal attention have.
    pub(super) fn needs_general(&self) -> bool {
        !self.needs().is_empty()
    }

    /// Refuses what the kernels of dense full and causal attention do not have, where there are no others: `place` says where.
    pub(super) fn refuse_general(&self, place: &str) -> Result<()> {
        let (field, value, allowed) = match *self {
            Self { layout: Layout::Packed, .. } => ("layout", "Packed".to_owned(), "Bshd or Sbhd"),
            Self { window, .. } if window != Window::default() => ("window", format!("{window:?}"), "without bounds"),
            Self { soft_cap: Some(cap), .. } => ("soft_cap", cap.to_string(), "none"),
            Self { sink, .. } if sink != Sink::None => ("sink", format!("{sink:?}"), "None"),
            Self { output, .. } if output != Output::Rounded => ("output", format!("{output:?}"), "Rounded"),
            Self { max_logit: true, .. } => ("max_logit", "true".to_owned(), "false"),
            Self { key_parts: Some(parts @ 2..), .. } => ("key_parts", parts.to_string(), "1 or none"),
            _ => return Ok(()),
        };
        refuse(field, value, format!("{allowed} {place}"))
    }

    /// The last key that query 0 sees.
    pub(super) fn diagonal(&self) -> i32 {
        match self.mask {
            Mask::CausalBottomRight => self.keys as i32 - self.queries as i32,
            Mask::Full | Mask::CausalTopLeft => 0,
        }
    }

    /// Heads that are computed together: all tiles of a head do the same work unless the mask is causal.
    pub(super) fn section(&self, element_bytes: u64) -> u32 {
        if self.mask == Mask::Full {
            return 1;
        }
        // Tensors of 8 bits have been measured with it: 3 % slower.
        let most = if element_bytes == 1 { u64::MAX } else { (SECTION_KEYS / self.keys.max(1)).max(1) };
        let key_heads = self.section_key_heads(element_bytes).min(most);
        // No more heads than there are: kernels count the tiles of a section in 32 bits.
        (key_heads * self.group()).min(self.batches * self.heads).clamp(1, i32::MAX as u64) as u32
    }

    /// Keys of heads that are computed together in the forward pass where sequences differ in length: fewer where all tiles of a head do the same
    /// work.
    pub(super) fn section_keys(&self, element_bytes: u64) -> u32 {
        let keys = SECTION_BYTES / ((self.head_size + self.value_size()) * element_bytes);
        let most = if self.mask == Mask::Full && self.window == Window::default() { SECTION_KEYS / 4 } else { SECTION_KEYS };
        keys.min(most) as u32
    }

    /// Key heads that are computed together in the backward pass. Where blocks of keys add in order, many of them, so that few of
    /// those that compute at a time wait for each other.
    pub(super) fn section_of_keys(&self, element_bytes: u64, ordered: bool) -> u32 {
        if self.mask == Mask::Full && !ordered {
            return 1;
        }
        self.section_key_heads(element_bytes).min(i32::MAX as u64) as u32
    }

    /// Key heads whose keys and values fit the L2 cache together, at least one.
    fn section_key_heads(&self, element_bytes: u64) -> u64 {
        let head_bytes = (self.head_size + self.value_size()) * self.keys * element_bytes;
        (SECTION_BYTES / head_bytes.max(1)).max(1)
    }

    /// The factor of scores whose exponentials are to base 2.
    pub(super) fn scale_log2(&self) -> f32 {
        (self.scale() * std::f64::consts::LOG2_E) as f32
    }
}
