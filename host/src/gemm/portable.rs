//! Matrices bound to the kernels on `mma.sync`.

use oxtile_kernels::gemm::{GemmPortable, GemmPortableArgs, OperandRowsArgument, PairElement};
use oxtile_tile::launch::{DeviceViewMut, Kernel};
use oxtile_tile::num::Float;
use oxtile_tile::register_tile::RegisterElement;

use super::config::GemmConfig;
use super::plan::GemmPlan;
use super::product::Matrices;
use super::table::Instance;
use crate::runtime::{Bound, Loaded, Result, Stream};

impl<T: RegisterElement + Float, O: PairElement, const ALIGNED: bool> Instance<T, T, O> for Loaded<GemmPortable<T, O, ALIGNED>>
where
    GemmPortable<T, O, ALIGNED>: Kernel,
{
    fn bind<'a>(&'a self, _: &Stream, config: GemmConfig, _: GemmPlan, matrices: Matrices<'a, T, T, O>) -> Result<Bound<'a>> {
        let Matrices { a, b, scales, bias, d } = matrices;
        let [m_major, n_major] = config.majors();
        let (memory, length) = (d.access("d"), d.len());
        Ok(Bound::new(move |stream| {
            // SAFETY: the closure holds the only view of this memory, lent by `d`, for as long as it lives.
            let d = unsafe { DeviceViewMut::from_raw(memory.address, length, memory.owner) };
            let a = OperandRowsArgument { values: a, along_k: !m_major };
            let b = OperandRowsArgument { values: b, along_k: !n_major };
            self.launch(stream, GemmPortableArgs { a, b, d, shape: config.shape(), fusion: config.fusion(scales, bias) })
        }))
    }
}
