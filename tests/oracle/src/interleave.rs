//! Interleaved block scales, one scale at a time from the formula.
//!
//! Formula: cuBLAS documentation, "1D block scaling factors layout"; TransformerEngine `common/cast/mxfp8/swizzle.cuh`.

/// The offset of the scale of outer index `i` and block `j`, of `blocks`.
pub fn offset(i: usize, j: usize, blocks: usize) -> usize {
    let tiles_a_row = blocks.div_ceil(4);
    let tile = (i / 128) * tiles_a_row + j / 4;
    tile * 512 + (i % 32) * 16 + ((i % 128) / 32) * 4 + (j % 4)
}

/// Bytes of the interleaved scales of `outer` by `blocks`.
pub fn length(outer: usize, blocks: usize) -> usize {
    outer.next_multiple_of(128) * blocks.next_multiple_of(4)
}

/// The interleaved scales, `scale(i, j)` being the compact one; the padding is 0.
pub fn interleave(outer: usize, blocks: usize, scale: impl Fn(usize, usize) -> u8) -> Vec<u8> {
    let mut interleaved = vec![0; length(outer, blocks)];
    for i in 0..outer {
        for j in 0..blocks {
            interleaved[offset(i, j, blocks)] = scale(i, j);
        }
    }
    interleaved
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each place of the padded grid is taken once, so the padding is what is left.
    #[test]
    fn a_bijection_on_the_padded_grid() {
        for (outer, blocks) in [(128, 4), (256, 12), (384, 8), (1024, 4)] {
            let mut taken = vec![0; length(outer, blocks)];
            (0..outer * blocks).for_each(|at| taken[offset(at / blocks, at % blocks, blocks)] += 1);
            assert!(taken.iter().all(|&count| count == 1), "{outer}x{blocks}");
        }
    }

    /// The first column of the picture in the cuBLAS documentation: rows 0, 1, 32, 128 of a matrix two tiles wide.
    #[test]
    fn by_hand() {
        let at = [(0, 0), (0, 3), (1, 0), (32, 0), (0, 4), (128, 0)].map(|(i, j)| offset(i, j, 8));
        assert_eq!(at, [0, 3, 16, 4, 512, 1024]);
        let of = interleave(1, 5, |_, j| j as u8 + 1);
        assert_eq!((of.len(), &of[..5], of[512]), (1024, [1, 2, 3, 4, 0].as_slice(), 5));
        assert_eq!(of.iter().filter(|&&code| code != 0).count(), 5);
    }
}
