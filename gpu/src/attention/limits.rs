//! What launches of attention are held to, and the grids of the forward kernels.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::launch::DeviceView;
use oxtile_tile::layout::Swizzle;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::RegisterElement;

use super::combine::MOST_PARTS;
use super::forward_fp8::{AttentionForwardFp8Args, FP8_QUERIES};
use super::forward_portable::{AttentionForwardPortableArgs, PORTABLE_QUERIES};
use super::forward_portable_general::AttentionForwardPortableGeneralArgs;
use super::forward_split::AttentionForwardSplitArgs;
use super::mask::check_reach;
use super::panels::{PANEL, RESTING};
use super::team::Team;
use super::workspace::Workspace;

/// Rows of a tensor of queries or of keys: sums of two of them are below 2^31.
const MOST_ROWS: u64 = (1 << 30) - 1;
/// Blocks of a grid, tiles of a launch.
const MOST_BLOCKS: u64 = (1 << 31) - 1;

type Checked = Result<(), LaunchError>;

/// `group` query heads share keys.
fn check_heads(heads: u32, group: u32) -> Checked {
    LaunchError::check_limit("group", group.into(), heads.into())?;
    LaunchError::check_multiple("heads", group.into(), heads.into())
}

fn check_rows(sides: [(&'static str, u32); 2]) -> Checked {
    sides.into_iter().try_for_each(|(name, rows)| LaunchError::check_limit(name, rows.into(), MOST_ROWS))
}

/// The four arrays of [`Sequences`](super::Sequences).
pub(super) fn check_sequences(
    batches: u32,
    query_ends: &DeviceView<'_, u32>,
    key_ends: &DeviceView<'_, u32>,
    query_offsets: &DeviceView<'_, u32>,
    key_offsets: &DeviceView<'_, u32>,
) -> Checked {
    [("query_ends", query_ends), ("key_ends", key_ends), ("query_offsets", query_offsets), ("key_offsets", key_offsets)]
        .into_iter()
        .try_for_each(|(name, array)| LaunchError::check_length(name, u64::from(batches) + 1, array.len()))
}

/// Heads of a row of the tensors: sequences that share rows, as `step` says if it is not 0, have heads of their own.
fn heads_of_a_row(name: &'static str, step: u32, batches: u32, heads: u32) -> Result<u64, LaunchError> {
    if step == 0 {
        return Ok(heads.into());
    }
    LaunchError::check_limit(name, step.into(), heads.into())?;
    LaunchError::check_multiple(name, heads.into(), step.into())?;
    Ok(u64::from(heads) * u64::from(batches))
}

/// Dense tensors.
struct Dense {
    batches: u32,
    heads: u32,
    group: u32,
    rows: u32,
    keys: u32,
    diagonal: i32,
}

impl Dense {
    fn check(&self) -> Checked {
        check_heads(self.heads, self.group)?;
        check_rows([("rows", self.rows), ("keys", self.keys)])?;
        check_reach("diagonal", self.diagonal)
    }

    /// Heads of all batches.
    fn heads(&self) -> u64 {
        u64::from(self.batches) * u64::from(self.heads)
    }

    /// A block for each multiprocessor, which take tiles by a counter, in sections of so many heads.
    fn grid(&self, tile_rows: u32, section: u32, log_sum_exp: u64, counter: u64, device: &DeviceLimits) -> Result<Grid, LaunchError> {
        self.check()?;
        let row_tiles = u64::from(self.rows.div_ceil(tile_rows));
        let tiles = self.heads().saturating_mul(row_tiles);
        LaunchError::check_limit("rows", tiles, MOST_BLOCKS)?;
        LaunchError::check_limit("section", row_tiles * u64::from(section), MOST_BLOCKS)?;
        LaunchError::check_length("log_sum_exp", self.heads().saturating_mul(self.rows.into()), log_sum_exp)?;
        LaunchError::check_length("counter", 1, counter)?;
        Ok(Grid::x(tiles.min(device.multiprocessors.into()) as u32))
    }
}

/// The same of e4m3 tensors, whose scales are one or one for each head.
pub(super) fn forward_fp8<const D: usize, S: Swizzle, const CAUSAL: bool>(
    args: &AttentionForwardFp8Args<'_, D, S, CAUSAL>,
    device: &DeviceLimits,
) -> Result<Grid, LaunchError>
where
    Columns<D>: MatrixColumns,
{
    let AttentionForwardFp8Args { batches, heads, group, rows, keys, diagonal, section, .. } = *args;
    let key_heads = heads.checked_div(group).unwrap_or_default();
    for (name, scales, heads) in
        [("q_scale", args.q_scale, heads), ("k_scale", args.k_scale, key_heads), ("v_scale", args.v_scale, key_heads)]
    {
        if scales.len() != 1 {
            LaunchError::check_length(name, heads.into(), scales.len())?;
        }
    }
    let dense = Dense { batches, heads, group, rows, keys, diagonal };
    dense.grid(FP8_QUERIES as u32, section, args.log_sum_exp.len(), args.counter.len(), device)
}

/// A block for each part of each tile.
pub(super) fn forward_split<T, const D: usize, const V: usize, const KEYS: usize, G>(
    args: &AttentionForwardSplitArgs<'_, T, D, V, KEYS, G>,
    _: &DeviceLimits,
) -> Result<Grid, LaunchError>
where
    T: RegisterElement,
    G: Team,
    Columns<D>: MatrixColumns,
    Columns<V>: MatrixColumns,
    Columns<KEYS>: MatrixColumns,
{
    let AttentionForwardSplitArgs { batches, heads, group, rows, keys, diagonal, parts, value_size, .. } = *args;
    let dense = Dense { batches, heads, group, rows, keys, diagonal };
    dense.check()?;
    let (rows, parts, value_size) = (u64::from(rows), u64::from(parts), u64::from(value_size));
    LaunchError::check_limit("parts", parts, MOST_PARTS.into())?;
    LaunchError::check_multiple("value_size", 2, value_size)?;
    LaunchError::check_limit("value_size", value_size, V as u64)?;
    let part_heads = parts.saturating_mul(dense.heads());
    LaunchError::check_limit("parts * heads * batches", part_heads, MOST_BLOCKS)?;
    LaunchError::check_length("logs", part_heads * rows, args.logs.len())?;
    LaunchError::check_length("sums", (part_heads * rows).saturating_mul(value_size), args.sums.len())?;
    LaunchError::check_alignment("sums", 8, args.sums.address())?;
    let blocks = part_heads * rows.div_ceil(G::QUERIES.into());
    LaunchError::check_limit("rows", blocks, MOST_BLOCKS)?;
    Ok(Grid::x(blocks as u32))
}

fn check_optional(name: &'static str, expected: u64, found: u64) -> Checked {
    if found == 0 { Ok(()) } else { LaunchError::check_length(name, expected, found) }
}

/// None, one for all heads, or one for each.
fn check_sinks(heads: u64, found: u64) -> Checked {
    if found <= 1 { Ok(()) } else { LaunchError::check_length("sink", heads, found) }
}

/// Tensors that a portable kernel addresses by itself.
struct Portable {
    batches: u32,
    heads: u32,
    group: u32,
    query_rows: u32,
    key_rows: u32,
    head_step: u32,
    row_tiles: u32,
    log_rows: u32,
}

impl Portable {
    /// A block for each tile of `tile_rows` queries that the longest sequence may have. Lengths are those of `q`, `k`, `v`, of the
    /// result of this name, and of the log-sum-exp.
    fn grid(
        &self,
        tile_rows: usize,
        [size, value_size]: [u64; 2],
        [q, k, v]: [u64; 3],
        (out, of_out): (&'static str, u64),
        log_sum_exp: u64,
    ) -> Result<Grid, LaunchError> {
        let (batches, heads, rows) = (u64::from(self.batches), u64::from(self.heads), u64::from(self.query_rows));
        check_heads(self.heads, self.group)?;
        check_rows([("query_rows", self.query_rows), ("key_rows", self.key_rows)])?;
        LaunchError::check_limit("row_tiles", self.row_tiles.into(), rows.div_ceil(tile_rows as u64))?;
        let blocks = (heads * batches).saturating_mul(self.row_tiles.into());
        LaunchError::check_limit("row_tiles", blocks, MOST_BLOCKS)?;
        let row_heads = heads_of_a_row("head_step", self.head_step, self.batches, self.heads)?;
        let queries = rows.saturating_mul(row_heads);
        let keys = u64::from(self.key_rows).saturating_mul(row_heads / u64::from(self.group).max(1));
        LaunchError::check_length("q", queries.saturating_mul(size), q)?;
        LaunchError::check_length("k", keys.saturating_mul(size), k)?;
        LaunchError::check_length("v", keys.saturating_mul(value_size), v)?;
        LaunchError::check_length(out, queries.saturating_mul(value_size), of_out)?;
        let statistics = match self.log_rows {
            0 => heads * rows,
            log_rows => (heads * batches).saturating_mul(log_rows.into()),
        };
        LaunchError::check_length("log_sum_exp", statistics, log_sum_exp)?;
        Ok(Grid::x(blocks as u32))
    }
}

pub(super) fn forward_portable<T: RegisterElement, const D: usize>(
    args: &AttentionForwardPortableArgs<'_, T, D>,
    _: &DeviceLimits,
) -> Result<Grid, LaunchError>
where
    Columns<D>: MatrixColumns,
{
    check_sequences(args.batches, &args.query_ends, &args.key_ends, &args.query_offsets, &args.key_offsets)?;
    check_reach("left", args.left)?;
    check_reach("right", args.right)?;
    for (name, bytes, address) in
        [("q", 16, args.q.address()), ("k", 16, args.k.address()), ("v", 16, args.v.address()), ("out", 4, args.out.address())]
    {
        LaunchError::check_alignment(name, bytes, address)?;
    }
    let AttentionForwardPortableArgs { batches, heads, group, query_rows, key_rows, head_step, row_tiles, log_rows, .. } = *args;
    let portable = Portable { batches, heads, group, query_rows, key_rows, head_step, row_tiles, log_rows };
    let inputs = [args.q.len(), args.k.len(), args.v.len()];
    portable.grid(PORTABLE_QUERIES, [D as u64; 2], inputs, ("out", args.out.len()), args.log_sum_exp.len())
}

pub(super) fn forward_portable_general<T: RegisterElement, const PANELS: usize, const KEYS: usize>(
    args: &AttentionForwardPortableGeneralArgs<'_, T, PANELS, KEYS>,
    _: &DeviceLimits,
) -> Result<Grid, LaunchError>
where
    Columns<KEYS>: MatrixColumns,
{
    check_sequences(args.batches, &args.query_ends, &args.key_ends, &args.query_offsets, &args.key_offsets)?;
    check_reach("left", args.left)?;
    check_reach("right", args.right)?;
    let sizes = [args.size, args.value_size].map(u64::from);
    for (name, size) in ["size", "value_size"].into_iter().zip(sizes) {
        LaunchError::check_multiple(name, 8, size)?;
        LaunchError::check_limit(name, size, (PANELS * PANEL) as u64)?;
    }
    let AttentionForwardPortableGeneralArgs { batches, heads, group, query_rows, key_rows, head_step, row_tiles, log_rows, .. } = *args;
    let portable = Portable { batches, heads, group, query_rows, key_rows, head_step, row_tiles, log_rows };
    let inputs = [args.q.len(), args.k.len(), args.v.len()];
    let result = if args.running.is_empty() { ("out", args.out.len()) } else { ("running", args.running.len()) };
    let grid = portable.grid(RESTING, sizes, inputs, result, args.log_sum_exp.len())?;
    let heads = heads.into();
    if !args.max_logit.is_empty() {
        LaunchError::check_length("max_logit", heads, args.max_logit.len())?;
        LaunchError::check_length("workspace", Workspace::words(heads), args.workspace.len())?;
    }
    check_sinks(heads, args.sink.len())?;
    for (name, bytes, address) in [
        ("q", 16, args.q.address()),
        ("k", 16, args.k.address()),
        ("v", 16, args.v.address()),
        ("out", 4, args.out.address()),
        ("running", 8, args.running.address()),
    ] {
        LaunchError::check_alignment(name, bytes, address)?;
    }
    Ok(grid)
}
