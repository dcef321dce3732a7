//! Benchmarks of Oxtile.
