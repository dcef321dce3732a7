//! Which tensors of a quantized file make up one matrix, decided from the header alone.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::{
    quantize::{
        Format,
        plan::{FORMAT_KEY, amax_name, data_name, global_scale_name, scale_name},
    },
    safetensors::{Checkpoint, Dtype, Tensor, TensorSpec},
    text::{printable, shape},
};

/// The job laid out.
#[derive(Debug)]
pub struct Plan<'a> {
    /// What the matrices were quantized to.
    pub format: Format,
    /// The matrices, in file order of their codes.
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
    /// Its name before the quantization.
    pub name: String,
    /// Its dimensions: those of before, or rows and columns where the file does not tell.
    pub shape: Vec<u64>,
    /// Rows and columns of the codes; a row is whole blocks.
    pub dimensions: [u64; 2],
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
    /// Not written by `oxtile quantize`.
    #[error("its metadata has no `{FORMAT_KEY}`: name a file that `oxtile quantize` wrote")]
    NotQuantized,
    /// Written by a newer one, or by hand.
    #[error("its metadata says {FORMAT_KEY} = {0:?}, which is none of: {names}", names = Format::ALL.map(Format::name).join(", "))]
    UnknownFormat(String),
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
    /// No matrix is complete.
    #[error("it holds no quantized matrix, though its metadata says {0}: the file is damaged, quantize the checkpoint again")]
    NoMatrices(&'static str),
    /// The restored name is taken.
    #[error("the output would hold two tensors named `{}`: rename the one that is not quantized", printable(.0))]
    NameClash(String),
}

impl<'a> Plan<'a> {
    /// Lays out the job; the matrices become `dtype`.
    ///
    /// # Errors
    /// If the file is not one of `oxtile quantize`, or its tensors do not belong together.
    pub fn new(checkpoint: &'a Checkpoint, dtype: Dtype) -> Result<Self, PlanError> {
        let name = checkpoint.metadata().get(FORMAT_KEY).ok_or(PlanError::NotQuantized)?;
        let format = Format::ALL.into_iter().find(|format| format.name() == name);
        let format = format.ok_or_else(|| PlanError::UnknownFormat(name.clone()))?;
        let by_name: HashMap<_, _> = checkpoint.tensors().iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
        let matrices = checkpoint.tensors().iter().filter_map(|codes| Matrix::of(codes, format, &by_name));
        let matrices = matrices.collect::<Result<Vec<_>, _>>()?;
        if matrices.is_empty() && checkpoint.tensors().iter().any(|tensor| tensor.dtype == format.scale_dtype()) {
            return Err(PlanError::NoMatrices(format.name()));
        }
        let used: HashSet<_> = matrices.iter().flat_map(|matrix| matrix.parts(format)).collect();
        let copies: Vec<_> = checkpoint.tensors().iter().filter(|tensor| !used.contains(&tensor.name)).collect();
        let restored = matrices.iter().map(|matrix| TensorSpec { name: matrix.name.clone(), dtype, shape: matrix.shape.clone() });
        let copied = copies.iter().map(|tensor| TensorSpec { name: tensor.name.clone(), dtype: tensor.dtype, shape: tensor.shape.clone() });
        let outputs: Vec<_> = restored.chain(copied).collect();
        let mut names = HashSet::new();
        if let Some(twice) = outputs.iter().find(|spec| !names.insert(&spec.name)) {
            return Err(PlanError::NameClash(twice.name.clone()));
        }
        let mut metadata = checkpoint.metadata().clone();
        metadata.retain(|key, _| !key.starts_with("oxtile."));
        metadata.insert("oxtile.dequantized_from".into(), format.name().into());
        Ok(Self { format, matrices, copies, outputs, metadata })
    }
}

impl<'a> Matrix<'a> {
    /// The matrix that these codes belong to; `None` for a tensor that is no codes.
    fn of(codes: &'a Tensor, format: Format, by_name: &HashMap<&str, &'a Tensor>) -> Option<Result<Self, PlanError>> {
        let (name, dtype) = match format {
            Format::Mxfp8 => (codes.name.as_str(), Dtype::F8E4M3),
            Format::Nvfp4 => (codes.name.strip_suffix("_packed")?, Dtype::U8),
        };
        // Scales and amax tell the codes from a tensor of the same type that was copied.
        let (scales, amax) = (by_name.get(scale_name(name).as_str())?, by_name.get(amax_name(name).as_str())?);
        let (outer, last) = codes.shape.split_last().filter(|_| codes.dtype == dtype).map(|(last, outer)| (outer, *last))?;
        let columns = if format == Format::Nvfp4 { last.checked_mul(2)? } else { last };
        let rows = outer.iter().product();
        let restored = match format {
            Format::Mxfp8 => codes.shape.clone(),
            Format::Nvfp4 => vec![rows, columns],
        };
        let check = |tensor: &Tensor, dtype, dimensions: &[u64]| {
            let said = |dtype: Dtype, dimensions: &[u64]| format!("{dtype} [{}]", shape(dimensions));
            if (tensor.dtype, tensor.shape.as_slice()) == (dtype, dimensions) && tensor.elements() > 0 {
                return Ok(());
            }
            let (expected, found) = (said(dtype, dimensions), said(tensor.dtype, &tensor.shape));
            Err(PlanError::Mismatch { name: tensor.name.clone(), matrix: name.to_owned(), expected, found })
        };
        let checked = check(scales, format.scale_dtype(), &[rows, columns / format.block()]).and_then(|()| check(amax, Dtype::F32, &[1]));
        let matrix = || Self { name: name.into(), shape: restored, dimensions: [rows, columns], codes, scales, amax };
        Some(checked.map(|()| matrix()))
    }

    /// Names of the tensors that it is made from.
    fn parts(&self, format: Format) -> Vec<String> {
        let mut parts = vec![data_name(&self.name, format), scale_name(&self.name), amax_name(&self.name)];
        if format == Format::Nvfp4 {
            parts.push(global_scale_name(&self.name));
        }
        parts
    }
}
