//! An attention block, trained with Oxtile's attention and with candle's own operations: the losses are equal but for the error of BF16.
//!
//!     cargo run --example attention_block            # on the CPU, by the emulator
//!     cargo run --release --no-default-features --features cuda --example attention_block -- cuda

use candle_core::{D, DType, Device, Result, Tensor, Var};
use oxtile_candle::{AttentionOptions, Mask, attention};

const HEADS: usize = 4;
const KEY_HEADS: usize = 2;
const SIZE: usize = 64;
const WIDTH: usize = 96;

/// Which attention the block has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// Oxtile's, in BF16.
    Oxtile,
    /// Candle's operations, in F32.
    Candle,
}

/// Projections to queries, keys and values and back.
struct Block {
    to_queries: Var,
    to_keys: Var,
    to_values: Var,
    back: Var,
    kind: Kind,
}

/// The same numbers on every machine, of mean 0 and variance 1/3 times the square of `scale`.
pub fn numbers(seed: u64, shape: &[usize], scale: f32, device: &Device) -> Result<Tensor> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * scale
    };
    let elements = std::iter::repeat_with(next).take(shape.iter().product()).collect();
    Tensor::from_vec(elements, shape, device)
}

/// Causal attention by candle's operations: `q` `[batches, rows, heads, size]`.
pub fn own_attention(q: &Tensor, k: &Tensor, v: &Tensor, visible: &Tensor) -> Result<Tensor> {
    let group = q.dim(2)? / k.dim(2)?;
    let by_head = |x: &Tensor, group| {
        let (batches, rows, heads, size) = x.dims4()?;
        let shared = x.unsqueeze(3)?.broadcast_as((batches, rows, heads, group, size))?.reshape((batches, rows, heads * group, size))?;
        shared.transpose(1, 2)?.contiguous()
    };
    let (q, k, v) = (by_head(q, 1)?, by_head(k, group)?, by_head(v, group)?);
    let scores = (q.matmul(&k.t()?)? * (q.dim(D::Minus1)? as f64).powf(-0.5))?;
    let scores = scores.broadcast_add(&((visible - 1.0)? * 1e9)?)?;
    let exponentials = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?.detach())?.exp()?.broadcast_mul(visible)?;
    // A query that sees no key gets zeros.
    let sums = (exponentials.sum_keepdim(D::Minus1)? + 1e-9)?;
    exponentials.broadcast_div(&sums)?.matmul(&v)?.transpose(1, 2)
}

/// 1 where row `i` of so many queries sees key `j`, else 0.
pub fn visible(queries: usize, keys: usize, device: &Device, sees: impl Fn(i64, i64) -> bool) -> Result<Tensor> {
    let places = (0..queries as i64).flat_map(|i| (0..keys as i64).map(move |j| (i, j)));
    Tensor::from_vec(places.map(|(i, j)| f32::from(u8::from(sees(i, j)))).collect(), (queries, keys), device)
}

impl Block {
    fn new(kind: Kind, device: &Device) -> Result<Self> {
        let weight = |seed, rows, columns| Var::from_tensor(&numbers(seed, &[rows, columns], 0.2, device)?);
        let (queries, keys) = (HEADS * SIZE, KEY_HEADS * SIZE);
        let (to_queries, to_keys, to_values) = (weight(1, WIDTH, queries)?, weight(2, WIDTH, keys)?, weight(3, WIDTH, keys)?);
        Ok(Self { to_queries, to_keys, to_values, back: weight(4, queries, WIDTH)?, kind })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (batches, rows, _) = x.dims3()?;
        let project = |weight: &Var, heads| x.broadcast_matmul(weight.as_tensor())?.reshape((batches, rows, heads, SIZE));
        let (q, k, v) = (project(&self.to_queries, HEADS)?, project(&self.to_keys, KEY_HEADS)?, project(&self.to_values, KEY_HEADS)?);
        let attended = match self.kind {
            Kind::Oxtile => {
                let [q, k, v] = [q.to_dtype(DType::BF16)?, k.to_dtype(DType::BF16)?, v.to_dtype(DType::BF16)?];
                let options = AttentionOptions { mask: Mask::CausalBottomRight, ..AttentionOptions::default() };
                attention(&q, &k, &v, &options)?.to_dtype(DType::F32)?
            }
            Kind::Candle => own_attention(&q, &k, &v, &visible(rows, rows, x.device(), |i, j| j <= i)?)?,
        };
        attended.reshape((batches, rows, HEADS * SIZE))?.broadcast_matmul(self.back.as_tensor())
    }
}

/// Trains a block, and returns the loss before each step.
pub fn train(kind: Kind, steps: usize, rows: usize, device: &Device) -> Result<Vec<f32>> {
    let block = Block::new(kind, device)?;
    let (x, wanted) = (numbers(5, &[2, rows, WIDTH], 1.0, device)?, numbers(6, &[2, rows, WIDTH], 1.0, device)?);
    let mut losses = Vec::new();
    for _ in 0..steps {
        let loss = (block.forward(&x)? - &wanted)?.sqr()?.mean_all()?;
        let gradients = loss.backward()?;
        for weight in [&block.to_queries, &block.to_keys, &block.to_values, &block.back] {
            let gradient = gradients.get(weight).expect("every weight is used");
            weight.set(&(weight.as_tensor() - (gradient * 2.0)?)?)?;
        }
        losses.push(loss.to_scalar()?);
    }
    Ok(losses)
}

fn main() -> Result<()> {
    let device = match std::env::args().nth(1).as_deref() {
        Some("cuda") => Device::new_cuda(0)?,
        _ => Device::Cpu,
    };
    let (steps, rows) = if device.is_cpu() { (8, 80) } else { (100, 1024) };
    let (ours, candles) = (train(Kind::Oxtile, steps, rows, &device)?, train(Kind::Candle, steps, rows, &device)?);
    println!("step  Oxtile    candle");
    for (step, (ours, candles)) in ours.iter().zip(&candles).enumerate() {
        println!("{step:4}  {ours:.6}  {candles:.6}");
        assert!((ours - candles).abs() < 0.005 * candles, "the losses part");
    }
    Ok(())
}
