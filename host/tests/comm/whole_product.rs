//! A product over all ranks in float64, and the parts of its matrices that ranks have.

use std::ops::Range;

use oxtile::HostElement;
use oxtile::num::{Float, Pod};
use oxtile::overlap::Global;
use oxtile_oracle::rows::dot;

use crate::values::values;

/// An element of an operand or of a result.
pub trait Number: Float + Pod + HostElement<Device = Self> {}

impl<T: Float + Pod + HostElement<Device = T>> Number for T {}

/// The operands of all ranks, row-major, as the elements hold them.
pub struct Whole {
    sizes: Global,
    pub a: Vec<f64>,
    pub b: Vec<f64>,
    pub bias: Vec<f64>,
    /// What the result was.
    pub old: Vec<f64>,
    /// At which GELU's derivative is taken.
    pub input: Vec<f64>,
    /// What each element is before an activation, and the magnitude of all that is rounded on the way to it.
    pub products: Vec<(f64, f64)>,
}

impl Whole {
    /// Of operands of `T` and results of `O`, and of a sum in so many equal parts, each of which is rounded, with the factors of the sum and of what the result was.
    pub fn new<T: Number, O: Number>(sizes: Global, parts: u32, [alpha, beta]: [f32; 2], seed: u64) -> Self {
        let Global { m, n, k } = sizes;
        let (a, b) = (numbers::<T>(10 * seed + 1, m * k), numbers::<T>(10 * seed + 2, k * n));
        let [bias, old, input] = [(3, n), (4, m * n), (5, m * n)].map(|(of, len)| numbers::<O>(10 * seed + of, len));
        let (parts, alpha, beta) = (u64::from(parts), f64::from(alpha), f64::from(beta));
        let columns: Vec<f64> = (0..n).flat_map(|column| b.iter().skip(column as usize).step_by(n as usize).copied()).collect();
        let product = |row: u64, column: u64| {
            let run = |line: u64, of: u64| (line * k + of * (k / parts)) as usize..(line * k + (of + 1) * (k / parts)) as usize;
            let part = |of: u64| dot(&a[run(row, of)], &columns[run(column, of)]);
            let (sum, size) = (0..parts).map(part).fold((0.0, 0.0), |(sum, size), part| (sum + part, size + part.abs()));
            let old = beta * old[(row * n + column) as usize];
            let x = alpha * sum + old + bias[column as usize];
            (x, alpha * size + old.abs() + x.abs())
        };
        let products = (0..m).flat_map(|row| (0..n).map(move |column| (row, column))).map(|(row, column)| product(row, column)).collect();
        Self { sizes, a, b, bias, old, input, products }
    }

    /// Rows and columns of `A`, as it is stored.
    pub fn rows<T: Number>(&self, transpose_a: bool, rows: Range<u64>, columns: Range<u64>) -> Vec<T> {
        let at = |(row, column): (u64, u64)| T::from_f32(self.a[(row * self.sizes.k + column) as usize] as f32);
        if transpose_a {
            return columns.flat_map(|column| rows.clone().map(move |row| (row, column))).map(at).collect();
        }
        rows.flat_map(|row| columns.clone().map(move |column| (row, column))).map(at).collect()
    }

    /// Rows and columns of `B`, as it is stored.
    pub fn weight<T: Number>(&self, transpose_b: bool, rows: Range<u64>, columns: Range<u64>) -> Vec<T> {
        let at = |(row, column): (u64, u64)| T::from_f32(self.b[(row * self.sizes.n + column) as usize] as f32);
        if transpose_b {
            return columns.flat_map(|column| rows.clone().map(move |row| (row, column))).map(at).collect();
        }
        rows.flat_map(|row| columns.clone().map(move |column| (row, column))).map(at).collect()
    }
}

/// Numbers that elements hold.
fn numbers<T: Number>(seed: u64, len: u64) -> Vec<f64> {
    values(seed, len).into_iter().map(|value| T::from_f32(value.to_f32()).to_f32().into()).collect()
}

/// The equal share of a rank, the last ones shorter.
pub fn share(size: u64, rank: u32, ranks: u32) -> Range<u64> {
    let extent = size.div_ceil(ranks.into());
    let at = |rank: u32| (u64::from(rank) * extent).min(size);
    at(rank)..at(rank + 1)
}

/// Rows and columns of a matrix that a rank has.
#[derive(Clone, Debug)]
pub struct Part {
    pub rows: Range<u64>,
    pub columns: Range<u64>,
}

impl Part {
    pub fn len(&self) -> u64 {
        (self.rows.end - self.rows.start) * self.width()
    }

    pub fn width(&self) -> u64 {
        self.columns.end - self.columns.start
    }

    /// The places of its elements in a matrix of so many columns.
    pub fn places(&self, width: u64) -> impl Iterator<Item = usize> + '_ {
        self.rows.clone().flat_map(move |row| self.columns.clone().map(move |column| (row * width + column) as usize))
    }

    pub fn of<T: Number>(&self, matrix: &[f64], width: u64) -> Vec<T> {
        self.places(width).map(|at| T::from_f32(matrix[at] as f32)).collect()
    }
}

pub fn gelu(x: f64) -> f64 {
    x / 2.0 * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh())
}

/// The derivative of GELU, by its definition.
pub fn slope(x: f64) -> f64 {
    const STEP: f64 = 1e-5;
    (gelu(x + STEP) - gelu(x - STEP)) / (2.0 * STEP)
}
