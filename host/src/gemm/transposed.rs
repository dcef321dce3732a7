//! Matrices bound to the kernels on wgmma whose 8-bit operands lie along `k`: those that do not are transposed first, at each run.

use std::sync::Arc;

use oxtile_kernels::fp8::{Fp8Transpose, Fp8TransposeArgs};
use oxtile_kernels::matrix::MatrixArgument;
use oxtile_tile::launch::{DeviceView, DeviceViewMut, Kernel};
use oxtile_tile::num::{Fp8, Pod};

use super::config::GemmConfig;
use super::plan::GemmPlan;
use super::product::Matrices;
use super::table::Instance;
use crate::runtime::{Bound, Buffer, Loaded, Result, Runtime, Stream};

/// A kernel of operands along `k`, and what transposes the operands that are not.
pub(super) struct Transposed<P, A: Fp8, B: Fp8>
where
    Fp8Transpose<A>: Kernel,
    Fp8Transpose<B>: Kernel,
{
    product: P,
    a: Option<Loaded<Fp8Transpose<A>>>,
    b: Option<Loaded<Fp8Transpose<B>>>,
}

impl<P, A: Fp8, B: Fp8> Transposed<P, A, B>
where
    Fp8Transpose<A>: Kernel,
    Fp8Transpose<B>: Kernel,
{
    /// Loads what transposes `A`, or `B`, or both, before a product.
    pub fn load(runtime: &Runtime, product: P, [a, b]: [bool; 2]) -> Result<Self> {
        let (a, b) = (a.then(|| runtime.load()).transpose()?, b.then(|| runtime.load()).transpose()?);
        Ok(Self { product, a, b })
    }
}

impl<P: Instance<A, B, O>, A: Fp8, B: Fp8, O: Pod> Instance<A, B, O> for Transposed<P, A, B>
where
    Fp8Transpose<A>: Kernel,
    Fp8Transpose<B>: Kernel,
{
    fn bind<'a>(&'a self, stream: &Stream, config: GemmConfig, plan: GemmPlan, matrices: Matrices<'a, A, B, O>) -> Result<Bound<'a>> {
        let (GemmConfig { m, n, k, .. }, Matrices { a, b, .. }) = (config, &matrices);
        let of_a = self.a.as_ref().map(|kernel| Transpose::new(stream, kernel, "A along k", *a, [k, m])).transpose()?;
        let of_b = self.b.as_ref().map(|kernel| Transpose::new(stream, kernel, "B along k", *b, [k, n])).transpose()?;
        // SAFETY: the operation that is returned has the transposes, and uses the views after them.
        let (a, b) = unsafe { (of_a.as_ref().map_or(*a, |of| of.view()), of_b.as_ref().map_or(*b, |of| of.view())) };
        let config = GemmConfig { transpose_a: false, transpose_b: true, ..config };
        let mut product = self.product.bind(stream, config, plan, Matrices { a, b, ..matrices })?;
        Ok(Bound::new(move |stream| {
            of_a.iter().try_for_each(|of| of.run(stream))?;
            of_b.iter().try_for_each(|of| of.run(stream))?;
            product.run(stream)
        }))
    }
}

/// The transpose of an operand, in memory that is allocated in stream order and freed so.
struct Transpose<'a, T: Fp8>
where
    Fp8Transpose<T>: Kernel,
{
    kernel: &'a Loaded<Fp8Transpose<T>>,
    operand: DeviceView<'a, T>,
    shape: [u64; 2],
    /// In an `Arc` for its address, which stays when this is moved.
    place: Arc<Buffer<T>>,
}

impl<'a, T: Fp8> Transpose<'a, T>
where
    Fp8Transpose<T>: Kernel,
{
    /// Loads the kernel on the device, so that a capture need not, and allocates.
    fn new(
        stream: &Stream,
        kernel: &'a Loaded<Fp8Transpose<T>>,
        name: &'static str,
        operand: DeviceView<'a, T>,
        shape: [u64; 2],
    ) -> Result<Self> {
        kernel.prepare(&stream.device())?;
        Ok(Self { kernel, operand, shape, place: Arc::new(Buffer::named(stream, name, operand.len())?) })
    }

    /// The transpose, for what is enqueued after [`run`](Self::run).
    ///
    /// # Safety
    /// This outlives what uses the view.
    unsafe fn view(&self) -> DeviceView<'a, T> {
        // SAFETY: promised by the caller; the buffer is not moved while it is in its `Arc`.
        unsafe { self.place.view_within() }
    }

    fn run(&self, stream: &Stream) -> Result<()> {
        let place = &*self.place;
        // SAFETY: the other views of this memory are those of the product, of the same operation, which is enqueued after this and reads alone.
        let transposed = unsafe { DeviceViewMut::from_raw(place.address(), place.len(), place.owner()) };
        self.kernel.launch(stream, Fp8TransposeArgs { input: MatrixArgument::new(self.operand, self.shape), transposed })
    }
}
