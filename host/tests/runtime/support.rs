//! What the tests share.

use oxtile::kernels::copy::{CopyWords, CopyWordsArgs};
use oxtile::runtime::Mode;
use oxtile::{Buffer, EmulatedOptions, Loaded, Result, Runtime, Stream};

/// The seeds that a property of the scheduler is shown under.
pub const SEEDS: std::ops::Range<u64> = 0..32;

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

/// An emulator that does not report what streams forget to order.
pub fn unsanitized(seed: u64, devices: u32) -> Runtime {
    let options = EmulatedOptions { devices, seed: Some(seed), sanitize_streams: false, ..EmulatedOptions::default() };
    Runtime::emulated_with(options).expect("valid options")
}

/// The back end at hand, and the emulator under every seed.
pub fn everywhere() -> impl Iterator<Item = Runtime> {
    std::iter::once(runtime()).chain(SEEDS.map(|seed| emulated(seed, 1)))
}

/// A new stream of a runtime's first device.
pub fn stream(runtime: &Runtime) -> Stream {
    runtime.device(0).and_then(|device| device.stream()).expect("a stream")
}

/// `N` new streams of a runtime's first device.
pub fn streams<const N: usize>(runtime: &Runtime) -> [Stream; N] {
    std::array::from_fn(|_| stream(runtime))
}

/// `target = source` by a kernel.
pub struct Copier(Loaded<CopyWords>);

impl Copier {
    pub fn new(runtime: &Runtime) -> Self {
        Self(runtime.load().expect("the copy kernel"))
    }

    #[track_caller]
    pub fn copy(&self, stream: &Stream, source: &Buffer<u32>, target: &mut Buffer<u32>) -> Result<()> {
        self.0.launch(stream, CopyWordsArgs { source: source.view(), target: target.view_mut() })
    }
}

/// `length` numbers that differ by place and salt.
pub fn numbers(length: u32, salt: u32) -> Vec<u32> {
    (0..length).map(|i| i.wrapping_mul(0x9e37_79b9) ^ salt).collect()
}

/// A buffer of [`numbers`] and the numbers, with the copy to it done.
pub fn filled(stream: &Stream, length: u32, salt: u32) -> (Buffer<u32>, Vec<u32>) {
    let numbers = numbers(length, salt);
    (Buffer::from_slice(stream, &numbers).expect("a buffer"), numbers)
}

/// The same memory again, whose uses the runtime does not connect with the first buffer's.
pub fn alias<T: oxtile::num::Pod>(buffer: &Buffer<T>) -> Buffer<T> {
    // SAFETY: the tests keep the first buffer while they use the alias, and order the two themselves.
    unsafe { Buffer::borrow_raw(&buffer.device(), buffer.address(), buffer.len()) }.expect("an alias")
}

/// Everything may be shared among threads.
const _: () = {
    const fn shared<T: Send + Sync>() {}
    shared::<Runtime>();
    shared::<Stream>();
    shared::<oxtile::Event>();
    shared::<oxtile::Graph>();
    shared::<oxtile::Error>();
    shared::<Buffer<u32>>();
    shared::<oxtile::PinnedBuffer<u32>>();
    shared::<Loaded<CopyWords>>();
};
