//! Matrices bound to the kernels on `mma.sync`. Sizes say whether rows are aligned; where views begin is known when they are bound, so that two kernels are loaded for
//! aligned rows.

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

/// The kernel of aligned rows, and the one that takes views that begin anywhere.
impl<T: RegisterElement + Float, O: PairElement> Instance<T, T, O> for (Loaded<GemmPortable<T, O, true>>, Loaded<GemmPortable<T, O, false>>)
where
    GemmPortable<T, O, true>: Kernel,
    GemmPortable<T, O, false>: Kernel,
{
    fn bind<'a>(&'a self, stream: &Stream, config: GemmConfig, plan: GemmPlan, matrices: Matrices<'a, T, T, O>) -> Result<Bound<'a>> {
        let Matrices { a, b, d, .. } = &matrices;
        let begins = [(a.address(), 16), (b.address(), 16), (d.address(), 2 * size_of::<O>() as u64)];
        match begins.into_iter().all(|(address, bytes)| address.is_multiple_of(bytes)) {
            true => self.0.bind(stream, config, plan, matrices),
            false => self.1.bind(stream, config, plan, matrices),
        }
    }
}

#[cfg(test)]
mod tests {
    use oxtile_tile::num::bf16;

    use crate::gemm::{Gemm, GemmConfig, GemmKernel};
    use crate::runtime::{Buffer, Runtime};

    /// Each of the three views begins one element too late for whole vectors, or none does.
    #[test]
    fn views_of_aligned_sizes_may_begin_anywhere() {
        let runtime = Runtime::checked(3).unwrap();
        let stream = runtime.device(0).unwrap().stream().unwrap();
        let config = GemmConfig { m: 16, n: 24, k: 8, ..GemmConfig::default() };
        let gemm = Gemm::<bf16, f32>::portable(&runtime, config).unwrap();
        assert_eq!(gemm.choice().decision, GemmKernel::Portable { aligned: true });
        let values = |count: usize, value: f32| Buffer::from_slice(&stream, &vec![half::bf16::from_f32(value); count + 1]).unwrap();
        let (a, b) = (values(16 * 8, 0.5), values(8 * 24, 3.0));
        for late in [[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1]] {
            let mut d = Buffer::<f32>::zeros(&stream, 16 * 24 + 1).unwrap();
            let [at_a, at_b, at_d] = late;
            let (a, b) = (a.view().slice(at_a, at_a + 16 * 8), b.view().slice(at_b, at_b + 8 * 24));
            let result = d.view_mut().split_at(at_d).1.split_at(16 * 24).0;
            gemm.run(&stream, a, b, None, result).unwrap();
            let mut expected = vec![12.0; 16 * 24 + 1];
            expected[if at_d == 0 { 16 * 24 } else { 0 }] = 0.0;
            assert_eq!(d.to_vec(&stream).unwrap(), expected, "{late:?}");
        }
    }
}
