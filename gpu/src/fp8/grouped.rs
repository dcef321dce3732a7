//! FP8 of a [group](crate::group) of tensors by one launch: cast with one scale a tensor, and back.
//!
//! The code is that of the single kernels. All members lie in one buffer of codes and one of values, where word 3 of a member's record says that it
//! starts; its amax and the inverse of its scale have the member's number. Members of any length, at any address.

use oxtile_tile::global::GlobalTable;
use oxtile_tile::num::{e4m3, e5m2};
use oxtile_tile::prelude::*;

use super::cast::{self, cast_run};
use super::dequantize::{self, dequantize_run};
use super::*;
use crate::group::{self, Grouped, Member, Members};
use crate::magnitude::Magnitude;

/// Runs of the single kernels that a CUDA block does: looking for the member costs as much as a short run.
const PARTS: u32 = 2;
/// CUDA blocks a multiprocessor. Addresses that a single kernel finds among its parameters are in registers here.
const CAST_RESIDENT: u32 = cast::RESIDENT - 1;
const DEQUANTIZE_RESIDENT: u32 = dequantize::RESIDENT - 2;

/// Casts each member by a scale made of `amaxes[member]`, as `fp8_cast` does, and leaves
/// `scale_inverses[member]`, that of a member without elements too.
#[kernel(threads = THREADS, grid = cast_grid, min_blocks = CAST_RESIDENT)]
#[instances(T = [bf16, f16, f32], Q = [e4m3, e5m2])]
pub fn fp8_cast_grouped<T: Magnitude, Q: Fp8>(
    inputs: GlobalTable<T>,
    table: Members,
    amaxes: Global<f32>,
    data: GlobalMut<Q>,
    scale_inverses: GlobalMut<f32>,
    options: ScaleOptions,
) {
    let rule = ScaleRule::new(options, f32::MAX);
    if block::index()[0] == 0 {
        let mut member = u64::from(thread::index());
        while member < amaxes.len() {
            scale_inverses.store(member, 1.0 / rule.scale::<Q>(amaxes.load(member)));
            member += u64::from(THREADS);
        }
    }
    if table.is_empty() {
        return;
    }
    let member = Member::of_block(&table);
    let (input, data) = (inputs.get(member.index), data.slice(member.starts[0], member.elements()));
    group::for_each_part::<PARTS>(member.block, |part| {
        cast_run(&input, &data, part, || rule.scale::<Q>(amaxes.load(member.index)));
    });
}

fn cast_grid<T: Magnitude, Q: Fp8>(args: &Fp8CastGroupedArgs<'_, T, Q>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("amaxes", args.inputs.len(), args.amaxes.len())?;
    LaunchError::check_length("scale_inverses", args.inputs.len(), args.scale_inverses.len())?;
    let grid = args.table.grid()?;
    // Members without elements have scales too.
    Ok(if args.inputs.is_empty() { grid } else { Grid::x(grid.x.max(1)) })
}

/// The values of each member: its codes times `scale_inverses[member]`, rounded to nearest even.
#[kernel(threads = THREADS, grid = dequantize_grid, min_blocks = DEQUANTIZE_RESIDENT)]
#[instances(Q = [e4m3, e5m2], T = [bf16, f16, f32])]
pub fn fp8_dequantize_grouped<Q: Fp8, T: Wide>(data: Global<Q>, scale_inverses: Global<f32>, table: Members, output: GlobalMut<T>) {
    let member = Member::of_block(&table);
    let start = member.starts[0];
    let (data, output) = (data.slice(start, member.elements()), output.slice(start, member.elements()));
    group::for_each_part::<PARTS>(member.block, |part| dequantize_run(&data, &output, part, || scale_inverses.load(member.index)));
}

fn dequantize_grid<Q: Fp8, T: Wide>(args: &Fp8DequantizeGroupedArgs<'_, Q, T>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("output", args.data.len(), args.output.len())?;
    args.table.grid()
}

impl<T: Magnitude, Q: Fp8> Grouped for Fp8CastGrouped<T, Q> {
    fn blocks(rows: u64, columns: u64) -> u64 {
        (rows * columns).div_ceil(u64::from(PARTS * cast::elements::<T>()))
    }
}

impl<Q: Fp8, T: Wide> Grouped for Fp8DequantizeGrouped<Q, T> {
    fn blocks(rows: u64, columns: u64) -> u64 {
        (rows * columns).div_ceil(u64::from(PARTS * dequantize::elements::<T>()))
    }
}
