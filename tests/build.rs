//! Exports the functions of the case binary: kernels that are compiled after it (`cargo xtask kernel NAME --emulate`) call them.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-link-arg-bin=oxtile-tests=-rdynamic");
}
