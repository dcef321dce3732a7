//! GPUs, through the driver API alone: no toolkit is needed to build or to run.
//!
//! | file | what it holds |
//! |---|---|
//! | `platform` | the back end: each method is one call of the driver |
//! | `driver`, `shared_library` | the driver's library and its errors; whether a library is there |
//! | `context` | devices and their contexts |
//! | `function` | compiled kernels |
//! | `copy`, `word` | copies, and words that streams write and wait for, many in one call |
//! | `pinned` | page-locked host memory |
//! | `tensor_map` | the encoding of tensor maps |
//! | `virtual_memory` | physical allocations and their mappings |
//! | `cublaslt` | matrix products |

mod context;
mod copy;
mod cublaslt;
mod driver;
mod function;
mod pinned;
mod platform;
mod shared_library;
mod tensor_map;
mod virtual_memory;
mod word;

pub(crate) use platform::platform;
