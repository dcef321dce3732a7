//! Compiles the hash of the kernels' sources in, so that the loader can refuse PTX of other sources.

fn main() {
    // Not `env!`: in a copied checkout this program is that of the first, which cargo does not compile again.
    let folder = std::env::var("CARGO_MANIFEST_DIR").expect("cargo runs build scripts");
    match oxtile_build::source_hash::cargo_directives(folder) {
        Ok(directives) => print!("{directives}"),
        Err(error) => panic!("{error}"),
    }
}
