//! Groups: any number of matrices, such as the experts of a mixture, quantized, dequantized, laid out and gathered by a number of
//! launches that does not depend on their number.
//!
//! The amax of an NVFP4 matrix that is split among ranks is agreed on before any rank casts. The types keep that order: a
//! [`LocalAmax`] becomes a [`GlobalAmax`] by one reduction for all members, which a [`Quantized`] needs. A rank
//! without rows takes part. What is gathered is compact: there is no gather of interleaved scales, which do not concatenate.
//!
//! | file | what it holds |
//! |---|---|
//! | `table`, `tensors` | where the members of a group lie |
//! | `format` | what the formats have in common |
//! | `fp8`, `mxfp8`, `nvfp4` | the casts of each format |
//! | `quantized` | groups of quantized matrices |
//! | `interleave` | the layouts of their scales |
//! | `gather` | shards of all ranks to the whole |
//!
//! ```
//! use oxtile::comm::SingleRank;
//! use oxtile::quantize::grouped::{GatherShards, GroupedNvfp4, Nvfp4Format, TensorGroup};
//! use oxtile::quantize::{Direction, MultiAmax};
//! use oxtile::{Buffer, Result, Runtime};
//!
//! # fn main() -> Result<()> {
//! let runtime = Runtime::checked(1)?; // or Runtime::cuda()
//! let (device, stream) = (runtime.device(0)?, runtime.device(0)?.stream()?);
//! let casts = GroupedNvfp4::<f32>::new(&runtime)?;
//! let experts = [Buffer::from_slice(&stream, &[1.5_f32; 16 * 64])?, Buffer::from_slice(&stream, &[-6.0_f32; 48 * 32])?];
//!
//! // One launch for all members, one collective, one launch.
//! let group = TensorGroup::new(&stream, &[(experts[0].view(), [16, 64]), (experts[1].view(), [48, 32])])?;
//! let communicator = SingleRank::new(&device);
//! let amax = MultiAmax::new(&runtime)?.local_amax(&stream, &group)?.reduce(&communicator, &stream)?;
//! let quantized = casts.quantize(&stream, &group, Direction::Columns, &amax)?;
//!
//! let whole = GatherShards::<Nvfp4Format>::new(&runtime)?.run(&communicator, &stream, &quantized, &[16, 48])?;
//! let restored = casts.dequantize(&stream, &whole)?;
//! assert_eq!(whole.amax().slots().to_vec(&stream)?, [1.5, 6.0]);
//! assert_eq!(restored.to_vec(&stream, 1)?, experts[1].to_vec(&stream)?);
//! # Ok(()) }
//! ```

mod format;
mod fp8;
mod gather;
mod interleave;
mod mxfp8;
mod nvfp4;
mod quantized;
mod table;
mod tensors;

pub use format::GroupFormat;
pub use fp8::GroupedFp8;
pub use gather::{GatherScratch, GatherShards, RowShards};
pub use interleave::InterleaveGroup;
pub use mxfp8::GroupedMxfp8;
pub use nvfp4::GroupedNvfp4;
pub use quantized::{CodesAndScales, Quantized};
pub use tensors::{Matrices, TensorGroup};

pub use super::format::{Format, Fp8Format, Mxfp8Format, Nvfp4Format};
pub use super::split_phase::{GlobalAmax, LocalAmax};
