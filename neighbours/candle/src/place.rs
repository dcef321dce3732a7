//! Where a call's tensors lie.

use candle_core::{Device, Layout, Result, Storage, bail};
use oxtile::{Buffer, Runtime, Stream};

use crate::cpu::Cpu;
use crate::element::Element;

/// A device and its stream for one call: buffers of the tensors that it reads, and memory for its results.
pub trait Place {
    /// The storage of a tensor there.
    type Storage;
    /// Memory of a result on its way.
    type Memory<T: Element>;
    /// What a buffer needs for as long as it is used.
    type Loan<'a>
    where
        Self: 'a;

    /// The runtime of the kernels.
    fn runtime(&self) -> &Runtime;

    /// The stream of the kernels.
    fn stream(&self) -> &Stream;

    /// The storage of a tensor that was checked to lie here.
    fn storage<'a>(&self, storage: &'a Storage) -> Result<&'a Self::Storage>;

    /// The elements of a contiguous tensor, to be read for as long as the loan is there.
    fn read<'a, T: Element>(&'a self, storage: &'a Self::Storage, layout: &Layout) -> Result<(Buffer<T>, Self::Loan<'a>)>;

    /// Allocates memory for a result.
    fn allocate<T: Element>(&self, len: u64) -> Result<Self::Memory<T>>;

    /// The memory of a result, to be written whole for as long as the loan is there.
    fn write<'a, T: Element>(&'a self, memory: &'a mut Self::Memory<T>) -> Result<(Buffer<T>, Self::Loan<'a>)>;

    /// A result that was written, with the buffer that it was written by. Its loan has ended.
    fn give<T: Element>(&self, memory: Self::Memory<T>, buffer: Buffer<T>) -> Result<Self::Storage>;

    /// The storage as candle has it in tensors.
    fn wrap(storage: Self::Storage) -> Storage;
}

/// What is done on one place.
pub trait Work {
    /// What comes of it.
    type Output;

    /// Does it.
    fn run<P: Place>(self, place: &P) -> Result<Self::Output>;
}

/// Does something where a device is.
pub fn run<W: Work>(device: &Device, work: W) -> Result<W::Output> {
    match device {
        Device::Cpu => work.run(&Cpu::open()?),
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => crate::cuda::on(device, |place| work.run(place)),
        #[cfg(not(feature = "cuda"))]
        Device::Cuda(_) => bail!("oxtile: tensors on a GPU need the feature `cuda` of oxtile-candle"),
        Device::Metal(_) => bail!("oxtile: the tensors are on a Metal device: move them to the CPU or to CUDA"),
    }
}

/// An error of Oxtile's, in its own words.
pub fn failed(error: oxtile::Error) -> candle_core::Error {
    candle_core::Error::wrap(error)
}
