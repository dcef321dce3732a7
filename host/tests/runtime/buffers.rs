//! Buffers: contents, host types, lifetime.

use oxtile::kernels::copy::CopyWords;
use oxtile::num;
use oxtile::runtime::Buffer;

use crate::support::{launch_copy, numbers, runtime, stream};

#[test]
fn a_kernel_copies_any_length() {
    let runtime = runtime();
    let stream = stream(&runtime);
    let kernel = runtime.load::<CopyWords>().unwrap();
    for length in [0, 1, 255, 4096, 4097, 20_000] {
        let expected = numbers(length, 7);
        let source = Buffer::from_slice(&stream, &expected).unwrap();
        let mut target = Buffer::<u32>::zeros(&stream, length.into()).unwrap();
        launch_copy(&kernel, &stream, &source, &mut target).unwrap();
        assert_eq!(target.to_vec(&stream).unwrap(), expected, "length {length}");
    }
}

#[test]
fn half_precision_host_types_are_the_kernels_types() {
    let runtime = runtime();
    let stream = stream(&runtime);
    let values = [1.5, -2.0, f32::INFINITY];
    let brain = Buffer::<num::bf16>::from_slice(&stream, &values.map(half::bf16::from_f32)).unwrap();
    assert_eq!(brain.to_vec(&stream).unwrap().map_bits(), values.map(|x| half::bf16::from_f32(x).to_bits()));
    let ieee = Buffer::<num::f16>::from_slice(&stream, &values.map(half::f16::from_f32)).unwrap();
    assert_eq!(ieee.to_vec_as::<half::f16>(&stream).unwrap(), values.map(half::f16::from_f32));
}

trait MapBits {
    fn map_bits(self) -> Vec<u16>;
}

impl MapBits for Vec<num::bf16> {
    fn map_bits(self) -> Vec<u16> {
        self.into_iter().map(num::bf16::to_bits).collect()
    }
}
