//! Which kernel the forward pass of a configuration takes, and why.

use oxtile_kernels::attention::PORTABLE_PANEL;

use super::config::{AttentionConfig, Kernels, LIMIT, Layout, Mask, Output, Sink, Window, refuse};
use super::forward::{AttentionElement, ForwardEntry};
use crate::choice::{Choice, Entry};
use crate::runtime::{Device, Error, Result};

/// A kernel of the forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForwardKernel {
    /// On wgmma.
    Wgmma {
        /// What it computes.
        problem: Problem,
        /// Elements of a row of a head that its tiles have room for, of `Q` and of `V`. Smaller heads are padded with zeros on their way into
        /// shared memory.
        sizes: [u64; 2],
    },
    /// On wgmma, for elements of 8 bits.
    Fp8 {
        /// What it computes: dense tensors, packed sequences, or both with options; no step of a ring, and keys are not divided.
        problem: Problem,
        /// Elements of a row of a head.
        head_size: u64,
    },
    /// On mma: all layouts, masks and windows.
    Portable {
        /// Elements of a row of a head.
        head_size: u64,
    },
    /// On mma: everything.
    PortableGeneral {
        /// Panels of 64 elements that heads have room in.
        panels: u64,
    },
}

/// What a kernel on wgmma computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Problem {
    /// Dense tensors.
    Dense {
        /// Whether there is a mask.
        causal: bool,
        /// Whether it is a step of a ring.
        ring: bool,
    },
    /// Packed sequences.
    Packed {
        /// Whether there is a mask.
        causal: bool,
        /// Whether it is a step of a ring.
        ring: bool,
    },
    /// Dense tensors, with a mask or without, whose keys are divided among blocks.
    Divided,
    /// Everything.
    Options,
}

/// Fields that the kernels of dense full and causal attention do not have.
const BEYOND_DENSE: &[&str] = &["layout", "window", "soft_cap", "sink", "output", "max_logit", "diagonals"];

/// Of those, the ones that only the kernels with options have.
pub(super) const OPTIONS: &[&str] = &["window", "soft_cap", "sink", "max_logit", "diagonals"];

/// Fields that the plain portable kernels do not have.
const BEYOND_PORTABLE: &[&str] = &["soft_cap", "sink", "output", "max_logit", "value_size", "head_size"];

/// A kernel, and those that come before it, each with why it is not taken.
pub(super) type Decision<K> = (K, Vec<(K, String)>);

impl AttentionConfig {
    /// The kernel for elements of `T` on Hopper, or the portable one if [`kernels`](Self::kernels) asks for it: keys are divided only if
    /// [`key_parts`](Self::key_parts) asks for it.
    ///
    /// # Errors
    /// As [`validate`](Self::validate), and for what no kernel has.
    pub fn choose<T: AttentionElement>(&self) -> Result<Choice<ForwardKernel>> {
        Ok(self.decide::<T>(None)?.1)
    }

    /// The kernel for elements of `T` on a device: Hopper's own, keys divided if that uses its multiprocessors better, elsewhere
    /// a portable one.
    ///
    /// # Errors
    /// As [`choose`](Self::choose); the portable kernels do not divide keys, and take no elements of 8 bits.
    pub fn choose_on<T: AttentionElement>(&self, device: &Device) -> Result<Choice<ForwardKernel>> {
        Ok(self.decide::<T>(Some(device))?.1)
    }

    /// The configuration with its keys divided as chosen, and the choice.
    pub(super) fn decide<T: AttentionElement>(&self, device: Option<&Device>) -> Result<(Self, Choice<ForwardKernel>)> {
        self.validate()?;
        let portable = self.why_portable(device);
        let config = match (device, &portable) {
            (Some(device), None) => self.divided_for::<T>(device),
            _ => *self,
        };
        let (decision, refused) = match portable {
            why if T::IS_SCALED => config.fp8_kernel(why)?,
            Some(why) => config.portable_kernel::<T>(why)?,
            None => config.wgmma_kernel::<T>()?,
        };
        let entry = Entry::find(T::KERNELS, &decision)?;
        config.check_tiles(decision, entry.tile[0])?;
        if config.is_output_empty() {
            return Ok((config, Choice { decision, kernel: None, why: "the output is empty".to_owned(), refused: Vec::new() }));
        }
        config.check_counts(decision)?;
        let why = config.why(decision, entry.tile);
        Ok((config, Choice { decision, kernel: Some(entry.name), why, refused }))
    }

    /// Why kernels on mma are taken, if they are; those on wgmma are Hopper's.
    pub(super) fn why_portable(&self, device: Option<&Device>) -> Option<String> {
        if self.kernels == Kernels::Portable {
            return Some("`kernels` is Portable".to_owned());
        }
        let (major, minor) = device.filter(|device| !device.is_hopper())?.capability();
        Some(format!("the kernels on wgmma need sm_90, this is sm_{major}{minor}"))
    }

    /// The kernel on wgmma; the configuration is valid.
    fn wgmma_kernel<T: AttentionElement>(&self) -> Result<Decision<ForwardKernel>> {
        let (beyond, parts) = (self.set_among(BEYOND_DENSE), self.parts());
        if parts > 1 && !beyond.is_empty() {
            return refuse("key_parts", parts, format!("1 with {}", beyond.join(", ")));
        }
        let (causal, ring) = (self.mask != Mask::Full && !self.folds(), self.output != Output::Rounded);
        let problem = match self.layout {
            _ if parts > 1 => Problem::Divided,
            Layout::Packed => Problem::Packed { causal, ring },
            Layout::Bshd | Layout::Sbhd => Problem::Dense { causal, ring },
        };
        let options = self.set_among(OPTIONS);
        match self.wgmma_entry::<T>(problem) {
            Ok(own) if options.is_empty() => Ok((own.decision, Vec::new())),
            own => {
                let refused = own.map(|own| (own.decision, format!("it does not have {}", options.join(", "))));
                Ok((self.wgmma_entry::<T>(Problem::Options)?.decision, refused.into_iter().collect()))
            }
        }
    }

    /// The kernel on wgmma with the smallest tiles that have room for the heads.
    pub(super) fn wgmma_entry<T: AttentionElement>(&self, of: Problem) -> Result<&'static ForwardEntry<T>> {
        let found = T::KERNELS.iter().copied().flatten().find(|entry| match entry.decision {
            ForwardKernel::Wgmma { problem, sizes: [d, v] } => problem == of && self.head_size <= d && self.value_size() <= v,
            _ => false,
        });
        found.ok_or_else(|| Error::Invalid { what: "AttentionConfig", why: format!("no kernel for {of:?}") })
    }

    /// The portable kernel; the configuration is valid.
    fn portable_kernel<T: AttentionElement>(&self, why: String) -> Result<Decision<ForwardKernel>> {
        if let Some(parts @ 2..) = self.key_parts {
            return refuse("key_parts", parts, "1 or none: the kernels for any GPU do not divide keys");
        }
        if [Output::First, Output::Last].contains(&self.output) {
            return refuse("output", format!("{:?}", self.output), "Rounded or Merged: the kernels for any GPU merge every step");
        }
        let (beyond, plain) = (self.set_among(BEYOND_PORTABLE), ForwardKernel::Portable { head_size: self.head_size });
        let mut refused = vec![(self.wgmma_kernel::<T>()?.0, why)];
        if beyond.is_empty() {
            return Ok((plain, refused));
        }
        refused.push((plain, format!("it does not have {}", beyond.join(", "))));
        Ok((ForwardKernel::PortableGeneral { panels: panels(self.head_size.max(self.value_size())) }, refused))
    }

    /// Refuses more tiles than kernels count.
    fn check_tiles(&self, decision: ForwardKernel, queries: u64) -> Result<()> {
        let [rows, heads] = match decision {
            ForwardKernel::Wgmma { .. } => self.rows_and_heads(),
            _ => [self.queries, self.heads],
        };
        let is_wgmma = matches!(decision, ForwardKernel::Wgmma { .. } | ForwardKernel::Fp8 { .. });
        let (of_rows, batches) = (u128::from(rows.div_ceil(queries)), u128::from(self.batches));
        // The packed sequences of a tensor share its tiles, and each may end in one of its own.
        let row_tiles = if is_wgmma && self.layout == Layout::Packed { of_rows + batches } else { of_rows * batches };
        let tiles = row_tiles * u128::from(heads) * u128::from(self.parts());
        if tiles <= i32::MAX as u128 {
            return Ok(());
        }
        let why = format!("batches, heads and queries make {tiles} tiles of {queries} queries: at most {}", i32::MAX);
        Err(Error::Invalid { what: "AttentionConfig", why })
    }

    /// Refuses what a kernel would not count or write, where tiles are few enough.
    fn check_counts(&self, decision: ForwardKernel) -> Result<()> {
        let results = u128::from(self.batches) * u128::from(self.queries) * u128::from(self.heads);
        match decision {
            ForwardKernel::Wgmma { problem: Problem::Options, .. } => {
                self.check_rows(LIMIT - 1)?;
                if ![Output::First, Output::Last].contains(&self.output) {
                    return Ok(());
                }
                let options = self.set_among(OPTIONS).join(", ");
                let needs = if options.is_empty() { "packed heads of more than 128 elements" } else { &options };
                let why = format!("Rounded or Merged with {needs}: fill the log-sum-exp with -inf, merge every step, and round the sum");
                refuse("output", format!("{:?}", self.output), why)
            }
            ForwardKernel::Wgmma { problem: Problem::Divided, .. } if results > i32::MAX as u128 => {
                refuse("key_parts", self.parts(), format!("1 where batches, queries and heads make more than {} rows", i32::MAX))
            }
            ForwardKernel::Portable { .. } | ForwardKernel::PortableGeneral { .. } => self.check_rows(LIMIT - 1),
            ForwardKernel::Fp8 { problem: Problem::Options, .. } => self.check_rows(LIMIT - 1),
            ForwardKernel::Wgmma { .. } | ForwardKernel::Fp8 { .. } => Ok(()),
        }
    }

    /// What a kernel computes at a time, and what for.
    fn why(&self, decision: ForwardKernel, [queries, keys]: [u64; 2]) -> String {
        let (size, value_size) = (self.head_size, self.value_size());
        let tile = |unit: &str| format!("{queries} queries by {keys} keys on {unit}");
        let (problem, [d, v]) = match decision {
            ForwardKernel::Wgmma { problem, sizes } => (problem, sizes),
            ForwardKernel::Fp8 { problem, .. } => {
                return format!("{}, 8 bits, head_size {size}, {}", tile("wgmma"), self.words_of(problem));
            }
            ForwardKernel::Portable { .. } => return format!("{}, head_size {size}", tile("mma")),
            ForwardKernel::PortableGeneral { panels } => {
                let (padded, beyond) = (panels * PORTABLE_PANEL as u64, self.set_among(BEYOND_PORTABLE).join(", "));
                return format!("{}, heads of {size} and {value_size} padded to {padded}, general for {beyond}", tile("mma"));
            }
        };
        let problem = self.words_of(problem);
        let padded = if [d, v] == [size, value_size] { String::new() } else { format!(" padded to {d} and {v}") };
        let folded = if self.folds() { format!(", {} heads that share keys as rows of one", self.group()) } else { String::new() };
        format!("{}, heads of {size} and {value_size}{padded}, {problem}{folded}", tile("wgmma"))
    }

    /// A problem in words.
    fn words_of(&self, problem: Problem) -> String {
        let masked = |causal: bool| if causal { "causal" } else { "all keys" };
        let merged = |ring: bool| if ring { ", merged" } else { "" };
        match problem {
            Problem::Dense { causal, ring } => format!("{}{}", masked(causal), merged(ring)),
            Problem::Packed { causal, ring } => format!("packed, {}{}", masked(causal), merged(ring)),
            Problem::Divided => format!("keys in {} parts for as many blocks, which another kernel puts together", self.parts()),
            Problem::Options => format!("with options for {}", self.set_among(BEYOND_DENSE).join(", ")),
        }
    }

    /// Whether it takes more than the kernels of dense full and causal attention have.
    pub(super) fn is_beyond_dense(&self) -> bool {
        !self.set_among(BEYOND_DENSE).is_empty()
    }

    /// The fields among `fields` that are set.
    pub(super) fn set_among(&self, fields: &[&str]) -> Vec<&'static str> {
        let set = [
            ("layout", self.layout == Layout::Packed),
            ("window", self.window != Window::default()),
            ("soft_cap", self.soft_cap.is_some()),
            ("sink", self.sink != Sink::None),
            ("output", self.output != Output::Rounded),
            ("max_logit", self.max_logit),
            ("diagonals", self.diagonals),
            ("value_size", self.value_size() != self.head_size),
            ("head_size", !matches!(self.head_size, 64 | 128)),
        ];
        set.into_iter().filter(|(field, is_set)| *is_set && fields.contains(field)).map(|(field, _)| field).collect()
    }
}

/// Panels that heads have room in: those of 3 in 4, of which one is left out.
pub(super) fn panels(size: u64) -> u64 {
    size.div_ceil(PORTABLE_PANEL as u64).next_power_of_two()
}
