//! Parameters that are made of parameters: structs in structs, and what may be absent.

use oxtile_tile::prelude::*;

use crate::THREADS;

/// Words that [`nested`](fn@nested) writes for each thread.
pub const NESTED_WORDS: u32 = 8;

/// Numbers of every type.
#[derive(Clone, Copy, Parameter)]
pub struct Numbers {
    /// Added.
    pub small: u32,
    /// Added, both halves.
    pub large: u64,
    /// Whether it is taken away instead.
    pub negative: bool,
    /// Added.
    pub signed: i32,
    /// Added, both halves.
    pub long: i64,
    /// Its bits are added.
    pub real: f32,
}

/// A view with how it is read.
#[derive(Clone, Copy, Parameter)]
#[parameter(optional)]
pub struct Table {
    /// The elements.
    pub values: Global<u32>,
    /// Whether the last comes first.
    pub turned: bool,
    /// Added to each.
    pub numbers: Numbers,
}

/// A struct of structs.
#[derive(Clone, Copy, Parameter)]
pub struct Tables {
    /// Always there.
    pub first: Table,
    /// Not always.
    pub second: Option<Table>,
    /// Whether sums are written.
    pub summed: bool,
}

/// Writes what it finds of each parameter: [`NESTED_WORDS`] words a thread, and the sum of those to `sums` if that is there.
#[kernel(threads = THREADS, grid = nested_grid)]
pub fn nested(
    before: u32,
    tables: Tables,
    view: Option<Global<u32>>,
    table: Option<Table>,
    sums: Option<GlobalMut<u32>>,
    after: bool,
    output: GlobalMut<u32>,
) {
    let t = thread::index();
    let words = [
        before.wrapping_add(t),
        element(&tables.first, t),
        tables.second.map_or(1, |table| element(&table, t)),
        u32::from(tables.summed),
        // Empty is not absent.
        view.map_or(2, |view| if view.is_empty() { 3 } else { view.load(u64::from(t)) }),
        table.map_or(4, |table| element(&table, t)),
        u32::from(sums.is_some()) << 1 | u32::from(after),
        output.len() as u32,
    ];
    let mut sum = 0u32;
    for (i, word) in words.into_iter().enumerate() {
        output.store(u64::from(t * NESTED_WORDS) + i as u64, word);
        sum = sum.wrapping_mul(31).wrapping_add(word);
    }
    if let Some(sums) = sums
        && tables.summed
    {
        sums.store(u64::from(t), sum);
    }
}

#[inline(always)]
fn element(table: &Table, t: u32) -> u32 {
    let Numbers { small, large, negative, signed, long, real } = table.numbers;
    let wide = large.wrapping_add(long.cast_unsigned());
    let numbers = small.wrapping_add((wide ^ wide >> 32) as u32).wrapping_add(signed.cast_unsigned()).wrapping_add(real.to_bits());
    let at = if table.turned { table.values.len() - 1 - u64::from(t) } else { u64::from(t) };
    let value = table.values.load(at);
    if negative { value.wrapping_sub(numbers) } else { value.wrapping_add(numbers) }
}

fn nested_grid(args: &NestedArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let threads = u64::from(THREADS);
    LaunchError::check_length("tables.first.values", threads, args.tables.first.values.len())?;
    for (name, table) in [("tables.second.values", &args.tables.second), ("table.values", &args.table)] {
        if let Some(table) = table {
            LaunchError::check_length(name, threads, table.values.len())?;
        }
    }
    if let Some(view) = args.view.filter(|view| !view.is_empty()) {
        LaunchError::check_length("view", threads, view.len())?;
    }
    if let Some(sums) = &args.sums {
        LaunchError::check_length("sums", threads, sums.len())?;
    }
    LaunchError::check_length("output", u64::from(NESTED_WORDS * THREADS), args.output.len())?;
    Ok(Grid::x(1))
}
