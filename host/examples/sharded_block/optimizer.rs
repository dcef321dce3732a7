//! AdamW on the rows of a rank: `f32` masters and moments, whose rounded copies are what the ranks share.

use oxtile::adamw::{Adamw, AdamwConfig, Weights};
use oxtile::num::bf16;
use oxtile::sharded::{GradientScatter, ShardSet, Updating, Weight, WeightId};
use oxtile::sum_parts::SumParts;
use oxtile::{Buffer, Result, Stream};

use super::format::Format;

/// The learning rate times the width of the model. AdamW moves every weight by about the rate, and a product adds up one such change for each element of the width: what a step changes in the
/// activations is the same at all widths. 4e-3 at a width of 128; with that rate the loss of a width of 4096 rises after a few steps.
const RATE_OF_WIDTH: f32 = 0.512;

/// A rank's rows of a weight.
pub struct Owned {
    id: WeightId,
    /// The number of the first element in the whole weight.
    pub start: u64,
    pub values: Buffer<f32>,
    moments: [Buffer<f32>; 2],
}

pub struct Optimizer {
    adamw: Adamw<bf16, f32>,
    round: SumParts<f32, bf16>,
    pub owned: Vec<Owned>,
}

impl Optimizer {
    /// Takes first values for the own rows of a model of so many elements a token. Gradients are sums over `batches`.
    pub fn new<F: Format>(stream: &Stream, set: &ShardSet<F>, width: u64, batches: u32) -> Result<Self> {
        let runtime = stream.device().runtime();
        let config = AdamwConfig { rate: RATE_OF_WIDTH / width as f32, gradient_scale: 1.0 / batches as f32, ..AdamwConfig::default() };
        let owned = |(id, weight): (WeightId, &Weight)| {
            let rows = set.own_rows(id)?;
            let [start, end] = [rows.start, rows.end].map(|row| row * weight.columns);
            let size = (weight.columns as f32).powf(-0.5);
            let values: Vec<_> = (start..end).map(|at| size * random(id.index() as u64, at)).collect();
            Ok(Owned {
                id,
                start,
                values: Buffer::from_slice(stream, &values)?,
                moments: [Buffer::zeros(stream, end - start)?, Buffer::zeros(stream, end - start)?],
            })
        };
        let owned = set.weights().map(owned).collect::<Result<_>>()?;
        Ok(Self { adamw: Adamw::new(&runtime, config)?, round: SumParts::new(&runtime)?, owned })
    }

    /// Writes the first values of all weights, rounded.
    pub fn begin<F: Format>(&self, stream: &Stream, updating: &mut Updating<'_, F>) -> Result<()> {
        self.owned.iter().try_for_each(|owned| self.round.round(stream, owned.values.view(), updating.master(owned.id, 0)?))
    }

    /// Makes step `number` by the gradients of the own rows, and writes the rounded values.
    pub fn step<F: Format>(
        &mut self,
        stream: &Stream,
        number: u32,
        gradients: &GradientScatter<f32>,
        updating: &mut Updating<'_, F>,
    ) -> Result<()> {
        for Owned { id, values, moments: [first, second], .. } in self.owned.iter_mut().take(gradients.ids().len()) {
            let rounded = Some(updating.master(*id, 0)?);
            let weights = Weights { values: values.view_mut(), first: first.view_mut(), second: second.view_mut(), rounded };
            self.adamw.step(stream, number, gradients.main_grad(*id)?.view(), weights)?;
        }
        Ok(())
    }
}

/// A number from -1 to 1.
fn random(weight: u64, at: u64) -> f32 {
    let bits = (weight * 1_299_709 + at + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let bits = (bits ^ (bits >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 40;
    bits as f32 / (1 << 23) as f32 - 1.0
}
