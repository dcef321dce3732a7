//! The memory and traffic of weights that ranks share and gather when they are used: how `oxtile::sharded` would hold a checkpoint.

use oxtile::{
    comm::WorldSize,
    sharded::{SlotPlan, WeightFormat},
};
use serde::Serialize;

use super::ShardFormat;
use crate::{
    quantize::{Direction, Directions, Format, Plan, PlanError, Side, plan::Action},
    safetensors::{Checkpoint, Dtype},
    text::printable,
};

/// What gathering costs.
#[derive(Debug, Serialize)]
pub struct Gathers {
    /// How many weights there are: matrices of F32, F16 or BF16.
    pub weights: usize,
    /// Their elements.
    pub elements: u64,
    /// `layers` where names have a number of a layer, else `file`.
    pub order: &'static str,
    /// Bytes of the shards of the rank that has most, in both directions.
    pub shard_bytes: u64,
    /// Bytes that the rank which receives most gets for a forward pass.
    pub forward_bytes: u64,
    /// The same for a backward pass.
    pub backward_bytes: u64,
    /// Bytes of gradients in F32 that the rank which sends most sends to their owners.
    pub gradient_bytes: u64,
    /// Bytes of the largest weight, gathered, in either direction.
    pub largest_bytes: u64,
    /// For each number of gathers that run ahead the memory of gathered weights.
    pub distances: Vec<Distance>,
}

/// The memory of gathered weights.
#[derive(Debug, Serialize)]
pub struct Distance {
    /// How many gathers run ahead.
    pub distance: u32,
    /// Bytes of all slots: the most that gathered weights take at a time.
    pub bytes: u64,
    /// Bytes of each slot.
    pub slots: Vec<u64>,
}

/// A weight, and what a rank holds of it.
struct Weight<'a> {
    name: &'a str,
    shape: [u64; 2],
    layout: Memory,
}

/// How a weight lies in memory.
#[derive(Clone, Copy)]
enum Memory {
    /// Elements of so many bytes, the same in both directions.
    Wide(u64),
    /// Codes and scales of each direction, of rows that are filled up to a multiple.
    Quantized(Format, u64),
}

impl Memory {
    /// The bytes of a matrix as the product of one pass takes it.
    fn bytes(self, [rows, columns]: [u64; 2], direction: Direction) -> u64 {
        match self {
            Self::Wide(element) => rows * columns * element,
            Self::Quantized(format, multiple) => {
                let shape = [rows.next_multiple_of(multiple), columns];
                let side = Side { format, direction, interleave: false, shape };
                let scales = if format.shapes().block.is_some() { side.compact_scales().iter().product::<u64>() } else { 0 };
                side.codes().iter().product::<u64>() + scales * side.scale_bytes()
            }
        }
    }

    /// The bytes of a shard: one plane where it serves both directions.
    fn shard_bytes(self, shape: [u64; 2]) -> u64 {
        let rows = self.bytes(shape, Direction::Rows);
        if matches!(self, Self::Wide(_)) { rows } else { rows + self.bytes(shape, Direction::Columns) }
    }
}

impl Gathers {
    /// Plans for ranks and numbers of gathers that run ahead.
    ///
    /// # Errors
    /// As [`Plan::new`] and [`SlotPlan::new`].
    pub fn new(checkpoint: &Checkpoint, format: ShardFormat, world: WorldSize, distances: &[u32]) -> Result<Self, super::ShardError> {
        let (weights, order) = in_order(weights(checkpoint, format)?);
        let bytes = |direction| weights.iter().map(|weight| weight.layout.bytes(weight.shape, direction)).collect::<Vec<_>>();
        let (forward, mut backward) = (bytes(Direction::Rows), bytes(Direction::Columns));
        let [forward_sum, backward_sum] = [&forward, &backward].map(|bytes| bytes.iter().sum::<u64>());
        let elements = weights.iter().map(|weight| weight.shape[0] * weight.shape[1]).sum::<u64>();
        // A rank holds [both directions, the forward pass's, the backward pass's, elements].
        let mut held = vec![[0; 4]; world.get() as usize];
        for weight in &weights {
            let ranges = format.ranges(weight.shape[0], world);
            for (held, range) in held.iter_mut().zip(ranges) {
                let shape = [range.end - range.start, weight.shape[1]];
                let [rows, columns] = [Direction::Rows, Direction::Columns].map(|direction| weight.layout.bytes(shape, direction));
                let more = [weight.layout.shard_bytes(shape), rows, columns, shape[0] * shape[1]];
                held.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
            }
        }
        let fewest = |what: usize| held.iter().map(|held| held[what]).min().unwrap_or(0);
        backward.reverse();
        let name = |pass: usize, position: usize| {
            let index = if pass == 0 { position } else { weights.len() - 1 - position };
            printable(weights[index].name).into_owned()
        };
        let slots = |&distance: &u32| {
            let plan = SlotPlan::new(&[&forward, &backward], distance, None, name)?;
            Ok(Distance { distance, bytes: plan.bytes(), slots: plan.slots().into() })
        };
        Ok(Self {
            weights: weights.len(),
            elements,
            order,
            shard_bytes: held.iter().map(|held| held[0]).max().unwrap_or(0),
            forward_bytes: forward_sum - fewest(1),
            backward_bytes: backward_sum - fewest(2),
            gradient_bytes: (elements - fewest(3)) * 4,
            largest_bytes: forward.iter().chain(&backward).copied().max().unwrap_or(0),
            distances: distances.iter().map(slots).collect::<Result<_, oxtile::Error>>()?,
        })
    }
}

/// The weights of a checkpoint in the file's order.
fn weights(checkpoint: &Checkpoint, format: ShardFormat) -> Result<Vec<Weight<'_>>, PlanError> {
    let plan = format.recipe(Directions::Rows).map(|recipe| Plan::new(checkpoint, recipe)).transpose()?;
    let found = checkpoint.tensors().iter().enumerate().filter_map(|(index, tensor)| {
        let columns = *tensor.shape.last()?;
        let is_weight = matches!(tensor.dtype, Dtype::F32 | Dtype::F16 | Dtype::Bf16) && tensor.shape.len() >= 2 && tensor.elements() > 0;
        let is_quantized = plan.as_ref().is_some_and(|plan| matches!(plan.actions[index].1, Action::Quantize(_)));
        let layout = match format {
            ShardFormat::Quantized(format) if is_quantized => Memory::Quantized(format, padding(format)),
            ShardFormat::Bf16 => Memory::Wide(2),
            _ => Memory::Wide(tensor.dtype.bits() / 8),
        };
        is_weight.then(|| Weight { name: &tensor.name, shape: [tensor.elements() / columns, columns], layout })
    });
    Ok(found.collect())
}

/// The number of which the rows of a gathered weight are a multiple.
fn padding(format: Format) -> u64 {
    match format {
        Format::Nvfp4 => oxtile::sharded::Nvfp4::PAD,
        Format::Nvfp4Squares => oxtile::sharded::Nvfp4Squares::PAD,
        Format::Mxfp8 => oxtile::sharded::Mxfp8::PAD,
        Format::Fp8 => oxtile::sharded::Fp8::PAD,
        Format::Fp8Block => 1,
    }
}

/// Weights by the number of their layer. Those without one stay before the layers or after them, as in the file.
fn in_order(mut weights: Vec<Weight<'_>>) -> (Vec<Weight<'_>>, &'static str) {
    let Some(first) = weights.iter().position(|weight| layer(weight.name).is_some()) else { return (weights, "file") };
    let mut keyed: Vec<_> = weights.drain(..).enumerate().collect();
    keyed.sort_by_key(|(index, weight)| match layer(weight.name) {
        Some(layer) => (1, layer),
        None => (if *index < first { 0 } else { 2 }, 0),
    });
    (keyed.into_iter().map(|(_, weight)| weight).collect(), "layers")
}

/// The first number between dots of a name.
fn layer(name: &str) -> Option<u64> {
    name.split('.').find_map(|word| word.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_counted_as_numbers() {
        let weight = |name| Weight { name, shape: [1, 1], layout: Memory::Wide(2) };
        let names = ["embed", "h.10.a", "h.2.b", "head", "h.2.a", "norm.w"];
        let (ordered, order) = in_order(names.map(weight).into());
        assert_eq!(order, "layers");
        assert_eq!(ordered.iter().map(|weight| weight.name).collect::<Vec<_>>(), ["embed", "h.2.b", "h.2.a", "h.10.a", "head", "norm.w"]);
        let (ordered, order) = in_order(["b", "a"].map(weight).into());
        assert_eq!((order, ordered[0].name), ("file", "b"));
        assert!(in_order(Vec::new()).0.is_empty());
    }

    #[test]
    fn bytes_of_directions() {
        let quantized = |format| Memory::Quantized(format, padding(format));
        let bytes = |format, shape| [Direction::Rows, Direction::Columns].map(|direction| quantized(format).bytes(shape, direction));
        assert_eq!(bytes(Format::Mxfp8, [33, 64]), [33 * 64 + 33 * 2, 33 * 64 + 2 * 64]);
        assert_eq!(bytes(Format::Nvfp4, [33, 64]), [48 * 32 + 48 * 4, 64 * 24 + 64 * 3]);
        assert_eq!(bytes(Format::Fp8, [33, 64]), [33 * 64, 33 * 64]);
        assert_eq!((Memory::Wide(2).bytes([3, 5], Direction::Columns), Memory::Wide(2).shard_bytes([3, 5])), (30, 30));
    }
}
