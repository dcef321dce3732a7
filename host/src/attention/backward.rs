//! The backward pass: the gradients of queries, keys and values.

use std::fmt;

use oxtile_kernels::attention::{
    AttentionBackward as Dense, AttentionBackwardAddKeys as AddKeys, AttentionBackwardAddQueries as AddQueries,
    AttentionBackwardConvert as Convert, AttentionBackwardConvertGeneral as ConvertGeneral, AttentionBackwardDeltas as DeltasKernel,
    AttentionBackwardGeneral as General, AttentionBackwardPortable as Portable, AttentionBackwardPrepare as Prepare,
    AttentionBackwardReduce as Reduce,
};
use oxtile_tile::launch::{DeviceView, DeviceViewMut};
use oxtile_tile::num::{Pod, bf16, f16};

use super::backward_deltas::{DeltaKernel, Deltas, OfResult};
use super::backward_plan::Key;
use super::backward_tensors::{BackwardInputs, BackwardStep, Gradients};
use super::config::{AttentionConfig, Layout};
use super::forward::BoundAttention;
use super::tensors::{Inputs, check_length};
use super::{backward_dense, backward_general, backward_portable};
use crate::runtime::{Buffer, Error, Result, Runtime, Stream};

/// How the gradients of queries are added up, to which blocks of keys contribute. The portable kernels are always deterministic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// In the order of keys: the same bits every time.
    #[default]
    Deterministic,
    /// As they come: faster where multiprocessors would wait for each other. The last bits vary; those of the gradients of
    /// keys and values do not.
    Fast,
}

/// The backward pass of attention with elements of `T`: `bf16` or `f16`. Of the forward pass it wants the inputs, `out` and `log_sum_exp`,
/// nothing else; gradients go to the caller's buffers, so that a [run](BoundAttention::run) allocates nothing.
///
/// The pass has two parts. [`prepare`](Self::prepare) needs no keys: it computes the row sums of `O dO` of a result. A
/// [`step`](Self::step) computes gradients, given those sums. [`bind`](Self::bind) does both; a ring of ranks prepares once, and steps with
/// the keys of each rank, whose gradients are [added](super::GradientOutput::Added).
pub struct AttentionBackward<T> {
    config: AttentionConfig,
    order: Order,
    loaded: Option<Loaded<T>>,
}

/// The kernels of both parts.
struct Loaded<T> {
    deltas: Box<dyn DeltaKernel<T>>,
    instance: Box<dyn Instance<T>>,
}

impl<T: BackwardElement> AttentionBackward<T> {
    /// Checks the configuration and loads its kernels.
    ///
    /// # Errors
    /// As [`AttentionConfig::choose_backward_on`] for the first device, and [`Runtime::load`].
    pub fn new(runtime: &Runtime, config: AttentionConfig, order: Order) -> Result<Self> {
        let (key, _) = config.backward_kernel::<T>(config.is_portable_on(&runtime.device(0)?))?;
        let loaded = match key {
            Some(key) => Some(Loaded { deltas: T::load_deltas(runtime)?, instance: T::load(runtime, key)? }),
            None => None,
        };
        Ok(Self { config, order, loaded })
    }

    /// Binds tensors, makes tensor maps and the memory that the pass needs in between: one `f32` a query and head, and on Hopper's own
    /// kernels one for each element of `Q`, and two words a query; where few tiles of keys are split, at most 140 MB more; where gradients
    /// of dense tensors are added, one `f32` for each element of `K` and `V`. Waits for those to be there.
    ///
    /// # Errors
    /// [`Error::Length`] if a view does not have the configuration's size, [`Error::Invalid`] if one is missing or too many; as
    /// [`TensorMap::strided`](crate::tensor::TensorMap::strided).
    pub fn bind<'a>(&'a self, stream: &Stream, inputs: BackwardInputs<'a, T>, gradients: Gradients<'a, T>) -> Result<BoundAttention<'a>> {
        inputs.check(&self.config)?;
        let BackwardInputs { forward, out, log_sum_exp, grad_out } = inputs;
        self.bind_of(stream, forward, DeltaSource::Of(out), log_sum_exp, grad_out, gradients)
    }

    /// Binds the part of the pass that needs no keys: a run writes `deltas`, the row sums of `O dO`, which are `f32` and laid out as the log-sum-exp:
    /// `[batches, heads, queries]`, or `[heads, queries]` if packed. `out` and `grad_out`, its gradient, are of the result's shape. Allocates
    /// nothing.
    ///
    /// The sums serve steps of any configuration with as many queries and heads, and the same layout and size of `V`.
    ///
    /// # Errors
    /// [`Error::Length`] if a view does not have the configuration's size.
    pub fn prepare<'a>(
        &'a self,
        out: DeviceView<'a, T>,
        grad_out: DeviceView<'a, T>,
        mut deltas: DeviceViewMut<'a, f32>,
    ) -> Result<BoundAttention<'a>> {
        let rows = self.config.rows()[0] * self.config.heads;
        check_length("AttentionBackward, out", rows * self.config.value_size(), out.len())?;
        check_length("AttentionBackward, grad_out", rows * self.config.value_size(), grad_out.len())?;
        check_length("AttentionBackward, deltas", rows, deltas.len())?;
        let Some(Loaded { deltas: kernel, .. }) = &self.loaded else { return Ok(BoundAttention::nothing()) };
        let result = OfResult::new(&self.config, out, grad_out);
        Ok(BoundAttention::new(move |stream| kernel.launch(stream, &result, deltas.slice_mut(0, rows))))
    }

    /// Binds a step: as [`bind`](Self::bind), of a result that was [prepared](Self::prepare) before.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub fn step<'a>(&'a self, stream: &Stream, step: BackwardStep<'a, T>, gradients: Gradients<'a, T>) -> Result<BoundAttention<'a>> {
        step.check(&self.config)?;
        let BackwardStep { forward, deltas, log_sum_exp, grad_out } = step;
        self.bind_of(stream, forward, DeltaSource::Given(deltas), log_sum_exp, grad_out, gradients)
    }

    fn bind_of<'a>(
        &'a self,
        stream: &Stream,
        inputs: Inputs<'a, T>,
        deltas: DeltaSource<'a, T>,
        log_sum_exp: DeviceView<'a, f32>,
        grad_out: DeviceView<'a, T>,
        gradients: Gradients<'a, T>,
    ) -> Result<BoundAttention<'a>> {
        gradients.check(&self.config)?;
        let Some(Loaded { deltas: delta_kernel, instance }) = &self.loaded else { return Ok(BoundAttention::nothing()) };
        let is_dense = self.config.layout != Layout::Packed;
        // Sequences without rows are none, however many there are.
        let config = if is_dense && self.config.is_empty() { AttentionConfig { batches: 0, ..self.config } } else { self.config };
        let delta_kernel = &**delta_kernel;
        instance.bind(Binding { stream, config, order: self.order, inputs, delta_kernel, deltas, log_sum_exp, grad_out, gradients })
    }

    /// Binds tensors and computes their gradients once.
    ///
    /// # Errors
    /// As [`bind`](Self::bind) and [`BoundAttention::run`].
    pub fn backward(&self, stream: &Stream, inputs: BackwardInputs<'_, T>, gradients: Gradients<'_, T>) -> Result<()> {
        self.bind(stream, inputs, gradients)?.run(stream)
    }
}

/// An element of the tensors of the backward pass.
pub trait BackwardElement: Pod {
    /// What is known of an entry.
    #[doc(hidden)]
    fn facts(key: Key) -> Option<Facts>;

    /// Loads it and what goes with it.
    #[doc(hidden)]
    fn load(runtime: &Runtime, key: Key) -> Result<Box<dyn Instance<Self>>>;

    /// Loads the kernel that needs no keys.
    #[doc(hidden)]
    fn load_deltas(runtime: &Runtime) -> Result<Box<dyn DeltaKernel<Self>>>;
}

/// What is known of the entry that computes the gradients of keys.
#[doc(hidden)]
pub struct Facts {
    pub(super) name: &'static str,
    /// Queries and keys of a step.
    pub(super) step: [u64; 2],
}

/// The loaded kernels of a key.
#[doc(hidden)]
pub trait Instance<T>: Send + Sync {
    fn bind<'a>(&'a self, binding: Binding<'_, 'a, T>) -> Result<BoundAttention<'a>>;
}

/// Tensors to be bound, of the lengths that the configuration says.
#[doc(hidden)]
pub struct Binding<'s, 'a, T> {
    pub(super) stream: &'s Stream,
    pub(super) config: AttentionConfig,
    pub(super) order: Order,
    pub(super) inputs: Inputs<'a, T>,
    delta_kernel: &'a dyn DeltaKernel<T>,
    pub(super) deltas: DeltaSource<'a, T>,
    pub(super) log_sum_exp: DeviceView<'a, f32>,
    pub(super) grad_out: DeviceView<'a, T>,
    pub(super) gradients: Gradients<'a, T>,
}

/// Where the row sums of `O dO` come from.
pub(super) enum DeltaSource<'a, T> {
    /// They are computed in each run, of this result.
    Of(DeviceView<'a, T>),
    /// They were computed before.
    Given(DeviceView<'a, f32>),
}

impl<'a, T> Binding<'_, 'a, T> {
    /// The row sums of `O dO`, laid out as the log-sum-exp.
    pub(super) fn deltas(&self) -> Result<Deltas<'a, T>> {
        Ok(match self.deltas {
            DeltaSource::Given(deltas) => Deltas::Given(deltas),
            DeltaSource::Of(out) => Deltas::Computed {
                kernel: self.delta_kernel,
                result: OfResult::new(&self.config, out, self.grad_out),
                sums: Buffer::uninitialised(self.stream, self.log_sum_exp.len())?,
            },
        })
    }
}

/// Each line: its key, the queries and keys of a step, and its kernels as a type of the element.
macro_rules! elements {
    ($($t:ident)*) => { $(
        elements! { @ $t
            [Key::Dense { head_size: 64, .. }] [128, 128] backward_dense::Kernels<Prepare<$t, 64>, Dense<$t, 64, 128, 64, true>, Reduce<$t, 64>, Convert<$t, 64, 128, 64>, AddKeys<64>, AddQueries<64, 128, 64>>;
            [Key::Dense { head_size: 128, masked: true }] [64, 128] backward_dense::Kernels<Prepare<$t, 128>, Dense<$t, 128, 64, 64, true>, Reduce<$t, 128>, Convert<$t, 128, 64, 64>, AddKeys<128>, AddQueries<128, 64, 64>>;
            [Key::Dense { head_size: 128, masked: false }] [80, 128] backward_dense::Kernels<Prepare<$t, 128>, Dense<$t, 128, 80, 80, false>, Reduce<$t, 128>, Convert<$t, 128, 80, 80>, AddKeys<128>, AddQueries<128, 80, 80>>;
            [Key::General { size: 64, capped: false }] [128, 128] backward_general::Kernels<General<$t, 64, 128, 64, false>, ConvertGeneral<$t, 64, 128, 64>>;
            [Key::General { size: 64, capped: true }] [96, 128] backward_general::Kernels<General<$t, 64, 96, 48, true>, ConvertGeneral<$t, 64, 96, 48>>;
            [Key::General { size: 128, capped: false }] [64, 128] backward_general::Kernels<General<$t, 128, 64, 64, false>, ConvertGeneral<$t, 128, 64, 64>>;
            [Key::General { size: 128, capped: true }] [64, 128] backward_general::Kernels<General<$t, 128, 64, 64, true>, ConvertGeneral<$t, 128, 64, 64>>;
            [Key::Portable { panels: 1 }] [64, 64] backward_portable::Kernels<Portable<$t, 1, 64, 1, true>, Portable<$t, 1, 64, 1, false>>;
            [Key::Portable { panels: 2 }] [64, 64] backward_portable::Kernels<Portable<$t, 2, 32, 2, true>, Portable<$t, 2, 32, 2, false>>;
            [Key::Portable { panels: 4 }] [64, 64] backward_portable::Kernels<Portable<$t, 4, 16, 2, true>, Portable<$t, 4, 16, 2, false>>;
        }
    )* };
    (@ $t:ident $([$key:pat] $step:tt $kernels:ty;)*) => {
        impl BackwardElement for $t {
            fn facts(key: Key) -> Option<Facts> {
                match key {
                    $($key => Some(Facts { name: <$kernels>::NAME, step: $step }),)*
                    _ => None,
                }
            }

            fn load(runtime: &Runtime, key: Key) -> Result<Box<dyn Instance<Self>>> {
                match key {
                    $($key => Ok(Box::new(<$kernels>::load(runtime)?)),)*
                    _ => Err(Error::Invalid { what: "AttentionBackward", why: format!("no kernel for {key:?}") }),
                }
            }

            fn load_deltas(runtime: &Runtime) -> Result<Box<dyn DeltaKernel<Self>>> {
                Ok(Box::new(runtime.load::<DeltasKernel<$t>>()?))
            }
        }
    };
}

elements! { bf16 f16 }

impl<T> fmt::Debug for AttentionBackward<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AttentionBackward").field("config", &self.config).field("order", &self.order).finish_non_exhaustive()
    }
}
