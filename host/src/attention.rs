//! Attention: `softmax(scale Q K^T + mask) V`, forward.
//!
//! `Q` and the output are `[batches, queries, heads, head_size]`, `K` and `V` are `[batches, keys, key_heads, head_size]`,
//! all without gaps; query head `h` sees key head `h / (heads / key_heads)`. The log-sum-exp is
//! `[batches, heads, queries]`, natural, of the scaled scores. A query that sees no key gets zeros and -inf.
//!
//! ```
//! use oxtile::attention::{Attention, AttentionConfig, Mask};
//! use oxtile::num::bf16;
//! use oxtile::{Buffer, Result, Runtime};
//!
//! # fn main() -> Result<()> {
//! let runtime = Runtime::emulated(1)?; // or Runtime::cuda()
//! let stream = runtime.device(0)?.stream()?;
//! let config = AttentionConfig { queries: 3, keys: 3, head_size: 64, mask: Mask::CausalBottomRight, ..AttentionConfig::default() };
//!
//! let (q, v) = (vec![half::bf16::ZERO; 3 * 64], [2.0, 4.0, 9.0].map(|x| [half::bf16::from_f32(x); 64]));
//! let (q, v) = (Buffer::from_slice(&stream, &q)?, Buffer::from_slice(&stream, v.as_flattened())?);
//! let mut out = Buffer::<bf16>::zeros(&stream, 3 * 64)?;
//! let mut log_sum_exp = Buffer::<f32>::zeros(&stream, 3)?;
//! let attention = Attention::<bf16>::new(&runtime, config)?;
//! attention.forward(&stream, q.view(), q.view(), v.view(), out.view_mut(), log_sum_exp.view_mut())?;
//!
//! let out: Vec<half::bf16> = out.to_vec_as(&stream)?;
//! assert_eq!([0, 64, 128].map(|i| out[i].to_f32()), [2.0, 3.0, 5.0]);
//! assert!((log_sum_exp.to_vec(&stream)?[2] - 3_f32.ln()).abs() < 1e-6);
//! # Ok(()) }
//! ```

use std::fmt;

use oxtile_kernels::attention::{AttentionForward, AttentionForwardArgs, KEYS, QUERIES};
use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::launch::{DeviceView, DeviceViewMut, Kernel};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::num::{Pod, bf16, f16};
use oxtile_tile::register_tile::{RegisterElement, StoredElement};

pub use crate::gemm::Choice;
use crate::runtime::{Buffer, Error, Loaded, Result, Runtime, Stream};
use crate::tensor::shape::numel;
use crate::tensor::{Strided, TensorMap, TensorMapMut};

/// What is computed. Made complete by `..AttentionConfig::default()`, which has one batch of one head.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionConfig {
    /// Batches.
    pub batches: u64,
    /// Rows of `Q` and of the output in each batch.
    pub queries: u64,
    /// Rows of `K` and `V` in each batch.
    pub keys: u64,
    /// Heads of `Q` and of the output.
    pub heads: u64,
    /// Heads of `K` and `V`, of which `heads` is a multiple.
    pub key_heads: u64,
    /// Elements of a row of a head: 64 or 128.
    pub head_size: u64,
    /// Which keys a query sees.
    pub mask: Mask,
    /// Factor of the scores, positive; `head_size` to the power -1/2 if none.
    pub scale: Option<f32>,
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

impl Default for AttentionConfig {
    fn default() -> Self {
        Self { batches: 1, queries: 0, keys: 0, heads: 1, key_heads: 1, head_size: 0, mask: Mask::Full, scale: None }
    }
}

/// Attends with elements of `T`: `bf16` or `f16`.
pub struct Attention<T> {
    config: AttentionConfig,
    instance: Option<Box<dyn Instance<T>>>,
}

/// Attention of given tensors, ready to be enqueued any number of times, in a graph's capture too. Runs that overlap,
/// on streams that do not wait for each other, need one each.
pub struct BoundAttention<'a>(Box<Launch<'a>>);

type Launch<'a> = dyn FnMut(&Stream) -> Result<()> + Send + 'a;

/// Bytes of keys and values that are read by heads computed together: about half of an H200's L2 cache.
const SECTION_BYTES: u64 = 32 << 20;

impl AttentionConfig {
    /// The kernel for elements of `T`, which does not depend on the device.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there is none: the field is named, with what it may be.
    pub fn choose<T: AttentionElement>(&self) -> Result<Choice> {
        let Self { batches, queries, keys, heads, key_heads, head_size, mask, scale } = *self;
        let refuse = |why: String| Err(Error::Invalid { what: "AttentionConfig", why });
        let limit = (1 << 30) - 1;
        let sizes = [("batches", batches), ("queries", queries), ("keys", keys), ("heads", heads), ("key_heads", key_heads)];
        if let Some((field, size)) = sizes.into_iter().find(|(_, size)| *size > limit) {
            return refuse(format!("{field} is {size}: at most {limit}"));
        }
        if key_heads == 0 || !heads.is_multiple_of(key_heads) {
            return refuse(format!("key_heads is {key_heads}: a divisor of heads, which is {heads}"));
        }
        if scale.is_some_and(|scale| !(scale.is_normal() && scale > 0.0)) {
            return refuse(format!("scale is {}: a positive number, or none for 1 / sqrt(head_size)", scale.unwrap_or_default()));
        }
        let causal = mask != Mask::Full;
        let Some(kernel) = T::name(head_size, causal) else {
            return refuse(format!("head_size is {head_size}: 64 or 128"));
        };
        let tiles = u128::from(batches) * u128::from(heads) * u128::from(queries.div_ceil(QUERIES as u64));
        if tiles > i32::MAX as u128 {
            return refuse(format!("batches, heads and queries make {tiles} tiles of {QUERIES} queries: at most {}", i32::MAX));
        }
        if tiles == 0 {
            return Ok(Choice { kernel: "", why: "the output is empty".to_owned() });
        }
        let masked = if causal { "causal" } else { "all keys" };
        Ok(Choice { kernel, why: format!("{QUERIES} queries by {KEYS} keys on wgmma, head_size {head_size}, {masked}") })
    }

    /// The last key that query 0 sees.
    fn diagonal(&self) -> i32 {
        match self.mask {
            Mask::CausalBottomRight => self.keys as i32 - self.queries as i32,
            Mask::Full | Mask::CausalTopLeft => 0,
        }
    }

    /// Heads that are computed together: all tiles of a head do the same work unless the mask is causal.
    fn section(&self, element_bytes: u64) -> u32 {
        if self.mask == Mask::Full {
            return 1;
        }
        let head_bytes = 2 * self.keys * self.head_size * element_bytes;
        let group = self.heads / self.key_heads;
        (SECTION_BYTES / head_bytes.max(1) * group).clamp(group.max(1), i32::MAX as u64) as u32
    }

    /// The factor of scores whose exponentials are to base 2.
    fn scale_log2(&self) -> f32 {
        let scale = self.scale.map_or_else(|| (self.head_size as f64).powf(-0.5), f64::from);
        (scale * std::f64::consts::LOG2_E) as f32
    }
}

impl<T: AttentionElement> Attention<T> {
    /// Checks the configuration and loads its kernel.
    ///
    /// # Errors
    /// As [`AttentionConfig::choose`] and [`Runtime::load`].
    pub fn new(runtime: &Runtime, config: AttentionConfig) -> Result<Self> {
        let launches = !config.choose::<T>()?.kernel.is_empty();
        Ok(Self { config, instance: launches.then(|| T::load(runtime, config.head_size, config.mask != Mask::Full)).transpose()? })
    }

    /// Binds tensors; encodes their tensor maps on the device and waits for those to be there.
    ///
    /// # Errors
    /// [`Error::Length`] if a view does not have the configuration's size; as [`TensorMap::strided`].
    pub fn bind<'a>(
        &'a self,
        stream: &Stream,
        q: DeviceView<'a, T>,
        k: DeviceView<'a, T>,
        v: DeviceView<'a, T>,
        out: DeviceViewMut<'a, T>,
        log_sum_exp: DeviceViewMut<'a, f32>,
    ) -> Result<BoundAttention<'a>> {
        let AttentionConfig { batches, queries, keys, heads, key_heads, head_size, .. } = self.config;
        let (of_queries, of_keys) = (numel(&[batches, queries, heads, head_size])?, numel(&[batches, keys, key_heads, head_size])?);
        let lengths = [
            ("Attention, q", of_queries, q.len()),
            ("Attention, k", of_keys, k.len()),
            ("Attention, v", of_keys, v.len()),
            ("Attention, out", of_queries, out.len()),
            ("Attention, log_sum_exp", batches * heads * queries, log_sum_exp.len()),
        ];
        if let Some((what, expected, found)) = lengths.into_iter().find(|(_, expected, found)| expected != found) {
            return Err(Error::Length { what, expected, found });
        }
        match &self.instance {
            Some(instance) => instance.bind(stream, self.config, Tensors { q, k, v, out, log_sum_exp }),
            None => Ok(BoundAttention(Box::new(|_| Ok(())))),
        }
    }

    /// Binds tensors and attends once.
    ///
    /// # Errors
    /// As [`bind`](Self::bind) and [`BoundAttention::run`].
    pub fn forward(
        &self,
        stream: &Stream,
        q: DeviceView<'_, T>,
        k: DeviceView<'_, T>,
        v: DeviceView<'_, T>,
        out: DeviceViewMut<'_, T>,
        log_sum_exp: DeviceViewMut<'_, f32>,
    ) -> Result<()> {
        self.bind(stream, q, k, v, out, log_sum_exp)?.run(stream)
    }
}

impl BoundAttention<'_> {
    /// Enqueues it.
    ///
    /// # Errors
    /// As [`Loaded::launch`].
    pub fn run(&mut self, stream: &Stream) -> Result<()> {
        (self.0)(stream)
    }
}

/// An element of `Q`, `K` and `V`.
pub trait AttentionElement: Pod {
    /// The entry for heads of a size; none if there is none.
    fn name(head_size: u64, causal: bool) -> Option<&'static str>;

    /// Loads it.
    #[doc(hidden)]
    fn load(runtime: &Runtime, head_size: u64, causal: bool) -> Result<Box<dyn Instance<Self>>>;
}

/// What takes part.
#[doc(hidden)]
pub struct Tensors<'a, T> {
    q: DeviceView<'a, T>,
    k: DeviceView<'a, T>,
    v: DeviceView<'a, T>,
    out: DeviceViewMut<'a, T>,
    log_sum_exp: DeviceViewMut<'a, f32>,
}

/// A loaded kernel of any head size and mask.
#[doc(hidden)]
pub trait Instance<T>: Send + Sync {
    fn bind<'a>(&'a self, stream: &Stream, config: AttentionConfig, tensors: Tensors<'a, T>) -> Result<BoundAttention<'a>>;
}

/// `[batches, rows, heads, head_size]` in memory, seen as `[batches, heads, rows, head_size]`.
fn by_head(batches: u64, rows: u64, heads: u64, head_size: u64) -> Strided<4> {
    Strided { shape: [batches, heads, rows, head_size], strides: [rows * heads * head_size, head_size, heads * head_size, 1] }
}

impl<T, const D: usize, const CAUSAL: bool> Instance<T> for Loaded<AttentionForward<T, D, CAUSAL>>
where
    T: RegisterElement + StoredElement,
    Columns<D>: MatrixColumns,
    AttentionForward<T, D, CAUSAL>: for<'a> Kernel<Args<'a> = AttentionForwardArgs<'a, T, D, CAUSAL>>,
{
    fn bind<'a>(&'a self, stream: &Stream, config: AttentionConfig, tensors: Tensors<'a, T>) -> Result<BoundAttention<'a>> {
        let AttentionConfig { batches, queries, keys, heads, key_heads, head_size, .. } = config;
        let Tensors { q, k, v, out, mut log_sum_exp } = tensors;
        let of_queries = by_head(batches, queries, heads, head_size);
        // Without keys nothing is loaded by these maps, which must be of something: the queries.
        let (k, v, of_keys) = if keys == 0 { (q, q, of_queries) } else { (k, v, by_head(batches, keys, key_heads, head_size)) };
        let q = TensorMap::<_, 64, D, Swizzle128, 4>::strided(stream, q, of_queries)?;
        let k = TensorMap::<_, KEYS, D, Swizzle128, 4>::strided(stream, k, of_keys)?;
        let v = TensorMap::<_, KEYS, D, Swizzle128, 4>::strided(stream, v, of_keys)?;
        let mut out = TensorMapMut::<_, 64, D, Swizzle128, 4>::strided(stream, out, of_queries)?;
        let mut counter = Buffer::<u32>::zeros(stream, 1)?;
        let [batches, rows, keys, group] = [batches, queries, keys, heads / key_heads].map(|size| size as u32);
        let log_sum_exp_length = log_sum_exp.len();
        let (diagonal, section, scale) = (config.diagonal(), config.section(size_of::<T>() as u64), config.scale_log2());
        Ok(BoundAttention(Box::new(move |stream| {
            let args = AttentionForwardArgs {
                q: q.view(),
                k: k.view(),
                v: v.view(),
                out: out.view_mut(),
                log_sum_exp: log_sum_exp.slice_mut(0, log_sum_exp_length),
                counter: counter.view_mut(),
                batches,
                heads: heads as u32,
                group,
                rows,
                keys,
                diagonal,
                section,
                scale,
            };
            self.launch(stream, args)
        })))
    }
}

macro_rules! elements {
    ($($t:ident: $([$d:literal $causal:literal])*;)*) => { $(
        impl AttentionElement for $t {
            fn name(head_size: u64, causal: bool) -> Option<&'static str> {
                match (head_size, causal) {
                    $(($d, $causal) => Some(<AttentionForward<$t, $d, $causal> as Kernel>::INFO.name),)*
                    _ => None,
                }
            }

            fn load(runtime: &Runtime, head_size: u64, causal: bool) -> Result<Box<dyn Instance<Self>>> {
                match (head_size, causal) {
                    $(($d, $causal) => Ok(Box::new(runtime.load::<AttentionForward<$t, $d, $causal>>()?)),)*
                    _ => Err(Error::Invalid { what: "Attention", why: format!("no kernel of head_size {head_size}") }),
                }
            }
        }
    )* };
}

elements! {
    bf16: [64 false] [64 true] [128 false] [128 true];
    f16: [64 false] [64 true] [128 false] [128 true];
}

impl<T> fmt::Debug for Attention<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attention").field("config", &self.config).finish_non_exhaustive()
    }
}
