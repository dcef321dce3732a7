//! What the tests share.

use oxtile::kernels::copy::{CopyWords, CopyWordsArgs};
use oxtile::runtime::{Buffer, EmulatedOptions, Loaded, Mode, Result, Runtime, Stream};

/// The seeds that a property of the scheduler is shown under.
pub const SEEDS: u64 = 32;

/// The back end at hand.
pub fn runtime() -> Runtime {
    if std::env::var("OXTILE_REQUIRE").is_ok_and(|required| required == "cuda") {
        return Runtime::cuda().expect("OXTILE_REQUIRE=cuda asks for a GPU");
    }
    Runtime::auto().expect("the emulator is always there").runtime
}

/// An emulator with every detector on.
pub fn emulated(seed: u64, devices: u32) -> Runtime {
    let options = EmulatedOptions { devices, mode: Mode::Check, seed: Some(seed), ..EmulatedOptions::default() };
    Runtime::emulated_with(options).expect("valid options")
}

/// The stream of a runtime's first device.
pub fn stream(runtime: &Runtime) -> Stream {
    runtime.device(0).and_then(|device| device.stream()).expect("a stream")
}

/// Enqueues `target = source`, as a kernel.
pub fn launch_copy(kernel: &Loaded<CopyWords>, stream: &Stream, source: &Buffer<u32>, target: &mut Buffer<u32>) -> Result<()> {
    kernel.launch(stream, CopyWordsArgs { source: source.view(), target: target.view_mut() })
}

/// `length` different numbers.
pub fn numbers(length: u32, salt: u32) -> Vec<u32> {
    (0..length).map(|i| i.wrapping_mul(0x9e37_79b9) ^ salt).collect()
}
