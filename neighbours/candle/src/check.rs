//! What tensors are refused, and the words for it.

use candle_core::{DType, Result, Tensor, bail};

/// A tensor with its name in errors.
pub type Named<'a> = (&'static str, &'a Tensor);

/// Fails unless the tensor is of one of the types.
pub fn element((name, tensor): Named<'_>, allowed: &[DType], what: &str) -> Result<()> {
    if allowed.contains(&tensor.dtype()) {
        return Ok(());
    }
    let allowed: Vec<String> = allowed.iter().map(|dtype| format!("{dtype:?}")).collect();
    bail!("oxtile: {name} is {:?}: {what} {}", tensor.dtype(), allowed.join(", "))
}

/// Fails unless the tensors lie on one device without gaps.
pub fn places(tensors: &[Named<'_>]) -> Result<()> {
    let (first, of_first) = tensors[0];
    for (name, tensor) in tensors {
        if !tensor.device().same_device(of_first.device()) {
            bail!("oxtile: {name} is on {:?}, {first} on {:?}: move one", tensor.device().location(), of_first.device().location())
        }
        if !tensor.is_contiguous() {
            bail!("oxtile: {name} is not contiguous (shape {:?}, strides {:?}): call contiguous()", tensor.dims(), tensor.stride())
        }
    }
    Ok(())
}

/// Fails unless the tensors have the type of the first.
pub fn same_type(tensors: &[Named<'_>]) -> Result<()> {
    let (first, of_first) = tensors[0];
    match tensors.iter().find(|(_, tensor)| tensor.dtype() != of_first.dtype()) {
        Some((name, tensor)) => bail!("oxtile: {name} is {:?}, {first} is {:?}: convert one", tensor.dtype(), of_first.dtype()),
        None => Ok(()),
    }
}

/// Fails unless the tensor has this shape.
pub fn shape((name, tensor): Named<'_>, expected: &[usize], because: &str) -> Result<()> {
    if tensor.dims() == expected {
        return Ok(());
    }
    bail!("oxtile: {name} has shape {:?}, not {expected:?}: {because}", tensor.dims())
}
