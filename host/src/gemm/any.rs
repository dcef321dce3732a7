//! Matrices bound to the kernel without tensor cores.

use oxtile_kernels::gemm::{self, GemmAny, GemmAnyArgs, OperandArgument};
use oxtile_tile::launch::{DeviceViewMut, Kernel};
use oxtile_tile::num::{Float, Pod};

use super::config::GemmConfig;
use super::plan::GemmPlan;
use super::product::Matrices;
use super::table::Instance;
use crate::runtime::{Bound, Loaded, Result, Stream};

impl<T: Float + Pod, O: Float + Pod> Instance<T, T, O> for Loaded<GemmAny<T, O>>
where
    GemmAny<T, O>: Kernel,
{
    fn bind<'a>(&'a self, _: &Stream, config: GemmConfig, _: GemmPlan, matrices: Matrices<'a, T, T, O>) -> Result<Bound<'a>> {
        let (Matrices { a, b, scales, bias, d }, shape @ gemm::Shape { m, n, k }) = (matrices, config.shape());
        let a_strides = if config.transpose_a { [1, m] } else { [k, 1] };
        let b_strides = if config.transpose_b { [k, 1] } else { [1, n] };
        let operand = |values, [stride, step]: [u32; 2]| OperandArgument { values, stride, step };
        let (memory, length) = (d.access("d"), d.len());
        Ok(Bound::new(move |stream| {
            // SAFETY: the closure holds the only view of this memory, lent by `d`, for as long as it lives.
            let d = unsafe { DeviceViewMut::from_raw(memory.address, length, memory.owner) };
            let (a, b, fusion) = (operand(a, a_strides), operand(b, b_strides), config.fusion(scales, bias));
            self.launch(stream, GemmAnyArgs { a, b, d, shape, fusion })
        }))
    }
}
