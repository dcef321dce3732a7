//! The operation from the operands' vectors to a result.

use core::marker::PhantomData;

use oxtile_tile::num::Pod;
use oxtile_tile::prelude::*;

use super::{Activation, in_f32};

/// An operation on a tensor before it is cast or stored: row by row, one vector of each result at a time, in `f32`.
pub trait Operation: 'static {
    /// Results that lie side by side in a row: 2 where one read of the operands gives a vector of each.
    const RESULTS: usize;
    /// Vectors of the operands that a vector of each result takes: `RESULTS`, or one more.
    const OPERANDS: usize;
    /// Whether the result differs from the input.
    const COMPUTES: bool = true;
    /// One `S` a result.
    type Each<S: SharedStorage + Copy>: SharedStorage + AsRef<[S]>;

    /// Columns of `input` for `columns` of all results.
    fn input_columns(columns: u64) -> u64;
    /// Columns of `gradient`.
    fn gradient_columns(columns: u64) -> u64;
    /// Where the [`OPERANDS`](Self::OPERANDS) vectors begin that go with the operands' elements [`at`](Operands::at) the results'
    /// place; the others are anywhere.
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

/// The operands of an operation.
pub struct Operands<T> {
    /// The input of the activation.
    pub input: Global<T>,
    /// The gradient of the result, which backward operations alone read.
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
