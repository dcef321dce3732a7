//! GPUs, through the driver API alone: no toolkit is needed to build or to run.

mod context;
mod copy;
mod cublaslt;
mod driver;
mod function;
mod pinned;
mod platform;
mod tensor_map;
mod virtual_memory;
mod word;

pub(crate) use platform::platform;
