//! Tensors of 8 bits, whose scales give what an element is worth, bound to the kernel for them.

use std::sync::Arc;

use oxtile_kernels::attention::{
    AttentionForwardFp8, AttentionForwardFp8Args, FP8_KEYS, Fp8InputsArgument, Fp8ResultsArgument, Fp8ScalesArgument, TileOrderArgument,
    WARPGROUP_QUERIES,
};
use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::launch::Kernel;
use oxtile_tile::layout::{Swizzle, Swizzle128};
use oxtile_tile::num::e4m3;

use super::choice::ForwardKernel;
use super::config::{AttentionConfig, Kernels, Layout, Mask, Output, Sink, Window, refuse};
use super::forward::Binding;
use super::heads::{ForwardMaps, by_head};
use super::tensors::{Outputs, Scales};
use crate::runtime::{Bound, Buffer, Error, Loaded, Result};
use crate::tensor::{TensorMapMut, Uploads};

impl AttentionConfig {
    /// The kernel for elements of 8 bits, unless those on wgmma cannot be taken; the configuration is valid.
    pub(super) fn fp8_kernel(&self, portable: Option<String>) -> Result<ForwardKernel> {
        let (field, value, allowed) = match *self {
            Self { kernels: Kernels::Portable, .. } => {
                return refuse("kernels", "Portable", "Fastest of 8 bits, whose kernels are Hopper's alone");
            }
            Self { layout: Layout::Packed, .. } => ("layout", "Packed".to_owned(), "Bshd or Sbhd"),
            Self { window, .. } if window != Window::default() => ("window", format!("{window:?}"), "without bounds"),
            Self { soft_cap: Some(cap), .. } => ("soft_cap", cap.to_string(), "none"),
            Self { sink, .. } if sink != Sink::None => ("sink", format!("{sink:?}"), "None"),
            Self { output, .. } if output != Output::Rounded => ("output", format!("{output:?}"), "Rounded"),
            Self { max_logit: true, .. } => ("max_logit", "true".to_owned(), "false"),
            Self { key_parts: Some(parts @ 2..), .. } => ("key_parts", parts.to_string(), "1 or none"),
            Self { head_size, .. } if self.value_size() != head_size => {
                return refuse("value_size", self.value_size(), format!("as head_size, which is {head_size}, of 8 bits"));
            }
            // An empty output may have any head size.
            Self { head_size, .. } if !matches!(head_size, 64 | 128) && !self.is_output_empty() => {
                ("head_size", head_size.to_string(), "64 or 128")
            }
            Self { head_size, mask, .. } => {
                let head_size = if head_size == 64 { 64 } else { 128 };
                let why = portable
                    .map(|why| Error::Invalid { what: "AttentionConfig", why: format!("no kernel takes elements of 8 bits here: {why}") });
                return why.map_or(Ok(ForwardKernel::Fp8 { head_size, causal: mask != Mask::Full }), Err);
            }
        };
        refuse(field, value, format!("{allowed} of 8 bits"))
    }
}

/// Binds tensors.
pub(super) fn bind<'a, const D: usize, S: Swizzle, const CAUSAL: bool>(
    kernel: Arc<Loaded<AttentionForwardFp8<D, S, CAUSAL>>>,
    Binding { stream, config, inputs, outputs }: Binding<'_, 'a, e4m3>,
) -> Result<Bound<'a>>
where
    Columns<D>: MatrixColumns,
    AttentionForwardFp8<D, S, CAUSAL>: Kernel,
{
    let Some(Scales { q: q_scale, k: k_scale, v: v_scale }) = inputs.scales else {
        unreachable!("inputs are checked before they are bound")
    };
    let mut uploads = Uploads::default();
    let tensors = [inputs.q, inputs.k, inputs.v];
    let layouts = tensors.map(|tensor| by_head(tensor.layout()));
    let maps = ForwardMaps::<_, FP8_KEYS, D, D, 4, S>::new(&mut uploads, stream, tensors, layouts)?;
    let Outputs { out, mut log_sum_exp, .. } = outputs;
    let of_out = by_head(out.layout());
    let mut out = TensorMapMut::<_, WARPGROUP_QUERIES, D, Swizzle128, 4>::with(&mut uploads, stream, out.rounded()?.into_view(), of_out)?;
    uploads.copy(stream)?;
    let mut counter = Buffer::<u32>::zeros(stream, 1)?;
    let shape = config.shape([config.queries, config.heads]);
    let (diagonal, section, scale) = (config.diagonal(), config.section(1), config.scale_log2());
    Ok(Bound::new(move |stream| {
        let args = AttentionForwardFp8Args {
            inputs: Fp8InputsArgument { q: maps.q.view(), k: maps.k.view(), v: maps.v.view() },
            scales: Fp8ScalesArgument { q: q_scale, k: k_scale, v: v_scale },
            results: Fp8ResultsArgument { out: out.view_mut(), log_sum_exp: log_sum_exp.reborrow() },
            shape,
            order: TileOrderArgument { counter: counter.view_mut(), section },
            diagonal,
            scale,
        };
        kernel.launch(stream, args)
    }))
}
