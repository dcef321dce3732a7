//! What happens to each tensor, decided from the header alone.

use std::collections::{BTreeMap, HashMap};

use super::{
    Direction, Recipe, Side,
    metadata::{self, FORMAT_KEY, SHARD_KEY},
};
use crate::{
    safetensors::{Checkpoint, Dtype, Tensor, TensorSpec},
    text::printable,
};

/// The job laid out: what is quantized, what is copied, what the output holds.
#[derive(Debug)]
pub struct Plan<'a> {
    /// What the tensors are quantized to, and how.
    pub recipe: Recipe,
    /// An action a tensor, in file order.
    pub actions: Vec<(&'a Tensor, Action)>,
    /// The output's tensors.
    pub outputs: Vec<TensorSpec>,
    /// The output's free-form strings: the input's and `oxtile.*`.
    pub metadata: BTreeMap<String, String>,
}

/// What happens to one tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Action {
    /// Quantized as a `[rows, columns]` matrix, row-major: the product of all dimensions but the last, and the last.
    Quantize([u64; 2]),
    /// Copied as it is.
    PassThrough(Reason),
}

/// Why a tensor is not quantized.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum Reason {
    /// Only f32, f16 and bf16 are quantized.
    #[error("{0} is not F32, F16 or BF16")]
    Dtype(Dtype),
    /// The kernels of an option take one type, as TransformerEngine's do.
    #[error("{0} is not BF16, the one type that {1} takes: convert it before, or leave {1} out")]
    NotBf16(Dtype, &'static str),
    /// Vectors and scalars are not matrices.
    #[error("{0} dimension{s}, fewer than 2", s = if *.0 == 1 { "" } else { "s" })]
    Dimensions(usize),
    /// A dimension is 0.
    #[error("no elements")]
    Empty,
    /// Rows do not divide into blocks.
    #[error("last dimension {columns} is not a multiple of {granule}")]
    LastDimension {
        /// The last dimension.
        columns: u64,
        /// What it should be a multiple of.
        granule: u64,
    },
    /// Columns do not divide into blocks.
    #[error("{rows} rows (all dimensions but the last) are not a multiple of {granule}")]
    Rows {
        /// The other dimensions.
        rows: u64,
        /// What it should be a multiple of.
        granule: u64,
    },
}

/// A checkpoint whose quantized form cannot be laid out.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// A name that the output needs twice.
    #[error(
        "the output would hold two tensors named `{}`: {first} and {second}; rename one of them in the input",
        printable(.name)
    )]
    NameClash {
        /// The name.
        name: String,
        /// What claimed it first.
        first: String,
        /// What claims it as well.
        second: String,
    },
    /// The input came out of this command.
    #[error(
        "the input is quantized already (its metadata says {FORMAT_KEY} = {0:?}); \
         name the checkpoint that it was made from"
    )]
    AlreadyQuantized(String),
    /// The input is the file of one rank.
    #[error("the input is the shard of rank {0} (its metadata has {SHARD_KEY}): put the shards together with `oxtile join` before")]
    Shard(String),
}

/// Refuses a checkpoint that is a shard, or, unless `takes_quantized`, that is quantized.
///
/// # Errors
/// What it is.
pub fn refuse_made(checkpoint: &Checkpoint, takes_quantized: bool) -> Result<(), PlanError> {
    let strings = checkpoint.metadata();
    if let Some(rank) = strings.get(SHARD_KEY) {
        return Err(PlanError::Shard(rank.clone()));
    }
    match strings.get(FORMAT_KEY) {
        Some(format) if !takes_quantized => Err(PlanError::AlreadyQuantized(format.clone())),
        _ => Ok(()),
    }
}

impl<'a> Plan<'a> {
    /// Lays out the job for a checkpoint.
    ///
    /// # Errors
    /// If two output tensors would share a name, or the input is a quantized file or a shard.
    pub fn new(checkpoint: &'a Checkpoint, recipe: Recipe) -> Result<Self, PlanError> {
        refuse_made(checkpoint, false)?;
        let actions: Vec<_> = checkpoint.tensors().iter().map(|tensor| (tensor, Action::of(tensor, &recipe))).collect();
        let outputs: Vec<(TensorSpec, String)> = actions.iter().flat_map(|(tensor, action)| action.outputs(tensor, &recipe)).collect();
        check_names(&outputs)?;
        let mut metadata = checkpoint.metadata().clone();
        let quantized = actions.iter().filter(|(_, action)| matches!(action, Action::Quantize(_)));
        let before = quantized.map(|(tensor, _)| (tensor.name.as_str(), tensor.dtype, tensor.shape.as_slice()));
        metadata::write(&recipe, before, &mut metadata);
        Ok(Self { recipe, actions, outputs: outputs.into_iter().map(|(spec, _)| spec).collect(), metadata })
    }
}

impl Action {
    /// The action for a tensor of this type and shape.
    fn of(tensor: &Tensor, recipe: &Recipe) -> Self {
        let granule = recipe.format.granule();
        let by_columns = recipe.directions.contains(Direction::Columns) || recipe.format.is_square();
        // The transposed codes and scales of a column are whole blocks, and so are the rows that the kernels read for it.
        let by_rows = recipe.directions.contains(Direction::Rows) || recipe.format.shapes().is_transposed(Direction::Columns);
        let option = [(recipe.hadamard, "--hadamard"), (recipe.seed.is_some(), "--stochastic")].into_iter().find(|option| option.0);
        let reason = match (tensor.dtype, tensor.shape.as_slice()) {
            (dtype @ (Dtype::F32 | Dtype::F16 | Dtype::Bf16), [outer @ .., columns]) if !outer.is_empty() => match tensor.elements() {
                0 => Reason::Empty,
                _ if by_rows && columns % granule != 0 => Reason::LastDimension { columns: *columns, granule },
                elements => match (elements / columns, option) {
                    (rows, _) if by_columns && rows % granule != 0 => Reason::Rows { rows, granule },
                    (_, Some((_, option))) if dtype != Dtype::Bf16 => Reason::NotBf16(dtype, option),
                    (rows, _) => return Self::Quantize([rows, *columns]),
                },
            },
            (Dtype::F32 | Dtype::F16 | Dtype::Bf16, shape) => Reason::Dimensions(shape.len()),
            (dtype, _) => Reason::Dtype(dtype),
        };
        Self::PassThrough(reason)
    }

    /// How often the tensor is read.
    pub const fn passes(self, recipe: &Recipe) -> u64 {
        match self {
            Self::Quantize(_) => recipe.passes(),
            Self::PassThrough(_) => 1,
        }
    }

    /// The tensors it writes, each with words for what it is.
    fn outputs(self, tensor: &Tensor, recipe: &Recipe) -> Vec<(TensorSpec, String)> {
        let (name, shown) = (&tensor.name, printable(&tensor.name));
        match self {
            Self::PassThrough(_) => {
                let spec = TensorSpec { name: name.clone(), dtype: tensor.dtype, shape: tensor.shape.clone() };
                vec![(spec, format!("the input's `{shown}`"))]
            }
            Self::Quantize(shape) => {
                let tensors = Side::each(recipe, shape).flat_map(|side| side.tensors(name, &tensor.shape));
                tensors.map(|(spec, what)| (spec, format!("{what} of `{shown}`"))).collect()
            }
        }
    }
}

fn check_names(outputs: &[(TensorSpec, String)]) -> Result<(), PlanError> {
    let mut owners = HashMap::new();
    for (TensorSpec { name, .. }, owner) in outputs {
        if let Some(first) = owners.insert(name, owner) {
            return Err(PlanError::NameClash { name: name.clone(), first: first.clone(), second: owner.clone() });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantize::{Directions, Format};

    fn action(dtype: Dtype, shape: &[u64], recipe: Recipe) -> Action {
        Action::of(&Tensor { name: "t".into(), dtype, shape: shape.into(), range: 0..0 }, &recipe)
    }

    fn by(format: Format, directions: Directions) -> Recipe {
        Recipe { directions, ..Recipe::of(format) }
    }

    #[test]
    fn matrices_of_whole_blocks_are_quantized() {
        let quantized = |dtype, shape: &[u64]| action(dtype, shape, Recipe::default());
        assert_eq!(quantized(Dtype::F32, &[7, 64]), Action::Quantize([7, 64]));
        assert_eq!(quantized(Dtype::Bf16, &[2, 3, 5, 32]), Action::Quantize([30, 32]));
        assert_eq!(quantized(Dtype::F16, &[1, 32]), Action::Quantize([1, 32]));
        assert_eq!(action(Dtype::F32, &[7, 48], Recipe::of(Format::Nvfp4)), Action::Quantize([7, 48]));
        assert_eq!(action(Dtype::F32, &[7, 3], by(Format::Fp8, Directions::Both)), Action::Quantize([7, 3]));
        assert_eq!(action(Dtype::F32, &[7, 136], Recipe::of(Format::Fp8Block)), Action::Quantize([7, 136]));
        assert_eq!(action(Dtype::F32, &[64, 3], by(Format::Mxfp8, Directions::Columns)), Action::Quantize([64, 3]));
    }

    #[test]
    fn the_rest_passes_through_for_a_reason() {
        let reason = |dtype, shape: &[u64], recipe| match action(dtype, shape, recipe) {
            Action::PassThrough(reason) => reason.to_string(),
            Action::Quantize(_) => "quantized".into(),
        };
        let rows = Recipe::default();
        assert_eq!(reason(Dtype::F32, &[384], rows), "1 dimension, fewer than 2");
        assert_eq!(reason(Dtype::F32, &[], rows), "0 dimensions, fewer than 2");
        assert_eq!(reason(Dtype::F32, &[4, 48], rows), "last dimension 48 is not a multiple of 32");
        assert_eq!(reason(Dtype::F16, &[0, 32], rows), "no elements");
        assert_eq!(reason(Dtype::F16, &[32, 0], rows), "no elements");
        assert_eq!(reason(Dtype::F64, &[32, 32], rows), "F64 is not F32, F16 or BF16");
        assert_eq!(reason(Dtype::F8E4M3, &[32, 32], rows), "F8_E4M3 is not F32, F16 or BF16");
        let both = by(Format::Mxfp8, Directions::Both);
        assert_eq!(reason(Dtype::F32, &[2, 24, 64], both), "48 rows (all dimensions but the last) are not a multiple of 32");
        assert_eq!(reason(Dtype::F32, &[32, 24], by(Format::Nvfp4, Directions::Columns)), "last dimension 24 is not a multiple of 16");
        let squares = "24 rows (all dimensions but the last) are not a multiple of 16";
        assert_eq!(reason(Dtype::F32, &[24, 32], Recipe::of(Format::Nvfp4Squares)), squares);
        assert_eq!(reason(Dtype::F32, &[3, 12], Recipe::of(Format::Fp8Block)), "last dimension 12 is not a multiple of 8");
        let hadamard = Recipe { hadamard: true, ..by(Format::Nvfp4, Directions::Both) };
        assert_eq!(
            reason(Dtype::F16, &[16, 16], hadamard),
            "F16 is not BF16, the one type that --hadamard takes: convert it before, or leave --hadamard out"
        );
        let stochastic = Recipe { seed: Some(1), ..Recipe::of(Format::Nvfp4) };
        assert_eq!(
            reason(Dtype::F32, &[16, 16], stochastic),
            "F32 is not BF16, the one type that --stochastic takes: convert it before, or leave --stochastic out"
        );
    }
}
