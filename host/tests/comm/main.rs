//! Ranks of the virtual cluster, on the public interface.

mod collectives;
mod exchange;
mod graphs;
mod mismatches;
mod one_sided;
mod sanitizer;
mod support;
mod symmetric;
mod timeline;
