//! Which kernel a configuration takes, and why.

use oxtile_kernels::attention::{KEYS, QUERIES};

use super::config::{AttentionConfig, Layout, Mask, Output, Sink, Window, refuse};
use super::forward::AttentionElement;
use crate::gemm::Choice;
use crate::runtime::{Error, Result};

/// Bytes of keys and values that are read by heads computed together: about half of an H200's L2 cache.
const SECTION_BYTES: u64 = 32 << 20;

impl AttentionConfig {
    /// The kernel for elements of `T`, which does not depend on the device.
    ///
    /// # Errors
    /// As [`validate`](Self::validate).
    pub fn choose<T: AttentionElement>(&self) -> Result<Choice> {
        self.validate()?;
        let Self { batches, queries, heads, head_size, mask, .. } = *self;
        let tiles = u128::from(batches) * u128::from(heads) * u128::from(queries.div_ceil(QUERIES as u64));
        if tiles > i32::MAX as u128 {
            let why = format!("batches, heads and queries make {tiles} tiles of {QUERIES} queries: at most {}", i32::MAX);
            return Err(Error::Invalid { what: "AttentionConfig", why });
        }
        if tiles == 0 {
            return Ok(Choice { kernel: "", why: "the output is empty".to_owned() });
        }
        let causal = mask != Mask::Full;
        if self.needs_general() {
            return Err(Error::Invalid { what: "AttentionConfig", why: "only dense full and causal attention has a kernel".to_owned() });
        }
        let Some(kernel) = T::name(head_size, causal) else {
            return refuse("head_size", head_size, "64 or 128");
        };
        let masked = if causal { "causal" } else { "all keys" };
        Ok(Choice { kernel, why: format!("{QUERIES} queries by {KEYS} keys on wgmma, head_size {head_size}, {masked}") })
    }

    /// Whether it takes more than the kernels of dense full and causal attention have.
    pub(super) fn needs_general(&self) -> bool {
        self.layout == Layout::Packed
            || self.window != Window::default()
            || self.soft_cap.is_some()
            || self.sink != Sink::None
            || self.output != Output::Rounded
            || self.max_logit
            || self.value_size() != self.head_size
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
        let head_bytes = (self.head_size + self.value_size()) * self.keys * element_bytes;
        (SECTION_BYTES / head_bytes.max(1) * self.group()).clamp(self.group().max(1), i32::MAX as u64) as u32
    }

    /// The factor of scores whose exponentials are to base 2.
    pub(super) fn scale_log2(&self) -> f32 {
        (self.scale() * std::f64::consts::LOG2_E) as f32
    }
}
