//! `--histogram`: the values of one tensor before and after a quantization, and its scales, gathered and drawn.

use std::{io::Write, path::Path};

use super::{
    Magnitudes, Statistics,
    svg::{Panel, Picture, Series},
};
use crate::{
    arguments,
    dequantize::{self, Matrix, Plan},
    output::{Completed, Output},
    progress::Progress,
    quantize::{metadata::FORMAT_KEY, runtime},
    safetensors::{Checkpoint, Dtype, ReadError, Tensor, TensorSpec, WriteError},
    text::{count, path, printable, shape},
};

/// Bytes of a tensor that are looked at at a time; a multiple of every element's size.
const WINDOW_BYTES: u64 = 8 << 20;

/// A histogram that cannot be drawn.
#[derive(Debug, thiserror::Error)]
pub enum HistogramError {
    /// A file.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The picture.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// The codes.
    #[error(transparent)]
    Restore(#[from] dequantize::JobError),
    /// What a quantized file holds.
    #[error("{file}: {error}")]
    Plan {
        /// The file.
        file: String,
        /// What is wrong with it.
        error: Box<dequantize::PlanError>,
    },
    /// No tensor of this name, or none at all.
    #[error("{file}: {}", match .name {
        Some(name) => format!("has no tensor `{}` with elements that are single numbers; `oxtile inspect` lists those that it has", printable(name)),
        None => "has no tensor with elements that are single numbers".into(),
    })]
    NoTensor {
        /// The file.
        file: String,
        /// The name asked for.
        name: Option<String>,
    },
    /// Another tensor before than after.
    #[error("tensor `{}` is [{after}], but [{before}] in {file}: name the file that it was made from", printable(.name))]
    Shape {
        /// The tensor.
        name: String,
        /// Its dimensions.
        after: String,
        /// Those in the other file.
        before: String,
        /// The other file.
        file: String,
    },
}

/// What was drawn.
#[derive(Debug, serde::Serialize)]
pub struct Drawn {
    /// The picture.
    pub output: String,
    /// The tensor.
    pub tensor: String,
}

/// One tensor's numbers.
struct Gathered {
    spec: TensorSpec,
    /// What it is, for people.
    title: String,
    values: Magnitudes,
    /// What codes are multiplied by.
    scales: Option<Magnitudes>,
}

/// Draws the histogram that a request asks for as `picture`, but for the file's name.
///
/// # Errors
/// If a file cannot be read or has no such tensor, or the picture cannot be written.
pub fn draw(request: &arguments::Inspect, picture: &Path, progress: &mut Progress) -> Result<(Drawn, Completed), crate::Error> {
    let inputs: Vec<&Path> = [Some(&request.file), request.against.as_ref()].into_iter().flatten().map(|path| path.as_path()).collect();
    let output = Output::create(picture, &inputs)?;
    let after = gather(&request.file, request.tensor.as_deref(), progress)?;
    let before = request.against.as_ref().map(|file| before(file, &after.spec, progress)).transpose()?;
    progress.clear();
    let drawing = drawing(&after, before.as_ref()).to_string();
    output.file().write_all(drawing.as_bytes()).map_err(|error| output.error("write", error))?;
    let drawn = Drawn { output: picture.display().to_string(), tensor: after.spec.name };
    Ok((drawn, output.complete()?))
}

/// The numbers of the file before, whose tensor must be that of after.
fn before(file: &Path, after: &TensorSpec, progress: &mut Progress) -> Result<Gathered, crate::Error> {
    let gathered = gather(file, Some(&after.name), progress)?;
    if gathered.spec.shape != after.shape {
        let [after_shape, before] = [&after.shape, &gathered.spec.shape].map(|dimensions| shape(dimensions));
        let (name, file) = (after.name.clone(), file.display().to_string());
        return Err(HistogramError::Shape { name, after: after_shape, before, file }.into());
    }
    Ok(gathered)
}

/// The numbers of a tensor, or of the largest there is; codes of a quantized file as the values that they stand for.
fn gather(file: &Path, name: Option<&str>, progress: &mut Progress) -> Result<Gathered, crate::Error> {
    let checkpoint = Checkpoint::open(file).map_err(HistogramError::from)?;
    if checkpoint.metadata().contains_key(FORMAT_KEY) {
        let plan = Plan::new(&checkpoint, Some(Dtype::F32), None)
            .map_err(|error| HistogramError::Plan { file: path(file), error: error.into() })?;
        let elements = |matrix: &&Matrix<'_>| matrix.output.shape.iter().product::<u64>();
        let found = match name {
            Some(name) => plan.matrices.iter().find(|matrix| matrix.output.name == name),
            None => plan.matrices.iter().rev().max_by_key(elements),
        };
        if let Some(matrix) = found {
            return gather_codes(&checkpoint, matrix, &plan.recipe.description(), progress);
        }
    }
    let drawable = checkpoint.tensors().iter().filter(|tensor| Statistics::covers(tensor.dtype) && tensor.elements() > 0);
    let found = match name {
        Some(name) => drawable.into_iter().find(|tensor| tensor.name == name),
        None => drawable.rev().max_by_key(|tensor| tensor.elements()),
    };
    let no_tensor = || HistogramError::NoTensor { file: path(file), name: name.map(str::to_owned) };
    Ok(gather_numbers(&checkpoint, found.ok_or_else(no_tensor)?, progress)?)
}

fn gather_numbers(checkpoint: &Checkpoint, tensor: &Tensor, progress: &mut Progress) -> Result<Gathered, HistogramError> {
    let mut values = Magnitudes::default();
    progress.start(&tensor.name);
    for window in checkpoint.windows(tensor, WINDOW_BYTES) {
        Statistics::visit(tensor.dtype, &window?, |value| values.add(value));
    }
    checkpoint.verify_unchanged()?;
    let spec = TensorSpec { name: tensor.name.clone(), dtype: tensor.dtype, shape: tensor.shape.clone() };
    Ok(Gathered { title: tensor.dtype.to_string(), spec, values, scales: None })
}

fn gather_codes(checkpoint: &Checkpoint, matrix: &Matrix<'_>, title: &str, progress: &mut Progress) -> Result<Gathered, crate::Error> {
    let (mut device, _) = runtime::open(arguments::Device::Auto)?;
    let (mut values, mut scales) = (Magnitudes::default(), Magnitudes::default());
    progress.start(&matrix.output.name);
    dequantize::restore(checkpoint, matrix, &mut device, |_, wide, _| {
        Statistics::visit(Dtype::F32, &wide, |value| values.add(value));
        Ok(())
    })?;
    let factor = match matrix.side.format {
        format if format.is_nvfp4() => f64::from(matrix.amax(checkpoint).map_err(HistogramError::from)?) / 2688.0,
        _ => 1.0,
    };
    Statistics::visit(matrix.side.format.scale_dtype(), &matrix.compact_scales(checkpoint, &mut device)?, |scale| {
        scales.add(scale * factor)
    });
    checkpoint.verify_unchanged().map_err(HistogramError::from)?;
    Ok(Gathered { spec: matrix.output.clone(), title: title.to_owned(), values, scales: Some(scales) })
}

fn drawing(after: &Gathered, before: Option<&Gathered>) -> Picture {
    let series = |class, name: &str, gathered: &Gathered| Series {
        class,
        label: format!("{name}: {}, {}", gathered.title, counted(&gathered.values)),
        magnitudes: gathered.values.clone(),
    };
    let values = match before {
        Some(before) => vec![series("before", "before", before), series("after", "after", after)],
        None => vec![series("after", "values", after)],
    };
    let mut panels = vec![Panel {
        title: "Values".into(),
        horizontal: "magnitude of a value, in octaves".into(),
        vertical: "share of the values".into(),
        series: values,
    }];
    if let Some(scales) = &after.scales {
        let label = format!("{} scales, {} distinct octaves", count(scales.total), octaves(scales));
        panels.push(Panel {
            title: "Scales".into(),
            horizontal: "what the codes of a block are multiplied by, in octaves".into(),
            vertical: "share of the blocks".into(),
            series: vec![Series { class: "scales", label, magnitudes: scales.clone() }],
        });
    }
    Picture { title: format!("{}  [{}]", printable(&after.spec.name), shape(&after.spec.shape)), panels }
}

fn octaves(magnitudes: &Magnitudes) -> usize {
    magnitudes.range().map_or(0, |[first, last]| (first..=last).filter(|&octave| magnitudes.count(octave) > 0).count())
}

/// What a legend says of the numbers.
fn counted(values: &Magnitudes) -> String {
    let mut words = format!("{} values, {} % zero", count(values.total), crate::text::percent(values.zeros, values.total));
    for (number, what) in [(values.nan, "NaN"), (values.infinite, "infinite")] {
        if number > 0 {
            words.push_str(&format!(", {number} {what}"));
        }
    }
    words
}
