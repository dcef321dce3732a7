//! The memory of gradients, before it is taken and after.

use super::super::format::WeightFormat;
use super::super::layout::aligned;
use super::super::weight::Weight;
use super::config::GradientBytes;
use super::layout::Layout;
use super::scatter::GradientScatter;
use super::slots::SLOTS;
use crate::comm::{Member, Team, WorldSize};
use crate::runtime::Result;
use crate::runtime::runtime::lock;
use crate::sum_parts::Addend;

impl<E: Addend> GradientScatter<E> {
    /// The bytes of an arena that [`new`](Self::new) takes for a team, beside 4 channels: two slots.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for a weight that the format cannot hold.
    pub fn arena_bytes<F: WeightFormat>(team: &Team, weights: &[Weight]) -> Result<u64> {
        Ok(Self::slot_bytes(&Self::layouts::<F>(weights, team.size())?))
    }

    /// What a member takes by an arena, and the bytes of the rows that it sends in a step that scatters every weight.
    ///
    /// # Errors
    /// As [`arena_bytes`](Self::arena_bytes).
    pub fn planned<F: WeightFormat>(member: &Member, weights: &[Weight]) -> Result<(GradientBytes, u64)> {
        let (layouts, me) = (Self::layouts::<F>(weights, member.team().size())?, member.rank().index() as usize);
        let (whole, own): (u64, u64) = (layouts.iter().map(Layout::whole).sum(), layouts.iter().map(|layout| layout.part(me)).sum());
        let largest = layouts.iter().map(Layout::whole).max().unwrap_or(0);
        let bytes = GradientBytes { slots: Self::slot_bytes(&layouts), buffers: SLOTS as u64 * largest * Self::ELEMENT, main: own * 4 };
        Ok((bytes, (whole - own) * Self::ELEMENT))
    }

    /// The device memory that was taken.
    pub fn bytes(&self) -> GradientBytes {
        GradientBytes {
            slots: lock(&self.state).link.as_ref().map_or(0, |link| link.bytes()),
            buffers: self.whole.iter().map(|whole| whole.len() * Self::ELEMENT).sum(),
            main: self.main.iter().map(|main| main.len() * 4).sum(),
        }
    }

    const ELEMENT: u64 = size_of::<E>() as u64;

    pub(super) fn layouts<F: WeightFormat>(weights: &[Weight], ranks: WorldSize) -> Result<Vec<Layout>> {
        weights.iter().try_for_each(Weight::check::<F>)?;
        Ok(weights.iter().map(|weight| Layout::new::<F>(weight, ranks, Self::ELEMENT)).collect())
    }

    /// Elements of a slot. A team of one rank has none.
    pub(super) fn slot_elements(layouts: &[Layout]) -> u64 {
        layouts.iter().map(Layout::parts_of_others).max().unwrap_or(0)
    }

    fn slot_bytes(layouts: &[Layout]) -> u64 {
        SLOTS as u64 * aligned(Self::slot_elements(layouts) * Self::ELEMENT)
    }
}
