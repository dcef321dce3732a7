//! The kernels for GPUs other than Hopper and for large heads, bound for the backward pass.

use oxtile_kernels::attention::{
    AttentionBackwardPortable as Main, AttentionBackwardPortableArgs as MainArgs, AttentionBackwardSink as Sink, PortableTargetArgument,
    PortableTensorsArgument, RESTING,
};
use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::launch::Kernel;
use oxtile_tile::register_tile::RegisterElement;

use super::backward::{Binding, Instance};
use super::backward_sequences::SequenceArguments;
use super::backward_tensors::{Gradients, reborrow};
use super::config::AttentionConfig;
use super::forward::BoundAttention;
use super::tensors::Inputs;
use crate::runtime::{Loaded, Result, Runtime};

/// The kernels, in their order.
pub(super) struct Kernels<K: Kernel, Q: Kernel> {
    of_keys: Loaded<K>,
    of_queries: Loaded<Q>,
    sink: Loaded<Sink>,
}

impl<K: Kernel, Q: Kernel> Kernels<K, Q> {
    pub(super) const NAME: &str = K::INFO.name;

    pub(super) fn load(runtime: &Runtime) -> Result<Self> {
        Ok(Self { of_keys: runtime.load()?, of_queries: runtime.load()?, sink: runtime.load()? })
    }
}

impl<T, const PANELS: usize, const STEP: usize, const PARTS: usize> Instance<T>
    for Kernels<Main<T, PANELS, STEP, PARTS, true>, Main<T, PANELS, STEP, PARTS, false>>
where
    T: RegisterElement,
    Columns<STEP>: MatrixColumns,
    Main<T, PANELS, STEP, PARTS, true>: Kernel,
    Main<T, PANELS, STEP, PARTS, false>: Kernel,
{
    fn bind<'a>(&'a self, binding: Binding<'_, 'a, T>) -> Result<BoundAttention<'a>> {
        let mut deltas = binding.deltas()?;
        let Binding { stream, config, inputs, log_sum_exp, grad_out, gradients, .. } = binding;
        let AttentionConfig { queries, keys, key_heads, .. } = config;
        let Inputs { q, k, v, sequences, sink } = inputs;
        let Gradients { q: grad_q, k: grad_k, v: grad_v, sink: mut grad_sink } = gradients;
        let [(mut grad_q, mut q_sum), (mut grad_k, mut k_sum), (mut grad_v, mut v_sum)] =
            [grad_q, grad_k, grad_v].map(|gradient| gradient.split());
        let arguments = SequenceArguments::new(stream, &config, sequences, log_sum_exp)?;
        let (size, value_size, scale) = (config.head_size as u32, config.value_size() as u32, config.scale() as f32);
        let row_tiles = |rows: u64| rows.div_ceil(RESTING as u64) as u32;
        Ok(BoundAttention::new(move |stream| {
            let deltas = deltas.run(stream)?;
            macro_rules! arguments {
                ($target:expr) => {
                    MainArgs {
                        tensors: PortableTensorsArgument { q, k, v, grad_out, size, value_size },
                        statistics: arguments.statistics(deltas),
                        target: $target,
                        sequences: arguments.sequences(),
                        heads: arguments.heads,
                        window: arguments.window,
                        scores: arguments.scores,
                    }
                };
            }
            if keys * key_heads > 0 {
                let (grad, grad_v) = (reborrow(&mut grad_k), reborrow(&mut grad_v));
                let (grad_sum, grad_v_sum) = (reborrow(&mut k_sum), reborrow(&mut v_sum));
                let target = PortableTargetArgument { grad, grad_v, grad_sum, grad_v_sum, scale, row_tiles: row_tiles(keys) };
                self.of_keys.launch(stream, arguments!(target))?;
            }
            if !log_sum_exp.is_empty() {
                let (grad, grad_sum) = (reborrow(&mut grad_q), reborrow(&mut q_sum));
                let target =
                    PortableTargetArgument { grad, grad_v: None, grad_sum, grad_v_sum: None, scale, row_tiles: row_tiles(queries) };
                self.of_queries.launch(stream, arguments!(target))?;
            }
            arguments.differentiate_sink(stream, &self.sink, sink, reborrow(&mut grad_sink), deltas)
        }))
    }
}
