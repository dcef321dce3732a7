//! The runtime's promises, shown on the back end at hand: GPUs where a driver and compiled kernels are found (or
//! `OXTILE_REQUIRE=cuda` asks for them), else the emulator. What only a seeded scheduler can show runs on the emulator
//! alone, under many seeds.
//!
//! | file | what it holds |
//! |---|---|
//! | `buffers`, `streams`, `graphs`, `launches`, `library`, `pack` | what they are named after |
//! | `collectives` | collectives in a world of one rank |
//! | `quantization`, `fp8`, `grouped`, `products` | the host's side of casts, of FP8, of groups; products and attention in graphs |
//! | `faults` | kernels that misbehave on the emulator |
//! | `training` | the host's side of RMS norm, rotary embedding, cross entropy, AdamW, embedding |
//! | `timeline` | what is recorded of streams |
//! | `lent` | streams and memory of other libraries, and calls that only enqueue |
//! | `support` | what the tests share |

mod buffers;
mod collectives;
mod faults;
mod fp8;
mod graphs;
mod grouped;
mod launches;
mod lent;
mod library;
mod pack;
mod products;
mod quantization;
mod streams;
mod support;
mod timeline;
mod training;
