//! The runtime's promises, shown on the back end at hand: GPUs where a driver and compiled kernels are found (or
//! `OXTILE_REQUIRE=cuda` asks for them), else the emulator. What only a seeded scheduler can show runs on the emulator
//! alone, under many seeds.

mod buffers;
mod collectives;
mod faults;
mod fp8;
mod graphs;
mod grouped;
mod launches;
mod library;
mod products;
mod quantization;
mod streams;
mod support;
mod timeline;
