//! Names the pack that is compiled in.
//!
//! A package of a registry holds one. A checkout takes that of the folder `OXTILE_EMBED`, for a program that shall have its kernels inside, or else none. A pack
//! that a packaging left behind in a checkout is not looked at: the developer's kernels are those of the last `cargo xtask build-ptx`.

use std::{env, fs, path::PathBuf};

fn main() {
    println!("cargo::rerun-if-env-changed=OXTILE_EMBED");
    println!("cargo::rerun-if-changed=build.rs");
    let folder = |name| PathBuf::from(env::var_os(name).expect("cargo runs build scripts"));
    let (package, name) = (folder("CARGO_MANIFEST_DIR"), env::var("CARGO_PKG_NAME").expect("cargo names the package"));
    // Cargo writes this file into packages alone.
    let is_packaged = package.join("Cargo.toml.orig").exists();
    let pack = match env::var_os("OXTILE_EMBED").filter(|folder| !folder.is_empty()) {
        _ if is_packaged => package.join("kernels.pack"),
        Some(folder) => PathBuf::from(folder).join(name.trim_start_matches("oxtile-cubins-")).with_extension("pack"),
        None => {
            let none = folder("OUT_DIR").join("kernels.pack");
            fs::write(&none, []).expect("a writable output folder");
            return println!("cargo::rustc-env=OXTILE_PACK={}", none.display());
        }
    };
    assert!(pack.is_file(), "there is no {}: `cargo xtask package` makes packs", pack.display());
    println!("cargo::rerun-if-changed={}", pack.display());
    println!("cargo::rustc-env=OXTILE_PACK={}", pack.display());
}
