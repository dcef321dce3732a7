//! Finds every kernel of Oxtile inside this program, for GPUs that it has none of. `cargo xtask package --check` builds it from the packages alone.

use std::time::Instant;

use oxtile::kernels::KERNELS;
use oxtile::runtime::{KernelLibrary, KernelPlace};
use oxtile::{Error, Runtime};

fn main() {
    let library = KernelLibrary::default();
    let start = Instant::now();
    let place = library.locate("oxtile-kernels").expect("packs that can be read");
    let Some(KernelPlace::Program(counts)) = place else { panic!("the kernels are not inside the program: {place:?}") };
    for (arch, capability) in [("sm_80", (8, 0)), ("sm_90a", (9, 0)), ("sm_100a", (10, 0))] {
        let (mut found, mut bytes) = (0, 0);
        let all = KERNELS.iter().flat_map(|family| family.instances);
        for kernel in all.filter(|kernel| kernel.requires.is_empty() || kernel.requires == arch) {
            let images = library.find(kernel, capability).unwrap_or_else(|error| panic!("{error}"));
            let code = images[0].bytes().expect("a cubin inside the program");
            assert!(images[0].path.starts_with("this program") && code.starts_with(b"\x7fELF"), "{images:?}");
            (found, bytes) = (found + 1, bytes + code.len());
        }
        assert!(counts.contains(&(arch.to_owned(), found)), "{found} kernels for {arch}, but there are {counts:?}");
        println!("{found} kernels for {arch}, {bytes} bytes");
    }
    println!("found in {:.0} ms", start.elapsed().as_secs_f64() * 1e3);
    // This program has no emulator, and the error names the feature.
    let error = Runtime::emulated(1).expect_err("there is no emulator");
    assert!(matches!(error, Error::Invalid { .. }) && error.to_string().contains("enable the feature `emulator`"), "{error}");
    if let Err(error) = Runtime::auto() {
        assert!(error.to_string().contains("CUDA is not available") && error.to_string().contains("feature `emulator`"), "{error}");
    }
}
