//! Device memory to device memory: the ceiling of every memory-bound kernel.

use anyhow::Result;
use oxtile::runtime::Buffer;
use oxtile_kernels::copy::{CopyWords, CopyWordsArgs};

use crate::bench::{Bench, Gpu, Output, Prepared, Size};

/// The family's name.
pub const FAMILY: &str = "copy";

/// The kernel's name.
const KERNEL: &str = "copy_words";

/// Copies of the sizes that the other families are held against, with their numbers of buffer sets.
pub fn benches(size: Size) -> Vec<Bench> {
    let bytes = size.pick([(1 << 30, 2), (256 << 20, 4), (32 << 20, 12)], [(64 << 10, 2), (36 << 10, 2), (1 << 10, 3)]);
    bytes.map(|(bytes, sets)| bench(bytes, sets)).into()
}

/// The name of the copy that moves about as many bytes as a kernel does.
pub fn ceiling(size: Size, bytes_moved: u64) -> Option<String> {
    benches(size).iter().min_by_key(|copy| copy.bytes.abs_diff(bytes_moved)).map(Bench::name)
}

fn bench(bytes: u64, sets: usize) -> Bench {
    Bench {
        family: FAMILY,
        kernel: KERNEL,
        shape: shape(bytes),
        dimensions: vec![bytes],
        bytes: 2 * bytes,
        flops: 0,
        sets,
        ceiling: None,
        peers: &["copy"],
        prepare: Box::new(move |gpu| prepare(gpu, bytes, sets)),
    }
}

fn shape(bytes: u64) -> String {
    if bytes >= 1 << 20 { format!("{} MiB", bytes >> 20) } else { format!("{} KiB", bytes >> 10) }
}

fn prepare(gpu: &Gpu, bytes: u64, sets: usize) -> Result<Prepared> {
    let words = bytes / 4;
    let mut buffers = Vec::new();
    for set in 0..sets {
        let source = Buffer::<u32>::from_slice(&gpu.stream, &gpu.pattern.fill_words(set, words))?;
        buffers.push((source, Buffer::<u32>::uninitialised(&gpu.stream, words)?));
    }
    let kernel = gpu.runtime.load::<CopyWords>()?;
    let launches = |buffers: &mut Vec<(Buffer<u32>, Buffer<u32>)>| {
        buffers
            .iter_mut()
            .try_for_each(|(source, target)| kernel.launch(&gpu.stream, CopyWordsArgs { source: source.view(), target: target.view_mut() }))
    };
    let graph = Prepared::capture(gpu, || launches(&mut buffers))?;
    Ok(Prepared::new(graph, move |stream| {
        let copied = buffers[0].1.to_vec(stream)?;
        Ok(vec![Output { name: "target", bytes: copied.iter().flat_map(|word| word.to_le_bytes()).collect() }])
    }))
}
