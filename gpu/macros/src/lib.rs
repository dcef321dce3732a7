//! `#[kernel]`, `#[derive(Parameter)]` and `#[derive(SharedStorage)]`, re-exported by `oxtile_tile`; documented there.
//!
//! | file | what it holds |
//! |---|---|
//! | `kernel`, `instances` | `#[kernel]`, and which instances it is compiled for |
//! | `parameter`, `shared_storage` | the derives |
//! | `names` | names of types, of families, of architectures |

mod instances;
mod kernel;
mod names;
mod parameter;
mod shared_storage;

use proc_macro::TokenStream;
use syn::parse_macro_input;

/// Turns a function into a GPU kernel that also runs on the emulator.
///
/// ```text
/// #[kernel(threads = 256, grid = grid)]
/// #[instances(T = [bf16, f32])]
/// pub fn scale<T: Float>(input: Global<T>, output: GlobalMut<T>, factor: f32) { /* ... */ }
///
/// fn grid<T: Float>(args: &ScaleArgs<'_, T>, device: &DeviceLimits) -> Result<Grid, LaunchError> { /* ... */ }
/// ```
///
/// generates, beside the function itself,
/// - `Scale<T>`, the type that names the kernel: `runtime.load::<Scale<bf16>>()`;
/// - `ScaleArgs<'a, T>`, one public field a parameter, the host's side of it, and `marker: PhantomData` where the
///   function has type parameters that no argument names;
/// - `impl Kernel for Scale<bf16>` and every other listed instance;
/// - `SCALE`, a `KernelFamily` that lists the instances, for the crate's registry;
/// - for nvptx64, one `extern "ptx-kernel"` entry an instance (`scale__bf16`) and one comment line
///   of metadata that `oxtile-build` reads.
///
/// Options: `threads` (required; constant expression), `grid` (required; a function that checks the
/// arguments and derives the grid), `shared` (a type that derives `SharedStorage`), `min_blocks`
/// (blocks that must fit on a multiprocessor, default 1), `cluster` (blocks a cluster, default 1),
/// `requires` (the oldest architecture that has what it uses, such as `sm_90` for bulk copies; with a letter, such as `sm_90a` for
/// wgmma, that architecture alone: the instance is left out for others; kernels that require `sm_90` or later begin before what the launch
/// ahead stored is in memory, and wait for it first). Expressions
/// may name the function's generic parameters.
///
/// `#[instances(T = [..], D = [..])]` lists the values of each generic parameter; the instances
/// are their product, and several attributes add up.
#[proc_macro_attribute]
pub fn kernel(options: TokenStream, item: TokenStream) -> TokenStream {
    let options = parse_macro_input!(options as kernel::Options);
    let function = parse_macro_input!(item as syn::ItemFn);
    kernel::expand(options, function).unwrap_or_else(syn::Error::into_compile_error).into()
}

/// Lays a struct of shared-memory handles out in the block's arena.
///
/// Every field is a type that implements `SharedStorage` (arrays of such types too). The derive
/// gives the struct its `SIZE`, its `ALIGN` and `at(offset)`, fields in order, each aligned.
#[proc_macro_derive(SharedStorage)]
pub fn shared_storage(item: TokenStream) -> TokenStream {
    let item = parse_macro_input!(item as syn::DeriveInput);
    shared_storage::expand(item).unwrap_or_else(syn::Error::into_compile_error).into()
}

/// Makes a struct of kernel parameters one kernel parameter.
///
/// ```text
/// #[derive(Clone, Copy, Parameter)]
/// pub struct Sequences { pub ends: Global<u32>, pub offsets: Global<u32>, pub padded: bool }
/// ```
///
/// A kernel takes `sequences: Sequences`; the entry takes the fields' words one by one, as if they were its own parameters. The host gives a
/// `SequencesArgument<'a> { ends: DeviceView<'a, u32>, .. }`, or the struct itself where all fields are numbers. Errors and reports name
/// `sequences.ends`. Structs may hold such structs.
///
/// Under `#[parameter(optional)]` `Option<Sequences>` is a parameter too; the first field is then a view (or such a struct), by
/// whose address the kernel knows whether it is there.
#[proc_macro_derive(Parameter, attributes(parameter))]
pub fn parameter(item: TokenStream) -> TokenStream {
    let item = parse_macro_input!(item as syn::DeriveInput);
    parameter::expand(item).unwrap_or_else(syn::Error::into_compile_error).into()
}
