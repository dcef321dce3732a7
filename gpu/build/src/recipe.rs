//! The compiler and its flags: the one place where they stand.

/// The release of rustc whose code the ratchet describes.
pub const PINNED_RELEASE: &str = "1.95.0";

/// The release of ptxas whose register and instruction counts the ratchet describes.
pub const PINNED_PTXAS: &str = "13.0.88";

/// The target triple of device code.
pub const TARGET: &str = "nvptx64-nvidia-cuda";

/// Set while rustc runs on a kernel crate for the GPU, so that its own build script neither starts the same build again nor compiles the
/// hash of all sources in, which would compile each family again after any edit.
pub const NESTED: &str = "OXTILE_BUILD_NESTED";

/// Code generation flags for every crate of the module, core included. After `--` they would reach the last crate only,
/// and barriers in the others would be duplicated.
///
/// - `-JumpThreading`: this MIR pass duplicates convergent calls (barriers) into divergent branches;
/// - `-unroll-threshold`: register tiles live in registers only once every index is a constant;
/// - `-unroll-runtime=false`: a loop with a run-time bound is not worth four copies of its body.
///
/// No `-fp-contract`: the host never fuses a multiplication and an addition, so the device may not either.
pub const CODEGEN_FLAGS: [&str; 2] = ["-Zmir-enable-passes=-JumpThreading", "-Cllvm-args=-unroll-threshold=100000 -unroll-runtime=false"];

/// The cargo profile of device code: one module, nothing left to link, no unwinding.
pub const PROFILE: [&str; 4] =
    ["profile.ptx.inherits=\"release\"", "profile.ptx.lto=\"fat\"", "profile.ptx.codegen-units=1", "profile.ptx.panic=\"abort\""];

/// Flags of the kernel crate itself: `#[kernel]` needs these features, and a user's crate should not have to name them.
pub const CRATE_FLAGS: [&str; 5] = [
    "-Zcrate-attr=feature(abi_ptx,asm_experimental_arch)",
    "-Zcrate-attr=allow(internal_features,unused_features)",
    "--check-cfg=cfg(oxtile_family,values(any()))",
    "--check-cfg=cfg(oxtile_kernel,values(any()))",
    "--check-cfg=cfg(oxtile_without,values(any()))",
];
