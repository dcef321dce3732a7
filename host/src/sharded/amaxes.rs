//! Agreement of ranks on the largest magnitude of each matrix.

use oxtile_tile::launch::DeviceView;
use oxtile_tile::num::bf16;

use super::set::AMAXES;
use crate::comm::{Member, Rank};
use crate::quantize::{FixedAmaxPlan, MultiAmax};
use crate::runtime::{Buffer, Result, Stream};
use crate::symmetric::{Arena, Flags, SymmetricBuffer};

/// How ranks agree on the amax of each matrix: every rank puts those of its rows to all, and takes the largest of all.
///
/// A rank's amaxes are overwritten in the next step, after the READY that their reader sets when it has read them.
pub(super) struct Amaxes {
    rows: MultiAmax<bf16>,
    rows_plan: FixedAmaxPlan,
    /// The amaxes of this rank's rows.
    own: Buffer<f32>,
    /// The amaxes of all ranks' rows, one rank's after another.
    parts: SymmetricBuffer<f32>,
    largest: MultiAmax<f32>,
    largest_plan: FixedAmaxPlan,
}

impl Amaxes {
    /// Loads the kernels. `parts` has room for the amaxes of all ranks.
    pub fn new(stream: &Stream, values: &[DeviceView<'_, bf16>], parts: SymmetricBuffer<f32>) -> Result<Self> {
        let (runtime, slots) = (stream.device().runtime(), (0..values.len() as u32).collect::<Vec<_>>());
        let ranks = parts.len() as usize / values.len().max(1);
        let largest_plan = FixedAmaxPlan::new(stream, &singles(&parts), &slots.repeat(ranks))?;
        Ok(Self {
            rows: MultiAmax::new(&runtime)?,
            rows_plan: FixedAmaxPlan::new(stream, values, &slots)?,
            own: Buffer::zeros(stream, values.len() as u64)?,
            parts,
            largest: MultiAmax::new(&runtime)?,
            largest_plan,
        })
    }

    /// Sets `agreed` to the amax of each matrix, of which `values` are this rank's rows. Every member takes part.
    pub fn agree(
        &mut self,
        stream: &Stream,
        (arena, member, flags): (&Arena, &Member, &Flags),
        values: &[DeviceView<'_, bf16>],
        agreed: &mut Buffer<f32>,
    ) -> Result<()> {
        self.rows.run_fixed(stream, &self.rows_plan, values, &mut self.own)?;
        let (matrices, me) = (self.own.len(), u64::from(member.rank().index()));
        let others: Vec<Rank> = member.others_in_world().collect();
        let targets = others.iter().chain([&member.world_rank()]).map(|to| self.parts.peer(*to)).collect::<Result<Vec<_>>>()?;
        let batch = targets.iter().try_fold(arena.batch(stream), |batch, peer| batch.put(peer, &self.own, 0..matrices, me * matrices))?;
        let batch = others.iter().try_fold(batch, |batch, to| batch.set(flags, AMAXES, *to))?;
        others.iter().try_fold(batch, |batch, from| batch.take_back(flags, AMAXES, *from))?.enqueue()?;
        self.largest.run_fixed(stream, &self.largest_plan, &singles(&self.parts), agreed)
    }
}

/// Each element as a tensor of its own.
fn singles(parts: &SymmetricBuffer<f32>) -> Vec<DeviceView<'_, f32>> {
    (0..parts.len()).map(|at| parts.local().view().slice(at, at + 1)).collect()
}
