//! Which kernels the backward pass of a configuration takes, and why.

use oxtile_kernels::attention::{BACKWARD_KEYS, PORTABLE_PANEL, PORTABLE_ROWS, WIDE_QUERIES, WIDE_ROWS};

use super::backward::BackwardElement;
use super::choice::panels;
use super::config::{AttentionConfig, LIMIT, Mask, Sink, Window, refuse};
use crate::choice::{Choice, Entry};
use crate::runtime::{Device, Result};

/// The kernels of a backward pass, named by the one that computes the gradients of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackwardKernel {
    /// On wgmma: dense tensors.
    Dense {
        /// Elements of a row of a head.
        head_size: u64,
        /// Whether there may be a mask. Without one blocks may be larger, as none of them is left mostly empty.
        masked: bool,
    },
    /// On wgmma: everything else of heads up to 128. There are queries and keys.
    General {
        /// Elements of a row of a head that tiles have room for.
        size: u64,
        /// Whether scores are capped.
        capped: bool,
    },
    /// On wgmma: heads above 128, without caps. There are queries and keys.
    Wide {
        /// Elements of a row of a head that tiles have room for, of `Q` and of `V`.
        sizes: [u64; 2],
    },
    /// On mma: everything.
    Portable {
        /// Panels of 64 elements that heads have room in.
        panels: u64,
    },
}

/// Fields that the kernels of dense tensors do not have.
const BEYOND_DENSE: &[&str] = &["layout", "soft_cap", "sink", "value_size", "head_size"];

/// Elements of a head that the general kernels on wgmma have tiles for, at most.
const LARGEST_GENERAL: u64 = 128;

/// Elements of heads of `Q` and of `V` that the kernels of wide heads have tiles for.
const WIDE: [[u64; 2]; 2] = [[192, 128], [256, 256]];

/// Heads that the general kernels count.
const MOST_HEADS: u64 = 65535;

impl AttentionConfig {
    /// The main kernel of the backward pass for elements of `T` on Hopper.
    ///
    /// # Errors
    /// As [`validate`](Self::validate), and for more than kernels count.
    pub fn choose_backward<T: BackwardElement>(&self) -> Result<Choice<BackwardKernel>> {
        Ok(self.decide_backward::<T>(None)?.1)
    }

    /// The same on a device.
    ///
    /// # Errors
    /// As [`choose_backward`](Self::choose_backward).
    pub fn choose_backward_on<T: BackwardElement>(&self, device: &Device) -> Result<Choice<BackwardKernel>> {
        Ok(self.decide_backward::<T>(Some(device))?.1)
    }

    /// Among how many tiles query heads that share keys are split, and the choice.
    pub(super) fn decide_backward<T: BackwardElement>(&self, device: Option<&Device>) -> Result<(u64, Choice<BackwardKernel>)> {
        self.validate()?;
        let Self { queries, keys, heads, key_heads, head_size, .. } = *self;
        let (decision, refused, needs) = self.backward_kernel(self.why_portable(device));
        // The gradient of a sink is written though nothing sees it.
        if self.is_empty() && self.sink != Sink::Learnable {
            return Ok((1, Choice { decision, kernel: None, why: "all tensors are empty".to_owned(), refused: Vec::new() }));
        }
        let &Entry { name, tile: [query_block, key_block], .. } = Entry::find(T::BACKWARD_KERNELS, &decision)?;
        self.check_backward_counts(decision, [("queries", queries, heads, query_block), ("keys", keys, key_heads, key_block)])?;
        let (value_size, needs, mut parts) = (self.value_size(), needs.join(", "), 1);
        let why = match decision {
            BackwardKernel::Dense { .. } => {
                parts = self.group_parts(query_block);
                let split = if parts == 1 { String::new() } else { format!(", tiles split in {parts} by query heads, as they are few") };
                format!("{BACKWARD_KEYS} keys by {query_block} queries on wgmma, head_size {head_size}{split}")
            }
            BackwardKernel::General { size, .. } => {
                let padded = if [head_size, value_size] == [size; 2] { String::new() } else { format!(" padded to {size}") };
                format!(
                    "{BACKWARD_KEYS} keys by {query_block} queries on wgmma, heads of {head_size} and {value_size}{padded}, general for {needs}"
                )
            }
            BackwardKernel::Wide { sizes: [d, v] } => {
                let padded = if [head_size, value_size] == [d, v] { String::new() } else { format!(" padded to {d} and {v}") };
                format!("{WIDE_ROWS} keys and {WIDE_QUERIES} queries on wgmma, heads of {head_size} and {value_size}{padded}, for {needs}")
            }
            BackwardKernel::Portable { panels } => {
                let padded = panels * PORTABLE_PANEL as u64;
                format!("{PORTABLE_ROWS} rows on mma, heads of {head_size} and {value_size} padded to {padded}, for {needs}")
            }
        };
        Ok((parts, Choice { decision, kernel: Some(name), why, refused }))
    }

    /// The kernels, those before them with why they are not taken, and what asks for these; the configuration is valid.
    fn backward_kernel(&self, portable: Option<String>) -> (BackwardKernel, Vec<(BackwardKernel, String)>, Vec<&'static str>) {
        let Self { batches, queries, keys, heads, head_size, .. } = *self;
        let (mut needs, largest) = (self.backward_beyond(), head_size.max(self.value_size()));
        let masked = head_size == 64 || self.mask != Mask::Full || self.window != Window::default();
        let dense = BackwardKernel::Dense { head_size, masked };
        let size = if largest <= 64 { 64 } else { LARGEST_GENERAL };
        let general = BackwardKernel::General { size, capped: self.soft_cap.is_some() };
        // No head is larger than the last of them.
        let wide = WIDE.into_iter().find(|[d, v]| head_size <= *d && self.value_size() <= *v).unwrap_or(WIDE[1]);
        let wide = BackwardKernel::Wide { sizes: wide };
        let last = BackwardKernel::Portable { panels: panels(largest) };
        if let Some(why) = portable {
            let first = if needs.is_empty() { dense } else { general };
            let refused = vec![(if largest > LARGEST_GENERAL { wide } else { first }, why)];
            needs.push("kernels");
            return (last, refused, needs);
        }
        if needs.is_empty() {
            return (dense, Vec::new(), needs);
        }
        let mut refused = vec![(dense, format!("it does not have {}", needs.join(", ")))];
        let is_empty = [batches, queries, keys, heads].contains(&0);
        if largest <= LARGEST_GENERAL {
            if !is_empty {
                return (general, refused, needs);
            }
            refused.push((general, "it does not have empty tensors".to_owned()));
            return (last, refused, vec!["empty tensors"]);
        }
        let above = "head sizes above 128";
        refused.push((general, format!("it does not have {above}")));
        let beyond_wide = match self.soft_cap {
            _ if is_empty => "empty tensors",
            Some(_) => "soft_cap",
            None => return (wide, refused, vec![above]),
        };
        refused.push((wide, format!("it does not have {beyond_wide}")));
        (last, refused, vec![above, beyond_wide])
    }

    /// Refuses what kernels would not count, of queries and of keys: rows, heads, blocks of so many rows.
    fn check_backward_counts(&self, kernel: BackwardKernel, sides: [(&'static str, u64, u64, u64); 2]) -> Result<()> {
        // A block of keys may end after the last.
        let most_keys = LIMIT - BACKWARD_KEYS as u64;
        match kernel {
            BackwardKernel::Dense { .. } if self.keys > most_keys => return refuse("keys", self.keys, format!("at most {most_keys}")),
            BackwardKernel::Dense { .. } => {}
            BackwardKernel::General { .. } | BackwardKernel::Wide { .. } => self.check_rows(most_keys)?,
            BackwardKernel::Portable { .. } => self.check_rows(LIMIT - 1)?,
        }
        let most = i32::MAX as u128;
        let ([query_rows, _], needs) = (self.rows(), self.backward_beyond().join(", "));
        if !matches!(kernel, BackwardKernel::Dense { .. }) && u128::from(query_rows) * u128::from(self.heads) > most {
            return refuse("queries", self.queries, format!("with batches and heads at most {most} rows"));
        }
        if let BackwardKernel::General { .. } = kernel {
            let most_batches = (most as u64 - query_rows) / sides[0].3;
            if self.heads > MOST_HEADS {
                return refuse("heads", self.heads, format!("at most {MOST_HEADS} with {needs}"));
            }
            if self.batches > most_batches {
                return refuse("batches", self.batches, format!("at most {most_batches} with {needs} and {query_rows} rows of queries"));
            }
        }
        for ((what, rows, heads, block), all_rows) in sides.into_iter().zip(self.rows()) {
            // Each sequence may end in a block of its own.
            let row_blocks = match kernel {
                BackwardKernel::General { .. } | BackwardKernel::Wide { .. } => u128::from(all_rows / block + self.batches),
                BackwardKernel::Dense { .. } | BackwardKernel::Portable { .. } => {
                    u128::from(rows.div_ceil(block)) * u128::from(self.batches)
                }
            };
            if row_blocks * u128::from(heads) > most {
                return refuse(what, rows, format!("with batches and heads at most {most} blocks of {block}"));
            }
        }
        Ok(())
    }

    /// The fields beyond the kernels of dense tensors. A constant sink has no gradient, and the log-sum-exp counts it already.
    fn backward_beyond(&self) -> Vec<&'static str> {
        let mut beyond = self.set_among(BEYOND_DENSE);
        beyond.retain(|field| *field != "sink" || self.sink == Sink::Learnable);
        beyond
    }
}
