//! The forward pass: the table of its kernels, one of which is chosen, loaded and bound.

use std::fmt;
use std::sync::Arc;

use oxtile_kernels::attention::{
    AttentionForward, AttentionForwardFp8 as Fp8, AttentionForwardPortable as Portable, AttentionForwardPortableGeneral as PortableGeneral,
    AttentionForwardSplit, Causal, FP8_KEYS, FP8_QUERIES, Full, Narrow, Optioned, PORTABLE_KEYS, PORTABLE_QUERIES, PackedCausal,
    PackedFull, PackedRingCausal, PackedRingFull, Pair, RingCausal, RingFull, WarpgroupRoles, Wide,
};
use oxtile_tile::layout::{Swizzle64, Swizzle128};
use oxtile_tile::num::{Pod, bf16, e4m3, f16};

use super::choice::{ForwardKernel, Problem};
use super::config::AttentionConfig;
use super::problems::{bind_dense, bind_options, bind_packed};
use super::table::{Load, rows};
use super::tensors::{Inputs, Outputs};
use super::{divided_keys, fp8, portable};
use crate::choice::{Choice, Entry, Table};
use crate::runtime::{Bound, Result, Runtime, Stream};

/// Attends with elements of `T`: `bf16` or `f16`, or `e4m3` with [scales](super::Scales).
///
/// Results go to the caller's buffers ([`Outputs`]), but for [`attend`](Self::attend), which makes them: so nothing is allocated where tensors are [bound](Self::bind) once and
/// [run](Bound::run) often, a graph captures a run, and results can be written where they are wanted, as into a ring's running ones.
/// What the backward pass needs of this one are two of those buffers, `out` and `log_sum_exp`, which
/// [`BackwardInputs`](super::BackwardInputs) takes beside the inputs; there is no other state.
pub struct Attention<T: AttentionElement> {
    config: AttentionConfig,
    choice: Choice<ForwardKernel>,
    bind: Option<Bind<T>>,
}

impl<T: AttentionElement> Attention<T> {
    /// Checks the configuration and loads its kernel.
    ///
    /// # Errors
    /// As [`AttentionConfig::choose_on`] for the first device, and [`Runtime::load`].
    pub fn new(runtime: &Runtime, config: AttentionConfig) -> Result<Self> {
        let (config, choice) = config.decide::<T>(Some(&runtime.device(0)?))?;
        let bind = choice.load(T::KERNELS, runtime)?;
        Ok(Self { config, choice, bind })
    }

    /// What is computed.
    pub fn config(&self) -> &AttentionConfig {
        &self.config
    }

    /// The kernel, and why.
    pub fn choice(&self) -> &Choice<ForwardKernel> {
        &self.choice
    }

    /// Binds tensors; encodes their tensor maps and copies those to the device, in stream order: the host does not wait. Allocates on the device what runs share: some
    /// words, and much more where keys are [divided](AttentionConfig::key_parts). Runs that overlap, on streams that do not wait for each
    /// other, need one bound operation each.
    ///
    /// # Errors
    /// [`Error::Length`](crate::Error::Length) if a view does not have the configuration's size, [`Error::Invalid`](crate::Error::Invalid) if
    /// one is missing or too many, or has another shape, or strides that the kernel does not take; as
    /// [`TensorMap::strided`](crate::tensor::TensorMap::strided).
    pub fn bind<'a>(&self, stream: &Stream, inputs: Inputs<'a, T>, outputs: Outputs<'a, T::Out>) -> Result<Bound<'a>> {
        let (inputs, outputs) = (inputs.shaped(&self.config)?, outputs.shaped(&self.config)?);
        match &self.bind {
            Some(bind) => bind(Binding { stream, config: self.config, inputs, outputs }),
            None => outputs.of_nothing(stream),
        }
    }

    /// Binds tensors and attends once. Allocates as [`bind`](Self::bind) does in each call: what attends to the same tensors more than once is
    /// bound once and [run](Bound::run) each time.
    ///
    /// # Errors
    /// As [`bind`](Self::bind) and [`Bound::run`].
    pub fn forward(&self, stream: &Stream, inputs: Inputs<'_, T>, outputs: Outputs<'_, T::Out>) -> Result<()> {
        self.bind(stream, inputs, outputs)?.run(stream)
    }
}

/// An element of `Q`, `K` and `V`.
pub trait AttentionElement: Pod {
    /// An element of the result.
    type Out: Pod;

    /// Whether inputs come with [`Scales`](super::Scales).
    const IS_SCALED: bool;

    /// The kernels.
    #[doc(hidden)]
    const KERNELS: Table<ForwardKernel, Bind<Self>>;
}

/// A kernel of the table.
pub(super) type ForwardEntry<T> = Entry<ForwardKernel, Bind<T>>;

/// Binds tensors to a loaded kernel.
#[doc(hidden)]
pub type Bind<T> = Box<dyn for<'s, 'a> Fn(Binding<'s, 'a, T>) -> Result<Bound<'a>> + Send + Sync>;

/// Tensors to be bound, of the shapes that the configuration says.
#[doc(hidden)]
pub struct Binding<'s, 'a, T: AttentionElement> {
    pub(super) stream: &'s Stream,
    pub(super) config: AttentionConfig,
    pub(super) inputs: Inputs<'a, T>,
    pub(super) outputs: Outputs<'a, T::Out>,
}

/// Loads the kernels that a function binds tensors to.
fn load_with<K, T>(runtime: &Runtime, bind: for<'s, 'a> fn(Arc<K>, Binding<'s, 'a, T>) -> Result<Bound<'a>>) -> Result<Bind<T>>
where
    K: Load + Send + Sync + 'static,
    T: AttentionElement,
{
    let kernels = Arc::new(K::load(runtime)?);
    Ok(Box::new(move |binding| bind(Arc::clone(&kernels), binding)))
}

/// The kernels on wgmma with one tile: elements of a row of a head of `Q` and of `V`, keys of a step, and the warpgroups that compute it.
macro_rules! tile {
    ($t:ident $d:tt $v:tt $keys:tt $roles:ident dense) => { tile! { @ $t [$d $v $keys $roles] bind_dense
        [Dense { causal: false, ring: false }] Full; [Dense { causal: true, ring: false }] Causal;
        [Dense { causal: false, ring: true }] RingFull; [Dense { causal: true, ring: true }] RingCausal;
    } };
    ($t:ident $d:tt $v:tt $keys:tt $roles:ident packed) => { tile! { @ $t [$d $v $keys $roles] bind_packed
        [Packed { causal: false, ring: false }] PackedFull; [Packed { causal: true, ring: false }] PackedCausal;
        [Packed { causal: false, ring: true }] PackedRingFull; [Packed { causal: true, ring: true }] PackedRingCausal;
    } };
    ($t:ident $d:tt $v:tt $keys:tt $roles:ident divided) => { rows! { ForwardKernel:
        [Wgmma { problem: Problem::Divided, sizes: [$d, $v] }] [<$roles as WarpgroupRoles>::QUERIES, $keys]
            AttentionForwardSplit<$t, $d, $v, $keys, $roles>: divided_keys::bind::<$t, $d, $v, $keys, $roles>;
    } };
    ($t:ident $d:tt $v:tt $keys:tt $roles:ident options) => { rows! { ForwardKernel:
        [Wgmma { problem: Problem::Options, sizes: [$d, $v] }] [<$roles as WarpgroupRoles>::QUERIES, $keys]
            AttentionForward<$t, $d, $v, $keys, $roles, Optioned>: bind_options::<$t, $d, $v, $keys, $roles>;
    } };
    (@ $t:ident [$d:tt $v:tt $keys:tt $roles:ident] $bind:ident $([$($problem:tt)*] $policy:ident;)*) => { rows! { ForwardKernel: $(
        [Wgmma { problem: Problem::$($problem)*, sizes: [$d, $v] }] [<$roles as WarpgroupRoles>::QUERIES, $keys]
            AttentionForward<$t, $d, $v, $keys, $roles, $policy>: $bind::<$t, $d, $v, $keys, $roles, $policy, _, _>;
    )* } };
}

/// The kernels of 8 bits with one head size, whose tiles have one swizzle.
macro_rules! fp8 {
    ($d:tt $swizzle:ident) => {
        rows! { ForwardKernel:
            [Fp8 { problem: Problem::Dense { causal: false, ring: false }, head_size: $d }] [FP8_QUERIES, FP8_KEYS]
                Fp8<$d, $swizzle, Full>: fp8::bind_dense::<$d, $swizzle, Full, _>;
            [Fp8 { problem: Problem::Dense { causal: true, ring: false }, head_size: $d }] [FP8_QUERIES, FP8_KEYS]
                Fp8<$d, $swizzle, Causal>: fp8::bind_dense::<$d, $swizzle, Causal, _>;
            [Fp8 { problem: Problem::Packed { causal: false, ring: false }, head_size: $d }] [FP8_QUERIES, FP8_KEYS]
                Fp8<$d, $swizzle, PackedFull>: fp8::bind_packed::<$d, $swizzle, PackedFull, _>;
            [Fp8 { problem: Problem::Packed { causal: true, ring: false }, head_size: $d }] [FP8_QUERIES, FP8_KEYS]
                Fp8<$d, $swizzle, PackedCausal>: fp8::bind_packed::<$d, $swizzle, PackedCausal, _>;
            [Fp8 { problem: Problem::Options, head_size: $d }] [FP8_QUERIES, FP8_KEYS]
                Fp8<$d, $swizzle, Optioned>: fp8::bind_options::<$d, $swizzle>;
        }
    };
}

macro_rules! elements {
    ($($t:ident)*) => { $(
        impl AttentionElement for $t {
            type Out = $t;
            const IS_SCALED: bool = false;
            const KERNELS: Table<ForwardKernel, Bind<$t>> = &[
                tile!($t 64 64 128 Narrow dense), tile!($t 128 128 128 Pair dense),
                tile!($t 192 128 128 Wide dense), tile!($t 256 256 80 Wide dense),
                tile!($t 64 64 128 Narrow divided), tile!($t 128 128 128 Pair divided),
                tile!($t 192 128 128 Wide divided), tile!($t 256 256 80 Wide divided),
                tile!($t 64 64 128 Narrow packed), tile!($t 128 128 128 Pair packed),
                tile!($t 64 64 128 Pair options), tile!($t 128 128 128 Wide options),
                tile!($t 192 128 128 Wide options), tile!($t 256 256 64 Wide options),
                rows! { ForwardKernel:
                    [Portable { head_size: 64 }] [PORTABLE_QUERIES, PORTABLE_KEYS] Portable<$t, 64>: portable::bind::<$t, 64>;
                    [Portable { head_size: 128 }] [PORTABLE_QUERIES, PORTABLE_KEYS] Portable<$t, 128>: portable::bind::<$t, 128>;
                    [PortableGeneral { panels: 1 }] [PORTABLE_QUERIES, 64] PortableGeneral<$t, 1, 64>: portable::bind_general::<$t, 1, 64>;
                    [PortableGeneral { panels: 2 }] [PORTABLE_QUERIES, 64] PortableGeneral<$t, 2, 64>: portable::bind_general::<$t, 2, 64>;
                    [PortableGeneral { panels: 4 }] [PORTABLE_QUERIES, 32] PortableGeneral<$t, 4, 32>: portable::bind_general::<$t, 4, 32>;
                },
            ];
        }
    )* };
}

elements! { bf16 f16 }

impl AttentionElement for e4m3 {
    type Out = bf16;
    const IS_SCALED: bool = true;
    const KERNELS: Table<ForwardKernel, Bind<e4m3>> = &[fp8!(64 Swizzle64), fp8!(128 Swizzle128)];
}

impl<T: AttentionElement> fmt::Debug for Attention<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attention").field("config", &self.config).field("choice", &self.choice).finish_non_exhaustive()
    }
}
