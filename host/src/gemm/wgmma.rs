//! Matrices bound to the kernels on wgmma.

use oxtile_kernels::gemm::{self, GemmArgs};
use oxtile_tile::arch::MatrixElement;
use oxtile_tile::launch::{DeviceViewMut, Kernel};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::register_tile::StoredElement;

use super::config::GemmConfig;
use super::product::Matrices;
use super::table::Instance;
use crate::runtime::{Bound, Loaded, Result, Stream};
use crate::tensor::{Strided, TensorMap, TensorMapMut, Uploads};

impl<T, const DEPTH: usize, O, const WIDTH: usize, const M_MAJOR: bool, const N_MAJOR: bool> Instance<T, O>
    for Loaded<gemm::Gemm<T, DEPTH, O, WIDTH, M_MAJOR, N_MAJOR>>
where
    T: MatrixElement,
    O: StoredElement,
    gemm::Gemm<T, DEPTH, O, WIDTH, M_MAJOR, N_MAJOR>: Kernel,
{
    fn bind<'a>(&'a self, stream: &Stream, config: GemmConfig, matrices: Matrices<'a, T, O>) -> Result<Bound<'a>> {
        let (GemmConfig { m, n, k, .. }, Matrices { a, b, scales, bias, d }) = (config, matrices);
        let (of_a, of_b) = (if M_MAJOR { [k, m] } else { [m, k] }, if N_MAJOR { [k, n] } else { [n, k] });
        let (mut uploads, memory, length) = (Uploads::default(), d.access("old"), d.len());
        let a = TensorMap::<_, 64, DEPTH, Swizzle128>::with(&mut uploads, stream, a, Strided::dense(of_a))?;
        let b = TensorMap::<_, 64, DEPTH, Swizzle128>::with(&mut uploads, stream, b, Strided::dense(of_b))?;
        let mut d = TensorMapMut::<_, 64, WIDTH, Swizzle128>::with(&mut uploads, stream, d, Strided::dense([m, n]))?;
        uploads.copy(stream)?;
        Ok(Bound::new(move |stream| {
            // SAFETY: the map `d` holds the only view of this memory, for as long as the closure lives. The kernel reads an
            // element of the matrix as it was before it stores that element, in the same warpgroup.
            let old = unsafe { DeviceViewMut::from_raw(memory.address, length, memory.owner) };
            let (a, b, d) = (a.view(), b.view(), d.view_mut());
            self.launch(stream, GemmArgs { a, b, d, old, shape: config.shape(), fusion: config.fusion(scales, bias) })
        }))
    }
}
