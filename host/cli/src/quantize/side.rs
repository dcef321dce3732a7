//! One direction of a quantized matrix: the tensors that it is written as.

use super::{Direction, Format, Recipe};
use crate::safetensors::{Dtype, Runs, TensorSpec};

/// A direction of a matrix `[rows, columns]` in a format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Side {
    /// The format.
    pub format: Format,
    /// The direction.
    pub direction: Direction,
    /// Whether the scales are interleaved.
    pub interleave: bool,
    /// Rows and columns of the matrix before the quantization.
    pub shape: [u64; 2],
}

impl Side {
    /// The directions that a recipe makes of a matrix.
    pub fn each(recipe: &Recipe, shape: [u64; 2]) -> impl Iterator<Item = Self> {
        let Recipe { format, directions, interleave, .. } = *recipe;
        directions.each().iter().map(move |&direction| Self { format, direction, interleave, shape })
    }

    /// Whether codes and scales are those of the transpose.
    pub const fn is_transposed(&self) -> bool {
        self.format.shapes().is_transposed(self.direction)
    }

    /// Rows and columns of the matrix as the codes have them.
    pub const fn lines(&self) -> [u64; 2] {
        self.format.shapes().lines(self.shape, self.direction)
    }

    /// Rows and columns of the bytes of codes.
    pub const fn codes(&self) -> [u64; 2] {
        self.format.shapes().codes(self.shape, self.direction)
    }

    /// Rows or columns that have scales of their own, and the blocks of each; a tensor of one scale is one of one.
    pub const fn extents(&self) -> [u64; 2] {
        self.format.shapes().extents(self.shape, self.direction)
    }

    /// Dimensions of the compact scales.
    pub const fn compact_scales(&self) -> [u64; 2] {
        self.format.shapes().scales(self.shape, self.direction)
    }

    /// Dimensions of the scales in the file.
    pub fn scale_shape(&self) -> Vec<u64> {
        match self.format {
            Format::Fp8 => vec![1],
            _ if self.interleave => self.format.shapes().interleaved_scales(self.shape, self.direction).into(),
            _ => self.compact_scales().into(),
        }
    }

    /// Bytes of one scale.
    pub const fn scale_bytes(&self) -> u64 {
        self.format.scale_dtype().bits() / 8
    }

    /// Where the codes of rows from `row` on go, `count` of them.
    pub fn code_runs(&self, row: u64, count: u64) -> Runs {
        let [rows, columns] = self.shape;
        let bytes = |elements| elements / self.format.shapes().elements;
        if self.is_transposed() {
            Runs { offset: bytes(row), bytes: bytes(count), stride: bytes(rows) }
        } else {
            Runs { offset: bytes(row * columns), bytes: bytes(count * columns), stride: 0 }
        }
    }

    /// Where the compact scales of rows from `row` on go, `count` of them; `row` is the first of a block of any direction.
    pub fn scale_runs(&self, row: u64, count: u64) -> Runs {
        let [lines, length] = self.compact_scales();
        let bytes = self.scale_bytes();
        let Some(block) = self.format.shapes().block else { return Runs { offset: 0, bytes, stride: 0 } };
        match self.direction {
            Direction::Rows => Runs { offset: row * length * bytes, bytes: count * length * bytes, stride: 0 },
            Direction::Columns if self.is_transposed() => {
                Runs { offset: row / block * bytes, bytes: count.div_ceil(block) * bytes, stride: length * bytes }
            }
            Direction::Columns => {
                debug_assert!(lines * block >= row + count);
                Runs { offset: row / block * length * bytes, bytes: count.div_ceil(block) * length * bytes, stride: 0 }
            }
        }
    }

    /// The tensors of `name`, which had this shape, each with words for what it is.
    pub fn tensors(&self, name: &str, shape: &[u64]) -> Vec<(TensorSpec, &'static str)> {
        let names = Names::of(name, self.format, self.direction);
        let spec = |name: &str, dtype, shape| TensorSpec { name: name.into(), dtype, shape };
        // A byte an element, in their order, has the shape that the tensor had.
        let keeps_shape = self.format.shapes().elements == 1 && !self.is_transposed();
        let codes = if keeps_shape { shape.into() } else { self.codes().into() };
        let mut tensors = vec![
            (spec(&names.codes, self.format.code_dtype(), codes), "the codes"),
            (spec(&names.scales, self.format.scale_dtype(), self.scale_shape()), "the scales"),
        ];
        if let Some(global) = &names.global_scale {
            tensors.push((spec(global, Dtype::F32, vec![1]), "the encode scale"));
        }
        tensors.push((spec(&names.amax, Dtype::F32, vec![1]), "the amax"));
        tensors
    }
}

/// Names of the tensors that one direction of a tensor becomes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Names {
    /// The codes.
    pub codes: String,
    /// The scales.
    pub scales: String,
    /// What NVFP4 brings a tensor to the range of its scales and codes with.
    pub global_scale: Option<String>,
    /// The largest magnitude of what was cast.
    pub amax: String,
}

impl Names {
    /// The names for `name`.
    pub fn of(name: &str, format: Format, direction: Direction) -> Self {
        let base = match direction {
            Direction::Rows => name.to_owned(),
            Direction::Columns => format!("{name}_columnwise"),
        };
        Self {
            codes: if format.is_nvfp4() { format!("{base}_packed") } else { base.clone() },
            scales: format!("{base}_scale"),
            global_scale: format.is_nvfp4().then(|| format!("{base}_global_scale")),
            amax: format!("{base}_amax"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensors(format: Format, direction: Direction, interleave: bool, shape: [u64; 2]) -> Vec<String> {
        let side = Side { format, direction, interleave, shape };
        side.tensors("t", &shape).into_iter().map(|(spec, _)| format!("{} {} {:?}", spec.name, spec.dtype, spec.shape)).collect()
    }

    #[test]
    fn tensors_of_each_format_and_direction() {
        use {Direction::*, Format::*};
        let found = |format, direction| tensors(format, direction, false, [64, 96]);
        assert_eq!(found(Mxfp8, Rows), ["t F8_E4M3 [64, 96]", "t_scale F8_E8M0 [64, 3]", "t_amax F32 [1]"]);
        let expected = ["t_columnwise F8_E4M3 [64, 96]", "t_columnwise_scale F8_E8M0 [2, 96]", "t_columnwise_amax F32 [1]"];
        assert_eq!(found(Mxfp8, Columns), expected);
        let expected = ["t_packed U8 [64, 48]", "t_scale F8_E4M3 [64, 6]", "t_global_scale F32 [1]", "t_amax F32 [1]"];
        assert_eq!(found(Nvfp4, Rows), expected);
        assert_eq!(found(Nvfp4, Columns)[..2], ["t_columnwise_packed U8 [96, 32]", "t_columnwise_scale F8_E4M3 [96, 4]"]);
        assert_eq!(found(Fp8, Rows), ["t F8_E4M3 [64, 96]", "t_scale F32 [1]", "t_amax F32 [1]"]);
        assert_eq!(found(Fp8, Columns)[0], "t_columnwise F8_E4M3 [96, 64]");
        assert_eq!(tensors(Fp8Block, Rows, false, [64, 136])[1], "t_scale F32 [64, 2]");
        assert_eq!(tensors(Fp8Block, Columns, false, [264, 96])[1], "t_columnwise_scale F32 [96, 3]");
        assert_eq!(tensors(Mxfp8, Rows, true, [64, 96])[1], "t_scale F8_E8M0 [128, 4]");
        assert_eq!(tensors(Nvfp4, Columns, true, [96, 160])[1], "t_columnwise_scale F8_E4M3 [256, 8]");
    }

    #[test]
    fn rows_go_to_their_places() {
        let side = |format, direction| Side { format, direction, interleave: false, shape: [256, 64] };
        let nvfp4 = side(Format::Nvfp4, Direction::Columns);
        assert_eq!(nvfp4.code_runs(128, 32), Runs { offset: 64, bytes: 16, stride: 128 });
        assert_eq!(nvfp4.scale_runs(128, 32), Runs { offset: 8, bytes: 2, stride: 16 });
        let mxfp8 = side(Format::Mxfp8, Direction::Columns);
        assert_eq!(mxfp8.code_runs(128, 32), Runs { offset: 128 * 64, bytes: 32 * 64, stride: 0 });
        assert_eq!(mxfp8.scale_runs(128, 32), Runs { offset: 4 * 64, bytes: 64, stride: 0 });
        assert_eq!(side(Format::Fp8Block, Direction::Rows).scale_runs(3, 2), Runs { offset: 12, bytes: 8, stride: 0 });
    }
}
