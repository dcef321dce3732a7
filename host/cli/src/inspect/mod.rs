//! `oxtile inspect`: what is in a safetensors file, values included.

pub mod histogram;
mod magnitudes;
mod statistics;
mod svg;

use std::{collections::BTreeMap, fmt, path::Path};

use histogram::Drawn;
pub use histogram::HistogramError;
pub use magnitudes::Magnitudes;
use serde::Serialize;
pub use statistics::Statistics;

use crate::{
    progress::Progress,
    safetensors::{Checkpoint, ReadError, Tensor},
    text::{Align, Table, bytes, count, printable, shape, shortened, value},
};

/// Bytes of a tensor that are looked at at a time; a multiple of every element's size.
const WINDOW_BYTES: u64 = 8 << 20;

/// A file's content. Serialized, it is the document that `--json` prints; `schema` counts its incompatible changes.
#[derive(Debug, Serialize)]
pub struct Inspection {
    command: &'static str,
    schema: u32,
    version: &'static str,
    file: String,
    bytes: u64,
    metadata: BTreeMap<String, String>,
    tensors: Vec<TensorInspection>,
    /// `null` unless one was asked for.
    pub histogram: Option<Drawn>,
}

#[derive(Debug, Serialize)]
struct TensorInspection {
    name: String,
    dtype: &'static str,
    shape: Vec<u64>,
    elements: u64,
    bytes: u64,
    /// `null` for a type whose elements are not single numbers.
    values: Option<Values>,
}

/// In JSON an infinite or absent number is `null`; the counts tell which.
#[derive(Debug, Serialize)]
struct Values {
    min: Option<f64>,
    max: Option<f64>,
    amax: Option<f64>,
    zeros: u64,
    nan: u64,
    infinite: u64,
}

impl Inspection {
    /// Reads a file through.
    ///
    /// # Errors
    /// If it is not a valid safetensors file, or changes while it is read.
    pub fn of(path: &Path, progress: &mut Progress) -> Result<Self, ReadError> {
        let checkpoint = Checkpoint::open(path)?;
        progress.expect(checkpoint.tensors().iter().map(Tensor::bytes).sum());
        let tensors = checkpoint.tensors().iter().map(|tensor| {
            progress.start(&tensor.name);
            inspect_tensor(&checkpoint, tensor, progress)
        });
        let tensors = tensors.collect::<Result<_, _>>()?;
        progress.clear();
        checkpoint.verify_unchanged()?;
        Ok(Self {
            command: "inspect",
            schema: 1,
            version: env!("CARGO_PKG_VERSION"),
            file: path.display().to_string(),
            bytes: checkpoint.bytes(),
            metadata: checkpoint.metadata().clone(),
            tensors,
            histogram: None,
        })
    }
}

fn inspect_tensor(checkpoint: &Checkpoint, tensor: &Tensor, progress: &mut Progress) -> Result<TensorInspection, ReadError> {
    let mut statistics = Statistics::default();
    if Statistics::covers(tensor.dtype) {
        for window in checkpoint.windows(tensor, WINDOW_BYTES) {
            let window = window?;
            statistics.add(tensor.dtype, &window);
            progress.advance(window.len() as u64);
        }
    }
    Ok(TensorInspection {
        name: tensor.name.clone(),
        dtype: tensor.dtype.name(),
        shape: tensor.shape.clone(),
        elements: tensor.elements(),
        bytes: tensor.bytes(),
        values: Statistics::covers(tensor.dtype).then(|| Values::from(statistics)),
    })
}

impl From<Statistics> for Values {
    fn from(statistics: Statistics) -> Self {
        let amax = statistics.amax();
        let known = |number: f64| amax.is_some().then_some(number);
        Self {
            min: known(statistics.min),
            max: known(statistics.max),
            amax,
            zeros: statistics.zeros,
            nan: statistics.nan,
            infinite: statistics.infinite,
        }
    }
}

impl fmt::Display for Inspection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use Align::{Left, Right};
        let elements = self.tensors.iter().map(|tensor| tensor.elements).sum();
        writeln!(f, "file    {}, {}", printable(&self.file), bytes(self.bytes))?;
        writeln!(f, "tensors {}, {} elements", self.tensors.len(), count(elements))?;
        if !self.metadata.is_empty() {
            let mut table = Table::new(&[("key", Left), ("value", Left)]);
            for (key, text) in &self.metadata {
                table.row([printable(key).into(), printable(text).into()]);
            }
            write!(f, "\nMetadata\n{table}")?;
        }
        if let Some(Drawn { output, tensor }) = &self.histogram {
            writeln!(f, "drawn   `{}` in {}", shortened(&printable(tensor), 120), printable(output))?;
        }
        if self.tensors.is_empty() {
            return Ok(());
        }
        let mut table = Table::new(&[
            ("tensor", Left),
            ("dtype", Left),
            ("shape", Right),
            ("size", Right),
            ("min", Right),
            ("max", Right),
            ("amax", Right),
            ("zero", Right),
            ("NaN", Right),
            ("infinite", Right),
        ]);
        for tensor in &self.tensors {
            let number = |number: fn(&Values) -> Option<f64>| tensor.values.as_ref().and_then(number).map_or("-".into(), value);
            let counted = |number: fn(&Values) -> u64| tensor.values.as_ref().map_or("-".into(), |values| number(values).to_string());
            table.row([
                printable(&tensor.name).into(),
                tensor.dtype.into(),
                shape(&tensor.shape),
                bytes(tensor.bytes),
                number(|values| values.min),
                number(|values| values.max),
                number(|values| values.amax),
                counted(|values| values.zeros),
                counted(|values| values.nan),
                counted(|values| values.infinite),
            ]);
        }
        write!(f, "\nTensors\n{table}")
    }
}
