//! Compiles the hash of the kernels' sources in, so that the loader can refuse PTX of other sources.

fn main() {
    match oxtile_build::source_hash::cargo_directives(env!("CARGO_MANIFEST_DIR")) {
        Ok(directives) => print!("{directives}"),
        Err(error) => panic!("{error}"),
    }
}
