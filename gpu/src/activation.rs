//! Activations and their derivatives, fused with casts or alone.
//!
//! Formulas: TransformerEngine `common/util/math.h`, computed in `f32`; `(1 + tanh(u)) / 2` is `1 / (1 + exp(-2 u))`, which loses
//! nothing where the activation is small. Rounded to `bf16` the results are within one unit in the last place of the
//! formulas' values. `exp2` and `reciprocal` are the approximate ones of the device.
//!
//! Floor of the kernel: each operand read once, the result written once.

use core::marker::PhantomData;

use oxtile_tile::num::{Pod, exp2, fma, max, min, reciprocal};
use oxtile_tile::prelude::*;

use crate::mxfp8::Wide;

const THREADS: u32 = 256;

/// A function of one number, with its derivative.
pub trait Activation: 'static {
    /// The function.
    fn value(x: f32) -> f32;
    /// Its derivative.
    fn slope(x: f32) -> f32;
}

/// `x (1 + tanh(u)) / 2` with `u = sqrt(2 / pi) (x + 0.044715 x^3)`.
#[derive(Debug)]
pub struct Gelu;
/// `x / (1 + exp(-x))`.
#[derive(Debug)]
pub struct Silu;
/// `x / (1 + exp(-1.702 x))`.
#[derive(Debug)]
pub struct QuickGelu;
/// `max(x, 0)`.
#[derive(Debug)]
pub struct Relu;
/// `max(x, 0)^2`.
#[derive(Debug)]
pub struct SquaredRelu;

impl Activation for Gelu {
    #[inline(always)]
    fn value(x: f32) -> f32 {
        x * sigmoid_of(gelu_exponent(x))
    }

    #[inline(always)]
    fn slope(x: f32) -> f32 {
        // d/dx of the sigmoid's argument: 2 sqrt(2 / pi) (1 + 3 * 0.044715 x^2), finite where `x` is.
        let inner = fma(0.214_064_45, min(x * x, 1e30), 1.595_769);
        let s = sigmoid_of(gelu_exponent(x));
        // As `product_slope` without its test: both factors are finite where `x` is, and one is 0 where the sigmoid is 0 or 1.
        fma(x * s, inner * (1.0 - s), s)
    }
}

impl Activation for Silu {
    #[inline(always)]
    fn value(x: f32) -> f32 {
        x * sigmoid(x)
    }

    #[inline(always)]
    fn slope(x: f32) -> f32 {
        product_slope(x, sigmoid(x))
    }
}

impl Activation for QuickGelu {
    #[inline(always)]
    fn value(x: f32) -> f32 {
        x * sigmoid(1.702 * x)
    }

    #[inline(always)]
    fn slope(x: f32) -> f32 {
        product_slope(1.702 * x, sigmoid(1.702 * x))
    }
}

impl Activation for Relu {
    #[inline(always)]
    fn value(x: f32) -> f32 {
        max(x, 0.0)
    }

    #[inline(always)]
    fn slope(x: f32) -> f32 {
        if x > 0.0 { 1.0 } else { 0.0 }
    }
}

impl Activation for SquaredRelu {
    #[inline(always)]
    fn value(x: f32) -> f32 {
        max(x, 0.0) * max(x, 0.0)
    }

    #[inline(always)]
    fn slope(x: f32) -> f32 {
        2.0 * max(x, 0.0)
    }
}

/// `1 / (1 + exp(-x))`.
#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    sigmoid_of(-core::f32::consts::LOG2_E * x)
}

/// `1 / (1 + 2^exponent)`.
#[inline(always)]
fn sigmoid_of(exponent: f32) -> f32 {
    reciprocal(1.0 + exp2(exponent))
}

/// `-log2(e) 2 sqrt(2 / pi) (x + 0.044715 x^3)`.
#[inline(always)]
fn gelu_exponent(x: f32) -> f32 {
    x * fma(-0.102_943_24, x * x, -2.302_208_2)
}

/// The derivative of `x s(u)`, given `x du/dx` and the sigmoid `s`: `s + x du/dx s (1 - s)`, whose last term is 0 where `s` is 0
/// or 1, however large the first factor.
#[inline(always)]
fn product_slope(factor: f32, s: f32) -> f32 {
    let curve = fma(-s, s, s);
    if curve == 0.0 { s } else { fma(factor, curve, s) }
}

/// What is done to a tensor before it is cast or stored: row by row, one vector of each result at a time, in `f32`.
pub trait Operation: 'static {
    /// Results that lie side by side in a row: 2 where one look at the operands gives a vector of either.
    const RESULTS: usize;
    /// Vectors of the operands that a vector of each result takes: as many as results, or one more.
    const OPERANDS: usize;
    /// Whether the result is another than the input.
    const COMPUTES: bool = true;
    /// One `S` a result.
    type Each<S: SharedStorage + Copy>: SharedStorage + AsRef<[S]>;

    /// Columns of `input` for `columns` of all results.
    fn input_columns(columns: u64) -> u64;
    /// Columns of `gradient`.
    fn gradient_columns(columns: u64) -> u64;
    /// Where the [`OPERANDS`](Self::OPERANDS) vectors begin that go with the operands' elements [`at`](Operands::at) the results' place; the others are
    /// anywhere.
    fn places<T: Pod>(operands: &Operands<T>, at: [u64; 2]) -> [Place<T>; 3];
    /// The vector of each result from those of the operands, in `f32`.
    fn results(operands: [[f32; 8]; 3]) -> [[f32; 8]; 2];

    /// The vector of each result, as many numbers as a vector of `T` has elements, the rest 0, from the operands' elements
    /// [`at`](Operands::at) its place.
    #[inline(always)]
    fn values<T: Float + Pod>(operands: &Operands<T>, at: [u64; 2]) -> [[f32; 8]; 2] {
        let places = Self::places(operands, at);
        let load = |Place { tensor, element }: Place<T>| in_f32(tensor.load_vector(element));
        Self::results(core::array::from_fn(|i| if i < Self::OPERANDS { load(places[i]) } else { NOTHING }))
    }
}

/// What an operation reads.
pub struct Operands<T> {
    /// The tensor that the activation is, or was, applied to.
    pub input: Global<T>,
    /// The gradient of the result, empty in the forward operations.
    pub gradient: Global<T>,
    /// Columns of one result.
    pub columns: u64,
}

impl<T> Operands<T> {
    /// The elements of both tensors that go with this place of a result of `O`.
    #[inline(always)]
    pub fn at<O: Operation>(&self, row: u64, column: u64) -> [u64; 2] {
        let columns = self.columns * O::RESULTS as u64;
        [row * O::input_columns(columns) + column, row * O::gradient_columns(columns) + column]
    }

    #[inline(always)]
    fn of_input(&self, element: u64) -> Place<T> {
        Place { tensor: self.input, element }
    }

    #[inline(always)]
    fn of_gradient(&self, element: u64) -> Place<T> {
        Place { tensor: self.gradient, element }
    }
}

/// Where a vector of an operand begins.
#[derive(Clone, Copy)]
pub struct Place<T> {
    /// The operand.
    pub tensor: Global<T>,
    /// The vector's first element.
    pub element: u64,
}

impl<T: Pod> Place<T> {
    /// The vector, from lines that [last](Global::lasting) in the cache.
    #[inline(always)]
    pub(crate) fn load(&self) -> Vector<T> {
        self.tensor.lasting().load_vector(self.element)
    }
}

/// The input itself.
#[derive(Debug)]
pub struct Identity;
/// `A(input)`.
pub struct Forward<A>(PhantomData<A>);
/// `gradient * A'(input)`.
pub struct Backward<A>(PhantomData<A>);
/// `A(input[:, ..columns]) * input[:, columns..]`: the gated linear units, GLU, SwiGLU, GeGLU and so on.
pub struct GatedForward<A>(PhantomData<A>);
/// The gradients of [`GatedForward`] by both halves of its input, side by side.
pub struct GatedBackward<A>(PhantomData<A>);

/// In place of a second result.
const NOTHING: [f32; 8] = [0.0; 8];

impl Operation for Identity {
    const RESULTS: usize = 1;
    const OPERANDS: usize = 1;
    const COMPUTES: bool = false;
    type Each<S: SharedStorage + Copy> = [S; 1];

    fn input_columns(columns: u64) -> u64 {
        columns
    }

    fn gradient_columns(_: u64) -> u64 {
        0
    }

    #[inline(always)]
    fn places<T: Pod>(operands: &Operands<T>, [input, _]: [u64; 2]) -> [Place<T>; 3] {
        [operands.of_input(input); 3]
    }

    #[inline(always)]
    fn results([x, ..]: [[f32; 8]; 3]) -> [[f32; 8]; 2] {
        [x, NOTHING]
    }
}

impl<A: Activation> Operation for Forward<A> {
    const RESULTS: usize = 1;
    const OPERANDS: usize = 1;
    type Each<S: SharedStorage + Copy> = [S; 1];

    fn input_columns(columns: u64) -> u64 {
        columns
    }

    fn gradient_columns(_: u64) -> u64 {
        0
    }

    #[inline(always)]
    fn places<T: Pod>(operands: &Operands<T>, [input, _]: [u64; 2]) -> [Place<T>; 3] {
        [operands.of_input(input); 3]
    }

    #[inline(always)]
    fn results([x, ..]: [[f32; 8]; 3]) -> [[f32; 8]; 2] {
        [x.map(A::value), NOTHING]
    }
}

impl<A: Activation> Operation for Backward<A> {
    const RESULTS: usize = 1;
    const OPERANDS: usize = 2;
    type Each<S: SharedStorage + Copy> = [S; 1];

    fn input_columns(columns: u64) -> u64 {
        columns
    }

    fn gradient_columns(columns: u64) -> u64 {
        columns
    }

    #[inline(always)]
    fn places<T: Pod>(operands: &Operands<T>, at: [u64; 2]) -> [Place<T>; 3] {
        let [gradient, x] = [operands.of_gradient(at[1]), operands.of_input(at[0])];
        [gradient, x, x]
    }

    #[inline(always)]
    fn results([gradient, x, _]: [[f32; 8]; 3]) -> [[f32; 8]; 2] {
        [core::array::from_fn(|i| gradient[i] * A::slope(x[i])), NOTHING]
    }
}

impl<A: Activation> Operation for GatedForward<A> {
    const RESULTS: usize = 1;
    const OPERANDS: usize = 2;
    type Each<S: SharedStorage + Copy> = [S; 1];

    fn input_columns(columns: u64) -> u64 {
        2 * columns
    }

    fn gradient_columns(_: u64) -> u64 {
        0
    }

    #[inline(always)]
    fn places<T: Pod>(operands: &Operands<T>, [input, _]: [u64; 2]) -> [Place<T>; 3] {
        let [x, gate] = [operands.of_input(input), operands.of_input(input + operands.columns)];
        [x, gate, gate]
    }

    #[inline(always)]
    fn results([x, gate, _]: [[f32; 8]; 3]) -> [[f32; 8]; 2] {
        [core::array::from_fn(|i| A::value(x[i]) * gate[i]), NOTHING]
    }
}

impl<A: Activation> Operation for GatedBackward<A> {
    const RESULTS: usize = 2;
    const OPERANDS: usize = 3;
    type Each<S: SharedStorage + Copy> = [S; 2];

    fn input_columns(columns: u64) -> u64 {
        columns
    }

    fn gradient_columns(columns: u64) -> u64 {
        columns / 2
    }

    #[inline(always)]
    fn places<T: Pod>(operands: &Operands<T>, [input, gradient]: [u64; 2]) -> [Place<T>; 3] {
        [operands.of_gradient(gradient), operands.of_input(input), operands.of_input(input + operands.columns)]
    }

    // As `values` of any operation, but registers of the rowwise cast last for this order.
    #[inline(always)]
    fn values<T: Float + Pod>(operands: &Operands<T>, [input, gradient]: [u64; 2]) -> [[f32; 8]; 2] {
        let load = |tensor: &Global<T>, element: u64| in_f32(tensor.load_vector(element));
        let gradient = load(&operands.gradient, gradient);
        let (x, gate) = (load(&operands.input, input), load(&operands.input, input + operands.columns));
        [core::array::from_fn(|i| gradient[i] * gate[i] * A::slope(x[i])), core::array::from_fn(|i| gradient[i] * A::value(x[i]))]
    }

    #[inline(always)]
    fn results([gradient, x, gate]: [[f32; 8]; 3]) -> [[f32; 8]; 2] {
        [core::array::from_fn(|i| gradient[i] * gate[i] * A::slope(x[i])), core::array::from_fn(|i| gradient[i] * A::value(x[i]))]
    }
}

/// The elements of a vector, the rest 0.
#[inline(always)]
pub(crate) fn in_f32<T: Float + Pod>(vector: Vector<T>) -> [f32; 8] {
    core::array::from_fn(|i| if i < Vector::<T>::LANES { vector.lane(i).to_f32() } else { 0.0 })
}

/// Writes the result of an operation, `[rows, columns]`, rounded to nearest even. Rows of all tensors are whole vectors.
#[kernel(threads = THREADS, grid = grid)]
#[instances(O = [
    Forward<Gelu>, Forward<Silu>, Forward<QuickGelu>, Forward<Relu>, Forward<SquaredRelu>,
    Backward<Gelu>, Backward<Silu>, Backward<QuickGelu>, Backward<Relu>, Backward<SquaredRelu>,
    GatedForward<Gelu>, GatedForward<Silu>, GatedForward<QuickGelu>, GatedForward<Relu>, GatedForward<SquaredRelu>,
    GatedBackward<Gelu>, GatedBackward<Silu>, GatedBackward<QuickGelu>, GatedBackward<Relu>, GatedBackward<SquaredRelu>
], T = [bf16])]
pub fn activate<O: Operation, T: Wide>(input: Global<T>, gradient: Global<T>, output: GlobalMut<T>, columns: u64) {
    let [row, group, _] = block::index();
    let of_result = columns / O::RESULTS as u64;
    let column = u64::from(group * THREADS + thread::index()) * Vector::<T>::LANES as u64;
    if column < of_result {
        let operands = Operands { input, gradient, columns: of_result };
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
    let rows = check_operands::<O, T>(&args.input, &args.gradient, ("output", elements), columns)?;
    LaunchError::check_alignment("output", 16, args.output.address())?;
    let groups = Grid::cover("columns", columns / O::RESULTS as u64, THREADS * Vector::<T>::LANES as u32)?.x;
    LaunchError::check_limit("columns", columns, 65_535 * u64::from(THREADS) * Vector::<T>::LANES as u64 * O::RESULTS as u64)?;
    LaunchError::check_limit("rows", rows, i32::MAX as u64)?;
    Ok(if elements == 0 { Grid::x(0) } else { Grid::xy(rows as u32, groups) })
}

/// Checks the operands of an operation whose result has these elements in rows of `columns`; gives the rows.
pub(crate) fn check_operands<O: Operation, T: Pod>(
    input: &DeviceView<'_, T>,
    gradient: &DeviceView<'_, T>,
    result: (&'static str, u64),
    columns: u64,
) -> Result<u64, LaunchError> {
    LaunchError::check_multiple(result.0, columns, result.1)?;
    let rows = result.1.checked_div(columns).unwrap_or(0);
    let vector = Vector::<T>::LANES as u64;
    for (name, view, of) in [("input", input, O::input_columns(columns)), ("gradient", gradient, O::gradient_columns(columns))] {
        LaunchError::check_multiple("columns", vector, of)?;
        LaunchError::check_length(name, rows * of, view.len())?;
        LaunchError::check_alignment(name, 16, view.address())?;
    }
    LaunchError::check_multiple("columns", vector * O::RESULTS as u64, columns)?;
    Ok(rows)
}
