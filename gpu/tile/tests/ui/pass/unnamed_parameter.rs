//! A type parameter that no argument names, a kernel without arguments, and generic code that launches.
use core::marker::PhantomData;

use oxtile_tile::launch::{Kernel, Signature};
use oxtile_tile::prelude::*;

#[kernel(threads = 32, grid = limits_grid)]
#[instances(T = [f32, bf16], U = [f32], N = [1, 2])]
pub fn limits<T: Float, U: Float + oxtile_tile::num::Pod, const N: usize>(output: GlobalMut<U>) {
    output.store(0, U::from_f32(T::MAX.to_f32()));
}

fn limits_grid<T: Float, U: Float + oxtile_tile::num::Pod, const N: usize>(_: &LimitsArgs<'_, T, U, N>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    Ok(Grid::x(1))
}

#[kernel(threads = 32, grid = nothing_grid)]
pub fn nothing() {}

fn nothing_grid(_: &NothingArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    Ok(Grid::x(1))
}

fn arguments(output: DeviceViewMut<'_, f32>) -> <Limits<bf16, f32, 2> as Signature>::Args<'_> {
    LimitsArgs { output, marker: PhantomData }
}

/// `X<T>: Kernel` is all that generic code states.
fn blocks<T: Float>(output: DeviceViewMut<'_, f32>) -> Result<u64, LaunchError>
where
    Limits<T, f32, 1>: Kernel,
{
    let args: <Limits<T, f32, 1> as Signature>::Args<'_> = LimitsArgs { output, marker: PhantomData };
    Ok(Limits::<T, f32, 1>::grid(&args, &DeviceLimits { multiprocessors: 1, shared_bytes_per_block: 0 })?.blocks())
}

fn main() {
    let _ = blocks::<bf16>;
    let _ = (arguments as fn(DeviceViewMut<'static, f32>) -> _, NothingArgs { marker: PhantomData });
    assert_eq!(Limits::<bf16, f32, 2>::INFO.name, "limits__bf16__f32__n2");
}
