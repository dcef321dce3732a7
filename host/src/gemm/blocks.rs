//! Matrices bound to the kernel of FP8 codes with a scale for every block: 128 neighbours along k of `A`, a square of 128x128 of `B`.

use std::marker::PhantomData;

use oxtile_kernels::fp8::{SIDE, row_of_scales};
use oxtile_kernels::gemm::{BLOCK, BlockOperandsArgument, GemmBlocks, GemmBlocksArgs, ScaledTile};
use oxtile_tile::launch::Kernel;
use oxtile_tile::layout::Linear;
use oxtile_tile::num::e4m3;
use oxtile_tile::register_tile::StoredElement;

use super::config::GemmConfig;
use super::plan::GemmPlan;
use super::product::Matrices;
use super::table::Instance;
use super::wgmma::{Maps, Parts};
use crate::runtime::{Bound, Error, Loaded, Result, Stream};
use crate::tensor::{Strided, TensorMap, Uploads};

impl<O: StoredElement, const WIDTH: usize, S: ScaledTile> Instance<e4m3, e4m3, O> for Loaded<GemmBlocks<O, WIDTH, S>>
where
    GemmBlocks<O, WIDTH, S>: Kernel,
{
    /// The scales are those of the blocks of `A`, `[ceil(k / 128), m]`, and of the squares of `B`, `[ceil(n / 128), ceil(k / 128)]`, each row filled up to a
    /// multiple of 4.
    fn bind<'a>(&'a self, stream: &Stream, config: GemmConfig, plan: GemmPlan, matrices: Matrices<'a, e4m3, e4m3, O>) -> Result<Bound<'a>> {
        let (bias, [a_scales, b_scales]) = (matrices.bias, matrices.scales.ok_or_else(without_scales)?);
        let blocks = config.k.div_ceil(BLOCK as u64);
        let (of_a, of_b) = ([blocks, row_of_scales(config.m)], [config.n.div_ceil(SIDE), row_of_scales(blocks)]);
        let mut uploads = Uploads::default();
        let a_scales = TensorMap::<f32, 1, 128, Linear>::with(&mut uploads, stream, a_scales, Strided::dense(of_a))?;
        let b_scales = TensorMap::<f32, 1, 4, Linear>::with(&mut uploads, stream, b_scales, Strided::dense(of_b))?;
        uploads.copy(stream)?;
        let mut maps = Maps::<e4m3, e4m3, BLOCK, O, WIDTH>::new(stream, config, matrices)?;
        let mut parts = Parts::new::<S>(stream, [config.m, config.n], plan)?;
        Ok(Bound::new(move |stream| {
            let (a, b, d, old) = maps.arguments();
            let (shape, fusion, split) = (config.shape(), config.fusion(None, bias), parts.argument());
            let operands = BlockOperandsArgument { a, b, a_scales: a_scales.view(), b_scales: b_scales.view() };
            self.launch(stream, GemmBlocksArgs { operands, d, old, shape, fusion, split, marker: PhantomData })
        }))
    }
}

fn without_scales() -> Error {
    Error::Invalid { what: "Gemm, scales", why: "codes in blocks are multiplied with the scales of their blocks: bind them too".to_owned() }
}
