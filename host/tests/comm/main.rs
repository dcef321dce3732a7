//! Ranks of the virtual cluster, on the public interface.

mod collectives;
mod mismatches;
mod sanitizer;
mod support;
