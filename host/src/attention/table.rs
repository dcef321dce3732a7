//! Rows of the tables of kernels.

use oxtile_tile::launch::{Kernel, Signature};

use crate::runtime::{Loaded, Result, Runtime};

/// Kernels that are loaded together.
pub(super) trait Load: Sized {
    /// Loads them.
    fn load(runtime: &Runtime) -> Result<Self>;
}

impl<K: Kernel + Signature> Load for Loaded<K> {
    fn load(runtime: &Runtime) -> Result<Self> {
        runtime.load()
    }
}

macro_rules! tuples {
    ($($($kernels:ident)*;)*) => { $(
        impl<$($kernels: Load),*> Load for ($($kernels,)*) {
            fn load(runtime: &Runtime) -> Result<Self> {
                Ok(($($kernels::load(runtime)?,)*))
            }
        }
    )* };
}

tuples! { A B; A B C; A B C D; A B C D E; A B C D E F G; }

/// Rows of a table: the decision, the queries and keys of a step, the main kernel, and the function that binds tensors to the kernels it takes.
macro_rules! rows {
    ($decisions:ident: $([$($decision:tt)*] [$queries:expr, $keys:expr] $kernel:ty: $bind:expr;)*) => {
        &[$(crate::choice::Entry {
            decision: $decisions::$($decision)*,
            name: <$kernel as oxtile_tile::launch::Kernel>::INFO.name,
            tile: [$queries as u64, $keys as u64],
            load: |runtime| load_with(runtime, $bind),
        }),*]
    };
}

pub(super) use rows;
