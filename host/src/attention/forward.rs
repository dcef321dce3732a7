//! The pass forward: tensors bound, kernels launched.

use std::fmt;

use oxtile_kernels::attention::{
    AttentionCombine, AttentionForward, AttentionForwardGeneral, AttentionForwardPacked, AttentionForwardSplit, Narrow, Pair, Team, Wide,
};
use oxtile_tile::launch::Kernel;
use oxtile_tile::num::{bf16, f16};

use super::config::AttentionConfig;
use super::plan::{Facts, Key, Kind};
use super::portable::PortableElement;
use super::tensors::{Inputs, Outputs};
use crate::runtime::{Error, Result, Runtime, Stream};

/// Attends with elements of `T`: `bf16` or `f16`.
///
/// Results go to the caller's buffers ([`Outputs`]) and are not returned: so nothing is allocated where tensors are [bound](Self::bind) once and
/// [run](BoundAttention::run) often, a graph captures a run, and results can be written where they are wanted, as into a ring's running ones.
/// What the pass backward saves of this one are two of those buffers, `out` and `log_sum_exp`, which
/// [`BackwardInputs`](super::BackwardInputs) takes beside the inputs; there is no other state.
pub struct Attention<T> {
    config: AttentionConfig,
    instance: Option<Box<dyn Instance<T>>>,
}

/// Attention of given tensors, ready to be enqueued any number of times, in a graph's capture too. Runs that overlap,
/// on streams that do not wait for each other, need one each.
pub struct BoundAttention<'a>(pub(super) Box<Launch<'a>>);

pub(super) type Launch<'a> = dyn FnMut(&Stream) -> Result<()> + Send + 'a;

impl<T: AttentionElement> Attention<T> {
    /// Checks the configuration and loads its kernel.
    ///
    /// # Errors
    /// As [`AttentionConfig::choose_on`] for the first device, and [`Runtime::load`].
    pub fn new(runtime: &Runtime, config: AttentionConfig) -> Result<Self> {
        let device = runtime.device(0)?;
        let launches = !config.choose_on::<T>(&device)?.kernel.is_empty();
        if config.is_portable_on(&device) {
            return Ok(Self { config, instance: launches.then(|| T::load_portable(runtime, config.portable_key())).transpose()? });
        }
        let config = config.divided_for::<T>(&device);
        Ok(Self { config, instance: launches.then(|| T::load(runtime, config.key())).transpose()? })
    }

    /// Binds tensors; encodes their tensor maps on the device and waits for those to be there. Allocates on the device what runs share: some
    /// words, and much more where keys are [divided](AttentionConfig::key_parts).
    ///
    /// # Errors
    /// [`Error::Length`] if a view does not have the configuration's size, [`Error::Invalid`] if one is missing or too many; as
    /// [`TensorMap::strided`](crate::tensor::TensorMap::strided).
    pub fn bind<'a>(&'a self, stream: &Stream, inputs: Inputs<'a, T>, outputs: Outputs<'a, T>) -> Result<BoundAttention<'a>> {
        inputs.check(&self.config)?;
        outputs.check(&self.config)?;
        match &self.instance {
            Some(instance) => instance.bind(Binding { stream, config: self.config, inputs, outputs }),
            None => outputs.of_nothing(stream),
        }
    }

    /// Binds tensors and attends once. Allocates as [`bind`](Self::bind) does in each call: what attends to the same tensors more than once is
    /// bound once and [run](BoundAttention::run) each time.
    ///
    /// # Errors
    /// As [`bind`](Self::bind) and [`BoundAttention::run`].
    pub fn forward(&self, stream: &Stream, inputs: Inputs<'_, T>, outputs: Outputs<'_, T>) -> Result<()> {
        self.bind(stream, inputs, outputs)?.run(stream)
    }
}

impl<'a> BoundAttention<'a> {
    /// What is enqueued.
    pub(super) fn new(launch: impl FnMut(&Stream) -> Result<()> + Send + 'a) -> Self {
        Self(Box::new(launch))
    }

    /// Nothing to be enqueued.
    pub(super) fn nothing() -> Self {
        Self::new(|_| Ok(()))
    }

    /// Enqueues it.
    ///
    /// # Errors
    /// As [`Loaded::launch`](crate::Loaded::launch).
    pub fn run(&mut self, stream: &Stream) -> Result<()> {
        (self.0)(stream)
    }
}

/// An element of `Q`, `K` and `V`.
pub trait AttentionElement: PortableElement {
    /// A kernel's name and step; none if there is none.
    #[doc(hidden)]
    fn facts(key: Key) -> Option<Facts>;

    /// Loads it.
    #[doc(hidden)]
    fn load(runtime: &Runtime, key: Key) -> Result<Box<dyn Instance<Self>>>;
}

/// A loaded kernel of any head size and mask.
#[doc(hidden)]
pub trait Instance<T>: Send + Sync {
    fn bind<'a>(&'a self, binding: Binding<'_, 'a, T>) -> Result<BoundAttention<'a>>;
}

/// Tensors to be bound, of the lengths that the configuration says.
#[doc(hidden)]
pub struct Binding<'s, 'a, T> {
    pub(super) stream: &'s Stream,
    pub(super) config: AttentionConfig,
    pub(super) inputs: Inputs<'a, T>,
    pub(super) outputs: Outputs<'a, T>,
}

/// Each line: sizes of heads, kind, its kernel as a type of the element with the keys of a step, and what is launched behind it.
macro_rules! elements {
    (@ load $runtime:ident, $kernel:ty) => { $runtime.load::<$kernel>()? };
    (@ load $runtime:ident, $kernel:ty, $then:ty) => { ($runtime.load::<$kernel>()?, $runtime.load::<$then>()?) };
    ($([$d:literal $v:literal $kind:ident] $kernel:ident<$keys:literal, $team:ty $(, $causal:literal)?> $(, $then:ident)?;)*) => {
        elements!(@ bf16 $([$d $v $kind] $kernel<$keys, $team $(, $causal)?> $(, $then)?;)*);
        elements!(@ f16 $([$d $v $kind] $kernel<$keys, $team $(, $causal)?> $(, $then)?;)*);
    };
    (@ $t:ident $([$d:literal $v:literal $kind:ident] $kernel:ident<$keys:literal, $team:ty $(, $causal:literal)?> $(, $then:ident)?;)*) => {
        impl AttentionElement for $t {
            fn facts(key: Key) -> Option<Facts> {
                match (key.sizes, key.kind) {
                    $(([$d, $v], Kind::$kind) => Some(Facts {
                        name: <$kernel<$t, $d, $v, $keys, $team $(, $causal)?> as Kernel>::INFO.name,
                        step: [<$team as Team>::QUERIES, $keys],
                    }),)*
                    _ => None,
                }
            }

            fn load(runtime: &Runtime, key: Key) -> Result<Box<dyn Instance<Self>>> {
                match (key.sizes, key.kind) {
                    $(([$d, $v], Kind::$kind) => Ok(Box::new(elements!(@ load runtime, $kernel<$t, $d, $v, $keys, $team $(, $causal)?> $(, $then<$t>)?))),)*
                    _ => Err(Error::Invalid { what: "Attention", why: format!("no kernel for {key:?}") }),
                }
            }
        }
    };
}

elements! {
    [64 64 Full] AttentionForward<128, Narrow, false>;
    [64 64 Causal] AttentionForward<128, Narrow, true>;
    [64 64 Split] AttentionForwardSplit<128, Narrow>, AttentionCombine;
    [64 64 Packed] AttentionForwardPacked<128, Narrow, false>;
    [64 64 PackedCausal] AttentionForwardPacked<128, Narrow, true>;
    [64 64 General] AttentionForwardGeneral<128, Pair>;
    [128 128 Full] AttentionForward<128, Pair, false>;
    [128 128 Causal] AttentionForward<128, Pair, true>;
    [128 128 Split] AttentionForwardSplit<128, Pair>, AttentionCombine;
    [128 128 Packed] AttentionForwardPacked<128, Pair, false>;
    [128 128 PackedCausal] AttentionForwardPacked<128, Pair, true>;
    [128 128 General] AttentionForwardGeneral<128, Wide>;
    [192 128 Full] AttentionForward<128, Wide, false>;
    [192 128 Causal] AttentionForward<128, Wide, true>;
    [192 128 Split] AttentionForwardSplit<128, Wide>, AttentionCombine;
    [192 128 General] AttentionForwardGeneral<128, Wide>;
    [256 256 Full] AttentionForward<80, Wide, false>;
    [256 256 Causal] AttentionForward<80, Wide, true>;
    [256 256 Split] AttentionForwardSplit<80, Wide>, AttentionCombine;
    [256 256 General] AttentionForwardGeneral<64, Wide>;
}

impl<T> fmt::Debug for Attention<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attention").field("config", &self.config).finish_non_exhaustive()
    }
}
