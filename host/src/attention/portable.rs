//! The kernels for GPUs other than Hopper: which configurations they take, and the arguments of the plain one.

use oxtile_kernels::attention::{
    AttentionForwardPortable, AttentionForwardPortableArgs, AttentionForwardPortableGeneral, Heads, InputsArgument, LogSumExpArgument,
    PORTABLE_KEYS, PORTABLE_PANEL, PORTABLE_QUERIES, PortableResultsArgument, SequencesArgument, portable_general_keys,
};
use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::launch::{DeviceView, DeviceViewMut, Kernel};
use oxtile_tile::num::{Pod, bf16, f16};
use oxtile_tile::register_tile::RegisterElement;

use super::config::{AttentionConfig, Kernels, LIMIT, Layout, Output, Sink, refuse};
use super::forward::{AttentionElement, Binding, BoundAttention, Instance};
use super::sequences::Placement;
use crate::choice::Choice;
use crate::runtime::{Device, Error, Loaded, Result, Runtime};

/// A portable kernel among those of an element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub enum PortableKey {
    /// All layouts, masks and windows, of one head size.
    Plain { head_size: u64 },
    /// Everything, of heads of so many panels.
    General { panels: u64 },
}

/// An element that the portable kernels take.
pub trait PortableElement: Pod {
    /// The entry; none if there is none.
    #[doc(hidden)]
    fn portable_name(key: PortableKey) -> Option<&'static str>;

    /// Loads it.
    #[doc(hidden)]
    fn load_portable(runtime: &Runtime, key: PortableKey) -> Result<Box<dyn Instance<Self>>>;
}

impl AttentionConfig {
    /// The kernel for elements of `T` on a device: Hopper's own, keys divided if that uses its multiprocessors better, elsewhere
    /// a portable one.
    ///
    /// # Errors
    /// As [`choose`](Self::choose); the portable kernels do not divide keys.
    pub fn choose_on<T: AttentionElement>(&self, device: &Device) -> Result<Choice> {
        self.validate()?;
        if self.is_portable_on(device) { self.choose_portable::<T>() } else { self.divided_for::<T>(device).choose::<T>() }
    }

    /// Whether it takes a portable kernel on a device.
    pub(super) fn is_portable_on(&self, device: &Device) -> bool {
        self.kernels == Kernels::Portable || !device.is_hopper()
    }

    pub(super) fn choose_portable<T: PortableElement>(&self) -> Result<Choice> {
        self.validate()?;
        if let Some(parts @ 2..) = self.key_parts {
            return refuse("key_parts", parts, "1 or none: the kernels for any GPU do not divide keys");
        }
        if [Output::First, Output::Last].contains(&self.output) {
            return refuse("output", format!("{:?}", self.output), "Rounded or Merged: the kernels for any GPU merge every step");
        }
        let key = self.portable_key();
        let Some(kernel) = T::portable_name(key) else {
            return Err(Error::Invalid { what: "AttentionConfig", why: format!("no kernel for {key:?}") });
        };
        let blocks = u128::from(self.batches) * u128::from(self.heads) * u128::from(self.queries.div_ceil(PORTABLE_QUERIES as u64));
        if blocks > i32::MAX as u128 {
            let why = format!("batches, heads and queries make {blocks} blocks of {PORTABLE_QUERIES} queries: at most {}", i32::MAX);
            return Err(Error::Invalid { what: "AttentionConfig", why });
        }
        if blocks == 0 {
            return Ok(Choice { kernel: "", why: "the output is empty".to_owned() });
        }
        self.check_rows(LIMIT - 1)?;
        let (size, value_size) = (self.head_size, self.value_size());
        let why = match key {
            PortableKey::Plain { .. } => format!("{PORTABLE_QUERIES} queries by {PORTABLE_KEYS} keys on mma, head_size {size}"),
            PortableKey::General { panels } => {
                let (keys, padded, needs) =
                    (portable_general_keys(panels as usize), panels as usize * PORTABLE_PANEL, self.portable_needs().join(", "));
                let heads = format!("heads of {size} and {value_size} padded to {padded}");
                format!("{PORTABLE_QUERIES} queries by {keys} keys on mma, {heads}, general for {needs}")
            }
        };
        Ok(Choice { kernel, why })
    }

    /// Its portable kernel; the configuration is valid.
    pub(super) fn portable_key(&self) -> PortableKey {
        if self.portable_needs().is_empty() {
            return PortableKey::Plain { head_size: self.head_size };
        }
        // Heads of 3 panels have room in 4, of which one is left out.
        let panels = self.head_size.max(self.value_size()).div_ceil(PORTABLE_PANEL as u64);
        PortableKey::General { panels: panels.next_power_of_two() }
    }

    /// Fields that take more than the plain portable kernel has.
    fn portable_needs(&self) -> Vec<&'static str> {
        let needs = [
            ("soft_cap", self.soft_cap.is_some()),
            ("sink", self.sink != Sink::None),
            ("output", self.output != Output::Rounded),
            ("max_logit", self.max_logit),
            ("value_size", self.value_size() != self.head_size),
            ("head_size", !matches!(self.head_size, 64 | 128)),
        ];
        needs.into_iter().filter(|(_, needed)| *needed).map(|(field, _)| field).collect()
    }
}

/// Copies are of 16 bytes, which lie at multiples of 16.
pub(super) fn check_aligned<T: Pod>(what: &'static str, view: DeviceView<'_, T>) -> Result<()> {
    let address = view.access(what).address;
    if address.is_multiple_of(16) {
        return Ok(());
    }
    Err(Error::Invalid { what, why: format!("it starts at {address:#x}, no multiple of 16 bytes: slice it elsewhere, or copy it") })
}

/// What both portable kernels take of a configuration.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub heads: Heads,
    /// Rows of the tensors of queries and of keys.
    rows: [u32; 2],
    /// Blocks of queries that the longest sequence may have.
    pub row_tiles: u32,
    /// Rows of the log-sum-exp of each sequence; 0 if they are those of the tensor.
    log_rows: u32,
}

impl Sizes {
    pub fn of(config: &AttentionConfig) -> Self {
        let AttentionConfig { layout, batches, queries, keys, heads, .. } = *config;
        let sbhd = layout == Layout::Sbhd;
        let step = if sbhd { heads } else { 0 };
        let [batches, heads, group, step] = [batches, heads, config.group(), step].map(|count| count as u32);
        Self {
            heads: Heads { batches, heads, group, step },
            rows: if sbhd { [queries, keys] } else { config.rows() }.map(|rows| rows as u32),
            row_tiles: queries.div_ceil(PORTABLE_QUERIES as u64) as u32,
            log_rows: if layout == Layout::Packed { 0 } else { queries as u32 },
        }
    }

    pub fn sequences<'s>(&self, placement: &'s Placement<'_>) -> SequencesArgument<'s> {
        placement.argument(self.rows)
    }

    pub fn log_sum_exp<'s>(&self, values: &'s mut DeviceViewMut<'_, f32>) -> LogSumExpArgument<'s> {
        LogSumExpArgument { values: values.slice_mut(0, values.len()), rows: self.log_rows }
    }
}

impl<T, const D: usize> Instance<T> for Loaded<AttentionForwardPortable<T, D>>
where
    T: RegisterElement,
    Columns<D>: MatrixColumns,
    AttentionForwardPortable<T, D>: Kernel,
{
    fn bind<'a>(&'a self, binding: Binding<'_, 'a, T>) -> Result<BoundAttention<'a>> {
        let Binding { stream, config, inputs, outputs } = binding;
        let (q, k, v) = (inputs.q, inputs.k, inputs.v);
        let (mut out, mut log_sum_exp) = (outputs.out.rounded()?, outputs.log_sum_exp);
        check_aligned("Attention, q", q)?;
        check_aligned("Attention, k", k)?;
        check_aligned("Attention, v", v)?;
        let placement = Placement::copied(stream, &config, inputs.sequences)?;
        let (sizes, window, scale) = (Sizes::of(&config), config.seen(), config.scale_log2());
        Ok(BoundAttention::new(move |stream| {
            let args = AttentionForwardPortableArgs {
                inputs: InputsArgument { q, k, v },
                results: PortableResultsArgument { out: out.slice_mut(0, out.len()), log_sum_exp: sizes.log_sum_exp(&mut log_sum_exp) },
                sequences: sizes.sequences(&placement),
                heads: sizes.heads,
                row_tiles: sizes.row_tiles,
                window,
                scale,
            };
            self.launch(stream, args)
        }))
    }
}

/// Each line: its kernel as a type of the element.
macro_rules! elements {
    ($($t:ident)*) => { $(
        elements! { @ $t
            [PortableKey::Plain { head_size: 64 }] AttentionForwardPortable<$t, 64>;
            [PortableKey::Plain { head_size: 128 }] AttentionForwardPortable<$t, 128>;
            [PortableKey::General { panels: 1 }] AttentionForwardPortableGeneral<$t, 1, { portable_general_keys(1) }>;
            [PortableKey::General { panels: 2 }] AttentionForwardPortableGeneral<$t, 2, { portable_general_keys(2) }>;
            [PortableKey::General { panels: 4 }] AttentionForwardPortableGeneral<$t, 4, { portable_general_keys(4) }>;
        }
    )* };
    (@ $t:ident $([$key:pat] $kernel:ty;)*) => {
        impl PortableElement for $t {
            fn portable_name(key: PortableKey) -> Option<&'static str> {
                match key {
                    $($key => Some(<$kernel as Kernel>::INFO.name),)*
                    _ => None,
                }
            }

            fn load_portable(runtime: &Runtime, key: PortableKey) -> Result<Box<dyn Instance<Self>>> {
                match key {
                    $($key => Ok(Box::new(runtime.load::<$kernel>()?)),)*
                    _ => Err(Error::Invalid { what: "Attention", why: format!("no portable kernel for {key:?}") }),
                }
            }
        }
    };
}

elements! { bf16 f16 }
