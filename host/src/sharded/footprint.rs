//! What weights in shards take of a rank's memory, and what travels in a step: known before any memory is taken.

use super::format::WeightFormat;
use super::gradient::{GradientBytes, GradientScatter};
use super::layout::{Layout, travelling_bytes, whole_bytes};
use super::slots::SlotPlan;
use super::weight::{Uses, Weight};
use crate::comm::Member;
use crate::quantize::Direction;
use crate::runtime::{Error, Result};
use crate::sum_parts::Addend;

/// What a [`ShardSet`](super::ShardSet), a [`Chain`](super::Chain) and a [`GradientScatter`] of the same weights take of a member's memory, and what travels in a step, in bytes.
///
/// Not in it: what the optimizer keeps beside (values in f32, moments), activations, flags, and the 8 bytes that a matrix has for its amax and scale.
///
/// ```
/// use oxtile::comm::{Team, WorldSize};
/// use oxtile::sharded::{Footprint, Mxfp8, Weight};
///
/// let team = Team::all(WorldSize::new(4).unwrap());
/// let weights = [Weight::new("embedding", [512, 64]).forward_only(), Weight::new("fc", [256, 64])];
/// let takes = Footprint::of::<Mxfp8, f32>(&team.member(team.members()[0]).unwrap(), &weights, &[0, 1], 1)?;
/// // Of the embedding codes and scales by rows alone.
/// assert_eq!(takes.slots.slots(), [512 * 64 + 512 * 2, 256 * 64 + 256 * 2]);
/// assert_eq!(takes.masters, (512 + 256) / 4 * 64 * 2);
/// # Ok::<(), oxtile::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Footprint {
    /// The shards, in the arena, and the amaxes that ranks tell each other there.
    pub shards: u64,
    /// The values in bf16 from which shards are cast; none of a format whose shards are these values.
    pub masters: u64,
    /// The memory of whole weights.
    pub slots: SlotPlan,
    /// The memory of gradients, by an arena.
    pub gradients: GradientBytes,
    /// What the member receives of other members' shards in a forward and in a backward pass.
    pub pulled: [u64; 2],
    /// What it sends of gradients in a step that scatters every weight once.
    pub scattered: u64,
}

impl Footprint {
    /// Of a forward pass that takes the weights of these numbers in this order, and a backward pass that takes them in reverse, as a chain of
    /// [`ChainConfig::new`](super::ChainConfig::new) without groups; gradients are of `E`.
    ///
    /// # Errors
    /// As [`ShardSet::arena_bytes`](super::ShardSet::arena_bytes) and [`SlotPlan::new`]; [`Error::Invalid`] for the number of no weight.
    pub fn of<F: WeightFormat, E: Addend>(member: &Member, weights: &[Weight], forward: &[usize], distance: u32) -> Result<Self> {
        let layout = Layout::<F>::new(weights, member.team())?;
        if let Some(none) = forward.iter().find(|number| **number >= weights.len()) {
            return Err(Error::Invalid { what: "Footprint", why: format!("there is no weight {none} among {}", weights.len()) });
        }
        let planes = [Direction::Rows, Direction::Columns].map(|direction| F::RULE.plane_of(direction));
        let backward = forward.iter().rev().copied().filter(|number| weights[*number].uses == Uses::Both).collect();
        let passes = [forward.to_vec(), backward];
        let bytes =
            |pass: usize, of: &dyn Fn(usize, Direction) -> u64| passes[pass].iter().map(|number| of(*number, planes[pass])).collect();
        let whole = |number: usize, plane| whole_bytes(&weights[number], layout.shards[number], plane);
        let travelling = |number: usize, plane| travelling_bytes(&weights[number], layout.shards[number], member.rank(), plane);
        let [sizes, pulled] =
            [&whole as &dyn Fn(usize, Direction) -> u64, &travelling].map(|of| [0, 1].map(|pass| -> Vec<u64> { bytes(pass, of) }));
        let name = |pass: usize, position: usize| weights[passes[pass][position]].name.clone();
        let (gradients, scattered) = GradientScatter::<E>::planned::<F>(member, weights)?;
        Ok(Self {
            shards: layout.arena_bytes(),
            masters: layout.master_bytes(weights, member.rank()),
            slots: SlotPlan::new(&[&sizes[0], &sizes[1]], distance, None, name)?,
            gradients,
            pulled: pulled.map(|bytes| bytes.iter().sum()),
            scattered,
        })
    }

    /// All memory.
    pub fn memory(&self) -> u64 {
        self.shards + self.masters + self.slots.bytes() + self.gradients.total()
    }

    /// All that travels in a step.
    pub fn traffic(&self) -> u64 {
        self.pulled.iter().sum::<u64>() + self.scattered
    }
}
