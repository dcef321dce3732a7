//! The kernels for GPUs other than Hopper: which configurations they take, and their arguments.

use oxtile_kernels::attention::{AttentionForwardPortable, AttentionForwardPortableArgs, FAR, PORTABLE_KEYS, PORTABLE_QUERIES};
use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::launch::{DeviceView, Kernel};
use oxtile_tile::num::{Pod, bf16, f16};
use oxtile_tile::register_tile::RegisterElement;

use super::config::{AttentionConfig, Kernels, Layout, Mask, Output, Sink, refuse};
use super::forward::{AttentionElement, BoundAttention, Instance};
use super::tensors::{Inputs, Outputs, Padding, Target};
use crate::gemm::Choice;
use crate::runtime::{Buffer, Device, Error, Loaded, Result, Runtime, Stream};

/// The devices that the kernels on wgmma run on.
const HOPPER: (u32, u32) = (9, 0);

/// An element that the portable kernels take.
pub trait PortableElement: Pod {
    /// The entry for heads of a size; none if there is none.
    #[doc(hidden)]
    fn portable_name(head_size: u64) -> Option<&'static str>;

    /// Loads it.
    #[doc(hidden)]
    fn load_portable(runtime: &Runtime, head_size: u64) -> Result<Box<dyn Instance<Self>>>;
}

impl AttentionConfig {
    /// The kernel for elements of `T` on a device: Hopper's own, keys divided if that uses its multiprocessors better, elsewhere
    /// the portable one.
    ///
    /// # Errors
    /// As [`choose`](Self::choose); the portable kernels have fewer sizes and outputs.
    pub fn choose_on<T: AttentionElement>(&self, device: &Device) -> Result<Choice> {
        if self.is_portable_on(device) { self.choose_portable::<T>() } else { self.divided_for::<T>(device).choose::<T>() }
    }

    /// Whether it takes a portable kernel on a device.
    pub(super) fn is_portable_on(&self, device: &Device) -> bool {
        self.kernels == Kernels::Portable || device.capability() != HOPPER
    }

    fn choose_portable<T: PortableElement>(&self) -> Result<Choice> {
        self.validate()?;
        let without = |field, given| refuse(field, given, "on GPUs other than Hopper there is no kernel for it");
        match *self {
            Self { sink, .. } if sink != Sink::None => return without("sink", format!("{sink:?}")),
            Self { output, .. } if output != Output::Rounded => return without("output", format!("{output:?}")),
            Self { soft_cap: Some(cap), .. } => return without("soft_cap", cap.to_string()),
            Self { max_logit: true, .. } => return without("max_logit", "true".to_owned()),
            Self { splits: Some(splits @ 2..), .. } => return without("splits", splits.to_string()),
            _ if self.value_size() != self.head_size => return without("value_size", self.value_size().to_string()),
            _ => {}
        }
        let Some(kernel) = T::portable_name(self.head_size) else {
            return refuse("head_size", self.head_size, "64 or 128 on GPUs other than Hopper");
        };
        let blocks = u128::from(self.batches) * u128::from(self.heads) * u128::from(self.queries.div_ceil(PORTABLE_QUERIES as u64));
        if blocks > i32::MAX as u128 {
            let why = format!("batches, heads and queries make {blocks} blocks of {PORTABLE_QUERIES} queries: at most {}", i32::MAX);
            return Err(Error::Invalid { what: "AttentionConfig", why });
        }
        if blocks == 0 {
            return Ok(Choice { kernel: "", why: "the output is empty".to_owned() });
        }
        Ok(Choice { kernel, why: format!("{PORTABLE_QUERIES} queries by {PORTABLE_KEYS} keys on mma, head_size {}", self.head_size) })
    }
}

/// Sums of lengths, and offsets, of sequences of `rows` rows.
fn dense(stream: &Stream, config: &AttentionConfig, rows: u64) -> Result<[Buffer<u32>; 2]> {
    let array = |step: u64| (0..=config.batches).map(|batch| (batch * step) as u32).collect::<Vec<u32>>();
    let between = if config.layout == Layout::Sbhd { 0 } else { rows };
    Ok([Buffer::from_slice(stream, &array(rows))?, Buffer::from_slice(stream, &array(between))?])
}

/// Copies are of 16 bytes, which lie at multiples of 16.
pub(super) fn check_aligned<T: Pod>(what: &'static str, view: DeviceView<'_, T>) -> Result<()> {
    let address = view.access(what).address;
    if address.is_multiple_of(16) {
        return Ok(());
    }
    Err(Error::Invalid { what, why: format!("it starts at {address:#x}, no multiple of 16 bytes: slice it elsewhere, or copy it") })
}

impl<T, const D: usize> Instance<T> for Loaded<AttentionForwardPortable<T, D>>
where
    T: RegisterElement,
    Columns<D>: MatrixColumns,
    AttentionForwardPortable<T, D>: for<'a> Kernel<Args<'a> = AttentionForwardPortableArgs<'a, T, D>>,
{
    fn bind<'a>(
        &'a self,
        stream: &Stream,
        config: AttentionConfig,
        inputs: Inputs<'a, T>,
        outputs: Outputs<'a, T>,
    ) -> Result<BoundAttention<'a>> {
        let AttentionConfig { layout, batches, queries, keys, heads, mask, window, .. } = config;
        let (Inputs { q, k, v, sequences, .. }, Outputs { out: Target::Rounded(mut out), mut log_sum_exp, .. }) = (inputs, outputs) else {
            return Err(Error::Invalid { what: "Attention, out", why: "this kernel rounds its result".to_owned() });
        };
        check_aligned("Attention, q", q)?;
        check_aligned("Attention, k", k)?;
        check_aligned("Attention, v", v)?;
        let (of_queries, of_keys) = (dense(stream, &config, queries)?, dense(stream, &config, keys)?);
        let (out_length, log_sum_exp_length) = (out.len(), log_sum_exp.len());
        let (packed, sbhd) = (layout == Layout::Packed, layout == Layout::Sbhd);
        let [query_rows, key_rows] = if sbhd { [queries, keys] } else { config.rows() };
        let bound = |bound: Option<u64>| bound.map_or(FAR, |bound| bound as i32);
        let right = if mask == Mask::CausalBottomRight { 0 } else { bound(window.right) };
        let group = config.group() as u32;
        let scale = config.scale_log2();
        Ok(BoundAttention::new(move |stream| {
            let [query_ends, key_ends, query_offsets, key_offsets] = match &sequences {
                Some(given) => [given.cu_seqlens_q, given.cu_seqlens_kv, given.query_offsets(), given.key_offsets()],
                None => [of_queries[0].view(), of_keys[0].view(), of_queries[1].view(), of_keys[1].view()],
            };
            let args = AttentionForwardPortableArgs {
                q,
                k,
                v,
                out: out.slice_mut(0, out_length),
                log_sum_exp: log_sum_exp.slice_mut(0, log_sum_exp_length),
                query_ends,
                key_ends,
                query_offsets,
                key_offsets,
                query_rows: query_rows as u32,
                key_rows: key_rows as u32,
                padded: u32::from(sequences.as_ref().is_some_and(|given| given.padding == Padding::Zeroed)),
                batches: batches as u32,
                heads: heads as u32,
                group,
                head_step: if sbhd { heads as u32 } else { 0 },
                row_tiles: queries.div_ceil(PORTABLE_QUERIES as u64) as u32,
                log_rows: if packed { 0 } else { queries as u32 },
                left: bound(window.left),
                right,
                top_left: u32::from(mask == Mask::CausalTopLeft),
                scale,
            };
            self.launch(stream, args)
        }))
    }
}

macro_rules! elements {
    ($($t:ident: $($d:literal)*;)*) => { $(
        impl PortableElement for $t {
            fn portable_name(head_size: u64) -> Option<&'static str> {
                match head_size {
                    $($d => Some(<AttentionForwardPortable<$t, $d> as Kernel>::INFO.name),)*
                    _ => None,
                }
            }

            fn load_portable(runtime: &Runtime, head_size: u64) -> Result<Box<dyn Instance<Self>>> {
                match head_size {
                    $($d => Ok(Box::new(runtime.load::<AttentionForwardPortable<$t, $d>>()?)),)*
                    _ => Err(Error::Invalid { what: "Attention", why: format!("no portable kernel of head_size {head_size}") }),
                }
            }
        }
    )* };
}

elements! {
    bf16: 64 128;
    f16: 64 128;
}
