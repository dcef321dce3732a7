//! Buffers: contents, host types, lifetime.

use oxtile::{Buffer, Error, PinnedBuffer, num};

use crate::support::{Copier, SEEDS, alias, emulated, everywhere, filled, numbers, runtime, stream, streams};

#[test]
fn a_kernel_copies_any_length() {
    let runtime = runtime();
    let stream = stream(&runtime);
    let copier = Copier::new(&runtime);
    for length in [0, 1, 255, 4096, 4097, 20_000] {
        let (source, expected) = filled(&stream, length, 7);
        let mut target = Buffer::zeros(&stream, length.into()).unwrap();
        copier.copy(&stream, &source, &mut target).unwrap();
        assert_eq!(target.to_vec(&stream).unwrap(), expected, "length {length}");
    }
}

#[test]
fn half_precision_host_types_are_the_kernels_types() {
    let runtime = runtime();
    let stream = stream(&runtime);
    let values = [1.5, -2.0, f32::INFINITY];
    let brain = Buffer::from_slice(&stream, &values.map(half::bf16::from_f32)).unwrap();
    let kernels: Vec<num::bf16> = brain.to_vec(&stream).unwrap();
    assert!(kernels.iter().zip(values).all(|(k, x)| k.to_bits() == half::bf16::from_f32(x).to_bits()));
    let ieee: Buffer<num::f16> = Buffer::from_slice(&stream, &values.map(half::f16::from_f32)).unwrap();
    assert_eq!(ieee.to_vec_as::<half::f16>(&stream).unwrap(), values.map(half::f16::from_f32));
}

#[test]
fn empty_buffers_are_legal_everywhere() {
    let runtime = runtime();
    let stream = stream(&runtime);
    let mut empty = Buffer::<u32>::zeros(&stream, 0).unwrap();
    empty.fill_zero(&stream).unwrap();
    empty.copy_from_slice::<u32>(&stream, &[]).unwrap();
    let other = Buffer::<u32>::from_slice::<u32>(&stream, &[]).unwrap();
    empty.copy_from(&stream, &other).unwrap();
    Copier::new(&runtime).copy(&stream, &other, &mut empty).unwrap();
    let mut pinned = PinnedBuffer::<u32>::zeros(&stream, 0).unwrap();
    empty.copy_to_pinned(&stream, &mut pinned).unwrap();
    assert_eq!(pinned.as_slice().unwrap(), &[0_u32; 0]);
    assert!(empty.to_vec(&stream).unwrap().is_empty());
    assert!(empty.is_empty() && empty.view().is_empty());
}

/// More memory than there is, and than an allocation may have, is an error, after which all goes on.
#[test]
fn too_much_memory_is_an_error() {
    let runtime = emulated(0, 1);
    let stream = stream(&runtime);
    for bytes in [1 << 62, i64::MAX as u64] {
        let error = Buffer::<u8>::uninitialised(&stream, bytes).map(drop).unwrap_err().to_string();
        assert!(error.contains(&format!("{bytes} bytes of memory are not to be had")), "{error}");
    }
    assert_eq!(Buffer::<u32>::zeros(&stream, 2).unwrap().to_vec(&stream).unwrap(), [0, 0]);
}

#[test]
fn wrong_lengths_are_errors_that_name_the_call() {
    let runtime = runtime();
    let stream = stream(&runtime);
    let mut buffer = Buffer::<u32>::zeros(&stream, 4).unwrap();
    let error = buffer.copy_from_slice(&stream, &[1_u32, 2, 3]).unwrap_err();
    assert_eq!(error.to_string(), "Buffer::copy_from_slice: 3 elements where 4 are needed");
    let other = Buffer::<u32>::zeros(&stream, 5).unwrap();
    assert!(matches!(buffer.copy_from(&stream, &other), Err(Error::Length { expected: 4, found: 5, .. })));
    let error = Buffer::<u64>::zeros(&stream, u64::MAX / 8 + 1).unwrap_err();
    assert!(matches!(error, Error::TooLarge { element_bytes: 8, .. }), "{error}");
}

#[test]
fn pinned_memory_is_read_only_when_its_copies_are_done() {
    for runtime in everywhere() {
        let [upload, download] = streams(&runtime);
        let expected = numbers(1000, 3);
        let mut source = PinnedBuffer::from_slice(&upload, &expected).unwrap();
        let mut target = PinnedBuffer::<u32>::zeros(&download, 1000).unwrap();
        let mut buffer = Buffer::<u32>::uninitialised(&upload, 1000).unwrap();
        buffer.copy_from_pinned(&upload, &source).unwrap();
        buffer.copy_to_pinned(&download, &mut target).unwrap();
        // Writing waits for the copy that reads, reading for the copy that writes.
        source.as_mut_slice().unwrap().fill(0);
        assert_eq!(target.as_slice().unwrap(), expected);
    }
}

#[test]
fn what_enqueued_work_uses_may_be_dropped() {
    for runtime in everywhere() {
        let [first, second] = streams(&runtime);
        let copier = Copier::new(&runtime);
        let (source, expected) = filled(&first, 5000, 11);
        let mut middle = Buffer::uninitialised(&first, 5000).unwrap();
        let mut target = Buffer::uninitialised(&second, 5000).unwrap();
        let mut pinned = PinnedBuffer::<u32>::zeros(&second, 5000).unwrap();
        copier.copy(&first, &source, &mut middle).unwrap();
        copier.copy(&second, &middle, &mut target).unwrap();
        middle.copy_to_pinned(&second, &mut pinned).unwrap();
        drop((source, middle, pinned, first));
        assert_eq!(target.to_vec(&second).unwrap(), expected);
    }
}

#[test]
fn dropped_memory_is_freed_behind_its_uses() {
    for seed in SEEDS {
        let runtime = emulated(seed, 1);
        let [first, second] = streams(&runtime);
        let (source, expected) = filled(&first, 100, 5);
        let mut target = Buffer::zeros(&second, 100).unwrap();
        second.synchronize().unwrap();
        let dangling = alias(&source);
        target.copy_from(&second, &source).unwrap();
        drop(source);
        assert_eq!(target.to_vec(&second).unwrap(), expected);
        // The free is on the stream that wrote last, after the read of the other stream.
        first.synchronize().unwrap();
        let error = target.copy_from(&second, &dangling).and_then(|()| second.synchronize()).unwrap_err();
        assert!(error.to_string().contains("it is used after it was freed"), "{error}");
    }
}
