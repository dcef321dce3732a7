//! Elements that context parallelism is for.

use oxtile_tile::launch::{DeviceView, DeviceViewMut};
use oxtile_tile::num::{bf16, f16};

use crate::attention::ArrivingGradients;
use crate::runtime::{Result, Runtime, Stream};
use crate::sum_parts::SumParts;

/// Adds parts that lie so far apart, in their order, and rounds the sum.
#[doc(hidden)]
pub type Sum<In, Out> = Box<dyn Fn(&Stream, DeviceView<'_, In>, u32, u64, DeviceViewMut<'_, Out>) -> Result<()> + Send + Sync>;

/// An element of queries, keys and values: `bf16` or `f16`. Others are refused where the operation is named:
///
/// ```compile_fail,E0277
/// use oxtile::context_parallel::ContextParallel;
/// use oxtile::num::e4m3;
///
/// fn of_fp8(_: &ContextParallel<'_, e4m3>) {}
/// ```
#[diagnostic::on_unimplemented(
    message = "context parallelism is of `bf16` and `f16`, not of `{Self}`",
    note = "ContextParallelFp8 casts `bf16` tensors to 8 bits; oxtile::quantize casts FP8 tensors back"
)]
pub trait ContextElement: ArrivingGradients {
    /// Loads the kernel that adds up what ranks computed.
    #[doc(hidden)]
    fn load_sum(runtime: &Runtime) -> Result<Sum<f32, Self>>;

    /// Loads the kernel that adds up what ranks have rounded.
    #[doc(hidden)]
    fn load_rounded_sum(runtime: &Runtime) -> Result<Sum<Self, Self>>;
}

macro_rules! elements {
    ($($t:ty)*) => { $(
        impl ContextElement for $t {
            fn load_sum(runtime: &Runtime) -> Result<Sum<f32, Self>> {
                let sum = SumParts::<f32, $t>::new(runtime)?;
                Ok(Box::new(move |stream, parts, count, stride, target| sum.run(stream, parts, count, stride, target)))
            }

            fn load_rounded_sum(runtime: &Runtime) -> Result<Sum<Self, Self>> {
                let sum = SumParts::<$t, $t>::new(runtime)?;
                Ok(Box::new(move |stream, parts, count, stride, target| sum.run(stream, parts, count, stride, target)))
            }
        }
    )* };
}
elements! { bf16 f16 }
