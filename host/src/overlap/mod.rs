//! Products that overlap with the communication which they need. Copy engines move chunks of an operand. A kernel waits for the flag of a chunk before it
//! first reads the chunk. A stream tells the other ranks when the operand has been read.
//!
//! [`AllGatherGemm`] gathers an operand from all members of a team while it multiplies. Which [`Method`] it takes is
//! [chosen](AllGatherConfig::choose) by a model of copies and tiles; `oxtile overlap --plan M,N,K --ranks 4` prints it. [`QuantizedAllGatherGemm`] gathers codes and scales of MXFP8 or NVFP4. [`GemmReduceScatter`] sums a product over the members, each of which gets some rows, [`QuantizedGemmReduceScatter`] the same of operands that are codes and scales, and [`GemmAllReduce`] gives all of them the whole sum.
//! Calls that gather elements, and those that scatter, have two halves, [`GatheredProduct::begin`] and [`ScatteredProduct::begin`], between which other products go on beside the copies.
//!
//! | file | what it holds |
//! |---|---|
//! | `sizes` | sizes over all ranks, and of one rank |
//! | `config` | what is computed, and how it overlaps |
//! | `choice`, `model` | which method is taken, and why; the times of each |
//! | `schedule` | which chunk travels when, which tile is computed when |
//! | `memory` | where operands are gathered, and the flags of their chunks |
//! | `table` | the kernels that wait, and matrices bound to them |
//! | `products` | a product for each shard |
//! | `gathered` | all-gather and product: made, and bound |
//! | `call` | one call of it |
//! | `bulk` | calls in two halves, with other products between them; whether that is faster |
//! | `transfer` | a call's copies to the others, and their flags |
//! | `format` | formats in which an operand travels as codes and scales |
//! | `quantized`, `quantized_call` | all-gather of codes and scales, and product |
//! | `scattered` | product and reduce-scatter |
//! | `reduced` | product and all-reduce |

mod bulk;
mod call;
mod choice;
mod config;
mod format;
mod gathered;
mod memory;
mod model;
mod products;
mod quantized;
mod quantized_call;
mod reduced;
mod scattered;
mod schedule;
mod sizes;
mod table;
mod transfer;

pub use bulk::{BulkChoice, BulkTimes, Gathering, Scattering};
pub use call::GatheredProduct;
pub use choice::{HostTimes, OverlapChoice, Predicted, Rates};
pub use config::{AllGatherConfig, Cut, Gathers, Method, OverlapConfig};
pub use format::{GatherFormat, GatheredFormat};
pub use gathered::AllGatherGemm;
pub use memory::OverlapMemory;
pub use quantized::QuantizedAllGatherGemm;
pub use quantized_call::QuantizedProduct;
pub use reduced::{
    AllReduceChoice, AllReduceConfig, AllReduceMemory, AllReduceMethod, AllReduceTimes, GemmAllReduce, ReduceOperands, ReducedProduct,
};
pub use scattered::{
    GemmReduceScatter, QuantizedGemmReduceScatter, ReduceScatterConfig, ScatterChoice, ScatterMethod, ScatterOperands, ScatterTimes,
    ScatteredProduct,
};
pub use sizes::{Global, Local, Split};
pub use table::GatherOperands;
