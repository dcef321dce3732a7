//! Which types of cudarc are lent.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceSlice, SyncOnDrop};

use sealed::Lent;

/// Memory of cudarc of elements `H` that is read for `'a`: `&CudaSlice`, `CudaView`, `&CudaView`. No other type: cudarc's own traits promise nothing of an address.
pub trait Source<'a, H>: Lent<'a> {}

/// Memory of cudarc of elements `H` that is written during `'a`: `&mut CudaSlice`, `CudaViewMut`, `&mut CudaViewMut`.
pub trait Target<'a, H>: Lent<'a> {}

pub(crate) mod sealed {
    use super::{Arc, CudaStream, SyncOnDrop};

    /// Memory that cudarc lends for `'a`.
    pub trait Lent<'a> {
        /// The stream that owns the memory and frees it.
        fn owner(&self) -> Arc<CudaStream>;

        /// How many elements.
        fn count(&self) -> usize;

        /// The address, once `lane` waits for cudarc's own earlier uses, and what records the use.
        fn lend(self, lane: &'a CudaStream) -> (u64, SyncOnDrop<'a>);
    }
}

macro_rules! lent {
    ($($kind:ident $type:ty, [$($generics:tt)*]: $lend:expr;)*) => { $(
        impl<'a, $($generics)*> $kind<'a, H> for $type {}

        impl<'a, $($generics)*> Lent<'a> for $type {
            fn owner(&self) -> Arc<CudaStream> {
                Arc::clone(DeviceSlice::stream(self.lent()))
            }

            fn count(&self) -> usize {
                DeviceSlice::len(self.lent())
            }

            fn lend(self, lane: &'a CudaStream) -> (u64, SyncOnDrop<'a>) {
                $lend(self, lane)
            }
        }
    )* };
}

/// One level of reference less, or none.
trait This {
    type This;
    fn lent(&self) -> &Self::This;
}

macro_rules! this {
    ($($type:ty, [$($generics:tt)*]: $this:ty;)*) => { $(
        impl<$($generics)*> This for $type {
            type This = $this;

            fn lent(&self) -> &$this {
                self
            }
        }
    )* };
}

this! {
    &CudaSlice<H>, [H]: CudaSlice<H>;
    &mut CudaSlice<H>, [H]: CudaSlice<H>;
    CudaView<'b, H>, ['b, H]: CudaView<'b, H>;
    &CudaView<'b, H>, ['b, H]: CudaView<'b, H>;
    CudaViewMut<'b, H>, ['b, H]: CudaViewMut<'b, H>;
    &mut CudaViewMut<'b, H>, ['b, H]: CudaViewMut<'b, H>;
}

lent! {
    Source &'a CudaSlice<H>, [H]: DevicePtr::device_ptr;
    Source CudaView<'a, H>, [H]: CudaView::view_ptr;
    Source &'a CudaView<'b, H>, ['b, H]: DevicePtr::device_ptr;
    Target &'a mut CudaSlice<H>, [H]: DevicePtrMut::device_ptr_mut;
    Target CudaViewMut<'a, H>, [H]: CudaViewMut::view_ptr_mut;
    Target &'a mut CudaViewMut<'b, H>, ['b, H]: DevicePtrMut::device_ptr_mut;
}
