//! Rows of the tables of kernels.

use std::sync::Arc;

use oxtile_tile::launch::{Kernel, Signature};

use crate::runtime::{Device, Loaded, Result, Runtime};

/// Kernels that are loaded together.
pub(super) trait Load: Sized {
    /// Finds them.
    fn load(runtime: &Runtime) -> Result<Self>;

    /// Loads them on a device, which the first launch there does else ([`Loaded::prepare`]).
    fn prepare(&self, device: &Device) -> Result<()>;
}

/// Kernels that are found and not loaded on a device yet, and what binds tensors to them.
#[doc(hidden)]
pub struct Unloaded<B> {
    bind: B,
    prepare: Prepare,
}

type Prepare = Box<dyn Fn(&Device) -> Result<()> + Send + Sync>;

impl<B> Unloaded<B> {
    /// Finds kernels, for what binds tensors to them.
    pub(super) fn new<K: Load + Send + Sync + 'static>(runtime: &Runtime, bind: impl FnOnce(Arc<K>) -> B) -> Result<Self> {
        let kernels = Arc::new(K::load(runtime)?);
        let bind = bind(Arc::clone(&kernels));
        Ok(Self { bind, prepare: Box::new(move |device| kernels.prepare(device)) })
    }

    /// Loads the kernels on a device: before another rank's kernel may wait for this one's.
    pub(super) fn load_on(self, device: &Device) -> Result<B> {
        (self.prepare)(device)?;
        Ok(self.bind)
    }
}

impl<K: Kernel + Signature> Load for Loaded<K> {
    fn load(runtime: &Runtime) -> Result<Self> {
        runtime.load()
    }

    fn prepare(&self, device: &Device) -> Result<()> {
        Loaded::prepare(self, device)
    }
}

macro_rules! tuples {
    ($($($kernels:ident)*;)*) => { $(
        impl<$($kernels: Load),*> Load for ($($kernels,)*) {
            fn load(runtime: &Runtime) -> Result<Self> {
                Ok(($($kernels::load(runtime)?,)*))
            }

            fn prepare(&self, device: &Device) -> Result<()> {
                #[expect(non_snake_case, reason = "a kernel has the name of its type")]
                let ($($kernels,)*) = self;
                $($kernels.prepare(device)?;)*
                Ok(())
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
