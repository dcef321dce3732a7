//! The backward pass: the gradients of queries, keys and values.

use std::fmt;
use std::sync::Arc;

use oxtile_kernels::attention::{
    AttentionBackward as Dense, AttentionBackwardGeneral as General, AttentionBackwardPortable as Portable,
    AttentionBackwardWideKeys as Wide, BACKWARD_KEYS, PORTABLE_ROWS, WIDE_ROWS,
};
use oxtile_tile::launch::{DeviceView, DeviceViewMut};
use oxtile_tile::num::{bf16, f16};

use super::backward_blocks::Workspace;
use super::backward_choice::BackwardKernel;
use super::backward_deltas::{self, DeltaKernel, DeltaSource, ResultRows};
use super::backward_tensors::{BackwardInputs, BackwardStep, Gradients};
use super::config::{AttentionConfig, Layout};
use super::forward::AttentionElement;
use super::table::{Load, rows};
use super::tensors::Inputs;
use super::{backward_dense, backward_general, backward_portable, backward_wide};
use crate::choice::{Choice, Table};
use crate::runtime::{Bound, Device, Error, Result, Runtime, Stream};
use crate::tensor::Heads;

/// How the gradients of queries are added up, to which blocks of keys contribute. The portable kernels and those of wide
/// heads are always deterministic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// In the order of keys: the same bits every time.
    #[default]
    Deterministic,
    /// In any order: faster where multiprocessors would wait for each other. The last bits vary; those of the gradients of
    /// keys and values do not.
    Fast,
}

/// The backward pass of attention with elements of `T`: `bf16` or `f16`. It needs only the inputs, `out` and `log_sum_exp` of the
/// forward pass. Gradients go to the caller's buffers, so that a [run](Bound::run) allocates nothing.
///
/// The pass has two parts. [`prepare`](Self::prepare) needs no keys: it computes the row sums of `O dO` of a result. A
/// [`step`](Self::step) computes gradients, given those sums. [`bind`](Self::bind) does both; a ring of ranks prepares once, and steps with
/// the keys of each rank, whose gradients are [added](super::GradientOutput::Added).
pub struct AttentionBackward<T: BackwardElement> {
    config: AttentionConfig,
    order: Order,
    /// Among how many tiles query heads that share keys are split.
    parts: u64,
    choice: Choice<BackwardKernel>,
    /// Memory that bound steps share.
    workspace: Option<Arc<Workspace>>,
    /// The kernels of both parts of the pass.
    loaded: Option<(DeltaKernel<T>, Bind<T>)>,
}

impl<T: BackwardElement> AttentionBackward<T> {
    /// Checks the configuration and loads its kernels.
    ///
    /// # Errors
    /// As [`AttentionConfig::choose_backward_on`] for the first device, and [`Runtime::load`].
    pub fn new(runtime: &Runtime, config: AttentionConfig, order: Order) -> Result<Self> {
        let (parts, choice) = config.decide_backward::<T>(Some(&runtime.device(0)?))?;
        let bind = choice.load(T::BACKWARD_KERNELS, runtime)?;
        let loaded = bind.map(|bind| Ok::<_, Error>((T::load_deltas(runtime)?, bind))).transpose()?;
        Ok(Self { config, order, parts, choice, workspace: None, loaded })
    }

    /// The same, with tiles split as for `whole`, of which this attention has some heads: so that their gradients have the bits of the whole's.
    pub(crate) fn new_as(runtime: &Runtime, config: AttentionConfig, order: Order, whole: &AttentionConfig) -> Result<Self> {
        let own = Self::new(runtime, config, order)?;
        // The whole may be more than one device counts.
        let parts = whole.decide_backward::<T>(Some(&runtime.device(0)?)).map_or(own.parts, |(parts, _)| parts);
        Ok(Self { parts, ..own })
    }

    /// The same, whose bound steps share memory with those of others: they are run one after another.
    pub(crate) fn sharing(self, workspace: &Arc<Workspace>) -> Self {
        Self { workspace: Some(Arc::clone(workspace)), ..self }
    }

    /// What is computed.
    pub fn config(&self) -> &AttentionConfig {
        &self.config
    }

    /// The main kernel, and why.
    pub fn choice(&self) -> &Choice<BackwardKernel> {
        &self.choice
    }

    /// Binds tensors, makes tensor maps and the memory that the pass needs in between: one `f32` a query and head, and on Hopper's own
    /// kernels one for each element of `Q`, and two words a query; where few tiles of keys are split, at most 140 MB more; where gradients
    /// of dense tensors are added, one `f32` for each element of `K` and `V`. All of it is in stream order: the host does not wait.
    ///
    /// # Errors
    /// [`Error::Length`] if a view does not have the configuration's size, [`Error::Invalid`] if one is missing or too many, or has another
    /// shape, or strides that the kernels do not take; as [`TensorMap::strided`](crate::tensor::TensorMap::strided).
    pub fn bind<'a>(&self, stream: &Stream, inputs: BackwardInputs<'a, T>, gradients: Gradients<'a, T>) -> Result<Bound<'a>> {
        let BackwardInputs { forward, out, log_sum_exp, grad_out } = inputs;
        let forward = forward.shaped(&self.config)?;
        let deltas = DeltaSource::Of(ResultRows::new(&self.config, out, grad_out)?);
        self.bind_of(stream, forward, deltas, log_sum_exp, grad_out, gradients)
    }

    /// Binds the part of the pass that needs no keys: a run writes `deltas`, the row sums of `O dO`, which are `f32` and laid out as the log-sum-exp:
    /// `[batches, heads, queries]`, or `[heads, queries]` if packed. `out` and `grad_out`, its gradient, are of the result's shape. Allocates
    /// nothing.
    ///
    /// The sums serve steps of any configuration with the same queries, heads, layout and size of `V`.
    ///
    /// # Errors
    /// [`Error::Length`] if a view does not have the configuration's size, [`Error::Invalid`] if a tensor has another shape, or gaps within a batch.
    pub fn prepare<'a>(
        &self,
        out: impl Into<Heads<'a, T>>,
        grad_out: impl Into<Heads<'a, T>>,
        mut deltas: DeviceViewMut<'a, f32>,
    ) -> Result<Bound<'a>> {
        let result = ResultRows::new(&self.config, out.into(), grad_out.into())?;
        self.check_statistics("AttentionBackward, deltas", deltas.as_view())?;
        let Some((kernel, _)) = &self.loaded else { return Ok(Bound::in_turn(Vec::new())) };
        let kernel = Arc::clone(kernel);
        Ok(Bound::new(move |stream| kernel(stream, &result, deltas.reborrow())))
    }

    /// Binds a step: as [`bind`](Self::bind), of a result that was [prepared](Self::prepare) before.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub fn step<'a>(&self, stream: &Stream, step: BackwardStep<'a, T>, gradients: Gradients<'a, T>) -> Result<Bound<'a>> {
        let BackwardStep { forward, deltas, log_sum_exp, grad_out } = step;
        let forward = forward.shaped(&self.config)?;
        self.check_statistics("AttentionBackward, deltas", deltas)?;
        self.bind_of(stream, forward, DeltaSource::Given(deltas), log_sum_exp, grad_out, gradients)
    }

    fn bind_of<'a>(
        &self,
        stream: &Stream,
        inputs: Inputs<'a, T>,
        deltas: DeltaSource<'a, T>,
        log_sum_exp: DeviceView<'a, f32>,
        grad_out: Heads<'a, T>,
        gradients: Gradients<'a, T>,
    ) -> Result<Bound<'a>> {
        self.check_statistics("AttentionBackward, log_sum_exp", log_sum_exp)?;
        let grad_out = grad_out.shaped("AttentionBackward, grad_out", self.config.whole_result())?;
        let gradients = gradients.shaped(&self.config)?;
        let Some((delta_kernel, bind)) = &self.loaded else { return Ok(Bound::in_turn(Vec::new())) };
        let is_dense = self.config.layout != Layout::Packed;
        // However many sequences there are: without rows there are none.
        let config = if is_dense && self.config.is_empty() { AttentionConfig { batches: 0, ..self.config } } else { self.config };
        let (order, parts, workspace) = (self.order, self.parts, self.workspace.as_deref());
        bind(Binding { stream, config, order, parts, workspace, inputs, delta_kernel, deltas, log_sum_exp, grad_out, gradients })
    }

    /// A number for each row of a head of the result.
    fn check_statistics(&self, what: &'static str, tensor: DeviceView<'_, f32>) -> Result<()> {
        Error::check_length(what, self.config.rows()[0] * self.config.heads, tensor.len())
    }

    /// Binds tensors and computes their gradients once.
    ///
    /// # Errors
    /// As [`bind`](Self::bind) and [`Bound::run`].
    pub fn backward(&self, stream: &Stream, inputs: BackwardInputs<'_, T>, gradients: Gradients<'_, T>) -> Result<()> {
        self.bind(stream, inputs, gradients)?.run(stream)
    }
}

/// An element of the tensors of the backward pass.
pub trait BackwardElement: AttentionElement<Out = Self> {
    /// The kernels.
    #[doc(hidden)]
    const BACKWARD_KERNELS: Table<BackwardKernel, Bind<Self>>;

    /// Loads the kernel that needs no keys.
    #[doc(hidden)]
    fn load_deltas(runtime: &Runtime) -> Result<DeltaKernel<Self>>;
    /// Loads it on a device.
    #[doc(hidden)]
    fn prepare_deltas(device: &Device) -> Result<()>;
}

/// Binds tensors to loaded kernels.
#[doc(hidden)]
pub type Bind<T> = Box<dyn for<'s, 'a> Fn(Binding<'s, 'a, T>) -> Result<Bound<'a>> + Send + Sync>;

/// Tensors to be bound, of the shapes that the configuration says.
#[doc(hidden)]
pub struct Binding<'s, 'a, T> {
    pub(super) stream: &'s Stream,
    pub(super) config: AttentionConfig,
    pub(super) order: Order,
    pub(super) parts: u64,
    pub(super) workspace: Option<&'s Workspace>,
    pub(super) inputs: Inputs<'a, T>,
    pub(super) delta_kernel: &'s DeltaKernel<T>,
    pub(super) deltas: DeltaSource<'a, T>,
    pub(super) log_sum_exp: DeviceView<'a, f32>,
    pub(super) grad_out: Heads<'a, T>,
    pub(super) gradients: Gradients<'a, T>,
}

/// Loads the kernels that a function binds tensors to.
fn load_with<K, T>(runtime: &Runtime, bind: for<'s, 'a> fn(Arc<K>, Binding<'s, 'a, T>) -> Result<Bound<'a>>) -> Result<Bind<T>>
where
    K: Load + Send + Sync + 'static,
    T: BackwardElement,
{
    let kernels = Arc::new(K::load(runtime)?);
    Ok(Box::new(move |binding| bind(Arc::clone(&kernels), binding)))
}

macro_rules! elements {
    ($($t:ident)*) => { $(
        impl BackwardElement for $t {
            const BACKWARD_KERNELS: Table<BackwardKernel, Bind<Self>> = &[rows! { BackwardKernel:
                [Dense { head_size: 64, masked: true }] [128, BACKWARD_KEYS] Dense<$t, 64, 128, 64, true>: backward_dense::bind::<$t, 64, 128, 64, true>;
                [Dense { head_size: 128, masked: true }] [64, BACKWARD_KEYS] Dense<$t, 128, 64, 64, true>: backward_dense::bind::<$t, 128, 64, 64, true>;
                [Dense { head_size: 128, masked: false }] [80, BACKWARD_KEYS] Dense<$t, 128, 80, 80, false>: backward_dense::bind::<$t, 128, 80, 80, false>;
                [General { size: 64, capped: false }] [128, BACKWARD_KEYS] General<$t, 64, 128, 64, false>: backward_general::bind::<$t, 64, 128, 64, false>;
                [General { size: 64, capped: true }] [96, BACKWARD_KEYS] General<$t, 64, 96, 48, true>: backward_general::bind::<$t, 64, 96, 48, true>;
                [General { size: 128, capped: false }] [64, BACKWARD_KEYS] General<$t, 128, 64, 64, false>: backward_general::bind::<$t, 128, 64, 64, false>;
                [General { size: 128, capped: true }] [64, BACKWARD_KEYS] General<$t, 128, 64, 64, true>: backward_general::bind::<$t, 128, 64, 64, true>;
                [Wide { sizes: [192, 128] }] [WIDE_ROWS, WIDE_ROWS] Wide<$t, 192, 128, 96, 12>: backward_wide::bind::<$t, 192, 128, 96, 12, 96>;
                [Wide { sizes: [256, 256] }] [WIDE_ROWS, WIDE_ROWS] Wide<$t, 256, 256, 64, 8>: backward_wide::bind::<$t, 256, 256, 64, 8, 64>;
                [Portable { panels: 1 }] [PORTABLE_ROWS, PORTABLE_ROWS] Portable<$t, 1, 64, 1, true>: backward_portable::bind::<$t, 1, 64, 1>;
                [Portable { panels: 2 }] [PORTABLE_ROWS, PORTABLE_ROWS] Portable<$t, 2, 32, 2, true>: backward_portable::bind::<$t, 2, 32, 2>;
                [Portable { panels: 4 }] [PORTABLE_ROWS, PORTABLE_ROWS] Portable<$t, 4, 16, 2, true>: backward_portable::bind::<$t, 4, 16, 2>;
            }];

            fn load_deltas(runtime: &Runtime) -> Result<DeltaKernel<Self>> {
                backward_deltas::load(runtime)
            }

            fn prepare_deltas(device: &Device) -> Result<()> {
                backward_deltas::prepare::<$t>(device)
            }
        }
    )* };
}

elements! { bf16 f16 }

impl<T: BackwardElement> fmt::Debug for AttentionBackward<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AttentionBackward")
            .field("config", &self.config)
            .field("order", &self.order)
            .field("choice", &self.choice)
            .finish_non_exhaustive()
    }
}
