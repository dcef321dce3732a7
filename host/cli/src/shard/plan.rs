//! The memory and traffic of weights that ranks share and gather when they are used: how `oxtile::sharded` would hold a checkpoint.

use oxtile::{
    Result,
    comm::{Member, Rank, Team},
    sharded::{Bf16, Footprint, Fp8, Mxfp8, Nvfp4, Nvfp4Squares, SlotPlan, Uses, Weight, WeightFormat},
};
use serde::Serialize;

use super::{ShardError, ShardFormat, order::Order};
use crate::{
    arguments,
    quantize::Format,
    safetensors::{Checkpoint, Dtype},
    text::printable,
};

/// What gathering costs.
#[derive(Debug, Default, Serialize)]
pub struct Gathers {
    /// How many weights there are: matrices of F32, F16 or BF16.
    pub weights: usize,
    /// Those that stay in BF16, since the format does not take them.
    pub wide: usize,
    /// Those of F32 or F16, which are held in BF16.
    pub rounded: usize,
    /// Their elements.
    pub elements: u64,
    /// `layers` where names have a number of a layer, else `file`.
    pub order: &'static str,
    /// Weights of forward passes alone.
    pub lookups: Vec<String>,
    /// The embedding that is the head too.
    pub tied: Option<String>,
    /// Bytes of the shards of the rank that has most, in all directions that are used.
    pub shard_bytes: u64,
    /// Bytes of the values in BF16 that shards are cast from.
    pub master_bytes: u64,
    /// Bytes of the slots in which gradients arrive.
    pub gradient_slot_bytes: u64,
    /// Bytes of the buffers of whole gradients.
    pub gradient_buffer_bytes: u64,
    /// Bytes of the sums of gradients, in F32.
    pub main_gradient_bytes: u64,
    /// Bytes that the rank which receives most gets for a forward pass.
    pub forward_bytes: u64,
    /// The same for a backward pass.
    pub backward_bytes: u64,
    /// Bytes of gradients in F32 that the rank which sends most sends to their owners.
    pub gradient_bytes: u64,
    /// All that travels a step: the three above.
    pub step_bytes: u64,
    /// Bytes of the largest weight, gathered, in either direction.
    pub largest_bytes: u64,
    /// For each number of gathers that run ahead the memory of gathered weights.
    pub distances: Vec<Distance>,
}

/// The memory of gathered weights.
#[derive(Debug, Default, Serialize)]
pub struct Distance {
    /// How many gathers run ahead.
    pub distance: u32,
    /// Bytes of all slots: the most that gathered weights take at a time.
    pub bytes: u64,
    /// With shards, masters and gradients.
    pub peak_bytes: u64,
    /// Bytes of each slot.
    pub slots: Vec<u64>,
    /// Which weight has which slot, in the order of a forward pass.
    pub forward: Vec<Taken>,
    /// The same of a backward pass.
    pub backward: Vec<Taken>,
}

/// A weight in its slot.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Taken {
    /// Its name.
    pub weight: String,
    /// The number of the slot.
    pub slot: usize,
}

/// The weights of one format, which are a chain of their own: in the order of the file, and that of a forward pass by number.
struct Set {
    format: Held,
    weights: Vec<Weight>,
    forward: Vec<usize>,
}

/// A format of `oxtile::sharded`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Held {
    Bf16,
    Fp8,
    Mxfp8,
    Nvfp4,
    Nvfp4Squares,
}

impl Held {
    /// Of weights that the format takes.
    fn native(format: ShardFormat) -> Self {
        Self::of(format, 0)
    }

    /// Of weights with so many columns: BF16 where the format does not take them.
    fn of(format: ShardFormat, columns: u64) -> Self {
        let (held, multiple) = match format {
            ShardFormat::Keep | ShardFormat::Bf16 | ShardFormat::Quantized(Format::Fp8Block) => (Self::Bf16, Bf16::COLUMNS),
            ShardFormat::Quantized(Format::Fp8) => (Self::Fp8, Fp8::COLUMNS),
            ShardFormat::Quantized(Format::Mxfp8) => (Self::Mxfp8, Mxfp8::COLUMNS),
            ShardFormat::Quantized(Format::Nvfp4) => (Self::Nvfp4, Nvfp4::COLUMNS),
            ShardFormat::Quantized(Format::Nvfp4Squares) => (Self::Nvfp4Squares, Nvfp4Squares::COLUMNS),
        };
        if columns.is_multiple_of(multiple) { held } else { Self::Bf16 }
    }
}

impl Set {
    /// What a member holds of it, its gradients in F32.
    fn footprint(&self, member: &Member, distance: u32) -> Result<Footprint> {
        let of = match self.format {
            Held::Bf16 => Footprint::of::<Bf16, f32>,
            Held::Fp8 => Footprint::of::<Fp8, f32>,
            Held::Mxfp8 => Footprint::of::<Mxfp8, f32>,
            Held::Nvfp4 => Footprint::of::<Nvfp4, f32>,
            Held::Nvfp4Squares => Footprint::of::<Nvfp4Squares, f32>,
        };
        of(member, &self.weights, &self.forward, distance)
    }

    /// Which weight has which slot in a pass, slots counted from `first`.
    fn taken(&self, plan: &SlotPlan, pass: usize, first: usize) -> Vec<Taken> {
        let is_both = |number: &&usize| self.weights[**number].uses == Uses::Both;
        let order: Vec<&usize> =
            if pass == 0 { self.forward.iter().collect() } else { self.forward.iter().rev().filter(is_both).collect() };
        let taken = |(position, number): (usize, &usize)| Taken {
            weight: printable(&self.weights[*number].name).into_owned(),
            slot: first + plan.slot(pass, position),
        };
        order.into_iter().enumerate().map(taken).collect()
    }
}

impl Gathers {
    /// Plans for the weights of all files of a checkpoint.
    ///
    /// # Errors
    /// As [`Footprint::of`]; if the request says what the embedding of tokens is, and no name is that of one.
    pub fn new(files: &[Checkpoint], request: &arguments::Shard) -> std::result::Result<Self, ShardError> {
        let weights: Vec<(Weight, Dtype)> = files.iter().flat_map(weights).collect();
        let names: Vec<_> = weights.iter().map(|(weight, _)| weight.name.as_str()).collect();
        let rows: Vec<u64> = weights.iter().map(|(weight, _)| weight.rows).collect();
        let order = Order::new(&names, &rows, request.embedding);
        if let Some(embedding) = request.embedding.filter(|_| order.tokens.is_none()) {
            return Err(ShardError::NoEmbedding(embedding.name()));
        }
        let sets = sets(&weights, &order, request.format);
        let team = Team::all(request.world);
        let member = |index| Rank::new(index, request.world).and_then(|rank| team.member(rank)).expect("a rank of the world");
        // The first rank has most rows of every weight, and the last one fewest: that one receives and sends most.
        let [most, fewest] = [0, request.world.get() - 1].map(member);
        let mut plan = Self {
            weights: weights.len(),
            wide: sets.iter().filter(|set| set.format != Held::native(request.format)).map(|set| set.weights.len()).sum(),
            rounded: weights.iter().filter(|(_, dtype)| *dtype != Dtype::Bf16).count(),
            elements: weights.iter().map(|(weight, _)| weight.rows * weight.columns).sum(),
            order: if order.has_layers { "layers" } else { "file" },
            lookups: order.lookups.iter().map(|number| printable(names[*number]).into_owned()).collect(),
            tied: order.tied.map(|number| printable(names[number]).into_owned()),
            ..Self::default()
        };
        for set in &sets {
            let (held, sent) = (set.footprint(&most, 0)?, set.footprint(&fewest, 0)?);
            plan.shard_bytes += held.shards;
            plan.master_bytes += held.masters;
            plan.gradient_slot_bytes += held.gradients.slots;
            plan.gradient_buffer_bytes += held.gradients.buffers;
            plan.main_gradient_bytes += held.gradients.main;
            plan.forward_bytes += sent.pulled[0];
            plan.backward_bytes += sent.pulled[1];
            plan.gradient_bytes += sent.scattered;
            plan.step_bytes += sent.traffic();
            // At distance 0 there is one slot.
            plan.largest_bytes = plan.largest_bytes.max(held.slots.bytes());
        }
        for distance in request.distances() {
            let mut all = Distance { distance, ..Distance::default() };
            for set in &sets {
                let held = set.footprint(&most, distance)?;
                let first = all.slots.len();
                all.bytes += held.slots.bytes();
                all.peak_bytes += held.memory();
                all.forward.extend(set.taken(&held.slots, 0, first));
                all.backward.extend(set.taken(&held.slots, 1, first));
                all.slots.extend(held.slots.slots());
            }
            plan.distances.push(all);
        }
        Ok(plan)
    }
}

/// The weights of a file, in its order.
fn weights(file: &Checkpoint) -> impl Iterator<Item = (Weight, Dtype)> {
    file.tensors().iter().filter_map(|tensor| {
        let columns = *tensor.shape.last()?;
        let is_weight = matches!(tensor.dtype, Dtype::F32 | Dtype::F16 | Dtype::Bf16) && tensor.shape.len() >= 2 && tensor.elements() > 0;
        is_weight.then(|| (Weight::new(&tensor.name, [tensor.elements() / columns, columns]), tensor.dtype))
    })
}

/// The weights that the format takes, and those that stay in BF16.
fn sets(weights: &[(Weight, Dtype)], order: &Order, format: ShardFormat) -> Vec<Set> {
    let own = Held::native(format);
    let of = |held: Held| {
        let numbers: Vec<usize> = (0..weights.len()).filter(|number| Held::of(format, weights[*number].0.columns) == held).collect();
        let weight = |number: &usize| {
            let weight = weights[*number].0.clone();
            if order.lookups.contains(number) { weight.forward_only() } else { weight }
        };
        let place = |number: &usize| numbers.binary_search(number).ok();
        Set { format: held, weights: numbers.iter().map(weight).collect(), forward: order.forward.iter().filter_map(place).collect() }
    };
    let others = (own != Held::Bf16).then_some(Held::Bf16);
    [Some(own), others].into_iter().flatten().map(of).filter(|set| !set.weights.is_empty()).collect()
}
