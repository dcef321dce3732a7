//! What a training step takes beside matrices: RMS norm, rotary embedding, cross entropy, AdamW, embedding, sums of ranks' gradients.

use anyhow::Result;
use oxtile::adamw::{Adamw, AdamwConfig, Weights};
use oxtile::cross_entropy::{CrossEntropy, Rule};
use oxtile::embedding::Embedding;
use oxtile::rms_norm::{RmsNorm, Saved};
use oxtile::rotary::{Angles, Pairing, Rotary};
use oxtile::runtime::{Buffer, HostElement};
use oxtile::sum_parts::{AddParts, SumParts};
use oxtile::tensor::{Heads, HeadsMut};
use oxtile_tile::num::{Pod, bf16};

use super::copy::ceiling;
use crate::bench::{Bench, Gpu, Output, Prepared, Size};

/// The family's name.
pub const FAMILY: &str = "training";

/// The sizes of a problem, and buffer sets.
type Shape = (Vec<u64>, usize);

/// What is measured: its name, the peers, the shape, the bytes of a launch, and what captures it.
type Measured = (&'static str, &'static [&'static str], Shape, u64, fn(&Gpu, &[u64], usize) -> Result<Prepared>);

/// All, each at a size or two.
pub fn benches(size: Size) -> Vec<Bench> {
    let pick = |full: (&[u64], usize), smoke: &[u64]| size.pick((full.0.to_vec(), full.1), (smoke.to_vec(), 2));
    let norms = [pick((&[16384, 4096], 3), &[8, 64]), pick((&[8192, 8192], 3), &[5, 1032]), pick((&[16384, 2048], 6), &[4, 520])];
    let of_norms = norms.into_iter().flat_map(|shape| {
        let (elements, rows, width) = (shape.0.iter().product::<u64>(), shape.0[0], shape.0[1]);
        let forward: Measured = ("rms_norm", &["rms_norm_compiled"], shape.clone(), 4 * elements + 2 * width + 4 * rows, rms_norm);
        [forward, ("rms_norm_backward", &["rms_norm_backward_compiled"], shape, 6 * elements + 4 * width + 4 * rows, rms_norm_backward)]
    });
    let heads = pick((&[8192, 32, 128], 3), &[5, 2, 32]);
    let turned = 4 * heads.0.iter().product::<u64>() + 4 * heads.0[0] * heads.0[2];
    let logits = [pick((&[2048, 50304], 2), &[3, 512]), pick((&[1024, 128_256], 2), &[2, 1000])];
    let of_logits = logits.into_iter().map(|shape| {
        let bytes = 4 * shape.0.iter().product::<u64>();
        (
            "cross_entropy",
            &["cross_entropy_compiled"] as &'static [_],
            shape,
            bytes,
            cross_entropy as fn(&Gpu, &[u64], usize) -> Result<Prepared>,
        )
    });
    let weights = pick((&[32 << 20], 1), &[4104]);
    let bytes_of_step = 28 * weights.0[0];
    // Tokens, rows of the table, width.
    let table = pick((&[16384, 32768, 2048], 2), &[6, 11, 64]);
    let gathered = table.0[0] * table.0[2];
    let others: [Measured; 5] = [
        ("rotary halves", &["rotary_halves_compiled"], heads.clone(), turned, rotary_halves),
        ("rotary neighbours", &["rotary_neighbours_compiled"], heads, turned, rotary_neighbours),
        ("adamw", &["adamw_compiled"], weights, bytes_of_step, adamw),
        ("embedding", &["embedding_compiled"], table.clone(), 4 * gathered, embedding),
        ("embedding_backward", &["embedding_backward_compiled"], table, 10 * gathered, embedding_backward),
    ];
    // Parts, and elements of each: gradients of 4 and of 8 ranks.
    let sums = [pick((&[4, 16 << 20], 1), &[3, 520]), pick((&[8, 8 << 20], 1), &[2, 1032])];
    let of_sums = sums.into_iter().flat_map(|shape| {
        let &[parts, elements] = shape.0.as_slice() else { unreachable!("parts and elements") };
        let sum: Measured = ("sum_parts", &["sum_parts_compiled"], shape.clone(), 2 * (parts + 1) * elements, sum_parts);
        [sum, ("add_parts", &["add_parts_compiled"], shape, (2 * parts + 8) * elements, add_parts)]
    });
    of_norms.chain(of_logits).chain(others).chain(of_sums).map(|measured| bench(size, measured)).collect()
}

fn bench(size: Size, (kernel, peers, (dimensions, sets), bytes, prepare): Measured) -> Bench {
    let shape = dimensions.iter().map(u64::to_string).collect::<Vec<_>>().join("x");
    let sizes = dimensions.clone();
    let ceiling = ceiling(size, bytes);
    let prepare = Box::new(move |gpu: &Gpu| prepare(gpu, &sizes, sets));
    Bench { family: FAMILY, kernel, shape: format!("{shape} bf16"), dimensions, bytes, flops: 0, sets, ceiling, peers, prepare }
}

fn halves(gpu: &Gpu, number: usize, count: u64) -> Result<Buffer<bf16>> {
    Ok(Buffer::from_slice(&gpu.stream, &gpu.pattern.fill(number, count))?)
}

fn floats(gpu: &Gpu, number: usize, count: u64) -> Result<Buffer<f32>> {
    let values: Vec<f32> = gpu.pattern.fill(number, count).into_iter().map(half::bf16::to_f32).collect();
    Ok(Buffer::from_slice(&gpu.stream, &values)?)
}

fn empty<T: Pod>(gpu: &Gpu, count: u64) -> Result<Buffer<T>> {
    Ok(Buffer::uninitialised(&gpu.stream, count)?)
}

/// An output as bytes.
fn output<T>(gpu: &oxtile::runtime::Stream, name: &'static str, buffer: &Buffer<T>) -> Result<Output>
where
    T: HostElement<Device = T> + Pod + ToBytes,
{
    Ok(Output { name, bytes: buffer.to_vec(gpu)?.into_iter().flat_map(ToBytes::bytes).collect() })
}

/// The bytes of an element, the low ones first.
trait ToBytes {
    fn bytes(self) -> Vec<u8>;
}

impl ToBytes for bf16 {
    fn bytes(self) -> Vec<u8> {
        self.to_bits().to_le_bytes().to_vec()
    }
}

impl ToBytes for f32 {
    fn bytes(self) -> Vec<u8> {
        self.to_le_bytes().to_vec()
    }
}

/// Tensors of every set, from one function of its number.
fn sets<T>(count: usize, set: impl Fn(usize) -> Result<T>) -> Result<Vec<T>> {
    (0..count).map(set).collect()
}

fn rms_norm(gpu: &Gpu, sizes: &[u64], count: usize) -> Result<Prepared> {
    let &[rows, width] = sizes else { unreachable!("rows and columns") };
    let weight = halves(gpu, 2 * count, width)?;
    let set = |number| anyhow::Ok((halves(gpu, number, rows * width)?, empty::<bf16>(gpu, rows * width)?, empty::<f32>(gpu, rows)?));
    let mut tensors = sets(count, set)?;
    let norm = RmsNorm::<bf16>::new(&gpu.runtime, width, 1e-5)?;
    let graph = Prepared::capture(gpu, || {
        tensors
            .iter_mut()
            .try_for_each(|(x, y, inverse)| norm.forward(&gpu.stream, x.view(), weight.view(), y.view_mut(), Some(inverse.view_mut())))
    })?;
    Ok(Prepared::new(graph, move |stream| Ok(vec![output(stream, "y", &tensors[0].1)?, output(stream, "inverse_rms", &tensors[0].2)?])))
}

fn rms_norm_backward(gpu: &Gpu, sizes: &[u64], count: usize) -> Result<Prepared> {
    let &[rows, width] = sizes else { unreachable!("rows and columns") };
    let weight = halves(gpu, 2 * count, width)?;
    let norm = RmsNorm::<bf16>::new(&gpu.runtime, width, 1e-5)?;
    let set = |number| {
        let (x, g) = (halves(gpu, number, rows * width)?, halves(gpu, count + number, rows * width)?);
        let (mut y, mut inverse) = (empty::<bf16>(gpu, rows * width)?, empty::<f32>(gpu, rows)?);
        norm.forward(&gpu.stream, x.view(), weight.view(), y.view_mut(), Some(inverse.view_mut()))?;
        anyhow::Ok((x, g, inverse, y, norm.weight_gradient(&gpu.stream, rows)?))
    };
    let mut tensors = sets(count, set)?;
    let graph = Prepared::capture(gpu, || {
        tensors.iter_mut().try_for_each(|(x, g, inverse, dx, dw)| {
            let saved = Saved { input: x.view(), weight: weight.view(), inverse_rms: inverse.view() };
            norm.backward(&gpu.stream, g.view(), saved, dx.view_mut(), dw)
        })
    })?;
    Ok(Prepared::new(graph, move |stream| Ok(vec![output(stream, "dx", &tensors[0].3)?, output(stream, "dw", &tensors[0].4.sums)?])))
}

fn rotary_halves(gpu: &Gpu, sizes: &[u64], count: usize) -> Result<Prepared> {
    rotary(gpu, sizes, count, Pairing::Halves)
}

fn rotary_neighbours(gpu: &Gpu, sizes: &[u64], count: usize) -> Result<Prepared> {
    rotary(gpu, sizes, count, Pairing::Neighbours)
}

/// Any numbers stand for cosines and sines.
fn rotary(gpu: &Gpu, sizes: &[u64], count: usize, pairing: Pairing) -> Result<Prepared> {
    let &[rows, heads, size] = sizes else { unreachable!("rows, heads and the size of a head") };
    let [cosines, sines] = [floats(gpu, count, rows * size / 2)?, floats(gpu, count + 1, rows * size / 2)?];
    let elements = rows * heads * size;
    let mut tensors = sets(count, |number| anyhow::Ok((halves(gpu, number, elements)?, empty::<bf16>(gpu, elements)?)))?;
    let rotary = Rotary::<bf16>::new(&gpu.runtime, pairing)?;
    let graph = Prepared::capture(gpu, || {
        tensors.iter_mut().try_for_each(|(x, y)| {
            let (input, output) = (Heads::packed(x.view(), [rows, heads, size])?, HeadsMut::packed(y.view_mut(), [rows, heads, size])?);
            rotary.turn(&gpu.stream, input, output, Angles { cosines: cosines.view(), sines: sines.view() })
        })
    })?;
    Ok(Prepared::new(graph, move |stream| Ok(vec![output(stream, "turned", &tensors[0].1)?])))
}

/// Numbers below `end`, the same as those of the peers.
fn spread(count: u64, end: u64) -> impl Iterator<Item = u64> {
    (0..count).map(move |i| i * 7919 % end)
}

fn cross_entropy(gpu: &Gpu, sizes: &[u64], count: usize) -> Result<Prepared> {
    let &[rows, width] = sizes else { unreachable!("rows and logits") };
    let targets: Vec<i32> = spread(rows, width).map(|target| target as i32).collect();
    let targets = Buffer::from_slice(&gpu.stream, &targets)?;
    let set = |number| anyhow::Ok((halves(gpu, number, rows * width)?, empty::<bf16>(gpu, rows * width)?, empty::<f32>(gpu, rows)?));
    let mut tensors = sets(count, set)?;
    let entropy = CrossEntropy::<bf16>::new(&gpu.runtime, width, Rule::default())?;
    let graph = Prepared::capture(gpu, || {
        tensors.iter_mut().try_for_each(|(logits, gradient, losses)| {
            entropy.gradient(&gpu.stream, logits.view(), targets.view(), gradient.view_mut(), losses.view_mut())
        })
    })?;
    Ok(Prepared::new(graph, move |stream| Ok(vec![output(stream, "gradient", &tensors[0].1)?, output(stream, "losses", &tensors[0].2)?])))
}

/// Each replay is a step, so that nothing is compared.
fn adamw(gpu: &Gpu, sizes: &[u64], count: usize) -> Result<Prepared> {
    let weights = sizes[0];
    let set = |number| {
        let [first, second] = [Buffer::<f32>::zeros(&gpu.stream, weights)?, Buffer::<f32>::zeros(&gpu.stream, weights)?];
        anyhow::Ok((halves(gpu, number, weights)?, floats(gpu, count + number, weights)?, first, second, empty::<bf16>(gpu, weights)?))
    };
    let mut tensors = sets(count, set)?;
    let adamw = Adamw::<bf16>::new(&gpu.runtime, AdamwConfig::default())?;
    let graph = Prepared::capture(gpu, || {
        tensors.iter_mut().try_for_each(|(gradient, values, first, second, rounded)| {
            let (first, second, rounded) = (first.view_mut(), second.view_mut(), Some(rounded.view_mut()));
            adamw.step(&gpu.stream, 1, gradient.view(), Weights { values: values.view_mut(), first, second, rounded })
        })
    })?;
    Ok(Prepared::new(graph, |_| Ok(Vec::new())))
}

fn tokens(gpu: &Gpu, count: u64, vocabulary: u64) -> Result<Buffer<u32>> {
    let tokens: Vec<u32> = spread(count, vocabulary).map(|token| token as u32).collect();
    Ok(Buffer::from_slice(&gpu.stream, &tokens)?)
}

fn embedding(gpu: &Gpu, sizes: &[u64], count: usize) -> Result<Prepared> {
    let &[rows, vocabulary, width] = sizes else { unreachable!("tokens, rows of the table and columns") };
    let tokens = tokens(gpu, rows, vocabulary)?;
    let mut tensors = sets(count, |number| anyhow::Ok((halves(gpu, number, vocabulary * width)?, empty::<bf16>(gpu, rows * width)?)))?;
    let embedding = Embedding::<bf16>::new(&gpu.runtime, width)?;
    let graph = Prepared::capture(gpu, || {
        tensors
            .iter_mut()
            .try_for_each(|(table, gathered)| embedding.forward(&gpu.stream, table.view(), tokens.view(), gathered.view_mut()))
    })?;
    Ok(Prepared::new(graph, move |stream| Ok(vec![output(stream, "gathered", &tensors[0].1)?])))
}

/// Each replay adds the gradients again, so that nothing is compared.
fn embedding_backward(gpu: &Gpu, sizes: &[u64], count: usize) -> Result<Prepared> {
    let &[rows, vocabulary, width] = sizes else { unreachable!("tokens, rows of the table and columns") };
    let tokens = tokens(gpu, rows, vocabulary)?;
    let set = |number| anyhow::Ok((halves(gpu, number, rows * width)?, Buffer::<f32>::zeros(&gpu.stream, vocabulary * width)?));
    let mut tensors = sets(count, set)?;
    let embedding = Embedding::<bf16>::new(&gpu.runtime, width)?;
    let graph = Prepared::capture(gpu, || {
        tensors.iter_mut().try_for_each(|(gradient, sums)| embedding.backward(&gpu.stream, gradient.view(), tokens.view(), sums.view_mut()))
    })?;
    Ok(Prepared::new(graph, |_| Ok(Vec::new())))
}

fn sum_parts(gpu: &Gpu, sizes: &[u64], count: usize) -> Result<Prepared> {
    let &[parts, elements] = sizes else { unreachable!("parts and elements") };
    let mut tensors = sets(count, |number| anyhow::Ok((halves(gpu, number, parts * elements)?, empty::<bf16>(gpu, elements)?)))?;
    let sum = SumParts::<bf16, bf16>::new(&gpu.runtime)?;
    let graph = Prepared::capture(gpu, || {
        tensors.iter_mut().try_for_each(|(all, total)| sum.run(&gpu.stream, all.view(), parts as u32, elements, total.view_mut()))
    })?;
    Ok(Prepared::new(graph, move |stream| Ok(vec![output(stream, "sum", &tensors[0].1)?])))
}

/// Each replay adds the sums again, so that nothing is compared.
fn add_parts(gpu: &Gpu, sizes: &[u64], count: usize) -> Result<Prepared> {
    let &[parts, elements] = sizes else { unreachable!("parts and elements") };
    let set = |number| anyhow::Ok((halves(gpu, number, parts * elements)?, Buffer::<f32>::zeros(&gpu.stream, elements)?));
    let (mut tensors, scale) = (sets(count, set)?, 1.0 / parts as f32);
    let add = AddParts::<bf16>::new(&gpu.runtime)?;
    let graph = Prepared::capture(gpu, || {
        tensors.iter_mut().try_for_each(|(all, target)| add.run(&gpu.stream, all.view(), parts as u32, elements, scale, target.view_mut()))
    })?;
    Ok(Prepared::new(graph, |_| Ok(Vec::new())))
}
