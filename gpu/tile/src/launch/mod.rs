//! What the host knows of a kernel: its [`KernelInfo`], its arguments, its grid.
//!
//! Nothing here knows of streams or devices' handles. A runtime lends memory as [`DeviceView`]s,
//! each with an opaque owner that it gets back through [`KernelArgs::accesses`].

mod grid;
mod parameter;
mod view;
mod words;

pub use grid::{DeviceLimits, Grid, LaunchError, Problem};
pub use parameter::Parameter;
pub use view::{BufferAccess, DeviceTable, DeviceTensorMap, DeviceTensorMapMut, DeviceView, DeviceViewMut, Owner};
pub use words::{ArgumentWords, WordReader};

/// A kernel instance: what to load, what to pass, how many blocks. Implemented by `#[kernel]`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a compiled kernel instance",
    note = "add its type parameters to the #[instances] of the kernel"
)]
pub trait Kernel {
    /// The compile-time facts of this instance.
    const INFO: KernelInfo;
    /// The argument struct, one field a parameter.
    type Args<'a>: KernelArgs;

    /// Checks the arguments against each other and derives the grid from them.
    ///
    /// # Errors
    /// The first argument that does not fit, with what was expected.
    fn grid(args: &Self::Args<'_>, device: &DeviceLimits) -> Result<Grid, LaunchError>;

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
    /// Hash of the sources the host side was compiled from; empty where the package sets none.
    pub source_hash: &'static str,
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
}

/// All compiled instances of one kernel function.
#[derive(Debug, Clone, Copy)]
pub struct KernelFamily {
    /// The function's name.
    pub name: &'static str,
    /// Its instances.
    pub instances: &'static [KernelInfo],
}

/// The arguments of one launch.
pub trait KernelArgs {
    /// Appends the words that the kernel's parameters are unpacked from, in order.
    fn pack(&self, words: &mut ArgumentWords);
    /// Names every buffer that the kernel may touch.
    fn accesses<'s>(&'s self, visit: &mut dyn FnMut(BufferAccess<'s>));
}
