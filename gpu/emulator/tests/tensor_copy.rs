//! Copies of boxes of tensors: what they move, and where boxes and tiles may lie.

mod common;
use common::*;
use oxtile_emulator::tensor_map::{self, Swizzle, TensorMap};
use oxtile_emulator::{FaultKind, Options, device};

/// Loads a box that hangs over every edge and stores it moved by one row.
fn boxes(arguments: &[u64]) {
    if thread() == 0 {
        device::mbarrier_init(2048, 1);
        device::fence_mbarrier_init();
        device::mbarrier_arrive_expect_transaction(2048, 1024);
        device::tensor_load(0, arguments[2], [-4i32, 6], 2048);
        device::mbarrier_wait_parity(2048, 0);
        device::tensor_store(arguments[3], [0i32, -1], 0);
        device::bulk_commit();
        device::bulk_wait(0, false);
    }
}

#[test]
fn tensor_copies_fill_with_zero_and_clip() {
    let encode = |address, swizzle| {
        let map = TensorMap { address, element_bytes: 4, dimensions: vec![16, 8], strides: vec![64], box_dimensions: vec![32, 8], swizzle };
        tensor_map::encode(&map).unwrap()
    };
    for swizzle in [Swizzle::None, Swizzle::Bytes128] {
        let job = || {
            let mut job = Job::new("boxes", 1, 32, 128, 2056, boxes);
            let maps = job.memory.allocate("maps", 256, 0);
            job.memory.write(maps, &encode(job.input, swizzle)).unwrap();
            job.memory.write(maps + 128, &encode(job.output, swizzle)).unwrap();
            job.launch.arguments.extend([maps, maps + 128]);
            job
        };
        silent(job, |out| {
            for (i, &value) in out.iter().enumerate() {
                let (x, y) = (i % 16, i / 16);
                let expected = if y + 1 + 6 < 8 && x >= 4 { (y + 7) * 16 + x - 4 } else { 0 };
                assert_eq!(value, expected as u32, "x {x}, y {y}, {swizzle:?}");
            }
        });
    }
}

#[test]
fn a_swizzled_box_lies_in_swizzled_order() {
    fn body(arguments: &[u64]) {
        if thread() == 0 {
            device::mbarrier_init(2048, 1);
            device::fence_mbarrier_init();
            device::mbarrier_arrive_expect_transaction(2048, 1024);
            device::tensor_load(0, arguments[2], [0i32, 0], 2048);
            device::mbarrier_wait_parity(2048, 0);
            for word in 0..256 {
                store(arguments[1] + u64::from(word) * 4, shared_load(word * 4));
            }
        }
    }
    let job = || {
        let mut job = Job::new("swizzle", 1, 32, 256, 2056, body);
        let map = job.memory.allocate("map", 128, 0);
        let described = TensorMap {
            address: job.input,
            element_bytes: 2,
            dimensions: vec![64, 8],
            strides: vec![128],
            box_dimensions: vec![64, 8],
            swizzle: Swizzle::Bytes128,
        };
        job.memory.write(map, &tensor_map::encode(&described).unwrap()).unwrap();
        job.launch.arguments.push(map);
        job
    };
    silent(job, |out| {
        for (word, &value) in out.iter().enumerate() {
            let (row, chunk, within) = (word / 32, word / 4 % 8, word % 4);
            assert_eq!(value as usize, row * 32 + (chunk ^ row) * 4 + within);
        }
    });
}

/// A job of a thread that may copy boxes of four words of rows of 16, by the map at `arguments[2]`.
fn quads(body: fn(&[u64])) -> impl Fn() -> Job {
    move || {
        let mut job = Job::new("quads", 1, 1, 64, 256, body);
        let map = job.memory.allocate("map", 128, 0);
        let dimensions = vec![16, 4];
        let described = TensorMap {
            address: job.input,
            element_bytes: 4,
            dimensions,
            strides: vec![64],
            box_dimensions: vec![4, 1],
            swizzle: Swizzle::None,
        };
        job.memory.write(map, &tensor_map::encode(&described).unwrap()).unwrap();
        job.launch.arguments.push(map);
        job
    }
}

/// Loads the four words from this column on, and stores them.
fn load_quad(arguments: &[u64], column: i32) {
    device::mbarrier_init(128, 1);
    device::fence_mbarrier_init();
    device::mbarrier_arrive_expect_transaction(128, 16);
    device::tensor_load(0, arguments[2], [column, 1], 128);
    device::mbarrier_wait_parity(128, 0);
    for word in 0..4 {
        store(arguments[1] + u64::from(word) * 4, shared_load(word * 4));
    }
}

#[test]
fn boxes_begin_at_multiples_of_16_bytes_of_the_tensor() {
    silent(quads(|a| load_quad(a, 4)), |out| assert_eq!(out[..4], [20, 21, 22, 23]));
    silent(quads(|a| load_quad(a, -4)), |out| assert_eq!(out[..4], [0; 4]));
    let bodies: [fn(&[u64]); 5] = [
        |a| load_quad(a, 1),
        |a| load_quad(a, 2),
        |a| load_quad(a, 3),
        |a| load_quad(a, -1),
        |a| {
            shared_store(0, 0);
            device::fence_proxy_async(oxtile_emulator::Space::Shared);
            device::tensor_store(a[2], [13i32, 1], 0);
        },
    ];
    for body in bodies {
        assert!(quads(body)().run(Options::fast()).is_err_and(|fault| fault.kind == FaultKind::Misaligned));
        let fault = reported(quads(body), FaultKind::Misaligned).to_string();
        assert!(fault.contains("of the innermost dimension, of 4 bytes each: "), "{fault}");
        assert!(fault.contains("gpu/emulator/tests/tensor_copy.rs:"), "{fault}");
    }
    let fault = reported(quads(|a| load_quad(a, 1)), FaultKind::Misaligned).to_string();
    let part = "a tensor copy beside offset 0 of the block's shared memory whose box begins at element 1 of the innermost dimension, of 4 bytes each: 4 bytes past a multiple of 16";
    assert!(fault.contains(part), "{fault}");
}

/// Tiles lie at multiples of 128 bytes of the shared memory (of 8 rows with swizzle), what a bulk copy moves at multiples of 16, mbarriers at multiples of 8.
#[test]
fn copies_and_mbarriers_lie_at_multiples_of_their_units() {
    let tile = reported(quads(|a| device::tensor_load(16, a[2], [0i32, 0], 128)), FaultKind::AsyncMisuse).to_string();
    assert!(tile.contains("a box at offset 16 of the block's shared memory under None"), "{tile}");
    assert!(tile.contains("align it to 8 swizzled rows, 128 bytes without swizzle"), "{tile}");
    silent(quads(|a| load_quad(a, 0)), |out| assert_eq!(out[..4], [16, 17, 18, 19]));
    reported(quads(|a| device::bulk_load(8, a[0], 16, 128)), FaultKind::Misaligned);
    reported(quads(|a| device::bulk_load(0, a[0] + 4, 16, 128)), FaultKind::Misaligned);
    reported(quads(|a| device::bulk_load(0, a[0], 24, 128)), FaultKind::AsyncMisuse);
    reported(quads(|a| device::bulk_store(a[1], 8, 16)), FaultKind::Misaligned);
    reported(quads(|_| device::mbarrier_init(132, 1)), FaultKind::MbarrierMisuse);
}
