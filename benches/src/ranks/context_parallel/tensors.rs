//! Tensors of attention: all tokens, or those of a rank.

use anyhow::Result;
use half::bf16 as Half;
use oxtile::attention::{BackwardInputs, Gradients, Inputs, Outputs, Sequences};
use oxtile::kernels::copy::{CopyWords, CopyWordsArgs};
use oxtile::num::bf16;
use oxtile::runtime::Loaded;
use oxtile::thd::Packed;
use oxtile::{Buffer, Stream};
use oxtile_tile::launch::DeviceView;

use super::rows::Row;
use crate::pattern;

/// Random values that tensors repeat: a prime, so that no two tokens are the same.
pub const VALUES: usize = 262_147;
/// At most so many rows of the beginning and of the end of a tensor are compared.
const SAMPLE: usize = 64;

/// What attention reads and writes.
pub struct Tensors {
    /// Queries, keys, values, and the gradient of the result.
    inputs: [Buffer<bf16>; 4],
    /// Sums of lengths of all sequences, without padding and with it, if they are packed.
    ends: Option<[Buffer<u32>; 2]>,
    result: (Buffer<bf16>, Buffer<f32>),
    /// The result that the backward pass reads: a copy, so that both passes are bound at once.
    saved: (Buffer<bf16>, Buffer<f32>),
    /// Of queries, keys and values.
    gradients: [Buffer<bf16>; 3],
    /// Elements of a token of queries and result, and of keys and values.
    widths: [u64; 2],
}

/// What both passes read and write.
pub struct Views<'a> {
    pub forward: (Inputs<'a, bf16>, Outputs<'a, bf16>),
    pub backward: (BackwardInputs<'a, bf16>, Gradients<'a, bf16>),
}

impl Tensors {
    /// Random values of these tokens: each token's are those of the whole tensor, which repeats the values.
    pub fn new(stream: &Stream, row: &Row, world: u32, tokens: &[u64], values: &[Half]) -> Result<Self> {
        let widths @ [wide, narrow] = [row.heads, row.key_heads].map(|heads| heads * row.head_size);
        let of = |number: usize, width: u64| -> Result<Buffer<bf16>> {
            let first = pattern::start(number, values.len());
            let mut part = Vec::with_capacity(tokens.len() * width as usize);
            for token in tokens {
                let (mut at, end) = ((first + (token * width) as usize) % values.len(), part.len() + width as usize);
                while part.len() < end {
                    let take = (end - part.len()).min(values.len() - at);
                    part.extend_from_slice(&values[at..at + take]);
                    at = 0;
                }
            }
            Ok(Buffer::from_slice(stream, &part)?)
        };
        let count = tokens.len() as u64;
        let tensor = |width: u64| Buffer::<bf16>::zeros(stream, count * width);
        let result = || -> Result<_> { Ok((tensor(wide)?, Buffer::<f32>::zeros(stream, count * row.heads)?)) };
        let ends = |ends: [Vec<u32>; 2]| -> Result<[Buffer<u32>; 2]> {
            Ok([Buffer::from_slice(stream, &ends[0])?, Buffer::from_slice(stream, &ends[1])?])
        };
        Ok(Self {
            inputs: [of(0, wide)?, of(1, narrow)?, of(2, narrow)?, of(3, wide)?],
            ends: row.sequences.map(|_| ends(row.ends(world))).transpose()?,
            result: result()?,
            saved: result()?,
            gradients: [tensor(wide)?, tensor(narrow)?, tensor(narrow)?],
            widths,
        })
    }

    /// Where sequences lie, if they are packed.
    pub fn packed(&self) -> Option<Packed<DeviceView<'_, u32>>> {
        self.ends.as_ref().map(|[lengths, padded]| Packed { cu_seqlens: lengths.view(), cu_seqlens_padded: padded.view() })
    }

    /// Keeps the result for backward passes.
    pub fn save(&mut self, stream: &Stream) -> Result<()> {
        self.saved.0.copy_from(stream, &self.result.0)?;
        Ok(self.saved.1.copy_from(stream, &self.result.1)?)
    }

    /// Views of all of them; with the sequences, if attention on one device reads them.
    pub fn views(&mut self, with_sequences: bool) -> Views<'_> {
        let ([q, k, v, grad], [grad_q, grad_k, grad_v]) = (&self.inputs, &mut self.gradients);
        let ends = self.ends.as_ref().filter(|_| with_sequences);
        let inputs = || {
            let sequences = ends.map(|[lengths, padded]| Sequences {
                cu_seqlens_q_padded: Some(padded.view()),
                cu_seqlens_kv_padded: Some(padded.view()),
                ..Sequences::new(lengths.view(), lengths.view())
            });
            Inputs { sequences, ..Inputs::new(q.view(), k.view(), v.view()) }
        };
        let (saved, log_sum_exp) = &self.saved;
        Views {
            forward: (inputs(), Outputs::new(self.result.0.view_mut(), self.result.1.view_mut())),
            backward: (
                BackwardInputs {
                    forward: inputs(),
                    out: saved.view().into(),
                    log_sum_exp: log_sum_exp.view(),
                    grad_out: grad.view().into(),
                },
                Gradients::new(grad_q.view_mut(), grad_k.view_mut(), grad_v.view_mut()),
            ),
        }
    }

    /// Values of the result and of the gradients, at some of the `places`.
    pub fn sample(&self, copy: &Loaded<CopyWords>, stream: &Stream, places: &[Place]) -> Result<[Vec<f32>; 4]> {
        let [wide, narrow] = self.widths;
        let of = |tensor: &Buffer<bf16>, width: u64| -> Result<Vec<f32>> {
            let mut values = Vec::new();
            for place in places {
                let mut kept = Buffer::<u32>::uninitialised(stream, place.rows * width / 2)?;
                let source = tensor.view().cast().slice(place.first * width / 2, (place.first + place.rows) * width / 2);
                copy.launch(stream, CopyWordsArgs { source, target: kept.view_mut() })?;
                let words = kept.to_vec(stream)?;
                values.extend(words.into_iter().flat_map(|word| [word << 16, word & 0xffff_0000]).map(f32::from_bits));
            }
            Ok(values)
        };
        let [grad_q, grad_k, grad_v] = &self.gradients;
        Ok([of(&self.result.0, wide)?, of(grad_q, wide)?, of(grad_k, narrow)?, of(grad_v, narrow)?])
    }
}

/// Rows that are neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    first: u64,
    rows: u64,
}

/// The first and the last rows of a rank, where they are in its tensors and in those of all tokens: as many as are neighbours in both.
pub fn places(tokens: &[u64]) -> [Vec<Place>; 2] {
    let follows = |pair: &[u64]| pair[0] + 1 == pair[1];
    let count = tokens.len().min(SAMPLE);
    let first = 1 + tokens[..count].windows(2).take_while(|pair| follows(pair)).count();
    let last = 1 + tokens[tokens.len() - count..].windows(2).rev().take_while(|pair| follows(pair)).count();
    let at = tokens.len() - last;
    let of = |first_row: u64, rows: usize| Place { first: first_row, rows: rows as u64 };
    [vec![of(0, first), of(at as u64, last)], vec![of(tokens[0], first), of(tokens[at], last)]]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_neighbours_in_both() {
        let of = |first, rows| Place { first, rows };
        assert_eq!(places(&[2, 3, 4, 8, 9]), [vec![of(0, 3), of(3, 2)], vec![of(2, 3), of(8, 2)]]);
        let tokens: Vec<u64> = (100..300).collect();
        assert_eq!(places(&tokens), [vec![of(0, 64), of(136, 64)], vec![of(100, 64), of(236, 64)]]);
    }
}
