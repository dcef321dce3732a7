//! Which kernels the backward pass of a configuration takes, and why.

use oxtile_kernels::attention::{KEYS, PORTABLE_PANEL, RESTING};

use super::backward::{BackwardElement, Facts};
use super::config::{AttentionConfig, LIMIT, Layout, Mask, Sink, Window, refuse};
use crate::choice::Choice;
use crate::runtime::{Device, Error, Result};

impl AttentionConfig {
    /// The main kernel of the backward pass for elements of `T` on Hopper.
    ///
    /// # Errors
    /// As [`validate`](Self::validate).
    pub fn choose_backward<T: BackwardElement>(&self) -> Result<Choice> {
        Ok(self.backward_kernel::<T>(self.kernels == super::Kernels::Portable)?.1)
    }

    /// The same on a device.
    ///
    /// # Errors
    /// As [`validate`](Self::validate).
    pub fn choose_backward_on<T: BackwardElement>(&self, device: &Device) -> Result<Choice> {
        Ok(self.backward_kernel::<T>(self.is_portable_on(device))?.1)
    }

    /// The kernels, and why them; none where nothing is launched.
    pub(super) fn backward_kernel<T: BackwardElement>(&self, portable: bool) -> Result<(Option<Key>, Choice)> {
        self.validate()?;
        // The gradient of a sink is written though nothing sees it.
        if self.is_empty() && self.sink != Sink::Learnable {
            return Ok((None, Choice { kernel: "", why: "all tensors are empty".to_owned() }));
        }
        let Self { batches, queries, keys, heads, key_heads, head_size, .. } = *self;
        let mut needs = self.backward_needs();
        let largest = head_size.max(self.value_size());
        let key = if portable {
            needs.push("kernels");
            Key::portable(largest)
        } else if needs.is_empty() {
            let masked = self.mask != Mask::Full || self.window != Window::default();
            Key::Dense { head_size, masked }
        } else if largest <= LARGEST_GENERAL && ![batches, queries, keys, heads].contains(&0) {
            Key::General { size: if largest <= 64 { 64 } else { LARGEST_GENERAL }, capped: self.soft_cap.is_some() }
        } else {
            needs = vec![if largest > LARGEST_GENERAL { "head sizes above 128" } else { "empty tensors" }];
            Key::portable(largest)
        };
        let Some(Facts { name, step: [query_block, key_block] }) = T::facts(key) else {
            return Err(Error::Invalid { what: "AttentionConfig", why: format!("no kernel for {key:?}") });
        };
        self.check_backward_counts(key, [("queries", queries, heads, query_block), ("keys", keys, key_heads, key_block)])?;
        let value_size = self.value_size();
        let why = match key {
            Key::Dense { .. } => {
                let split = match self.group_parts(query_block) {
                    1 => String::new(),
                    parts => format!(", tiles split in {parts} by query heads, as they are few"),
                };
                format!("{KEYS} keys by {query_block} queries on wgmma, head_size {head_size}{split}")
            }
            Key::General { size, .. } => {
                let needs = needs.join(", ");
                let padded = if [head_size, value_size] == [size; 2] { String::new() } else { format!(" padded to {size}") };
                format!("{KEYS} keys by {query_block} queries on wgmma, heads of {head_size} and {value_size}{padded}, general for {needs}")
            }
            Key::Portable { panels } => {
                let (padded, needs) = (panels as usize * PORTABLE_PANEL, needs.join(", "));
                format!("{RESTING} rows on mma, heads of {head_size} and {value_size} padded to {padded}, for {needs}")
            }
        };
        Ok((Some(key), Choice { kernel: name, why }))
    }

    /// Refuses what kernels would not count, of queries and of keys: rows, heads, blocks of so many rows.
    fn check_backward_counts(&self, key: Key, sides: [(&'static str, u64, u64, u64); 2]) -> Result<()> {
        // A block of keys may end after the last.
        let most_keys = LIMIT - KEYS as u64;
        match key {
            Key::Dense { .. } if self.keys > most_keys => return refuse("keys", self.keys, format!("at most {most_keys}")),
            Key::Dense { .. } => {}
            Key::General { .. } => self.check_rows(most_keys)?,
            Key::Portable { .. } => self.check_rows(LIMIT - 1)?,
        }
        let most = i32::MAX as u128;
        let ([query_rows, _], needs) = (self.rows(), self.backward_needs().join(", "));
        if !matches!(key, Key::Dense { .. }) && u128::from(query_rows) * u128::from(self.heads) > most {
            return refuse("queries", self.queries, format!("with batches and heads at most {most} rows"));
        }
        if let Key::General { .. } = key {
            let most_batches = (most as u64 - query_rows) / sides[0].3;
            if self.heads > MOST_HEADS {
                return refuse("heads", self.heads, format!("at most {MOST_HEADS} with {needs}"));
            }
            if self.batches > most_batches {
                return refuse("batches", self.batches, format!("at most {most_batches} with {needs} and as many queries"));
            }
        }
        for ((what, rows, heads, block), all_rows) in sides.into_iter().zip(self.rows()) {
            // Each sequence may end in a block of its own.
            let row_blocks = match key {
                Key::General { .. } => u128::from(all_rows / block + self.batches),
                Key::Dense { .. } | Key::Portable { .. } => u128::from(rows.div_ceil(block)) * u128::from(self.batches),
            };
            if row_blocks * u128::from(heads) > most {
                return refuse(what, rows, format!("with batches and heads at most {most} blocks of {block}"));
            }
        }
        Ok(())
    }

    /// Fields that take more than the kernels of dense tensors have.
    fn backward_needs(&self) -> Vec<&'static str> {
        let needs = [
            ("layout", self.layout == Layout::Packed),
            ("soft_cap", self.soft_cap.is_some()),
            ("sink", self.sink == Sink::Learnable),
            ("value_size", self.value_size() != self.head_size),
            ("head_size", !matches!(self.head_size, 64 | 128)),
        ];
        needs.into_iter().filter(|(_, needed)| *needed).map(|(field, _)| field).collect()
    }
}

/// The kernels of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub enum Key {
    /// Those on wgmma, of a head size; without a mask blocks may be larger, as none of them is left mostly empty.
    Dense { head_size: u64, masked: bool },
    /// Those of everything else on wgmma, of heads of up to so many elements, whose scores may be capped. No tensor is empty: their maps
    /// must be of something.
    General { size: u64, capped: bool },
    /// Those on mma, with heads of so many panels.
    Portable { panels: u64 },
}

/// Elements of a head that the general kernels on wgmma have tiles for, at most.
const LARGEST_GENERAL: u64 = 128;

/// Heads that they count.
const MOST_HEADS: u64 = 65535;

impl Key {
    /// Heads of 3 panels have room in 4, of which one is left out.
    fn portable(size: u64) -> Self {
        Self::Portable { panels: size.div_ceil(PORTABLE_PANEL as u64).next_power_of_two() }
    }
}
