//! Products whose operand is gathered: the shards of ranks, and the plain product that has the same bits. The tests of GPUs have them too.

use std::ops::Range;

use half::bf16 as Half;
use oxtile::comm::WorldSize;
use oxtile::gemm::{Gemm, GemmConfig};
use oxtile::kernels::copy::{CopyWords, CopyWordsArgs};
use oxtile::num::{Float, Pod};
use oxtile::overlap::{AllGatherConfig, Cut, GatherOperands, Gathers, Global, Method, OverlapConfig};
use oxtile::{Buffer, HostElement, Result, Stream};

use crate::values::values;

/// A product whose operand so many ranks gather.
#[derive(Clone, Copy, Debug)]
pub struct Problem {
    pub ranks: u32,
    pub config: AllGatherConfig,
}

impl Problem {
    /// The product of a rank on the gathered operand.
    pub fn product(&self) -> GemmConfig {
        self.config.product(WorldSize::new(self.ranks).unwrap()).unwrap()
    }

    /// Elements along the gathered dimension and along the other, and whether shards are rows of the operand as it is stored.
    fn gathered(&self) -> ([u64; 2], bool) {
        let AllGatherConfig { sizes: Global { m, n, k }, transpose_a, transpose_b, .. } = self.config;
        match self.config.gathers {
            Gathers::Rows => ([m, k], !transpose_a),
            Gathers::SumOfA => ([k, m], transpose_a),
            Gathers::SumOfB => ([k, n], !transpose_b),
        }
    }

    /// The shard of a rank of the operand in a round, without gaps.
    pub fn shard(&self, operand: &[Half], rank: u32) -> Vec<Half> {
        let ([gathered, other], are_rows) = self.gathered();
        let extent = gathered.div_ceil(self.ranks.into());
        let [start, end] = [rank, rank + 1].map(|of| (u64::from(of) * extent).min(gathered) as usize);
        if are_rows {
            return operand[start * other as usize..end * other as usize].to_vec();
        }
        operand.chunks(gathered as usize).flat_map(|row| row[start..end].to_vec()).collect()
    }

    pub fn operand(&self, round: u64) -> Vec<Half> {
        let ([gathered, other], _) = self.gathered();
        values(1000 + round, gathered * other)
    }

    pub fn weight(&self, rank: u32) -> Vec<Half> {
        let GemmConfig { m, n, k, .. } = self.product();
        values(rank.into(), k * if self.config.gathers == Gathers::SumOfB { m } else { n })
    }

    /// A rank's result of a gathered operand, in words, by the plain product on a stream's device.
    pub fn multiplied<T: Operand<O>, O: Pod>(&self, stream: &Stream, method: Method, rank: u32, operand: &[Half]) -> Result<Vec<u32>> {
        let (runtime, config) = (stream.device().runtime(), self.product());
        let extent = config.m.div_ceil(self.ranks.into());
        let (gathered, weight) = (operand.to_vec(), self.weight(rank));
        let (a, b) = if self.config.gathers == Gathers::SumOfB { (weight, gathered) } else { (gathered, weight) };
        let rows = |rows: Range<u64>| a[(rows.start * config.k) as usize..(rows.end * config.k) as usize].to_vec();
        match method {
            Method::Sequential => multiply(stream, &Gemm::<T, O>::new(&runtime, config)?, config, a, b),
            Method::Fused => {
                let (config, a, b) = self.rotated(T::STEP, config, rank, a, b);
                // The product whose tiles are not split.
                let plans = config.plans::<T, O>(&runtime.device(0)?);
                let whole = *plans.iter().find(|plan| plan.parts == 1).expect("a plan is not split");
                multiply(stream, &Gemm::<T, O>::planned(&runtime, config, whole)?, config, a, b)
            }
            Method::Chunked => {
                let shards = (0..u64::from(self.ranks)).map(|of| (of * extent).min(config.m)..((of + 1) * extent).min(config.m));
                let product = |shard: Range<u64>| {
                    let config = GemmConfig { m: shard.end - shard.start, ..config };
                    multiply(stream, &Gemm::<T, O>::new(&runtime, config)?, config, rows(shard), b.clone())
                };
                shards.map(product).collect::<Result<Vec<_>>>().map(|parts| parts.concat())
            }
        }
    }

    /// Operands of which the sum begins with the rank's own part, in whole steps of a kernel.
    fn rotated(&self, step: u64, config: GemmConfig, rank: u32, a: Vec<Half>, b: Vec<Half>) -> (GemmConfig, Vec<Half>, Vec<Half>) {
        if self.config.gathers == Gathers::Rows {
            return (config, a, b);
        }
        let k = config.k.next_multiple_of(step);
        let first = (u64::from(rank) * config.k.div_ceil(self.ranks.into())).next_multiple_of(step);
        let first = if first < k { first as usize } else { 0 };
        // Rows along the sum, or along the other dimension.
        let turn = |mut matrix: Vec<Half>, width: u64, is_along: bool| {
            let along = |row: &[Half]| {
                let mut row = row.to_vec();
                row.resize(k as usize, Half::ZERO);
                row.rotate_left(first);
                row
            };
            if is_along {
                return matrix.chunks(config.k as usize).flat_map(along).collect();
            }
            matrix.resize((k * width) as usize, Half::ZERO);
            matrix.rotate_left(first * width as usize);
            matrix
        };
        (GemmConfig { k, ..config }, turn(a, config.m, !config.transpose_a), turn(b, config.n, config.transpose_b))
    }
}

fn multiply<T: Operand<O>, O: Pod>(stream: &Stream, gemm: &Gemm<T, O>, config: GemmConfig, a: Vec<Half>, b: Vec<Half>) -> Result<Vec<u32>> {
    let [a, b] = [a, b].map(|values| Buffer::<T>::from_slice(stream, &elements::<T>(&values)));
    let mut d = Buffer::<O>::zeros(stream, config.m * config.n)?;
    gemm.run(stream, a?.view(), b?.view(), None, d.view_mut())?;
    words(stream, &d)
}

/// An element of operands that are gathered.
pub trait Operand<O: 'static>: GatherOperands<O> + Float + Pod + HostElement<Device = Self> {}

impl<O: 'static, T: GatherOperands<O> + Float + Pod + HostElement<Device = T>> Operand<O> for T {}

/// Values as elements.
pub fn elements<T: Float>(values: &[Half]) -> Vec<T> {
    values.iter().map(|value| T::from_f32(value.to_f32())).collect()
}

/// The bits of a matrix of an even number of elements.
pub fn words<T: Pod>(stream: &Stream, matrix: &Buffer<T>) -> Result<Vec<u32>> {
    let copy = stream.device().runtime().load::<CopyWords>()?;
    let mut words = Buffer::<u32>::zeros(stream, matrix.len() * size_of::<T>() as u64 / 4)?;
    copy.launch(stream, CopyWordsArgs { source: matrix.view().cast(), target: words.view_mut() })?;
    words.to_vec(stream)
}

/// Shards in so many panels of so many slabs each.
pub const fn cut(panels: u32, slabs: u32) -> Cut {
    Cut { panels, slabs, halving: false, last_only: false }
}

/// As [`cut`], with slabs of the last panel alone.
pub const fn last(panels: u32, slabs: u32) -> Cut {
    Cut { last_only: true, ..cut(panels, slabs) }
}

/// By rows of a row-major operand, with a method.
pub fn by(method: Method, cut: Option<Cut>, [m, n, k]: [u64; 3]) -> AllGatherConfig {
    let overlap = OverlapConfig { method: Some(method), cut, ..OverlapConfig::default() };
    AllGatherConfig { overlap, ..AllGatherConfig::new(Global { m, n, k }) }
}
