//! Quantized shards of all ranks to the whole.

use std::fmt;
use std::ops::Range;

use oxtile_kernels::group::Grouped;
use oxtile_kernels::shards::{Byte, JoinShardsGroupedArgs};
use oxtile_tile::launch::{Kernel, Signature};

use super::format::GroupFormat;
use super::quantized::{Quantized, SCALE_UNIT, scale_starts};
use super::table::{Record, Starts, Table};
use super::tensors::{UNIT, starts_of};
use crate::comm::{Communicator, Rank, WorldSize};
use crate::quantize::format::{Direction, Format, Shapes};
use crate::quantize::layout::Compact;
use crate::runtime::{Buffer, Error, Loaded, Result, Runtime, Stream};

/// How the rows of a matrix are split among ranks: the same number of whole blocks for each, except that the last ranks may have fewer, or none.
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
/// Shards that are shorter than the others are padded before, and the padding is left out after. Transposed matrices, NVFP4's by columns, arrive
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

/// The shapes of one of the two buffers of a group, on its way from shards to wholes. Of each member, in codes or scales; a
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

    /// Scratch for shards like these, whose wholes have so many rows.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn scratch(
        &self,
        communicator: &impl Communicator,
        stream: &Stream,
        shards: &Quantized<F, Compact>,
        rows: &[u64],
    ) -> Result<GatherScratch<F>> {
        let [padded, whole] = shapes::<F>(communicator, shards, rows)?;
        let direction = shards.direction;
        let by_side = F::SHAPES.is_transposed(direction);
        let join = |of: fn(Shapes, [u64; 2], Direction) -> [u64; 2], unit| {
            let all = |shapes: &[[u64; 2]]| shapes.iter().map(|shape| of(F::SHAPES, *shape, direction)).collect::<Vec<_>>();
            Join::new(all(&shards.shapes), all(&padded), all(&whole), by_side, unit)
        };
        let elements = F::SHAPES.elements;
        let codes = |starts: &Starts| Starts { of: starts.of.iter().map(|start| start / elements).collect(), end: starts.end / elements };
        let world = communicator.world();
        let (from, to) = (codes(&shards.element_starts), codes(&starts_of(&whole)?));
        let codes = join(Shapes::codes, UNIT / elements)?.scratch::<F::JoinCodes, _>(stream, world, &from, &to)?;
        let (from, to) = (&shards.scale_starts, scale_starts::<F, Compact>(&whole, direction)?);
        let scales = join(Shapes::scales, SCALE_UNIT)?.scratch::<F::JoinScales, _>(stream, world, from, &to)?;
        Ok(GatherScratch { rank: communicator.rank(), direction, shards: shards.shapes.clone(), whole, codes, scales })
    }

    /// The whole of every member on every rank, from this rank's [`RowShards`] of it; `rows` are those of the wholes. The codes and scales
    /// are those of the whole cast at once, if all ranks had the same amaxes. Scratch and output are new.
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
        let mut scratch = self.scratch(communicator, stream, shards, rows)?;
        let mut output = Quantized::<F>::uninitialised(stream, &scratch.whole, shards.direction, shards.amax.clone())?;
        self.run_into(communicator, stream, shards, &mut scratch, &mut output)?;
        Ok(output)
    }

    /// As [`run`](Self::run), into existing buffers, whose addresses stay, as a captured graph or a consumer that keeps
    /// them needs it. Nothing is allocated or copied from the host, so that it may be captured from the first call on. The scratch is of such shards, and
    /// the wholes are of its shapes; their amax becomes that of the shards.
    ///
    /// # Errors
    /// [`Error::Invalid`] for shards, wholes or a rank that the scratch is not of; as [`Communicator::all_gather`] and [`Loaded::launch`].
    pub fn run_into(
        &self,
        communicator: &impl Communicator,
        stream: &Stream,
        shards: &Quantized<F, Compact>,
        scratch: &mut GatherScratch<F>,
        output: &mut Quantized<F, Compact>,
    ) -> Result<()> {
        scratch.check(communicator, shards, output)?;
        output.amax = shards.amax.clone();
        scratch.codes.run(communicator, stream, &shards.data, &mut output.data, &self.codes)?;
        scratch.scales.run(communicator, stream, &shards.scales, &mut output.scales, &self.scales)
    }
}

/// The memory of a gather of shards of some shapes: padded shards, those of all ranks, and the tables of its kernels. Made by
/// [`GatherShards::scratch`].
pub struct GatherScratch<F: GroupFormat> {
    rank: Rank,
    direction: Direction,
    shards: Vec<[u64; 2]>,
    whole: Vec<[u64; 2]>,
    codes: JoinScratch<F::Code>,
    scales: JoinScratch<F::Scale>,
}

impl<F: GroupFormat> GatherScratch<F> {
    fn check(&self, communicator: &impl Communicator, shards: &Quantized<F, Compact>, output: &Quantized<F, Compact>) -> Result<()> {
        let invalid = |what, why| Err(Error::Invalid { what, why });
        if communicator.rank() != self.rank || u64::from(communicator.world().get()) != self.codes.shards {
            let why = format!("it is of {} of {}, the communicator is {}", self.rank, self.codes.shards, communicator.rank());
            return invalid("GatherShards::run_into, scratch", why);
        }
        if shards.direction != self.direction || shards.shapes != self.shards {
            let why = format!(
                "they are {:?} along {:?} where the scratch is of {:?} along {:?}: make one by `GatherShards::scratch`",
                shards.shapes, shards.direction, self.shards, self.direction
            );
            return invalid("GatherShards::run_into, shards", why);
        }
        if output.direction != self.direction || output.shapes != self.whole {
            let why = format!(
                "it holds {:?} along {:?} where shards of {:?} along {:?} are gathered: make one by `Quantized::uninitialised`",
                output.shapes, output.direction, self.whole, self.direction
            );
            return invalid("GatherShards::run_into, output", why);
        }
        Ok(())
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

    /// Room for padded shards, where this rank's are shorter, and for those of all.
    fn scratch<K: Grouped, T: Byte>(self, stream: &Stream, world: WorldSize, starts: &Starts, whole: &Starts) -> Result<JoinScratch<T>> {
        let end = self.padded_starts.end;
        let padded = if self.shard == self.padded {
            None
        } else {
            let table = table::<K>(stream, (&self.shard, starts), (&self.padded, &self.padded_starts))?;
            Some((Buffer::uninitialised(stream, end)?, table))
        };
        let shards = u64::from(world.get());
        let gathered = Buffer::uninitialised(stream, shards * end)?;
        Ok(JoinScratch { shards, padded, gathered, table: table::<K>(stream, (&self.padded, &self.padded_starts), (&self.whole, whole))? })
    }
}

/// The memory of a [`Join`].
struct JoinScratch<T> {
    /// How many are joined.
    shards: u64,
    /// This rank's, where it is shorter than the others, and how it is padded.
    padded: Option<(Buffer<T>, Table)>,
    gathered: Buffer<T>,
    table: Table,
}

impl<T: Byte> JoinScratch<T> {
    /// Pads this rank's shards where they are shorter, gathers, and joins.
    fn run<K>(
        &mut self,
        communicator: &impl Communicator,
        stream: &Stream,
        shards: &Buffer<T>,
        whole: &mut Buffer<T>,
        kernel: &Loaded<K>,
    ) -> Result<()>
    where
        K: Grouped + Kernel + for<'a> Signature<Args<'a> = JoinShardsGroupedArgs<'a, T>>,
    {
        match &mut self.padded {
            None => communicator.all_gather(stream, shards, &mut self.gathered)?,
            Some((padded, table)) => {
                let (gathered, whole, shard_stride) = (shards.view(), padded.view_mut(), shards.len());
                kernel.launch(stream, JoinShardsGroupedArgs { gathered, whole, table: table.lend(), shards: 1, shard_stride })?;
                communicator.all_gather(stream, &*padded, &mut self.gathered)?;
            }
        }
        let (gathered, whole, table) = (self.gathered.view(), whole.view_mut(), self.table.lend());
        let shard_stride = self.gathered.len() / self.shards;
        kernel.launch(stream, JoinShardsGroupedArgs { gathered, whole, table, shards: self.shards as u32, shard_stride })
    }
}

/// The kernel's records: the rows of what it writes, where a member starts in a shard and in the whole, and the width of a shard's row.
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

impl<F: GroupFormat> fmt::Debug for GatherScratch<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GatherScratch").field("rank", &self.rank).field("whole", &self.whole).finish_non_exhaustive()
    }
}
