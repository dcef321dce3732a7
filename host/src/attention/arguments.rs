//! What a configuration is to the kernels: sizes, masks, factors of scores, and the order of tiles.

use std::f64::consts::LOG2_E;

use oxtile_kernels::attention::{FAR, Mask as Bounds, Scores, Sequence, Shape, Window as Seen};

use super::config::{AttentionConfig, Mask, Window};

/// Bytes of keys and values that are read by heads computed together: about half of an H200's L2 cache.
const SECTION_BYTES: u64 = 32 << 20;

/// Keys of heads that are computed together in the forward pass, at most: with more, of small heads, a causal tile's keys come from the L2 cache
/// less often.
const SECTION_KEYS: u64 = 1 << 16;

impl AttentionConfig {
    /// Sizes of dense tensors with so many rows of queries and heads.
    pub(super) fn shape(&self, [queries, heads]: [u64; 2]) -> Shape {
        let [batches, heads, group, queries, keys] =
            [self.batches, heads, heads / self.key_heads, queries, self.keys].map(|size| size as u32);
        Shape { batches, heads, group, queries, keys }
    }

    /// The last key that query 0 sees.
    pub(super) fn diagonal(&self) -> i32 {
        match self.mask {
            Mask::CausalBottomRight => self.keys as i32 - self.queries as i32,
            Mask::Full | Mask::CausalTopLeft => 0,
        }
    }

    /// What bounds all sequences.
    pub(super) fn seen(&self) -> Seen {
        let bound = |bound: Option<u64>| bound.map_or(FAR, |bound| bound as i32);
        let right = if self.mask == Mask::CausalBottomRight { 0 } else { FAR };
        Seen { left: bound(self.window.left), right: right.min(bound(self.window.right)), top_left: self.mask == Mask::CausalTopLeft }
    }

    /// What bounds each of the sequences of a dense layout.
    pub(super) fn bounds(&self) -> Bounds {
        self.seen().of(&Sequence::alone(self.queries as u32, self.keys as u32))
    }

    /// The factor of scores whose exponentials are to base 2.
    pub(super) fn scale_log2(&self) -> f32 {
        (self.scale() * LOG2_E) as f32
    }

    /// That factor with the cap of scores.
    pub(super) fn scores(&self) -> Scores {
        let [scale, cap_limit, cap_factor] = match self.soft_cap.map(f64::from) {
            None => [self.scale() * LOG2_E, 0.0, 0.0],
            Some(cap) => [1.0, cap * LOG2_E, 2.0 * LOG2_E * self.scale() / cap],
        }
        .map(|x| x as f32);
        Scores { scale, cap_limit, cap_factor }
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
        let most = match (self.mask == Mask::Full && self.window == Window::default(), element_bytes) {
            (true, _) => SECTION_KEYS / 4,
            // As in `section`.
            (false, 1) => u64::from(u32::MAX),
            (false, _) => SECTION_KEYS,
        };
        self.cached_keys(element_bytes).min(most) as u32
    }

    /// Keys of a head that fit the L2 cache with their values.
    pub(super) fn cached_keys(&self, element_bytes: u64) -> u64 {
        SECTION_BYTES / ((self.head_size + self.value_size()) * element_bytes)
    }

    /// Rows of heads that are computed together in the backward pass of wide heads: one head where all of its tiles do the same work.
    pub(super) fn section_rows(&self, element_bytes: u64) -> u32 {
        let is_full = self.mask == Mask::Full && self.window == Window::default();
        if is_full { 1 } else { self.cached_keys(element_bytes) as u32 }
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
}
