//! What the host knows of a kernel: its [`KernelInfo`], its arguments, its grid.
//!
//! Nothing here knows of streams or devices' handles. A runtime lends memory as [`DeviceView`]s,
//! each with an opaque owner that it gets back through [`KernelArgs::accesses`].
//!
//! | file | what it holds |
//! |---|---|
//! | `grid` | the grid of a launch, what it may depend on, and why there is none |
//! | `parameter`, `optional` | what a kernel may take: values, views, structs of them, and what may be absent |
//! | `parameter_name` | its name in reports and errors |
//! | `word_list` | the PTX parameters of an entry as types |
//! | `words` | packed arguments |
//! | `view` | device memory as the host lends it |

use crate::arch::{Cluster, Target};

mod grid;
mod optional;
mod parameter;
mod parameter_name;
mod view;
mod word_list;
mod words;

pub use grid::{DeviceLimits, Grid, LaunchError, Problem};
pub use optional::OptionalParameter;
pub use parameter::Parameter;
pub use parameter_name::ParameterName;
pub use view::{
    BufferAccess, DeviceFlags, DeviceSlots, DeviceTable, DeviceTensorMap, DeviceTensorMapMut, DeviceView, DeviceViewMut, Meanwhile, Owner,
};
pub use word_list::WordList;
pub use words::{ArgumentWords, WordReader};

/// What a kernel takes, of any type parameters. Implemented by `#[kernel]` for instances and all others, so that generic code which launches
/// `X<T>` states `X<T>: Kernel` and no more.
pub trait Signature {
    /// The argument struct, one field a parameter.
    type Args<'a>: KernelArgs;
}

/// A kernel instance: what to load, what to pass, how many blocks. Implemented by `#[kernel]`.
///
/// # Safety
/// A launch trusts this trait alone, so the implementor promises that
/// - the entry [`INFO.name`](KernelInfo::name) of the package's PTX takes exactly the words that
///   [`Args::pack`](KernelArgs::pack) appends, in that order and of those types;
/// - [`emulate`](Self::emulate) reads the same words and runs the same function;
/// - [`INFO`](Self::INFO) states what the entry was compiled for: its threads, cluster and shared memory.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a compiled kernel instance",
    note = "add its type parameters to the #[instances] of the kernel"
)]
pub unsafe trait Kernel {
    /// The compile-time facts of this instance.
    const INFO: KernelInfo;

    /// Checks the arguments against each other and derives the grid from them.
    ///
    /// # Errors
    /// The first argument that does not fit, with what was expected.
    fn grid(args: &<Self as Signature>::Args<'_>, device: &DeviceLimits) -> Result<Grid, LaunchError>
    where
        Self: Signature;

    /// Runs one emulated thread on packed arguments. Called by the emulator's launcher alone.
    fn emulate(words: &[u64]);
}

/// The compile-time facts of a kernel instance. `oxtile-build` finds the same in the PTX.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelInfo {
    /// The entry's name, such as `amax__bf16`.
    pub name: &'static str,
    /// The source file or folder, such as `amax`: one ratchet, one compile.
    pub family: &'static str,
    /// The Cargo package the kernel belongs to: kernels are looked up by it.
    pub package: &'static str,
    /// Hash of the sources the host side was compiled from; empty where the package has none ([`source_hash!`](crate::source_hash)).
    pub source_hash: &'static &'static str,
    /// Threads a block.
    pub threads: u32,
    /// Blocks that must be resident on a multiprocessor; caps the registers of a thread.
    pub min_blocks: u32,
    /// Blocks a cluster; 1 means none.
    pub cluster: u32,
    /// Bytes of dynamic shared memory.
    pub shared_bytes: u32,
    /// The architecture it needs, such as `sm_90a`; empty for any.
    pub requires: &'static str,
    /// The names of the parameters, in order.
    pub parameters: &'static [&'static str],
    /// The words that they are packed into: the PTX parameters of the entry.
    pub words: u32,
}

/// The hash of a package that has none. For the macro.
#[doc(hidden)]
pub static OXTILE_SOURCE_HASH: &str = "";

/// Compiles the hash of a kernel crate's sources in, so that stale kernels are refused by name. It stands in the crate's root, once; the
/// build script sets `OXTILE_SOURCE_HASH` (`oxtile_build::source_hash::cargo_directives`).
///
/// The hash is one static, which the facts of all kernels point to: an edit of one kernel compiles that kernel again, and not all that
/// names a kernel.
#[macro_export]
macro_rules! source_hash {
    () => {
        /// The hash of the sources that this crate was compiled from.
        pub static OXTILE_SOURCE_HASH: &str =
            env!("OXTILE_SOURCE_HASH", "the build script of a kernel crate prints `oxtile_build::source_hash::cargo_directives`");
    };
}

/// Waits until the launches before this one have ended: what a kernel that [begins early](KernelInfo::begins_early) does first. For the macro.
#[doc(hidden)]
#[inline(always)]
pub fn wait_for_launches() {
    <Target as Cluster>::wait_for_launches();
}

impl KernelInfo {
    /// Whether its blocks may begin when those of the launch before have ended, and what these stored is not yet in memory: the entry waits for that, before anything
    /// else. So do all kernels that require sm_90 or later. CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
    pub const fn begins_early(&self) -> bool {
        matches!(self.requires.as_bytes(), [b's', b'm', b'_', b'9' | b'1', ..])
    }

    /// These facts, if a multiprocessor can hold such a block; `#[kernel]` asks at compile time. For the macro.
    ///
    /// Limits: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", 9.0; a cluster of more
    /// than 8 blocks is not portable.
    ///
    /// # Panics
    /// If not, naming the option of `#[kernel]` that is wrong.
    #[doc(hidden)]
    #[track_caller]
    pub const fn checked(self) -> Self {
        assert!(
            self.threads >= 32 && self.threads.is_multiple_of(32),
            "`threads` must be a multiple of 32: a block is made of whole warps"
        );
        assert!(self.threads <= 1024, "`threads` must be at most 1024: the most that a block can have");
        assert!(self.shared_bytes <= SHARED_BYTES, "`shared` must be at most 227 KiB: the most that a block can have");
        assert!(self.cluster >= 1 && self.cluster <= 8, "`cluster` must be 1 to 8 blocks: larger ones are not portable");
        assert!(self.min_blocks >= 1 && self.min_blocks <= 32, "`min_blocks` must be 1 to 32: the most that a multiprocessor holds");
        assert!(
            self.min_blocks * self.threads <= 2048,
            "`min_blocks` times `threads` must be at most 2048: the threads of a multiprocessor"
        );
        // The driver keeps 1 KiB a block to itself.
        assert!(
            self.min_blocks * (self.shared_bytes + 1024) <= SHARED_BYTES + 1024,
            "`min_blocks` times `shared`, and 1 KiB a block, must be at most 228 KiB: the shared memory of a multiprocessor"
        );
        assert!(
            self.words as usize <= ArgumentWords::CAPACITY,
            "the parameters must be at most 64 words: the most that an entry takes; a view is two, a number or a tensor map is one"
        );
        self
    }
}

/// Bytes of shared memory that one block can have.
pub(crate) const SHARED_BYTES: u32 = 227 * 1024;

/// All compiled instances of one kernel function.
#[derive(Debug, Clone, Copy)]
pub struct KernelFamily {
    /// The function's name.
    pub name: &'static str,
    /// Its instances.
    pub instances: &'static [KernelInfo],
}

/// The arguments of one launch. Implemented by `#[kernel]`.
///
/// # Safety
/// The implementor promises that [`pack`](Self::pack) appends no address of memory that
/// [`accesses`](Self::accesses) does not name, and that every access has the bounds and the `writes` of what the kernel
/// does: a runtime orders and keeps alive what is named, and nothing else.
pub unsafe trait KernelArgs {
    /// Appends the words that the kernel's parameters are unpacked from, in order.
    fn pack(&self, words: &mut ArgumentWords);
    /// Names every buffer that the kernel may touch.
    fn accesses<'s>(&'s self, visit: &mut dyn FnMut(BufferAccess<'s>));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_of_sm_90_and_later_begin_early() {
        let begins_early = |requires| {
            let info = KernelInfo {
                name: "kernel",
                family: "family",
                package: "package",
                source_hash: &OXTILE_SOURCE_HASH,
                threads: 32,
                min_blocks: 1,
                cluster: 1,
                shared_bytes: 0,
                requires,
                parameters: &[],
                words: 0,
            };
            info.begins_early()
        };
        assert_eq!(["sm_90", "sm_90a", "sm_100a", "sm_121"].map(begins_early), [true; 4]);
        assert_eq!(["", "sm_80", "sm_89"].map(begins_early), [false; 3]);
    }
}
