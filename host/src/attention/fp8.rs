//! Attention of e4m3 tensors, whose scales say what an element is worth, into bf16.

use std::fmt;

use oxtile_kernels::attention::{
    AttentionForwardFp8, AttentionForwardFp8Args, FP8_KEYS, FP8_QUERIES, Fp8InputsArgument, Fp8ResultsArgument, Fp8ScalesArgument, Shape,
    TileOrderArgument,
};
use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::launch::{DeviceView, Kernel};
use oxtile_tile::layout::{Swizzle, Swizzle64, Swizzle128};
use oxtile_tile::num::{bf16, e4m3};

use super::config::{AttentionConfig, Kernels, Mask, refuse};
use super::dense::by_head;
use super::forward::BoundAttention;
use super::tensors::{Inputs, Outputs, Target};
use crate::choice::Choice;
use crate::runtime::{Buffer, Error, Loaded, Result, Runtime, Stream};
use crate::tensor::{TensorMap, TensorMapMut};

/// What an element of each input is worth: one positive number for the tensor, or one for each of its heads.
#[derive(Clone, Copy)]
pub struct Scales<'a> {
    /// Of queries: 1 or `heads`.
    pub q: DeviceView<'a, f32>,
    /// Of keys: 1 or `key_heads`.
    pub k: DeviceView<'a, f32>,
    /// Of values: 1 or `key_heads`.
    pub v: DeviceView<'a, f32>,
}

/// Attends with e4m3 elements: weights are rounded to e4m3 too, sums are `f32`, the result is bf16.
///
/// ```
/// use oxtile::attention::{AttentionConfig, AttentionFp8, Inputs, Outputs, Scales};
/// use oxtile::num::{bf16, e4m3};
/// use oxtile::{Buffer, Result, Runtime};
///
/// # fn main() -> Result<()> {
/// let runtime = Runtime::emulated(1)?; // or Runtime::cuda()
/// let stream = runtime.device(0)?.stream()?;
/// let config = AttentionConfig { queries: 2, keys: 2, head_size: 64, ..AttentionConfig::default() };
///
/// let (zero, one, three) = (e4m3::from_bits(0), e4m3::from_bits(0x38), e4m3::from_bits(0x44));
/// let (q, v) = (vec![zero; 2 * 64], [[one; 64], [three; 64]]);
/// let (q, v) = (Buffer::from_slice(&stream, &q)?, Buffer::from_slice(&stream, v.as_flattened())?);
/// let (unit, half) = (Buffer::from_slice(&stream, &[1.0_f32])?, Buffer::from_slice(&stream, &[0.5_f32])?);
/// let scales = Scales { q: unit.view(), k: unit.view(), v: half.view() };
/// let mut out = Buffer::<bf16>::zeros(&stream, 2 * 64)?;
/// let mut log_sum_exp = Buffer::<f32>::zeros(&stream, 2)?;
/// let outputs = Outputs::new(out.view_mut(), log_sum_exp.view_mut());
/// AttentionFp8::new(&runtime, config)?.forward(&stream, Inputs::new(q.view(), q.view(), v.view()), scales, outputs)?;
///
/// let out: Vec<half::bf16> = out.to_vec_as(&stream)?;
/// assert_eq!(out[0].to_f32(), 1.0);
/// # Ok(()) }
/// ```
pub struct AttentionFp8 {
    config: AttentionConfig,
    instance: Option<Box<dyn Instance>>,
}

impl AttentionConfig {
    /// The kernel for e4m3 elements, which does not depend on the device: Hopper has one.
    ///
    /// # Errors
    /// As [`validate`](Self::validate), and for what no kernel has.
    pub fn choose_fp8(&self) -> Result<Choice> {
        self.validate()?;
        if self.kernels == Kernels::Portable {
            return refuse("kernels", "Portable", "Fastest of 8 bits, whose kernels are Hopper's alone");
        }
        self.refuse_general("of 8 bits")?;
        if self.value_size() != self.head_size {
            return refuse("value_size", self.value_size(), format!("as head_size, which is {}, of 8 bits", self.head_size));
        }
        let choice = self.choose::<bf16>()?;
        let causal = self.mask != Mask::Full;
        let kernel = match (self.head_size, causal) {
            _ if choice.kernel.is_empty() => return Ok(choice),
            (64, false) => <AttentionForwardFp8<64, Swizzle64, false> as Kernel>::INFO.name,
            (64, true) => <AttentionForwardFp8<64, Swizzle64, true> as Kernel>::INFO.name,
            (128, false) => <AttentionForwardFp8<128, Swizzle128, false> as Kernel>::INFO.name,
            (128, true) => <AttentionForwardFp8<128, Swizzle128, true> as Kernel>::INFO.name,
            (size, _) => return refuse("head_size", size, "64 or 128 of 8 bits"),
        };
        Ok(Choice { kernel, why: format!("{FP8_QUERIES} queries by {FP8_KEYS} keys on wgmma, 8 bits, head_size {}", self.head_size) })
    }
}

impl AttentionFp8 {
    /// Checks the configuration and loads its kernel.
    ///
    /// # Errors
    /// As [`AttentionConfig::choose_fp8`] and [`Runtime::load`].
    pub fn new(runtime: &Runtime, config: AttentionConfig) -> Result<Self> {
        let launches = !config.choose_fp8()?.kernel.is_empty();
        let load = || -> Result<Box<dyn Instance>> {
            Ok(match (config.head_size, config.mask != Mask::Full) {
                (64, false) => Box::new(runtime.load::<AttentionForwardFp8<64, Swizzle64, false>>()?),
                (64, true) => Box::new(runtime.load::<AttentionForwardFp8<64, Swizzle64, true>>()?),
                (_, false) => Box::new(runtime.load::<AttentionForwardFp8<128, Swizzle128, false>>()?),
                (_, true) => Box::new(runtime.load::<AttentionForwardFp8<128, Swizzle128, true>>()?),
            })
        };
        Ok(Self { config, instance: launches.then(load).transpose()? })
    }

    /// Binds tensors; encodes their tensor maps on the device and waits for those to be there.
    ///
    /// # Errors
    /// [`Error::Length`] if a view does not have the configuration's size; as [`TensorMap::strided`].
    pub fn bind<'a>(
        &'a self,
        stream: &Stream,
        inputs: Inputs<'a, e4m3>,
        scales: Scales<'a>,
        outputs: Outputs<'a, bf16>,
    ) -> Result<BoundAttention<'a>> {
        inputs.check(&self.config)?;
        outputs.check(&self.config)?;
        let AttentionConfig { heads, key_heads, .. } = self.config;
        for (what, found, expected) in [
            ("AttentionFp8, scales.q", scales.q.len(), heads),
            ("AttentionFp8, scales.k", scales.k.len(), key_heads),
            ("AttentionFp8, scales.v", scales.v.len(), key_heads),
        ] {
            if found != 1 && found != expected {
                return Err(Error::Length { what, expected, found });
            }
        }
        match &self.instance {
            Some(instance) => instance.bind(stream, &self.config, inputs, scales, outputs),
            None => Ok(BoundAttention::new(|_| Ok(()))),
        }
    }

    /// Binds tensors and attends once.
    ///
    /// # Errors
    /// As [`bind`](Self::bind) and [`BoundAttention::run`].
    pub fn forward(&self, stream: &Stream, inputs: Inputs<'_, e4m3>, scales: Scales<'_>, outputs: Outputs<'_, bf16>) -> Result<()> {
        self.bind(stream, inputs, scales, outputs)?.run(stream)
    }
}

/// A loaded kernel of any head size and mask.
trait Instance: Send + Sync {
    fn bind<'a>(
        &'a self,
        stream: &Stream,
        config: &AttentionConfig,
        inputs: Inputs<'a, e4m3>,
        scales: Scales<'a>,
        outputs: Outputs<'a, bf16>,
    ) -> Result<BoundAttention<'a>>;
}

impl<const D: usize, S: Swizzle, const CAUSAL: bool> Instance for Loaded<AttentionForwardFp8<D, S, CAUSAL>>
where
    Columns<D>: MatrixColumns,
    AttentionForwardFp8<D, S, CAUSAL>: Kernel,
{
    fn bind<'a>(
        &'a self,
        stream: &Stream,
        config: &AttentionConfig,
        inputs: Inputs<'a, e4m3>,
        scales: Scales<'a>,
        outputs: Outputs<'a, bf16>,
    ) -> Result<BoundAttention<'a>> {
        let AttentionConfig { layout, batches, queries, keys, heads, key_heads, head_size, .. } = *config;
        let (Inputs { q, k, v, .. }, Outputs { out: Target::Rounded(out), mut log_sum_exp, .. }) = (inputs, outputs) else {
            return Err(Error::Invalid { what: "AttentionFp8, out", why: "this kernel rounds its result".to_owned() });
        };
        let of_queries = by_head(layout, batches, queries, heads, head_size);
        // Without keys nothing is loaded by these maps, which must be of something: the queries.
        let (k, v, of_keys) = if keys == 0 { (q, q, of_queries) } else { (k, v, by_head(layout, batches, keys, key_heads, head_size)) };
        let q = TensorMap::<_, 64, D, S, 4>::strided(stream, q, of_queries)?;
        let k = TensorMap::<_, FP8_KEYS, D, S, 4>::strided(stream, k, of_keys)?;
        let v = TensorMap::<_, FP8_KEYS, D, S, 4>::strided(stream, v, of_keys)?;
        let mut out = TensorMapMut::<_, 64, D, Swizzle128, 4>::strided(stream, out, of_queries)?;
        let mut counter = Buffer::<u32>::zeros(stream, 1)?;
        let [batches, heads, group, queries, keys] = [batches, heads, heads / key_heads, queries, keys].map(|size| size as u32);
        let shape = Shape { batches, heads, group, queries, keys };
        let log_sum_exp_length = log_sum_exp.len();
        let (diagonal, section, scale) = (config.diagonal(), config.section(1), config.scale_log2());
        Ok(BoundAttention::new(move |stream| {
            let args = AttentionForwardFp8Args {
                inputs: Fp8InputsArgument { q: q.view(), k: k.view(), v: v.view() },
                scales: Fp8ScalesArgument { q: scales.q, k: scales.k, v: scales.v },
                results: Fp8ResultsArgument { out: out.view_mut(), log_sum_exp: log_sum_exp.slice_mut(0, log_sum_exp_length) },
                shape,
                order: TileOrderArgument { counter: counter.view_mut(), section },
                diagonal,
                scale,
            };
            self.launch(stream, args)
        }))
    }
}

impl fmt::Debug for AttentionFp8 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AttentionFp8").field("config", &self.config).finish_non_exhaustive()
    }
}
