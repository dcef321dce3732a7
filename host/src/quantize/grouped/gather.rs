//! Quantized shards of all ranks to the whole.

use std::fmt;
use std::ops::Range;

use oxtile_kernels::group::Grouped;
use oxtile_kernels::shards::{Byte, JoinShardsGroupedArgs};
use oxtile_tile::launch::Kernel;

use super::format::GroupFormat;
use super::quantized::{Quantized, SCALE_UNIT};
use super::table::{Record, Starts, Table};
use super::tensors::UNIT;
use crate::comm::{Communicator, Rank, WorldSize};
use crate::quantize::format::{Direction, Format, Shapes};
use crate::quantize::layout::Compact;
use crate::runtime::{Buffer, Error, Loaded, Result, Runtime, Stream};

/// How the rows of a matrix are split among ranks: as many whole blocks for each, of which the last ranks may have fewer, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowShards {
    rows: u64,
    a_shard: u64,
}

impl RowShards {
    /// The split of so many rows for a format.
    pub fn new<F: Format>(rows: u64, world: WorldSize) -> Self {
        Self { rows, a_shard: rows.div_ceil(u64::from(world.get())).next_multiple_of(F::SHAPES.alignment()) }
    }

    /// The rows of a rank.
    pub fn range(self, rank: Rank) -> Range<u64> {
        let start = self.rows.min(u64::from(rank.index()) * self.a_shard);
        start..self.rows.min(start + self.a_shard)
    }
}

/// Gathers quantized shards by two collectives, of all codes and of all scales, whatever the number of members, and puts them
/// together in one launch each.
///
/// Shards that are shorter than the others are padded before, and the padding is left out after. What is transposed, NVFP4's columns, comes
/// as one transposed shard after the other; the launch that joins them puts their rows side by side.
///
/// Interleaved scales of shards are not those of the whole, and cannot be gathered:
///
/// ```compile_fail,E0308
/// use oxtile::comm::SingleRank;
/// use oxtile::quantize::grouped::{GatherShards, Nvfp4Format, Quantized};
/// use oxtile::quantize::{Compact, Interleaved};
/// # use oxtile::Stream;
///
/// fn gather(gather: &GatherShards<Nvfp4Format>, ranks: &SingleRank, stream: &Stream, shards: &Quantized<Nvfp4Format, Interleaved>) {
///     gather.run(ranks, stream, shards, &[64]).unwrap();
/// }
/// ```
///
/// ```
/// # use oxtile::comm::SingleRank;
/// # use oxtile::quantize::grouped::{GatherShards, Nvfp4Format, Quantized};
/// # use oxtile::quantize::{Compact, Interleaved};
/// # use oxtile::Stream;
/// fn gather(gather: &GatherShards<Nvfp4Format>, ranks: &SingleRank, stream: &Stream, shards: &Quantized<Nvfp4Format, Compact>) {
///     gather.run(ranks, stream, shards, &[64]).unwrap();
/// }
/// ```
pub struct GatherShards<F: GroupFormat> {
    codes: Loaded<F::JoinCodes>,
    scales: Loaded<F::JoinScales>,
}

/// Bytes of a row that the kernel can count.
const WIDTH_LIMIT: u64 = u32::MAX as u64 - (1 << 16);

/// One of the two buffers of a group, on its way from shards to wholes. Of each member, in codes or scales; a
/// member whose shards follow each other is a single row.
struct Join {
    /// Rows, and codes of a row, of this rank's shard, of a padded one, and of the whole.
    shard: Vec<[u64; 2]>,
    padded: Vec<[u64; 2]>,
    whole: Vec<[u64; 2]>,
    padded_starts: Starts,
}

impl<F: GroupFormat> GatherShards<F> {
    /// Loads the kernels.
    ///
    /// # Errors
    /// As [`Runtime::load`].
    pub fn new(runtime: &Runtime) -> Result<Self> {
        Ok(Self { codes: runtime.load()?, scales: runtime.load()? })
    }

    /// The whole of every member on every rank, from this rank's [`RowShards`] of it; `rows` are those of the wholes. The codes and scales
    /// are those of the whole cast at once, if all ranks had the same amaxes.
    ///
    /// # Errors
    /// [`Error::Length`] unless there are rows for each member; [`Error::Invalid`] names the first whose shard is not this rank's; as
    /// [`Quantized::uninitialised`], [`Communicator::all_gather`] and [`Loaded::launch`].
    pub fn run(
        &self,
        communicator: &impl Communicator,
        stream: &Stream,
        shards: &Quantized<F, Compact>,
        rows: &[u64],
    ) -> Result<Quantized<F, Compact>> {
        let [_, whole] = shapes::<F>(communicator, shards, rows)?;
        let mut output = Quantized::<F>::uninitialised(stream, &whole, shards.direction, shards.amax.clone())?;
        self.run_into(communicator, stream, shards, &mut output)?;
        Ok(output)
    }

    /// As [`run`](Self::run), into buffers that are there already and whose addresses stay, as a captured graph or a consumer that keeps
    /// them needs it. The wholes' rows are those of `output`, and its amax becomes that of the shards.
    ///
    /// # Errors
    /// As [`run`](Self::run); [`Error::Invalid`] unless `output` is quantized along the shards' direction and of their columns.
    pub fn run_into(
        &self,
        communicator: &impl Communicator,
        stream: &Stream,
        shards: &Quantized<F, Compact>,
        output: &mut Quantized<F, Compact>,
    ) -> Result<()> {
        let rows: Vec<u64> = output.shapes.iter().map(|shape| shape[0]).collect();
        let [padded, whole] = shapes::<F>(communicator, shards, &rows)?;
        if output.direction != shards.direction || output.shapes != whole {
            let why = format!(
                "it holds {:?} along {:?} where shards of {whole:?} along {:?} are gathered: make one by `Quantized::uninitialised`",
                output.shapes, output.direction, shards.direction
            );
            return Err(Error::Invalid { what: "GatherShards::run_into, output", why });
        }
        output.amax = shards.amax.clone();
        let by_side = F::SHAPES.is_transposed(shards.direction);
        let join = |of: fn(Shapes, [u64; 2], Direction) -> [u64; 2], unit| {
            let all = |shapes: &[[u64; 2]]| shapes.iter().map(|shape| of(F::SHAPES, *shape, shards.direction)).collect::<Vec<_>>();
            Join::new(all(&shards.shapes), all(&padded), all(&whole), by_side, unit)
        };
        let elements = F::SHAPES.elements;
        let codes = |starts: &Starts| Starts { of: starts.of.iter().map(|start| start / elements).collect(), end: starts.end / elements };
        let (from, to) = (codes(&shards.element_starts), codes(&output.element_starts));
        join(Shapes::codes, UNIT / elements)?.run(communicator, stream, (&shards.data, &from), (&mut output.data, &to), &self.codes)?;
        let (from, to) = ((&shards.scales, &shards.scale_starts), (&mut output.scales, &output.scale_starts));
        join(Shapes::scales, SCALE_UNIT)?.run(communicator, stream, from, to, &self.scales)
    }
}

impl Join {
    fn new(shard: Vec<[u64; 2]>, padded: Vec<[u64; 2]>, whole: Vec<[u64; 2]>, by_side: bool, unit: u64) -> Result<Self> {
        let flat = |shapes: Vec<[u64; 2]>| if by_side { shapes } else { shapes.iter().map(|[rows, width]| [1, rows * width]).collect() };
        let (shard, padded, whole) = (flat(shard), flat(padded), flat(whole));
        if let Some(i) = padded.iter().chain(&whole).position(|[_, width]| *width > WIDTH_LIMIT) {
            let why = format!("member {} has more than {WIDTH_LIMIT} bytes in a row of what is joined: split it", i % whole.len());
            return Err(Error::Invalid { what: "GatherShards::run", why });
        }
        let padded_starts = Starts::new(padded.iter().map(|[rows, width]| rows * width), unit)?;
        Ok(Self { shard, padded, whole, padded_starts })
    }

    /// Pads this rank's shards where they are shorter, gathers, and joins.
    fn run<K, T: Byte>(
        &self,
        communicator: &impl Communicator,
        stream: &Stream,
        (shards, starts): (&Buffer<T>, &Starts),
        (whole, whole_starts): (&mut Buffer<T>, &Starts),
        kernel: &Loaded<K>,
    ) -> Result<()>
    where
        K: Grouped + for<'a> Kernel<Args<'a> = JoinShardsGroupedArgs<'a, T>>,
    {
        let world = communicator.world().get();
        let end = self.padded_starts.end;
        let mut gathered_shards = Buffer::uninitialised(stream, u64::from(world) * end)?;
        if self.shard == self.padded {
            communicator.all_gather(stream, shards, &mut gathered_shards)?;
        } else {
            let mut padded = Buffer::uninitialised(stream, end)?;
            let table = table::<K>(stream, (&self.shard, starts), (&self.padded, &self.padded_starts))?;
            let (gathered, whole, shard_stride) = (shards.view(), padded.view_mut(), shards.len());
            kernel.launch(stream, JoinShardsGroupedArgs { gathered, whole, table: table.lend(), shards: 1, shard_stride })?;
            communicator.all_gather(stream, &padded, &mut gathered_shards)?;
        }
        let table = table::<K>(stream, (&self.padded, &self.padded_starts), (&self.whole, whole_starts))?;
        let (gathered, whole) = (gathered_shards.view(), whole.view_mut());
        kernel.launch(stream, JoinShardsGroupedArgs { gathered, whole, table: table.lend(), shards: world, shard_stride: end })
    }
}

/// What the kernel is told: the rows of what it writes, where a member starts in a shard and in the whole, and the width of a shard's row.
fn table<G: Grouped>(stream: &Stream, from: (&[[u64; 2]], &Starts), to: (&[[u64; 2]], &Starts)) -> Result<Table> {
    let record = |i: usize| Record { index: i as u64, shape: to.0[i], starts: [from.1.of[i], to.1.of[i], from.0[i][1]] };
    Table::new::<G>(stream, (0..to.0.len()).map(record))
}

/// The shapes of padded shards and of wholes, once this rank's shards are found to be its own.
fn shapes<F: GroupFormat>(communicator: &impl Communicator, shards: &Quantized<F, Compact>, rows: &[u64]) -> Result<[Vec<[u64; 2]>; 2]> {
    if rows.len() != shards.len() {
        return Err(Error::Length { what: "GatherShards::run, rows", expected: shards.len() as u64, found: rows.len() as u64 });
    }
    let (mut padded, mut whole) = (Vec::new(), Vec::new());
    for (i, ([found, columns], rows)) in shards.shapes.iter().zip(rows).enumerate() {
        let split = RowShards::new::<F>(*rows, communicator.world());
        let range = split.range(communicator.rank());
        if *found != range.end - range.start {
            let why = format!("member {i}: {found} rows where {} has rows {range:?} of {rows}: cast those", communicator.rank());
            return Err(Error::Invalid { what: "GatherShards::run, shards", why });
        }
        padded.push([split.a_shard, *columns]);
        whole.push([*rows, *columns]);
    }
    Ok([padded, whole])
}

impl<F: GroupFormat> fmt::Debug for GatherShards<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GatherShards").field("codes", &self.codes).finish_non_exhaustive()
    }
}
