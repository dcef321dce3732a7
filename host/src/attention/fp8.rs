//! Tensors of 8 bits, whose scales give what an element is worth, bound to the kernel for them, by problem: dense tensors, packed sequences,
//! tensors of any layout with options.

use std::sync::Arc;

use oxtile_kernels::attention::{
    AttentionForwardFp8, AttentionForwardFp8Args, FP8_KEYS, Fp8Dense, Fp8DenseArgument, Fp8InputsArgument, Fp8OptionsArgument, Fp8Packed,
    Fp8PackedArgument, Fp8Policy, Fp8ResultsArgument, Fp8ScalesArgument, Optioned, TileOrderArgument, WARPGROUP_QUERIES,
};
use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::launch::{DeviceViewMut, Kernel};
use oxtile_tile::layout::{Swizzle, Swizzle128};
use oxtile_tile::num::{bf16, e4m3};

use super::choice::{Decision, ForwardKernel, OPTIONS, Problem};
use super::config::{AttentionConfig, Kernels, Layout, Mask, Output, refuse};
use super::forward::Binding;
use super::heads::{ForwardMaps, Rows, by_head};
use super::sequences::{BoundSequences, row_steps};
use super::sink::BoundSink;
use super::tensors::{Inputs, Outputs, Scales};
use crate::runtime::{Bound, Buffer, Error, Loaded, Result, Stream};
use crate::tensor::{MapLayout, Strided, TensorMapMut, Uploads};

impl AttentionConfig {
    /// The kernel for elements of 8 bits, unless those on wgmma cannot be taken; the configuration is valid.
    pub(super) fn fp8_kernel(&self, portable: Option<String>) -> Result<Decision<ForwardKernel>> {
        let (field, value, allowed) = match *self {
            Self { kernels: Kernels::Portable, .. } => {
                return refuse("kernels", "Portable", "Fastest of 8 bits, whose kernels are Hopper's alone");
            }
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
            _ => return self.fp8_decision(portable),
        };
        refuse(field, value, format!("{allowed} of 8 bits"))
    }

    /// The same of what kernels of 8 bits have.
    fn fp8_decision(&self, portable: Option<String>) -> Result<Decision<ForwardKernel>> {
        if let Some(why) = portable {
            return Err(Error::Invalid { what: "AttentionConfig", why: format!("no kernel takes elements of 8 bits here: {why}") });
        }
        let (causal, head_size) = (self.mask != Mask::Full, if self.head_size == 64 { 64 } else { 128 });
        let problem = match self.layout {
            Layout::Packed => Problem::Packed { causal, ring: false },
            Layout::Bshd | Layout::Sbhd => Problem::Dense { causal, ring: false },
        };
        let (own, options) = (ForwardKernel::Fp8 { problem, head_size }, self.set_among(OPTIONS));
        match options.is_empty() {
            true => Ok((own, Vec::new())),
            false => {
                let why = format!("it does not have {}", options.join(", "));
                Ok((ForwardKernel::Fp8 { problem: Problem::Options, head_size }, vec![(own, why)]))
            }
        }
    }
}

/// What every problem has, between launches.
struct Tensors<'a, const D: usize, S, const RANK: usize> {
    maps: ForwardMaps<'a, e4m3, FP8_KEYS, D, D, RANK, S>,
    out: TensorMapMut<'a, bf16, WARPGROUP_QUERIES, D, Swizzle128, RANK>,
    log_sum_exp: DeviceViewMut<'a, f32>,
    scales: Scales<'a>,
    counter: Buffer<u32>,
}

impl<'a, const D: usize, S: Swizzle, const RANK: usize> Tensors<'a, D, S, RANK> {
    /// Encodes the maps of tensors that lie as `layout` says.
    fn new<R: MapLayout<RANK>>(
        uploads: &mut Uploads,
        stream: &Stream,
        inputs: &Inputs<'a, e4m3>,
        Outputs { out, log_sum_exp, .. }: Outputs<'a, bf16>,
        layout: impl Fn(Strided<4>) -> R,
    ) -> Result<Self> {
        let Some(scales) = inputs.scales else { unreachable!("inputs are checked before they are bound") };
        let tensors = [inputs.q, inputs.k, inputs.v];
        let maps = ForwardMaps::new(uploads, stream, tensors, tensors.map(|tensor| layout(tensor.layout())))?;
        let of_out = layout(out.layout());
        let out = TensorMapMut::with(uploads, stream, out.rounded()?.into_view(), of_out)?;
        Ok(Self { maps, out, log_sum_exp, scales, counter: Buffer::zeros(stream, 1)? })
    }

    /// The arguments of a launch, and its counter.
    fn arguments(
        &mut self,
    ) -> (Fp8InputsArgument<'_, D, S, RANK>, Fp8ScalesArgument<'_>, Fp8ResultsArgument<'_, D, RANK>, DeviceViewMut<'_, u32>) {
        let Scales { q, k, v } = self.scales;
        (
            Fp8InputsArgument { q: self.maps.q.view(), k: self.maps.k.view(), v: self.maps.v.view() },
            Fp8ScalesArgument { q, k, v },
            Fp8ResultsArgument { out: self.out.view_mut(), log_sum_exp: self.log_sum_exp.reborrow() },
            self.counter.view_mut(),
        )
    }
}

/// Binds dense tensors.
pub(super) fn bind_dense<'a, const D: usize, S: Swizzle, P, const CAUSAL: bool>(
    kernel: Arc<Loaded<AttentionForwardFp8<D, S, P>>>,
    Binding { stream, config, inputs, outputs }: Binding<'_, 'a, e4m3>,
) -> Result<Bound<'a>>
where
    P: Fp8Policy<Of<D, S> = Fp8Dense<D, S, CAUSAL>>,
    Columns<D>: MatrixColumns,
    AttentionForwardFp8<D, S, P>: Kernel,
{
    let mut uploads = Uploads::default();
    let mut tensors = Tensors::<D, S, 4>::new(&mut uploads, stream, &inputs, outputs, by_head)?;
    uploads.copy(stream)?;
    let shape = config.shape([config.queries, config.heads]);
    let (diagonal, section, scale) = (config.diagonal(), config.section(1), config.scale_log2());
    Ok(Bound::new(move |stream| {
        let (inputs, scales, results, counter) = tensors.arguments();
        let order = TileOrderArgument { counter, section };
        let problem = Fp8DenseArgument { inputs, scales, results, shape, order, diagonal, scale };
        kernel.launch(stream, AttentionForwardFp8Args { problem })
    }))
}

/// Binds packed sequences.
pub(super) fn bind_packed<'a, const D: usize, S: Swizzle, P, const CAUSAL: bool>(
    kernel: Arc<Loaded<AttentionForwardFp8<D, S, P>>>,
    Binding { stream, config, inputs, outputs }: Binding<'_, 'a, e4m3>,
) -> Result<Bound<'a>>
where
    P: Fp8Policy<Of<D, S> = Fp8Packed<D, S, CAUSAL>>,
    Columns<D>: MatrixColumns,
    AttentionForwardFp8<D, S, P>: Kernel,
{
    let mut uploads = Uploads::default();
    let mut tensors = Tensors::<D, S, 5>::new(&mut uploads, stream, &inputs, outputs, |tensor| config.sequence_rows(tensor))?;
    let sequences = BoundSequences::new(&mut uploads, &config, inputs.sequences, [0; 2]);
    uploads.copy(stream)?;
    let (section_keys, scale, top_left) = (config.section_keys(1), config.scale_log2(), config.mask == Mask::CausalTopLeft);
    Ok(Bound::new(move |stream| {
        let (inputs, scales, results, counter) = tensors.arguments();
        let (heads, sequences) = (sequences.heads, sequences.argument());
        let problem = Fp8PackedArgument { inputs, scales, results, sequences, heads, counter, section_keys, top_left, scale };
        kernel.launch(stream, AttentionForwardFp8Args { problem })
    }))
}

/// Binds tensors of any layout.
pub(super) fn bind_options<'a, const D: usize, S: Swizzle>(
    kernel: Arc<Loaded<AttentionForwardFp8<D, S, Optioned>>>,
    Binding { stream, config, inputs, outputs }: Binding<'_, 'a, e4m3>,
) -> Result<Bound<'a>>
where
    Columns<D>: MatrixColumns,
    AttentionForwardFp8<D, S, Optioned>: Kernel,
{
    let mut uploads = Uploads::default();
    let steps = row_steps(&config, &inputs, &outputs, Rows::Strided)?;
    let mut tensors = Tensors::<D, S, 5>::new(&mut uploads, stream, &inputs, outputs, |tensor| config.sequence_rows(tensor))?;
    let sequences = BoundSequences::new(&mut uploads, &config, inputs.sequences, steps);
    let sink = BoundSink::new(&mut uploads, &config, inputs.sink);
    uploads.copy(stream)?;
    let section_keys = config.section_keys(1);
    Ok(Bound::new(move |stream| {
        let (inputs, scales, results, counter) = tensors.arguments();
        let problem = Fp8OptionsArgument {
            inputs,
            scales,
            results,
            sequences: sequences.argument(),
            heads: sequences.heads,
            log_rows: sequences.log_rows,
            window: config.seen(),
            scores: config.scores(),
            sink: sink.argument(),
            counter,
            section_keys,
        };
        kernel.launch(stream, AttentionForwardFp8Args { problem })
    }))
}
