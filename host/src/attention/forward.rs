//! The forward pass: tensors bound, kernels launched.

use std::fmt;

use oxtile_kernels::attention::{
    AttentionCombine, AttentionForward, AttentionForwardSplit, Causal, Full, Narrow, Optioned, PackedCausal, PackedFull, PackedRingCausal,
    PackedRingFull, Pair, RingCausal, RingFull, Team, Wide,
};
use oxtile_tile::launch::Kernel;
use oxtile_tile::num::{bf16, f16};

use super::config::AttentionConfig;
use super::plan::{Facts, Key, Kind};
use super::portable::PortableElement;
use super::tensors::{Inputs, Outputs};
use super::{dense, options, packed};
use crate::runtime::{Error, Result, Runtime, Stream};

/// Attends with elements of `T`: `bf16` or `f16`.
///
/// Results go to the caller's buffers ([`Outputs`]) and are not returned: so nothing is allocated where tensors are [bound](Self::bind) once and
/// [run](BoundAttention::run) often, a graph captures a run, and results can be written where they are wanted, as into a ring's running ones.
/// What the backward pass needs of this one are two of those buffers, `out` and `log_sum_exp`, which
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

/// A loaded kernel, and the function that binds tensors to it.
struct Entry<K, B>(K, B);

impl<T, K, B> Instance<T> for Entry<K, B>
where
    K: Send + Sync,
    B: for<'a> Fn(&'a K, Binding<'_, 'a, T>) -> Result<BoundAttention<'a>> + Send + Sync,
{
    fn bind<'a>(&'a self, binding: Binding<'_, 'a, T>) -> Result<BoundAttention<'a>> {
        (self.1)(&self.0, binding)
    }
}

/// Each row: sizes of heads, keys of a step, and which warpgroups compute it. The kinds of a row, their policies, and what binds tensors to
/// them are the same for all rows of a group.
macro_rules! elements {
    (@ $t:ident dense $([$d:tt $v:tt $keys:tt $team:ident])* packed $([$pd:tt $pv:tt $pkeys:tt $pteam:ident])* options $([$od:tt $ov:tt $okeys:tt $oteam:ident])*) => {
        elements! { @@ $t
            $([$d $v $keys $team] Full: Full by dense::bind;)*
            $([$d $v $keys $team] Causal: Causal by dense::bind;)*
            $([$d $v $keys $team] RingFull: RingFull by dense::bind;)*
            $([$d $v $keys $team] RingCausal: RingCausal by dense::bind;)*
            $([$pd $pv $pkeys $pteam] Packed: PackedFull by packed::bind;)*
            $([$pd $pv $pkeys $pteam] PackedCausal: PackedCausal by packed::bind;)*
            $([$pd $pv $pkeys $pteam] PackedRing: PackedRingFull by packed::bind;)*
            $([$pd $pv $pkeys $pteam] PackedRingCausal: PackedRingCausal by packed::bind;)*
            $([$od $ov $okeys $oteam] Options: Optioned by options::bind;)*
            split $([$d $v $keys $team])*
        }
    };
    (@@ $t:ident $([$d:tt $v:tt $keys:tt $team:ident] $kind:ident: $policy:ident by $bind:path;)* split $([$sd:tt $sv:tt $skeys:tt $steam:ident])*) => {
        impl AttentionElement for $t {
            fn facts(key: Key) -> Option<Facts> {
                let facts = |name, queries, keys| Some(Facts { name, step: [queries, keys] });
                match (key.sizes, key.kind) {
                    $(([$d, $v], Kind::$kind) => {
                        facts(<AttentionForward<$t, $d, $v, $keys, $team, $policy> as Kernel>::INFO.name, <$team as Team>::QUERIES, $keys)
                    })*
                    $(([$sd, $sv], Kind::Split) => {
                        facts(<AttentionForwardSplit<$t, $sd, $sv, $skeys, $steam> as Kernel>::INFO.name, <$steam as Team>::QUERIES, $skeys)
                    })*
                    _ => None,
                }
            }

            fn load(runtime: &Runtime, key: Key) -> Result<Box<dyn Instance<Self>>> {
                Ok(match (key.sizes, key.kind) {
                    $(([$d, $v], Kind::$kind) => {
                        Box::new(Entry(runtime.load::<AttentionForward<$t, $d, $v, $keys, $team, $policy>>()?, $bind))
                    })*
                    $(([$sd, $sv], Kind::Split) => {
                        let attend = runtime.load::<AttentionForwardSplit<$t, $sd, $sv, $skeys, $steam>>()?;
                        Box::new((attend, runtime.load::<AttentionCombine<$t>>()?))
                    })*
                    _ => return Err(Error::Invalid { what: "Attention", why: format!("no kernel for {key:?}") }),
                })
            }
        }
    };
    ($($rows:tt)*) => { elements! { @ bf16 $($rows)* } elements! { @ f16 $($rows)* } };
}

elements! {
    dense [64 64 128 Narrow] [128 128 128 Pair] [192 128 128 Wide] [256 256 80 Wide]
    packed [64 64 128 Narrow] [128 128 128 Pair]
    options [64 64 128 Pair] [128 128 128 Wide] [192 128 128 Wide] [256 256 64 Wide]
}

impl<T> fmt::Debug for Attention<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attention").field("config", &self.config).finish_non_exhaustive()
    }
}
