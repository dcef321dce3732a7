//! Activations and their derivatives, fused with casts or alone.
//!
//! Formulas: TransformerEngine `common/util/math.h`, computed in `f32`; `(1 + tanh(u)) / 2` is `1 / (1 + exp(-2 u))`, which loses
//! nothing where the activation is small. Rounded to `bf16` the results are within one unit in the last place of the
//! formulas' values, as long as the sigmoid is at least 2^-126. Below that `reciprocal` gives 0, where the formulas may have normal numbers, of
//! up to about 1e-36: `Gelu` below -10.0, `Silu` below -87.3 and `QuickGelu` below -51.3 are -0, and their derivatives 0. `exp2` and `reciprocal` are the
//! approximate ones of the device.
//!
//! Floor of the kernel: each operand read once, the result written once.

mod function;
mod operation;

use oxtile_tile::num::Pod;
use oxtile_tile::prelude::*;

use crate::wide::Wide;

pub use function::*;
pub use operation::*;

const THREADS: u32 = 256;

/// The elements of a vector, the rest 0.
#[inline(always)]
pub(crate) fn in_f32<T: Float + Pod>(vector: Vector<T>) -> [f32; 8] {
    core::array::from_fn(|i| if i < Vector::<T>::LANES { vector.lane(i).to_f32() } else { 0.0 })
}

/// Writes the result of an operation, `[rows, columns]`, rounded to nearest even. Rows of all tensors are whole vectors. Backward operations
/// have a gradient.
#[kernel(threads = THREADS, grid = grid)]
#[instances(O = [
    Forward<Gelu>, Forward<Silu>, Forward<QuickGelu>, Forward<Relu>, Forward<SquaredRelu>,
    Backward<Gelu>, Backward<Silu>, Backward<QuickGelu>, Backward<Relu>, Backward<SquaredRelu>,
    GatedForward<Gelu>, GatedForward<Silu>, GatedForward<QuickGelu>, GatedForward<Relu>, GatedForward<SquaredRelu>,
    GatedBackward<Gelu>, GatedBackward<Silu>, GatedBackward<QuickGelu>, GatedBackward<Relu>, GatedBackward<SquaredRelu>
], T = [bf16])]
pub fn activate<O: Operation, T: Wide>(input: Global<T>, gradient: Option<Global<T>>, output: GlobalMut<T>, columns: u64) {
    let [row, group, _] = block::index();
    let of_result = columns / O::RESULTS as u64;
    let column = u64::from(group * THREADS + thread::index()) * Vector::<T>::LANES as u64;
    if column < of_result {
        let operands = Operands { input, gradient: gradient.unwrap_or_default(), columns: of_result };
        let values = O::values(&operands, operands.at::<O>(u64::from(row), column));
        for (result, values) in values.into_iter().take(O::RESULTS).enumerate() {
            output.store_vector(u64::from(row) * columns + result as u64 * of_result + column, vector_of(values));
        }
    }
}

/// One vector, rounded to nearest even.
#[inline(always)]
pub(crate) fn vector_of<T: Wide>([a, b, c, d, e, f, g, h]: [f32; 8]) -> Vector<T> {
    T::vector([a, b, c, d], [e, f, g, h])
}

fn grid<O: Operation, T: Wide>(args: &ActivateArgs<'_, O, T>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let (elements, columns) = (args.output.len(), args.columns);
    let operands = [("input", Some(&args.input)), ("gradient", args.gradient.as_ref())];
    let rows = check_operands::<O, T>(operands, ("output", elements), ("columns", columns))?;
    LaunchError::check_alignment("output", 16, args.output.address())?;
    let groups = Grid::cover("columns", columns / O::RESULTS as u64, THREADS * Vector::<T>::LANES as u32)?.x;
    LaunchError::check_limit("columns", columns, 65_535 * u64::from(THREADS) * Vector::<T>::LANES as u64 * O::RESULTS as u64)?;
    LaunchError::check_limit("rows", rows, i32::MAX as u64)?;
    Ok(if elements == 0 { Grid::x(0) } else { Grid::xy(rows as u32, groups) })
}

/// Checks the operands of an operation whose result has these elements in rows of `columns`; gives the rows.
pub(crate) fn check_operands<O: Operation, T: Pod>(
    operands: [(&'static str, Option<&DeviceView<'_, T>>); 2],
    result: (&'static str, u64),
    (columns_name, columns): (&'static str, u64),
) -> Result<u64, LaunchError> {
    LaunchError::check_multiple(result.0, columns, result.1)?;
    let rows = result.1.checked_div(columns).unwrap_or(0);
    let vector = Vector::<T>::LANES as u64;
    for ((name, view), of) in operands.into_iter().zip([O::input_columns(columns), O::gradient_columns(columns)]) {
        LaunchError::check_multiple(columns_name, vector, of)?;
        LaunchError::check_length(name, rows * of, view.map_or(0, DeviceView::len))?;
        LaunchError::check_alignment(name, 16, view.map_or(0, DeviceView::address))?;
    }
    LaunchError::check_multiple(columns_name, vector * O::RESULTS as u64, columns)?;
    Ok(rows)
}
