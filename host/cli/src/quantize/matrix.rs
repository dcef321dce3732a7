//! What the host does to matrices: the transpose, the random Hadamard transform.

use half::{bf16, f16};

use crate::safetensors::Dtype;

/// Columns that are transformed together.
const BLOCK: usize = 16;
/// Signs before the transform (TransformerEngine `pytorch/tensor/nvfp4_tensor.py`), bit `i` set where the `i`th is negative.
const NEGATIVE: u32 = 0xd7e8;

/// The transpose of a row-major matrix of rows of this length.
pub fn transpose<T: Copy + Default>(matrix: &[T], length: usize) -> Vec<T> {
    /// Side of the squares that stay in the cache.
    const TILE: usize = 32;
    if length == 0 {
        return Vec::new();
    }
    let lines = matrix.len() / length;
    let mut transposed = vec![T::default(); matrix.len()];
    for top in (0..lines).step_by(TILE) {
        for left in (0..length).step_by(TILE) {
            for line in top..lines.min(top + TILE) {
                for column in left..length.min(left + TILE) {
                    transposed[column * lines + line] = matrix[line * length + column];
                }
            }
        }
    }
    transposed
}

/// Transforms each 16 neighbours: `H (d x) / 4`, with `H` the Hadamard matrix of Sylvester's construction and the signs `d`.
pub fn transform(values: &mut [f32]) {
    let (blocks, _) = values.as_chunks_mut::<BLOCK>();
    for block in blocks {
        change_signs(block);
        butterflies(block);
    }
}

/// The inverse: the transform is orthogonal, and `H` its own transpose.
pub fn invert_transform(values: &mut [f32]) {
    let (blocks, _) = values.as_chunks_mut::<BLOCK>();
    for block in blocks {
        butterflies(block);
        change_signs(block);
    }
}

fn change_signs(block: &mut [f32; BLOCK]) {
    for (i, value) in block.iter_mut().enumerate() {
        *value = if NEGATIVE >> i & 1 == 1 { -*value } else { *value };
    }
}

fn butterflies(block: &mut [f32; BLOCK]) {
    for step in [1, 2, 4, 8] {
        for i in (0..BLOCK).filter(|i| i & step == 0) {
            (block[i], block[i + step]) = (block[i] + block[i + step], block[i] - block[i + step]);
        }
    }
    block.iter_mut().for_each(|value| *value *= 0.25);
}

/// Values as little-endian elements of `dtype`, rounded to nearest even: F32, F16 or BF16.
pub fn to_bytes(values: &[f32], dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::F16 => values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect(),
        Dtype::Bf16 => values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transpose_of_any_shape() {
        assert_eq!(transpose(&[1, 2, 3, 4, 5, 6], 3), [1, 4, 2, 5, 3, 6]);
        let matrix: Vec<u32> = (0..70 * 33).collect();
        let transposed = transpose(&matrix, 33);
        assert_eq!(transposed[5 * 70 + 64], 64 * 33 + 5);
        assert_eq!(transpose(&transposed, 70), matrix);
        assert!(transpose::<u8>(&[], 0).is_empty());
    }

    #[test]
    fn the_transform_and_back() {
        let before: Vec<f32> = (0..32).map(|i| (i * i % 23) as f32).collect();
        let mut values = before.clone();
        transform(&mut values);
        let oracle = oxtile_tests::oracle::nvfp4::hadamard(&before);
        assert_eq!(values, oracle);
        invert_transform(&mut values);
        assert_eq!(values, before);
    }
}
