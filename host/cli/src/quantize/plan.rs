//! What happens to each tensor, decided from the header alone.

use std::collections::{BTreeMap, HashMap};

use super::Format;
use crate::{
    safetensors::{Checkpoint, Dtype, Tensor, TensorSpec},
    text::printable,
};

/// Metadata key that names the format of the quantized tensors.
pub const FORMAT_KEY: &str = "oxtile.format";

/// The job laid out: what is quantized, what is copied, what the output holds.
#[derive(Debug)]
pub struct Plan<'a> {
    /// What the tensors are quantized to.
    pub format: Format,
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
    /// Quantized as a `[rows, columns]` matrix, row-major.
    Quantize {
        /// Product of all dimensions but the last.
        rows: u64,
        /// The last dimension, a multiple of the format's block.
        columns: u64,
    },
    /// Copied as it is.
    PassThrough(Reason),
}

/// Why a tensor is not quantized.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum Reason {
    /// Only f32, f16 and bf16 are quantized.
    #[error("{0} is not F32, F16 or BF16")]
    Dtype(Dtype),
    /// Vectors and scalars are not matrices.
    #[error("{0} dimension{s}, fewer than 2", s = if *.0 == 1 { "" } else { "s" })]
    Dimensions(usize),
    /// A dimension is 0.
    #[error("no elements")]
    Empty,
    /// Rows do not divide into blocks.
    #[error("last dimension {columns} is not a multiple of {block}")]
    LastDimension {
        /// The last dimension.
        columns: u64,
        /// Elements a block.
        block: u64,
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
}

impl<'a> Plan<'a> {
    /// Lays out the job for a checkpoint.
    ///
    /// # Errors
    /// If two output tensors would share a name, or the input is a quantized file.
    pub fn new(checkpoint: &'a Checkpoint, format: Format) -> Result<Self, PlanError> {
        if let Some(format) = checkpoint.metadata().get(FORMAT_KEY) {
            return Err(PlanError::AlreadyQuantized(format.clone()));
        }
        let actions: Vec<_> = checkpoint.tensors().iter().map(|tensor| (tensor, Action::of(tensor, format))).collect();
        let outputs: Vec<(TensorSpec, String)> = actions.iter().flat_map(|(tensor, action)| action.outputs(tensor, format)).collect();
        check_names(&outputs)?;
        let mut metadata = checkpoint.metadata().clone();
        metadata.extend([
            (FORMAT_KEY.into(), format.name().into()),
            ("oxtile.format_version".into(), "1".into()),
            ("oxtile.block_size".into(), format.block().to_string()),
            ("oxtile.producer".into(), format!("oxtile {}", env!("CARGO_PKG_VERSION"))),
        ]);
        Ok(Self { format, actions, outputs: outputs.into_iter().map(|(spec, _)| spec).collect(), metadata })
    }
}

impl Action {
    /// The action for a tensor of this type and shape.
    fn of(tensor: &Tensor, format: Format) -> Self {
        let block = format.block();
        let reason = match (tensor.dtype, tensor.shape.as_slice()) {
            (Dtype::F32 | Dtype::F16 | Dtype::Bf16, [outer @ .., columns]) if !outer.is_empty() => match tensor.elements() {
                0 => Reason::Empty,
                _ if columns % block != 0 => Reason::LastDimension { columns: *columns, block },
                elements => return Self::Quantize { rows: elements / columns, columns: *columns },
            },
            (Dtype::F32 | Dtype::F16 | Dtype::Bf16, shape) => Reason::Dimensions(shape.len()),
            (dtype, _) => Reason::Dtype(dtype),
        };
        Self::PassThrough(reason)
    }

    /// How often the tensor is read.
    pub const fn passes(self, format: Format) -> u64 {
        match self {
            Self::Quantize { .. } => format.passes(),
            Self::PassThrough(_) => 1,
        }
    }

    /// The tensors it writes, each with words for what it is.
    fn outputs(self, tensor: &Tensor, format: Format) -> Vec<(TensorSpec, String)> {
        let spec = |name: &str, dtype, shape| TensorSpec { name: name.into(), dtype, shape };
        let name = &tensor.name;
        let shown = printable(name);
        match self {
            Self::PassThrough(_) => {
                vec![(spec(name, tensor.dtype, tensor.shape.clone()), format!("the input's `{shown}`"))]
            }
            Self::Quantize { rows, columns } => {
                let scales = vec![rows, columns / format.block()];
                let amax = (spec(&amax_name(name), Dtype::F32, vec![1]), format!("the amax of `{shown}`"));
                let (data, scales_of) = (format!("the input's `{shown}`, quantized"), format!("the scales of `{shown}`"));
                match format {
                    Format::Mxfp8 => vec![
                        (spec(name, Dtype::F8E4M3, tensor.shape.clone()), data),
                        (spec(&scale_name(name), format.scale_dtype(), scales), scales_of),
                        amax,
                    ],
                    Format::Nvfp4 => vec![
                        (spec(&packed_name(name), Dtype::U8, vec![rows, columns / 2]), data),
                        (spec(&scale_name(name), format.scale_dtype(), scales), scales_of),
                        (spec(&global_scale_name(name), Dtype::F32, vec![1]), format!("the encode scale of `{shown}`")),
                        amax,
                    ],
                }
            }
        }
    }
}

/// Name of the tensor that holds the codes of `name`.
pub fn data_name(name: &str, format: Format) -> String {
    match format {
        Format::Mxfp8 => name.into(),
        Format::Nvfp4 => packed_name(name),
    }
}

/// Name of the tensor that holds the NVFP4 codes of `name`: U8 `[rows, columns / 2]`, the even element in the low nibble.
fn packed_name(name: &str) -> String {
    format!("{name}_packed")
}

/// Name of the tensor that holds what NVFP4 brings `name` to the range of its scales and codes with: F32 `[1]`.
pub fn global_scale_name(name: &str) -> String {
    format!("{name}_global_scale")
}

/// Name of the tensor that holds the scales of `name`: F8_E8M0 `[rows, columns / 32]`, or F8_E4M3 `[rows, columns / 16]`.
pub fn scale_name(name: &str) -> String {
    format!("{name}_scale")
}

/// Name of the tensor that holds the largest magnitude of `name`: F32 `[1]`.
pub fn amax_name(name: &str) -> String {
    format!("{name}_amax")
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

    fn action(dtype: Dtype, shape: &[u64]) -> Action {
        Action::of(&Tensor { name: "t".into(), dtype, shape: shape.into(), range: 0..0 }, Format::Mxfp8)
    }

    #[test]
    fn matrices_of_whole_blocks_are_quantized() {
        assert_eq!(action(Dtype::F32, &[7, 64]), Action::Quantize { rows: 7, columns: 64 });
        assert_eq!(action(Dtype::Bf16, &[2, 3, 5, 32]), Action::Quantize { rows: 30, columns: 32 });
        assert_eq!(action(Dtype::F16, &[1, 32]), Action::Quantize { rows: 1, columns: 32 });
    }

    #[test]
    fn blocks_are_those_of_the_format() {
        let tensor = Tensor { name: "t".into(), dtype: Dtype::F32, shape: vec![7, 48], range: 0..0 };
        assert_eq!(Action::of(&tensor, Format::Nvfp4), Action::Quantize { rows: 7, columns: 48 });
        assert_eq!(Action::of(&tensor, Format::Mxfp8), Action::PassThrough(Reason::LastDimension { columns: 48, block: 32 }));
        let outputs = Action::of(&tensor, Format::Nvfp4).outputs(&tensor, Format::Nvfp4);
        let names: Vec<_> = outputs.iter().map(|(spec, _)| (spec.name.as_str(), spec.dtype, spec.shape.as_slice())).collect();
        let expected: [(&str, Dtype, &[u64]); 4] = [
            ("t_packed", Dtype::U8, &[7, 24]),
            ("t_scale", Dtype::F8E4M3, &[7, 3]),
            ("t_global_scale", Dtype::F32, &[1]),
            ("t_amax", Dtype::F32, &[1]),
        ];
        assert_eq!(names, expected);
    }

    #[test]
    fn the_rest_passes_through_for_a_reason() {
        let reason = |dtype, shape: &[u64]| match action(dtype, shape) {
            Action::PassThrough(reason) => reason.to_string(),
            Action::Quantize { .. } => "quantized".into(),
        };
        assert_eq!(reason(Dtype::F32, &[384]), "1 dimension, fewer than 2");
        assert_eq!(reason(Dtype::F32, &[]), "0 dimensions, fewer than 2");
        assert_eq!(reason(Dtype::F32, &[4, 48]), "last dimension 48 is not a multiple of 32");
        assert_eq!(reason(Dtype::F16, &[0, 32]), "no elements");
        assert_eq!(reason(Dtype::F16, &[32, 0]), "no elements");
        assert_eq!(reason(Dtype::F64, &[32, 32]), "F64 is not F32, F16 or BF16");
        assert_eq!(reason(Dtype::F8E4M3, &[32, 32]), "F8_E4M3 is not F32, F16 or BF16");
    }
}
