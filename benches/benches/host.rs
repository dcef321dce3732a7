//! Host paths, by criterion: what a launch costs before it reaches a device.

use criterion::{Criterion, criterion_group, criterion_main};
use oxtile::runtime::{Buffer, Runtime};
use oxtile_kernels::copy::{CopyWords, CopyWordsArgs};
use oxtile_tile::launch::{ArgumentWords, DeviceLimits, Kernel, KernelArgs};
use std::hint::black_box;

fn host_paths(criterion: &mut Criterion) {
    let runtime = Runtime::emulated_fast(1).expect("an emulated runtime");
    let stream = runtime.device(0).and_then(|device| device.stream()).expect("a stream");
    let source = Buffer::<u32>::zeros(&stream, 1024).expect("a buffer");
    let mut target = Buffer::<u32>::zeros(&stream, 1024).expect("a buffer");

    let limits = DeviceLimits { multiprocessors: 132, shared_bytes_per_block: 227 << 10 };
    criterion.bench_function("pack arguments and derive the grid", |bencher| {
        let args = CopyWordsArgs { source: source.view(), target: target.view_mut() };
        bencher.iter(|| {
            let mut words = ArgumentWords::new();
            black_box(&args).pack(&mut words);
            (CopyWords::grid(&args, &limits), words)
        });
    });

    let kernel = runtime.load::<CopyWords>().expect("a kernel");
    criterion.bench_function("launch one block on the emulator and wait", |bencher| {
        bencher.iter(|| {
            kernel.launch(&stream, CopyWordsArgs { source: source.view(), target: target.view_mut() }).expect("a launch");
            stream.synchronize().expect("a copy");
        });
    });
}

criterion_group!(benches, host_paths);
criterion_main!(benches);
