//! The Oxtile kernel DSL: thread identity, memory views, barriers, pipelines, number formats.
#![no_std]
#![warn(missing_docs)]
#![cfg_attr(target_arch = "nvptx64", feature(asm_experimental_arch))]

pub mod arch;
pub mod num;
