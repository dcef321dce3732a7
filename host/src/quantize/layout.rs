//! How the scales of a quantized tensor lie, as types.

use std::fmt;

use oxtile_tile::launch::{DeviceView, DeviceViewMut};
use oxtile_tile::num::Pod;

use crate::runtime::{Buffer, HostElement, Result, Stream};

/// A layout of block scales: [`Compact`] or [`Interleaved`].
pub trait Layout: sealed::Sealed + fmt::Debug + Send + Sync + 'static {
    /// Whether it is [`Interleaved`].
    const IS_INTERLEAVED: bool;
    /// The memory of scales in this layout.
    type Scales<S: Pod>: Scales<S>;
}

/// Row-major, unpadded, in a [`Buffer`]. The scales of shards, one after the other, are those of the whole: only this layout is exchanged
/// between ranks.
#[derive(Debug, Clone, Copy)]
pub struct Compact;

/// In padded tiles of 128 by 4, as block-scaled matrix multiplication reads them
/// ([`oxtile_kernels::interleave`]): [`InterleavedScales`].
#[derive(Debug, Clone, Copy)]
pub struct Interleaved;

impl Layout for Compact {
    const IS_INTERLEAVED: bool = false;
    type Scales<S: Pod> = Buffer<S>;
}

impl Layout for Interleaved {
    const IS_INTERLEAVED: bool = true;
    type Scales<S: Pod> = InterleavedScales<S>;
}

/// The memory of scales: a [`Buffer`], or [`InterleavedScales`].
pub trait Scales<S>: sealed::Sealed + fmt::Debug + Sized {
    /// Room for so many, all 0 or uninitialised.
    ///
    /// # Errors
    /// As [`Buffer::zeros`].
    fn new(stream: &Stream, len: u64, zeros: bool) -> Result<Self>;

    /// Lends them to kernels that read them.
    fn view(&self) -> DeviceView<'_, S>;

    /// Lends them to a kernel that writes them.
    fn view_mut(&mut self) -> DeviceViewMut<'_, S>;
}

/// Interleaved scales, padding included. They are not a [`Buffer`], so that no collective takes them: interleaved scales of shards are not those of the whole.
///
/// ```compile_fail,E0308
/// use oxtile::comm::{Communicator, SingleRank};
/// use oxtile::quantize::{Interleaved, Nvfp4Tensor};
/// # use oxtile::{Buffer, Stream, num::e4m3};
///
/// fn gather(ranks: &SingleRank, stream: &Stream, shard: &Nvfp4Tensor<Interleaved>, whole: &mut Buffer<e4m3>) {
///     ranks.all_gather(stream, &shard.scales, whole).unwrap();
/// }
/// ```
///
/// ```
/// # use oxtile::comm::{Communicator, SingleRank};
/// # use oxtile::quantize::{Compact, Nvfp4Tensor};
/// # use oxtile::{Buffer, Stream, num::e4m3};
/// fn gather(ranks: &SingleRank, stream: &Stream, shard: &Nvfp4Tensor<Compact>, whole: &mut Buffer<e4m3>) {
///     ranks.all_gather(stream, &shard.scales, whole).unwrap();
/// }
/// ```
pub struct InterleavedScales<S>(Buffer<S>);

impl<S: Pod> InterleavedScales<S> {
    /// Room for so many.
    ///
    /// # Errors
    /// As [`Buffer::uninitialised`].
    pub fn uninitialised(stream: &Stream, len: u64) -> Result<Self> {
        Buffer::uninitialised(stream, len).map(Self)
    }

    /// Copies scales from the host.
    ///
    /// # Errors
    /// As [`Buffer::from_slice`].
    pub fn from_slice<H: HostElement<Device = S>>(stream: &Stream, slice: &[H]) -> Result<Self> {
        Buffer::from_slice(stream, slice).map(Self)
    }

    /// How many, padding included.
    pub fn len(&self) -> u64 {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Lends them to kernels that read them.
    pub fn view(&self) -> DeviceView<'_, S> {
        self.0.view()
    }

    /// Lends them to a kernel that writes them.
    pub fn view_mut(&mut self) -> DeviceViewMut<'_, S> {
        self.0.view_mut()
    }

    /// The scales on the host; waits for the stream.
    ///
    /// # Errors
    /// As [`Buffer::copy_to_slice`].
    #[track_caller]
    pub fn to_vec(&self, stream: &Stream) -> Result<Vec<S>>
    where
        S: HostElement<Device = S>,
    {
        self.0.to_vec(stream)
    }
}

macro_rules! scales {
    ($($memory:ident $of:expr;)*) => { $(
        impl<S: Pod> Scales<S> for $memory<S> {
            fn new(stream: &Stream, len: u64, zeros: bool) -> Result<Self> {
                let buffer = if zeros { Buffer::zeros(stream, len) } else { Buffer::uninitialised(stream, len) };
                buffer.map($of)
            }

            fn view(&self) -> DeviceView<'_, S> {
                self.view()
            }

            fn view_mut(&mut self) -> DeviceViewMut<'_, S> {
                self.view_mut()
            }
        }

        impl<S> sealed::Sealed for $memory<S> {}
    )* };
}
scales! { Buffer std::convert::identity; InterleavedScales InterleavedScales; }

impl<S> fmt::Debug for InterleavedScales<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("InterleavedScales").field(&self.0).finish()
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Compact {}
    impl Sealed for super::Interleaved {}
}
