//! The JSON header, parsed with every rule of the format checked.

use std::{collections::BTreeMap, ops::Range};

use serde_json::value::RawValue;

use super::{Dtype, Fault, Field, METADATA_KEY, object::Object};
use crate::text::printable;

/// The longest header the format allows, in bytes.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Its name, unique in the file.
    pub name: String,
    /// Its element type.
    pub dtype: Dtype,
    /// Its dimensions, outermost first; empty for a scalar.
    pub shape: Vec<u64>,
    /// Its bytes, counted from the start of the data section.
    pub range: Range<u64>,
}

impl Tensor {
    /// Number of elements: the product of the shape, 1 for a scalar.
    pub fn elements(&self) -> u64 {
        // No overflow: `Header::parse` has computed this product with checks.
        self.shape.iter().product()
    }

    /// Size of its data in bytes.
    pub fn bytes(&self) -> u64 {
        self.range.end - self.range.start
    }
}

/// A header: the tensors in the order of their data, and the file's free-form strings.
#[derive(Clone, Debug, PartialEq)]
pub struct Header {
    /// The tensors, by ascending offset. They cover the data section without holes or overlaps.
    pub tensors: Vec<Tensor>,
    /// The strings under `__metadata__`.
    pub metadata: BTreeMap<String, String>,
}

impl Header {
    /// Parses a header and holds it against a data section of `data_bytes` bytes.
    ///
    /// # Errors
    /// Any departure from the format, as the [`Fault`] that names the tensor and the field.
    pub fn parse(header: &[u8], data_bytes: u64) -> Result<Self, Fault> {
        match header.first() {
            None => return Err(Fault::HeaderEmpty),
            Some(b'{') => {}
            Some(&byte) => return Err(Fault::HeaderStart(byte)),
        }
        let text = std::str::from_utf8(header).map_err(|error| Fault::HeaderUtf8(error.valid_up_to()))?;
        let entries = serde_json::from_str::<Object<&RawValue>>(text).map_err(|error| Fault::HeaderJson(error.to_string()))?;

        let mut metadata = BTreeMap::new();
        let mut tensors = Vec::with_capacity(entries.0.len());
        for (key, value) in entries.0 {
            if key == METADATA_KEY {
                metadata = parse_metadata(value)?;
            } else {
                tensors.push(parse_tensor(key, value)?);
            }
        }
        tensors.sort_by_key(|tensor| (tensor.range.start, tensor.range.end));
        check_coverage(&tensors, data_bytes)?;
        Ok(Self { tensors, metadata })
    }
}

fn parse_metadata(value: &RawValue) -> Result<BTreeMap<String, String>, Fault> {
    let members = parse_value::<Object<&RawValue>>(value).map_err(Fault::Metadata)?;
    let parse = |(key, value): (String, &RawValue)| match parse_value::<String>(value) {
        Ok(text) => Ok((key, text)),
        Err(reason) => Err(Fault::Metadata(format!("value of {key:?}: {reason}"))),
    };
    members.0.into_iter().map(parse).collect()
}

fn parse_tensor(name: String, value: &RawValue) -> Result<Tensor, Fault> {
    let fault = |field, reason| Fault::Tensor { name: name.clone(), field, reason };
    let members = parse_value::<Object<&RawValue>>(value).map_err(|reason| fault(Field::Entry, reason))?;
    let (mut dtype, mut shape, mut offsets) = (None, None, None);
    for (key, value) in members.0 {
        match key.as_str() {
            "dtype" => dtype = Some(parse_dtype(value).map_err(|reason| fault(Field::Dtype, reason))?),
            "shape" => shape = Some(parse_value::<Vec<u64>>(value).map_err(|reason| fault(Field::Shape, reason))?),
            "data_offsets" => {
                let pair = parse_value::<[u64; 2]>(value).map_err(|reason| fault(Field::DataOffsets, reason))?;
                offsets = Some(pair);
            }
            // The format does not forbid others.
            _ => {}
        }
    }
    let missing = |field| fault(field, "is missing".into());
    let dtype = dtype.ok_or_else(|| missing(Field::Dtype))?;
    let shape = shape.ok_or_else(|| missing(Field::Shape))?;
    let [start, end] = offsets.ok_or_else(|| missing(Field::DataOffsets))?;

    if end < start {
        return Err(fault(Field::DataOffsets, format!("end {end} lies before begin {start}")));
    }
    let expected = byte_count(dtype, &shape).map_err(|reason| fault(Field::Shape, reason))?;
    if expected != end - start {
        let reason = format!("span {} bytes, but {dtype} of shape {shape:?} takes {expected}", end - start);
        return Err(fault(Field::DataOffsets, reason));
    }
    Ok(Tensor { name, dtype, shape, range: start..end })
}

fn parse_dtype(value: &RawValue) -> Result<Dtype, String> {
    let name = parse_value::<String>(value)?;
    Dtype::from_name(&name).ok_or_else(|| {
        let known: Vec<_> = Dtype::ALL.iter().map(|dtype| dtype.name()).collect();
        format!("{name:?} is none of {}", known.join(", "))
    })
}

/// Bytes that a tensor takes.
///
/// # Errors
/// If the number does not fit 64 bits, or packed elements do not fill their last byte.
pub(super) fn byte_count(dtype: Dtype, shape: &[u64]) -> Result<u64, String> {
    let bits = shape.iter().try_fold(1u64, |product, &size| product.checked_mul(size));
    let bits = bits.and_then(|elements| elements.checked_mul(dtype.bits()));
    let bits = bits.ok_or_else(|| format!("the size of {dtype} {shape:?} does not fit 64 bits"))?;
    if bits % 8 != 0 {
        return Err(format!("{dtype} {shape:?} takes {bits} bits, which is no whole number of bytes"));
    }
    Ok(bits / 8)
}

/// Checks that the tensors, sorted by offset, cover the data section exactly.
fn check_coverage(tensors: &[Tensor], data_bytes: u64) -> Result<(), Fault> {
    let mut covered = 0;
    let mut before = "the start of the data";
    for tensor in tensors {
        let before_it = printable(before);
        let fault = |reason| Err(Fault::Tensor { name: tensor.name.clone(), field: Field::DataOffsets, reason });
        let Range { start, end } = tensor.range;
        if start < covered {
            return fault(format!("begin at {start}, inside `{before_it}`, which ends at {covered}"));
        }
        if start > covered {
            return fault(format!("begin at {start}, {} bytes after the end of `{before_it}` at {covered}", start - covered));
        }
        if end > data_bytes {
            let reason = format!("end at {end}, but the file holds {data_bytes} data bytes; it is cut short: fetch or make it again");
            return fault(reason);
        }
        covered = end;
        before = &tensor.name;
    }
    if covered != data_bytes {
        return Err(Fault::TrailingBytes { covered, available: data_bytes });
    }
    Ok(())
}

/// Parses one value. Its position inside the value says nothing to a reader who is told the tensor and field: cut it off.
fn parse_value<'a, T: serde::Deserialize<'a>>(value: &'a RawValue) -> Result<T, String> {
    serde_json::from_str(value.get()).map_err(|error| {
        let text = error.to_string();
        text.rsplit_once(" at line ").map_or(text.clone(), |(reason, _)| reason.into())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_are_sorted_by_their_data() {
        let json = br#"{"b":{"dtype":"F4","shape":[2,3],"data_offsets":[4,7]},"__metadata__":{"k":"v"},
            "s":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"e":{"dtype":"I64","shape":[0,9],"data_offsets":[7,7]}}   "#;
        let header = Header::parse(json, 7).expect("a valid header");
        let names: Vec<_> = header.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        assert_eq!(names, ["s", "b", "e"]);
        assert_eq!(header.tensors.iter().map(Tensor::elements).collect::<Vec<_>>(), [1, 6, 0]);
        assert_eq!(header.metadata["k"], "v");
    }

    #[test]
    fn sizes_that_do_not_fit_are_refused() {
        assert_eq!(byte_count(Dtype::F32, &[]), Ok(4));
        assert_eq!(byte_count(Dtype::F6E2M3, &[4]), Ok(3));
        assert!(byte_count(Dtype::F4, &[3]).is_err());
        assert!(byte_count(Dtype::U8, &[1 << 32, 1 << 32]).is_err());
        assert!(byte_count(Dtype::U8, &[1 << 61]).is_err(), "in bits it no longer fits");
    }
}
