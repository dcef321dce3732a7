//! Which tensors of a quantized file make up one matrix, decided from the header alone.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::{
    quantize::{
        Direction, Names, Recipe, Side, direction_name,
        metadata::{self, MetadataError},
    },
    safetensors::{Checkpoint, Dtype, Tensor, TensorSpec},
    text::{printable, shape},
};

/// The job laid out.
#[derive(Debug)]
pub struct Plan<'a> {
    /// What the matrices were quantized to, and how.
    pub recipe: Recipe,
    /// Which codes they are restored from.
    pub direction: Direction,
    /// The matrices, by name.
    pub matrices: Vec<Matrix<'a>>,
    /// What is copied as it is.
    pub copies: Vec<&'a Tensor>,
    /// The output's tensors.
    pub outputs: Vec<TensorSpec>,
    /// The output's free-form strings: the input's without what the quantization added.
    pub metadata: BTreeMap<String, String>,
}

/// The tensors that one matrix became.
#[derive(Debug)]
pub struct Matrix<'a> {
    /// The tensor that is restored.
    pub output: TensorSpec,
    /// The codes' format, direction and shape.
    pub side: Side,
    /// Whether the codes are those of transformed columns.
    pub hadamard: bool,
    /// The codes.
    pub codes: &'a Tensor,
    /// A scale a block.
    pub scales: &'a Tensor,
    /// The largest magnitude, one element.
    pub amax: &'a Tensor,
}

/// A file that cannot be restored.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// What the file says about itself.
    #[error(transparent)]
    Metadata(#[from] MetadataError),
    /// It has not the direction asked for.
    #[error("it holds no codes by {asked}s, but by {has}: name another --direction", asked = direction_name(*.asked))]
    Direction {
        /// What was asked for.
        asked: Direction,
        /// What it has.
        has: &'static str,
    },
    /// A tensor of a matrix is missing.
    #[error("tensor `{}` is missing, which `{}` needs: the file is damaged, quantize the checkpoint again", printable(.name), printable(.matrix))]
    Missing {
        /// The tensor.
        name: String,
        /// The matrix that it belongs to.
        matrix: String,
    },
    /// A tensor of a matrix does not fit the others.
    #[error(
        "tensor `{}` is {found}, where `{}` needs {expected}: the file is damaged, quantize the checkpoint again",
        printable(.name), printable(.matrix)
    )]
    Mismatch {
        /// The tensor.
        name: String,
        /// The matrix that it belongs to.
        matrix: String,
        /// What is needed: type and dimensions.
        expected: String,
        /// What is there.
        found: String,
    },
    /// A shape of before that the format does not take.
    #[error("its metadata says that `{}` was {found}, which is not quantized: the file is damaged, quantize the checkpoint again", printable(.name))]
    Shape {
        /// The matrix.
        name: String,
        /// Its shape.
        found: String,
    },
    /// The restored name is taken.
    #[error("the output would hold two tensors named `{}`: rename the one that is not quantized", printable(.0))]
    NameClash(String),
}

impl<'a> Plan<'a> {
    /// Lays out the job; the matrices become `dtype`, or what they were, from the codes of `direction`, or those by rows where there
    /// are any.
    ///
    /// # Errors
    /// If the file is not one of `oxtile quantize`, or its tensors do not belong together.
    pub fn new(checkpoint: &'a Checkpoint, dtype: Option<Dtype>, direction: Option<Direction>) -> Result<Self, PlanError> {
        let (recipe, originals) = metadata::read(checkpoint.metadata())?;
        let direction = direction.unwrap_or(recipe.directions.each()[0]);
        if !recipe.directions.contains(direction) {
            return Err(PlanError::Direction { asked: direction, has: recipe.directions.name() });
        }
        let by_name: HashMap<_, _> = checkpoint.tensors().iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
        let mut used = HashSet::new();
        let mut matrices = Vec::new();
        for original in originals {
            let shape = matrix_shape(&original)?;
            for side in Side::each(&recipe, shape) {
                used.extend(side.tensors(&original.name, &original.shape).into_iter().map(|(spec, _)| spec.name));
            }
            let side = Side { format: recipe.format, direction, interleave: recipe.interleave, shape };
            let hadamard = recipe.hadamard && side.is_transposed();
            matrices.push(Matrix::of(original, side, hadamard, dtype, &by_name)?);
        }
        let copies: Vec<_> = checkpoint.tensors().iter().filter(|tensor| !used.contains(&tensor.name)).collect();
        let copied = copies.iter().map(|tensor| TensorSpec { name: tensor.name.clone(), dtype: tensor.dtype, shape: tensor.shape.clone() });
        let outputs: Vec<_> = matrices.iter().map(|matrix| matrix.output.clone()).chain(copied).collect();
        let mut names = HashSet::new();
        if let Some(twice) = outputs.iter().find(|spec| !names.insert(&spec.name)) {
            return Err(PlanError::NameClash(twice.name.clone()));
        }
        let mut metadata = checkpoint.metadata().clone();
        metadata.retain(|key, _| !key.starts_with(metadata::PREFIX));
        metadata.insert("oxtile.dequantized_from".into(), recipe.format.name().into());
        Ok(Self { recipe, direction, matrices, copies, outputs, metadata })
    }
}

/// Rows and columns of a tensor of before.
fn matrix_shape(original: &TensorSpec) -> Result<[u64; 2], PlanError> {
    let refused = || PlanError::Shape { name: original.name.clone(), found: shape(&original.shape) };
    let elements = original.shape.iter().try_fold(1u64, |product, &size| product.checked_mul(size));
    // In bytes, padding of scales included, it must still fit.
    let elements = elements.filter(|&elements| elements > 0 && elements < 1 << 56).ok_or_else(refused)?;
    match original.shape.as_slice() {
        [_, .., columns] => Ok([elements / columns, *columns]),
        _ => Err(refused()),
    }
}

impl<'a> Matrix<'a> {
    fn of(
        original: TensorSpec,
        side: Side,
        hadamard: bool,
        dtype: Option<Dtype>,
        by_name: &HashMap<&str, &'a Tensor>,
    ) -> Result<Self, PlanError> {
        let matrix = &original.name;
        let find = |name: &str| {
            let missing = || PlanError::Missing { name: name.into(), matrix: matrix.clone() };
            by_name.get(name).copied().ok_or_else(missing)
        };
        for (spec, _) in side.tensors(matrix, &original.shape) {
            let tensor = find(&spec.name)?;
            let said = |dtype: Dtype, dimensions: &[u64]| format!("{dtype} [{}]", shape(dimensions));
            if (tensor.dtype, &tensor.shape) != (spec.dtype, &spec.shape) {
                let (expected, found) = (said(spec.dtype, &spec.shape), said(tensor.dtype, &tensor.shape));
                return Err(PlanError::Mismatch { name: spec.name, matrix: matrix.clone(), expected, found });
            }
        }
        let granule = side.format.granule();
        let [rows, columns] = side.shape;
        let (by_rows, by_columns) = (side.direction == Direction::Rows || side.is_transposed(), side.direction == Direction::Columns);
        if by_rows && columns % granule != 0 || by_columns && rows % granule != 0 {
            return Err(PlanError::Shape { name: matrix.clone(), found: shape(&original.shape) });
        }
        let names = Names::of(matrix, side.format, side.direction);
        let (codes, scales, amax) = (find(&names.codes)?, find(&names.scales)?, find(&names.amax)?);
        let output = TensorSpec { dtype: dtype.unwrap_or(original.dtype), ..original };
        Ok(Self { output, side, hadamard, codes, scales, amax })
    }
}
