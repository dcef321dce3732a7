//! How the scales of a quantized tensor lie, as types.

/// A layout of block scales: [`Compact`] or [`Interleaved`].
pub trait Layout: sealed::Sealed + Send + Sync + 'static {
    /// Whether it is [`Interleaved`].
    const IS_INTERLEAVED: bool;
}

/// Row-major, unpadded. The scales of shards, one after the other, are those of the whole: only this layout is exchanged
/// between ranks.
#[derive(Debug, Clone, Copy)]
pub struct Compact;

/// In padded tiles of 128 by 4, as block-scaled matrix multiplication reads them
/// ([`oxtile_kernels::interleave`]).
#[derive(Debug, Clone, Copy)]
pub struct Interleaved;

impl Layout for Compact {
    const IS_INTERLEAVED: bool = false;
}

impl Layout for Interleaved {
    const IS_INTERLEAVED: bool = true;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Compact {}
    impl Sealed for super::Interleaved {}
}
