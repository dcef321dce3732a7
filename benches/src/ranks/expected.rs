//! What a gathered product has to be: the bits of plain products on the gathered operand.

use anyhow::{Context, Result};
use oxtile::gemm::{Gemm, GemmConfig, GemmKernel, GemmTile};
use oxtile::kernels::copy::{CopyWords, CopyWordsArgs};
use oxtile::num::bf16;
use oxtile::overlap::Method;
use oxtile::runtime::Loaded;
use oxtile::{Buffer, Runtime, Stream};
use oxtile_tile::launch::DeviceView;

/// Of a larger result so many words of its beginning and of its end are compared.
const SPAN: u64 = 8 << 20;

/// Multiplies with the kernel that a method of so many ranks equals, on whole shards.
pub fn multiply(
    runtime: &Runtime,
    stream: &Stream,
    config: GemmConfig,
    (method, tile, ranks): (Method, Option<GemmTile>, u32),
    [a, b]: [&Buffer<bf16>; 2],
    d: &mut Buffer<bf16>,
) -> Result<()> {
    let GemmConfig { m, n, k, .. } = config;
    match method {
        Method::Sequential => Gemm::<bf16, bf16>::new(runtime, config)?.run(stream, a.view(), b.view(), None, d.view_mut())?,
        Method::Fused => {
            let plans = config.plans::<bf16, bf16>(&stream.device());
            let is_of = |kernel| matches!(kernel, GemmKernel::Wgmma { tile: of, .. } if Some(of) == tile);
            let whole = plans.into_iter().find(|plan| plan.parts == 1 && is_of(plan.kernel));
            let plan = whole.with_context(|| format!("no plain product has whole tiles of {tile:?}"))?;
            Gemm::<bf16, bf16>::planned(runtime, config, plan)?.run(stream, a.view(), b.view(), None, d.view_mut())?;
        }
        Method::Chunked => {
            let rows = m / u64::from(ranks);
            let gemm = Gemm::<bf16, bf16>::new(runtime, GemmConfig { m: rows, ..config })?;
            for rank in 0..u64::from(ranks) {
                let (_, rest) = d.view_mut().split_at(rank * rows * n);
                let (d, _) = rest.split_at(rows * n);
                gemm.run(stream, a.view().slice(rank * rows * k, (rank + 1) * rows * k), b.view(), None, d)?;
            }
        }
    }
    Ok(())
}

/// The words of a result that are compared.
pub struct Sample<'a> {
    copy: &'a Loaded<CopyWords>,
    stream: &'a Stream,
    ranges: Vec<[u64; 2]>,
}

impl<'a> Sample<'a> {
    /// Of so many elements.
    pub fn of(copy: &'a Loaded<CopyWords>, stream: &'a Stream, elements: u64) -> Self {
        let words = elements / 2;
        let ranges = if words <= 2 * SPAN { vec![[0, words]] } else { vec![[0, SPAN], [words - SPAN, words]] };
        Self { copy, stream, ranges }
    }

    /// Buffers for them.
    pub fn room(&self) -> Result<Vec<Buffer<u32>>> {
        Ok(self.ranges.iter().map(|[start, end]| Buffer::uninitialised(self.stream, end - start)).collect::<oxtile::Result<_>>()?)
    }

    /// Copies them on the device.
    pub fn keep(&self, result: DeviceView<'_, bf16>, kept: &mut [Buffer<u32>]) -> Result<()> {
        for ([start, end], kept) in self.ranges.iter().zip(kept) {
            let source = result.cast().slice(*start, *end);
            self.copy.launch(self.stream, CopyWordsArgs { source, target: kept.view_mut() })?;
        }
        Ok(())
    }

    /// Copies them to the host.
    pub fn words(&self, kept: &[Buffer<u32>]) -> Result<Vec<Vec<u32>>> {
        Ok(kept.iter().map(|kept| kept.to_vec(self.stream)).collect::<oxtile::Result<_>>()?)
    }
}

/// How results differ, if they do.
pub fn difference(found: &[Vec<u32>], expected: &[Vec<u32>]) -> Option<String> {
    let (part, (found, expected)) = found.iter().zip(expected).enumerate().find(|(_, (found, expected))| found != expected)?;
    let at = || found.iter().zip(expected).enumerate().filter(|(_, (found, expected))| found != expected);
    let (first, (word, other)) = at().next()?;
    Some(format!("{} words of {} differ in part {part}, the first at {first}: {word:#010x} for {other:#010x}", at().count(), found.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_that_differ_are_counted() {
        assert_eq!(difference(&[vec![1, 2], vec![3]], &[vec![1, 2], vec![3]]), None);
        let differs = difference(&[vec![1, 2], vec![3, 4, 5]], &[vec![1, 2], vec![3, 0, 6]]);
        assert_eq!(differs.unwrap(), "2 words of 3 differ in part 1, the first at 1: 0x00000004 for 0x00000000");
    }
}
