//! What launches of attention are held to, and the grids of the forward kernels of dense, of packed and of all other tensors.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::launch::DeviceView;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{RegisterElement, StoredElement};

use super::forward::AttentionForwardArgs;
use super::forward_general::AttentionForwardGeneralArgs;
use super::forward_packed::AttentionForwardPackedArgs;
use super::mask::check_reach;
use super::team::Team;
use super::workspace::Workspace;

/// Rows of a tensor of queries or of keys: sums of two of them are below 2^31.
const MOST_ROWS: u64 = (1 << 30) - 1;
/// Blocks of a grid, tiles of a launch.
const MOST_BLOCKS: u64 = (1 << 31) - 1;

type Checked = Result<(), LaunchError>;

/// `group` heads of queries share keys.
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
        LaunchError::check_at_least("section", 1, section.into())?;
        LaunchError::check_limit("section", row_tiles * u64::from(section), MOST_BLOCKS)?;
        LaunchError::check_length("log_sum_exp", self.heads().saturating_mul(self.rows.into()), log_sum_exp)?;
        LaunchError::check_length("counter", 1, counter)?;
        Ok(Grid::x(tiles.min(device.multiprocessors.into()) as u32))
    }
}

/// The grid of [`attention_forward`](fn@super::attention_forward).
pub(super) fn forward<T, const D: usize, const V: usize, const KEYS: usize, G, const CAUSAL: bool>(
    args: &AttentionForwardArgs<'_, T, D, V, KEYS, G, CAUSAL>,
    device: &DeviceLimits,
) -> Result<Grid, LaunchError>
where
    T: RegisterElement + StoredElement,
    G: Team,
    Columns<D>: MatrixColumns,
    Columns<V>: MatrixColumns,
    Columns<KEYS>: MatrixColumns,
{
    let AttentionForwardArgs { batches, heads, group, rows, keys, diagonal, section, .. } = *args;
    let dense = Dense { batches, heads, group, rows, keys, diagonal };
    dense.grid(G::QUERIES, section, args.log_sum_exp.len(), args.counter.len(), device)
}

/// A block for each multiprocessor.
pub(super) fn forward_general<T, const D: usize, const V: usize, const KEYS: usize, G>(
    args: &AttentionForwardGeneralArgs<'_, T, D, V, KEYS, G>,
    device: &DeviceLimits,
) -> Result<Grid, LaunchError>
where
    T: RegisterElement + StoredElement,
    G: Team,
    Columns<D>: MatrixColumns,
    Columns<V>: MatrixColumns,
    Columns<KEYS>: MatrixColumns,
{
    let (batches, heads, rows) = (u64::from(args.batches), u64::from(args.heads), u64::from(args.query_rows));
    check_sequences(args.batches, &args.query_ends, &args.key_ends, &args.query_offsets, &args.key_offsets)?;
    check_heads(args.heads, args.group)?;
    check_rows([("query_rows", args.query_rows), ("key_rows", args.key_rows)])?;
    check_reach("left", args.left)?;
    check_reach("right", args.right)?;
    let row_heads = heads_of_a_row("sequence_heads", args.sequence_heads, args.batches, args.heads)?;
    let of_heads = heads.saturating_mul(args.statistics_head);
    let statistics = match args.packed {
        // A head's rows are behind those of the one before, and a batch's heads too.
        0 => {
            LaunchError::check_limit("statistics_head", of_heads, args.statistics_batch)?;
            batches.saturating_mul(args.statistics_batch)
        }
        _ => {
            LaunchError::check_limit("statistics_batch", args.statistics_batch, 0)?;
            LaunchError::check_limit("query_rows", rows, args.statistics_head)?;
            of_heads
        }
    };
    LaunchError::check_length("log_sum_exp", statistics, args.log_sum_exp.len())?;
    LaunchError::check_length("workspace", Workspace::words(heads), args.workspace.len())?;
    check_optional("max_logit", heads, args.max_logit.len())?;
    check_sinks(heads, args.sink.len())?;
    if !args.running.is_empty() {
        LaunchError::check_multiple("value_size", 2, args.value_size.into())?;
        LaunchError::check_limit("value_size", args.value_size.into(), V as u64)?;
        LaunchError::check_multiple("row_stride", 2, args.row_stride)?;
        LaunchError::check_limit("value_size", row_heads.saturating_mul(args.value_size.into()), args.row_stride)?;
        LaunchError::check_length("running", rows.saturating_mul(args.row_stride), args.running.len())?;
        LaunchError::check_alignment("running", 8, args.running.address())?;
    }
    Ok(sequence_grid(batches, heads, rows, G::QUERIES, device))
}

/// A block for each multiprocessor, or for each tile that there may be: each sequence may end in one of its own.
fn sequence_grid(batches: u64, heads: u64, rows: u64, tile_rows: u32, device: &DeviceLimits) -> Grid {
    let tiles = heads.saturating_mul(batches.saturating_mul(rows.div_ceil(tile_rows.into()) + 1));
    Grid::x(tiles.min(device.multiprocessors.into()) as u32)
}

/// A block for each multiprocessor.
pub(super) fn forward_packed<T, const D: usize, const V: usize, const KEYS: usize, G, const CAUSAL: bool>(
    args: &AttentionForwardPackedArgs<'_, T, D, V, KEYS, G, CAUSAL>,
    device: &DeviceLimits,
) -> Result<Grid, LaunchError>
where
    T: RegisterElement + StoredElement,
    G: Team,
    Columns<D>: MatrixColumns,
    Columns<V>: MatrixColumns,
    Columns<KEYS>: MatrixColumns,
{
    let (batches, heads, rows) = (u64::from(args.batches), u64::from(args.heads), u64::from(args.query_rows));
    check_sequences(args.batches, &args.query_ends, &args.key_ends, &args.query_offsets, &args.key_offsets)?;
    check_heads(args.heads, args.group)?;
    check_rows([("query_rows", args.query_rows), ("key_rows", args.key_rows)])?;
    LaunchError::check_length("log_sum_exp", heads.saturating_mul(rows), args.log_sum_exp.len())?;
    LaunchError::check_length("counter", 1, args.counter.len())?;
    Ok(sequence_grid(batches, heads, rows, G::QUERIES, device))
}

fn check_optional(name: &'static str, expected: u64, found: u64) -> Checked {
    if found == 0 { Ok(()) } else { LaunchError::check_length(name, expected, found) }
}

/// None, one for all heads, or one for each.
fn check_sinks(heads: u64, found: u64) -> Checked {
    if found <= 1 { Ok(()) } else { LaunchError::check_length("sink", heads, found) }
}
