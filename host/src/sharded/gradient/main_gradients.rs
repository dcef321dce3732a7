//! What the owners of rows keep: the sums of all ranks' gradients.

use super::super::memory::lend;
use super::super::weight::WeightId;
use super::scatter::GradientScatter;
use crate::runtime::module::enqueue;
use crate::runtime::runtime::lock;
use crate::runtime::{Buffer, Error, Result, Stream};
use crate::sum_parts::Addend;

impl<E: Addend> GradientScatter<E> {
    /// The gradient of the rows of this rank, `[experts, own rows, columns]`, of all steps since [`zero_grads`](Self::zero_grads). It is no memory for a product's whole gradient:
    ///
    /// ```compile_fail,E0308
    /// use oxtile::sharded::{GradientScatter, WeightId};
    /// use oxtile_tile::launch::DeviceViewMut;
    /// # use oxtile::Result;
    ///
    /// fn whole(gradients: &GradientScatter<f32>, id: WeightId) -> Result<DeviceViewMut<'_, f32>> {
    ///     gradients.main_grad(id)
    /// }
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] for a weight of another set.
    pub fn main_grad(&self, id: WeightId) -> Result<&Buffer<f32>> {
        Ok(&self.main[self.index("GradientScatter::main_grad", id)?])
    }

    /// The same, to write: to clip it, or to add what replicas found.
    ///
    /// # Errors
    /// As [`main_grad`](Self::main_grad).
    pub fn main_grad_mut(&mut self, id: WeightId) -> Result<&mut Buffer<f32>> {
        let weight = self.index("GradientScatter::main_grad_mut", id)?;
        Ok(&mut self.main[weight])
    }

    /// Fills all main gradients with zeros, in stream order. May be captured.
    ///
    /// # Errors
    /// [`Error::Invalid`] inside of a step; [`Error::ForeignRuntime`], [`Error::WrongDevice`]; an error of the driver.
    #[track_caller]
    pub fn zero_grads(&self, stream: &Stream) -> Result<()> {
        const WHAT: &str = "GradientScatter::zero_grads";
        let caller = std::panic::Location::caller();
        if !lock(&self.state).steps.is_between() {
            let why = "a step is under way, whose sums may come later: finish it before".to_owned();
            return Err(Error::Invalid { what: WHAT, why });
        }
        self.main.iter().filter(|main| !main.is_empty()).try_for_each(|main| {
            let access = lend(main).access("main gradient");
            enqueue(stream, "fill", &[access], |id| stream.0.runtime.backend.fill(id, access.address, 0, access.bytes, caller))
        })
    }
}
