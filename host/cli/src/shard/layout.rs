//! What the files of shards hold, decided from the header alone.

use std::collections::{BTreeMap, HashSet};

use oxtile::comm::WorldSize;

use super::{
    By, Division, ShardError, ShardFormat,
    metadata::{self, Part, Stated},
};
use crate::{
    quantize::{Direction, Directions, Plan, Side, plan::Action, plan::refuse_made},
    safetensors::{Checkpoint, Dtype, ReadError, Tensor, TensorSpec, frame, header_bytes},
};

/// The tensors of the joined file, in its order, and how each is divided.
#[derive(Debug)]
pub struct Layout<'a> {
    /// What becomes of the tensors before they are divided.
    pub format: ShardFormat,
    /// The directions that matrices are quantized in.
    pub directions: Directions,
    /// How many ranks.
    pub world: WorldSize,
    /// What is quantized, where anything is.
    pub plan: Option<Plan<'a>>,
    /// The tensors, each as the joined file has it.
    pub tensors: Vec<(TensorSpec, Division)>,
    /// The free-form strings of the input, and those of the joined file.
    pub metadata: [BTreeMap<String, String>; 2],
    /// The frame of the input's header, where the joined file is the input and this program would write another one.
    pub header: Option<String>,
}

impl<'a> Layout<'a> {
    /// Lays out the shards of a checkpoint.
    ///
    /// # Errors
    /// If the input is a shard, or is quantized and the format is not `keep`, or its header cannot be read again; as [`Plan::new`].
    pub fn new(checkpoint: &'a Checkpoint, format: ShardFormat, directions: Directions, world: WorldSize) -> Result<Self, ShardError> {
        refuse_made(checkpoint, format == ShardFormat::Keep)?;
        let plan = format.recipe(directions).map(|recipe| Plan::new(checkpoint, recipe)).transpose()?;
        let tensors = match &plan {
            Some(plan) => plan.actions.iter().flat_map(|&(tensor, action)| divided(tensor, action, plan, format, world)).collect(),
            None => checkpoint.tensors().iter().map(|tensor| kept(tensor, becomes(tensor, format), world)).collect(),
        };
        let before = checkpoint.metadata().clone();
        let joined = plan.as_ref().map_or_else(|| before.clone(), |plan| plan.metadata.clone());
        let header = if format == ShardFormat::Keep { header(checkpoint)? } else { None };
        Ok(Self { format, directions, world, plan, tensors, metadata: [before, joined], header })
    }

    /// The names of the input's tensors.
    pub fn inputs(&self) -> HashSet<&str> {
        match &self.plan {
            Some(plan) => plan.actions.iter().map(|(tensor, _)| tensor.name.as_str()).collect(),
            None => self.tensors.iter().map(|(spec, _)| spec.name.as_str()).collect(),
        }
    }

    /// The tensors in the file of a rank.
    pub fn specs(&self, rank: usize) -> Vec<TensorSpec> {
        let spec = |(spec, division): &(TensorSpec, Division)| TensorSpec { shape: division.shape(rank), ..spec.clone() };
        self.tensors.iter().map(spec).collect()
    }

    /// The free-form strings in the file of a rank.
    pub fn strings(&self, rank: usize) -> BTreeMap<String, String> {
        let part = |(spec, division): &(TensorSpec, Division)| {
            (spec.name.clone(), Part { shape: spec.shape.clone(), by: division.by, first: division.first(rank) })
        };
        let [before, joined] = &self.metadata;
        let stated = Stated {
            rank: rank as u32,
            ranks: self.world,
            format: self.format,
            directions: self.plan.is_some().then_some(self.directions),
            model: metadata::NO_DIGEST.into(),
            data: Some(metadata::NO_DIGEST.into()),
            header: self.header.clone().filter(|_| rank == 0),
            tensors: self.tensors.iter().map(part).collect(),
            joined: joined.clone(),
        };
        let mut strings = before.clone();
        stated.write(&mut strings);
        strings
    }
}

/// The frame of a header that is not the one that this program would write.
fn header(checkpoint: &Checkpoint) -> Result<Option<String>, ReadError> {
    let specs: Vec<_> = checkpoint.tensors().iter().map(TensorSpec::of).collect();
    let text = checkpoint.header_text()?;
    let own = header_bytes(checkpoint.path(), &specs, checkpoint.metadata());
    let is_own = own.is_ok_and(|own| own == text.as_bytes());
    let framed = || frame(&text, checkpoint.metadata()).ok();
    Ok(if is_own { None } else { framed() })
}

/// The type that a tensor has in the files where nothing is quantized.
fn becomes(tensor: &Tensor, format: ShardFormat) -> Dtype {
    match tensor.dtype {
        Dtype::F32 | Dtype::F16 if format == ShardFormat::Bf16 && tensor.shape.len() >= 2 => Dtype::Bf16,
        dtype => dtype,
    }
}

/// A tensor that is divided along its first dimension; one without dimensions is in every file.
pub fn kept(tensor: &Tensor, dtype: Dtype, world: WorldSize) -> (TensorSpec, Division) {
    let spec = TensorSpec { name: tensor.name.clone(), dtype, shape: tensor.shape.clone() };
    let division = match tensor.shape.as_slice() {
        [] => Division::none(&[]),
        [rows, row @ ..] => {
            let step = rows_of_whole_bytes(dtype, row);
            let ranges = ShardFormat::Keep.ranges(rows / step, world);
            let ranges = ranges.into_iter().map(|range| range.start * step..range.end * step).collect();
            Division { by: By::Rows, view: tensor.shape.clone(), ranges }
        }
    };
    (spec, division)
}

/// The fewest rows that take whole bytes: more than one where elements are packed.
fn rows_of_whole_bytes(dtype: Dtype, row: &[u64]) -> u64 {
    let bits = row.iter().fold(dtype.bits(), |bits, &size| bits.wrapping_mul(size)) % 8;
    (1..=8).find(|rows| rows * bits % 8 == 0).unwrap_or(8)
}

/// The tensors that one tensor of the input becomes.
fn divided(tensor: &Tensor, action: Action, plan: &Plan<'_>, format: ShardFormat, world: WorldSize) -> Vec<(TensorSpec, Division)> {
    let Action::Quantize(shape) = action else { return vec![kept(tensor, tensor.dtype, world)] };
    let rows = format.ranges(shape[0], world);
    let of_side = |side: Side| {
        // Codes, scales, then what every rank needs.
        let divisions = [codes(&side, &rows), scales(&side, &rows)].into_iter().map(Some).chain(std::iter::repeat(None));
        let tensors = side.tensors(&tensor.name, &tensor.shape).into_iter().map(|(spec, _)| spec);
        let paired = tensors.zip(divisions).map(|(spec, division)| {
            let division = division.unwrap_or_else(|| Division::none(&spec.shape));
            (spec, division)
        });
        paired.collect::<Vec<_>>()
    };
    Side::each(&plan.recipe, shape).flat_map(of_side).collect()
}

/// The parts of the codes of one direction.
fn codes(side: &Side, rows: &[std::ops::Range<u64>]) -> Division {
    let elements = if side.is_transposed() { side.format.shapes().elements } else { 1 };
    let ranges = rows.iter().map(|range| range.start / elements..range.end / elements).collect();
    Division { by: if side.is_transposed() { By::Columns } else { By::Rows }, view: side.codes().into(), ranges }
}

/// The parts of the compact scales of one direction.
fn scales(side: &Side, rows: &[std::ops::Range<u64>]) -> Division {
    let Some(block) = side.format.shapes().block else { return Division::none(&side.scale_shape()) };
    let block = if side.direction == Direction::Columns { block } else { 1 };
    let ranges = rows.iter().map(|range| range.start.div_ceil(block)..range.end.div_ceil(block)).collect();
    Division { by: if side.is_transposed() { By::Columns } else { By::Rows }, view: side.compact_scales().into(), ranges }
}
