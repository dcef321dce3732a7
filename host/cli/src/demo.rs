//! `oxtile demo-checkpoint`: a checkpoint to try things on, made from a seed.
//!
//! It has the tensors of a 22.7 M-parameter sentence encoder (BERT with 6 layers, width 384, vocabulary 30522), under the
//! names and in the shapes of all-MiniLM-L6-v2, and values spread as in a trained model: every row has a scale of its own,
//! and a few elements in a thousand lie far outside the bulk.

use std::path::Path;

use half::{bf16, f16};

use crate::{
    output::Completed,
    safetensors::{Dtype, TensorSpec, WriteError, Writer},
};

const LAYERS: usize = 6;
const WIDTH: u64 = 384;
const INTERMEDIATE: u64 = 4 * WIDTH;
const VOCABULARY: u64 = 30_522;
const POSITIONS: u64 = 512;

/// How a tensor's values are spread.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Values {
    /// Around zero, with this standard deviation.
    Normal(f64),
    /// Gains of a layer norm: around 0.9.
    Gain,
    /// 0, 1, 2, ...
    Index,
}

/// Writes the checkpoint, but for its name; returns its number of parameters and its size in bytes.
///
/// # Errors
/// If the file cannot be written; none is left then.
pub fn write(path: &Path, seed: u64, dtype: Dtype) -> Result<(u64, u64, Completed), WriteError> {
    let tensors = tensors(dtype);
    let specs: Vec<_> = tensors.iter().map(|(spec, _)| spec.clone()).collect();
    let metadata = [("format".into(), "pt".into()), ("seed".into(), seed.to_string())].into();
    let mut writer = Writer::create(path, &[], &specs, &metadata)?;
    let mut parameters = 0;
    for (index, (spec, values)) in tensors.iter().enumerate() {
        let row = spec.shape.last().copied().unwrap_or(1);
        let rows = spec.shape.iter().product::<u64>() / row;
        // A generator a tensor: its values do not depend on the tensors before it.
        let mut random = Random::new(seed, index as u64);
        let mut bytes = Vec::new();
        for _ in 0..rows {
            values.extend_row(&mut random, row, spec.dtype, &mut bytes);
        }
        writer.append(&spec.name, &bytes)?;
        parameters += if *values == Values::Index { 0 } else { rows * row };
    }
    Ok((parameters, writer.bytes(), writer.complete()?))
}

/// The encoder's tensors, in the order of its layers.
struct Encoder {
    dtype: Dtype,
    tensors: Vec<(TensorSpec, Values)>,
}

fn tensors(dtype: Dtype) -> Vec<(TensorSpec, Values)> {
    let mut encoder = Encoder { dtype, tensors: Vec::new() };
    encoder.add("embeddings.position_ids".into(), Dtype::I64, &[1, POSITIONS], Values::Index);
    encoder.embedding("word", VOCABULARY);
    encoder.embedding("position", POSITIONS);
    encoder.embedding("token_type", 2);
    encoder.norm("embeddings");
    for layer in 0..LAYERS {
        encoder.layer(&format!("encoder.layer.{layer}"));
    }
    encoder.linear("pooler.dense", WIDTH, WIDTH);
    encoder.tensors
}

impl Encoder {
    fn layer(&mut self, name: &str) {
        for projection in ["query", "key", "value"] {
            self.linear(&format!("{name}.attention.self.{projection}"), WIDTH, WIDTH);
        }
        self.linear(&format!("{name}.attention.output.dense"), WIDTH, WIDTH);
        self.norm(&format!("{name}.attention.output"));
        self.linear(&format!("{name}.intermediate.dense"), INTERMEDIATE, WIDTH);
        self.linear(&format!("{name}.output.dense"), WIDTH, INTERMEDIATE);
        self.norm(&format!("{name}.output"));
    }

    fn embedding(&mut self, name: &str, rows: u64) {
        self.add(format!("embeddings.{name}_embeddings.weight"), self.dtype, &[rows, WIDTH], Values::Normal(0.06));
    }

    fn linear(&mut self, name: &str, outputs: u64, inputs: u64) {
        self.add(format!("{name}.weight"), self.dtype, &[outputs, inputs], Values::Normal(0.05));
        self.add(format!("{name}.bias"), self.dtype, &[outputs], Values::Normal(0.02));
    }

    fn norm(&mut self, name: &str) {
        self.add(format!("{name}.LayerNorm.weight"), self.dtype, &[WIDTH], Values::Gain);
        self.add(format!("{name}.LayerNorm.bias"), self.dtype, &[WIDTH], Values::Normal(0.05));
    }

    fn add(&mut self, name: String, dtype: Dtype, shape: &[u64], values: Values) {
        self.tensors.push((TensorSpec { name, dtype, shape: shape.into() }, values));
    }
}

impl Values {
    /// Appends one row of `elements` values to a tensor's bytes.
    fn extend_row(self, random: &mut Random, elements: u64, dtype: Dtype, bytes: &mut Vec<u8>) {
        // Rows of a trained matrix differ in scale by some tens of percent.
        let row_scale = (0.25 * random.normal()).exp();
        for index in 0..elements {
            let value = match self {
                Values::Index => {
                    bytes.extend(index.to_le_bytes());
                    continue;
                }
                Values::Gain => 0.9 + 0.08 * random.normal(),
                Values::Normal(deviation) => deviation * row_scale * random.heavy_tailed(),
            };
            match dtype {
                Dtype::F16 => bytes.extend(f16::from_f64(value).to_le_bytes()),
                Dtype::Bf16 => bytes.extend(bf16::from_f64(value).to_le_bytes()),
                _ => bytes.extend((value as f32).to_le_bytes()),
            }
        }
    }
}

/// SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) with normal deviates.
struct Random {
    state: u64,
    /// Box and Muller's method yields two deviates at a time.
    spare: Option<f64>,
}

impl Random {
    fn new(seed: u64, stream: u64) -> Self {
        // Hashed, so that the streams of neighbouring numbers do not overlap.
        let mut start = Self { state: stream, spare: None };
        let offset = start.bits();
        Self { state: seed ^ offset, spare: None }
    }

    fn bits(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `(0, 1]`.
    fn uniform(&mut self) -> f64 {
        ((self.bits() >> 11) + 1) as f64 * 2f64.powi(-53)
    }

    /// Mean 0, standard deviation 1.
    fn normal(&mut self) -> f64 {
        if let Some(spare) = self.spare.take() {
            return spare;
        }
        let radius = (-2.0 * self.uniform().ln()).sqrt();
        let (sine, cosine) = (std::f64::consts::TAU * self.uniform()).sin_cos();
        self.spare = Some(radius * sine);
        radius * cosine
    }

    /// Normal, but one value in 256 comes from a distribution four times as wide.
    fn heavy_tailed(&mut self) -> f64 {
        let wide = self.bits() >> 56 == 0;
        self.normal() * if wide { 4.0 } else { 1.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_encoder_has_its_known_size() {
        let parameters = |(spec, values): &(TensorSpec, Values)| match values {
            Values::Index => 0,
            _ => spec.shape.iter().product::<u64>(),
        };
        let tensors = tensors(Dtype::F32);
        assert_eq!(tensors.iter().map(parameters).sum::<u64>(), 22_713_216);
        assert_eq!(tensors.len(), 104);
    }

    #[test]
    fn deviates_have_the_moments_they_claim() {
        let mut random = Random::new(7, 0);
        let sample: Vec<f64> = (0..100_000).map(|_| random.normal()).collect();
        let mean = sample.iter().sum::<f64>() / sample.len() as f64;
        let variance = sample.iter().map(|x| x * x).sum::<f64>() / sample.len() as f64;
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.02, "mean {mean}, variance {variance}");
    }
}
