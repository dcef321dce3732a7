//! Compiles any crate that uses #[kernel] to PTX, lints and assembles it.
