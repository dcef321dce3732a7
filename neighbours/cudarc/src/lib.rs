//! Oxtile on [cudarc](https://docs.rs/cudarc)'s streams and device memory. Nothing is copied, and the host waits for nothing.
//!
//! ```no_run
//! use cudarc::driver::CudaContext;
//! use half::bf16;
//! use oxtile::Runtime;
//! use oxtile::attention::{Attention, AttentionConfig, Inputs, Outputs};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let theirs = CudaContext::new(0)?.new_stream()?;
//! let [q, k, v] = [1, 2, 3].map(|_| theirs.alloc_zeros::<bf16>(8 * 4096 * 128).unwrap());
//! let (mut out, mut log_sum_exp) = (theirs.alloc_zeros::<bf16>(q.len())?, theirs.alloc_zeros::<f32>(8 * 4096)?);
//! let runtime = Runtime::cuda()?;
//! oxtile_cudarc::on(&runtime, &theirs, |on| {
//!     let (q, k, v) = (on.read(&q)?, on.read(&k)?, on.read(&v)?);
//!     let (mut out, mut log_sum_exp) = (on.write(&mut out)?, on.write(&mut log_sum_exp)?);
//!     let config = AttentionConfig { queries: 4096, keys: 4096, heads: 8, key_heads: 8, head_size: 128, ..AttentionConfig::default() };
//!     let outputs = Outputs::new(out.view_mut(), log_sum_exp.view_mut());
//!     Attention::new(&runtime, config)?.forward(on.stream(), Inputs::new(q.view(), k.view(), v.view()), outputs)?;
//!     Ok::<_, oxtile_cudarc::Error>(())
//! })?;
//! # Ok(()) }
//! ```
//!
//! [`on`] makes a stream of cudarc a stream of Oxtile for the length of a closure. There [`On::read`] and [`On::write`] make slices and views of
//! cudarc [`Buffer`](oxtile::Buffer)s, which any part of Oxtile takes. When they are dropped, cudarc knows of the use: its events are recorded, so that its own
//! later work comes after it on every stream, and its memory is freed after it.
//!
//! | cudarc's stream | Oxtile's work goes |
//! |---|---|
//! | a stream that was created, or the default stream | to that stream |
//! | the per-thread stream, as candle's default | to a stream of Oxtile's for each thread, after what the per-thread stream holds; what comes next there waits for it |
//!
//! Such a buffer is used on [`On::stream`] alone, and in no graph of Oxtile's: both are refused by [`Error`]. For what lives longer, own memory is right, or
//! [`Buffer::lent`](oxtile::Buffer::lent).
//!
//! A buffer does not outlive its slice:
//!
//! ```compile_fail
//! # use std::sync::Arc;
//! # use cudarc::driver::CudaStream;
//! # fn f(runtime: &oxtile::Runtime, stream: &Arc<CudaStream>) -> Result<(), oxtile_cudarc::Error> {
//! oxtile_cudarc::on(runtime, stream, |on| {
//!     let slice = stream.alloc_zeros::<f32>(4).unwrap();
//!     let read = on.read(&slice)?;
//!     drop(slice); // error[E0505]: cannot move out of `slice` because it is borrowed
//!     drop(read);
//!     Ok(())
//! })
//! # }
//! ```
//!
//! nor the closure:
//!
//! ```compile_fail
//! # use std::sync::Arc;
//! # use cudarc::driver::{CudaSlice, CudaStream};
//! # fn f(runtime: &oxtile::Runtime, stream: &Arc<CudaStream>, slice: &CudaSlice<f32>) -> Result<(), oxtile_cudarc::Error> {
//! let mut kept = None;
//! oxtile_cudarc::on(runtime, stream, |on| {
//!     kept = Some(on.read(slice)?); // error: borrowed data escapes outside of closure
//!     Ok::<_, oxtile_cudarc::Error>(())
//! })
//! # }
//! ```
//!
//! and what is written is lent once:
//!
//! ```compile_fail
//! # use std::sync::Arc;
//! # use cudarc::driver::{CudaSlice, CudaStream};
//! # fn f(runtime: &oxtile::Runtime, stream: &Arc<CudaStream>, slice: &mut CudaSlice<f32>) -> Result<(), oxtile_cudarc::Error> {
//! oxtile_cudarc::on(runtime, stream, |on| {
//!     let read = on.read(&*slice)?;
//!     let write = on.write(&mut *slice)?; // error[E0502]: cannot borrow `*slice` as mutable
//!     drop((read, write));
//!     Ok::<_, oxtile_cudarc::Error>(())
//! })
//! # }
//! ```
//!
//! and does not leave the closure in exchange for another buffer:
//!
//! ```compile_fail,E0596
//! # use std::sync::Arc;
//! # use cudarc::driver::{CudaSlice, CudaStream};
//! # fn f(runtime: &oxtile::Runtime, stream: &Arc<CudaStream>, slice: &mut CudaSlice<f32>) -> Result<(), oxtile_cudarc::Error> {
//! oxtile_cudarc::on(runtime, stream, |on| {
//!     let (mut write, mut own) = (on.write(&mut *slice)?, oxtile::Buffer::<f32>::zeros(on.stream(), 4).unwrap());
//!     std::mem::swap(&mut *write, &mut own); // error[E0596]: cannot borrow data in dereference of `Write` as mutable
//!     Ok::<_, oxtile_cudarc::Error>(())
//! })
//! # }
//! ```
//!
//! | file | what it holds |
//! |---|---|
//! | `on` | the stream of a closure, borrowed or forked |
//! | `loan` | slices as buffers, and the events at both ends |
//! | `slice` | which types of cudarc are lent |
//! | `error` | what can go wrong |

mod error;
mod loan;
mod on;
mod slice;

pub use cudarc;
pub use error::{Error, Result};
pub use loan::{Loan, Read, Write};
pub use on::{On, device, on};
pub use slice::{Source, Target};
