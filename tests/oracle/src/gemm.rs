//! Matrix multiplication in f64.

/// What is computed: `alpha A B + beta D + bias`, then GELU if asked for.
#[derive(Debug, Clone, Copy)]
pub struct Problem {
    /// Rows of `A`, columns of `B`, and the direction that is summed over.
    pub shape: [usize; 3],
    /// Whether `A` is stored `[k, m]`, and `B` `[n, k]`.
    pub transposed: [bool; 2],
    /// Factor of the product.
    pub alpha: f64,
    /// Factor of `D`.
    pub beta: f64,
    /// Whether GELU comes last.
    pub gelu: bool,
}

/// The result, and for each element the sum of the magnitudes that went into it, which errors are measured by.
pub struct Product {
    /// `[m, n]`
    pub values: Vec<f64>,
    /// `[m, n]`
    pub magnitudes: Vec<f64>,
}

/// Multiplies; `bias` has a value a column, or none.
pub fn gemm(problem: &Problem, a: &[f32], b: &[f32], d: &[f32], bias: &[f32]) -> Product {
    let [a, b] = [a, b].map(|x| x.iter().copied().map(f64::from).collect::<Vec<_>>());
    gemm_wide(problem, &a, &b, d, bias)
}

/// As [`gemm`] for operands that are no f32, such as codes times scales.
pub fn gemm_wide(problem: &Problem, a: &[f64], b: &[f64], d: &[f32], bias: &[f32]) -> Product {
    let [m, n, k] = problem.shape;
    let at_a = |i: usize, l: usize| if problem.transposed[0] { a[l * m + i] } else { a[i * k + l] };
    // Row by row, so that the inner loop is a vector's.
    let b: Vec<f64> = if problem.transposed[1] { (0..k * n).map(|at| b[at % n * k + at / n]).collect() } else { b.to_vec() };
    let mut product = Product { values: vec![0.0; m * n], magnitudes: vec![0.0; m * n] };
    for i in 0..m {
        let (values, magnitudes) = (&mut product.values[i * n..][..n], &mut product.magnitudes[i * n..][..n]);
        let row: Vec<f64> = (0..k).map(|l| problem.alpha * at_a(i, l)).collect();
        add_row(values, magnitudes, &row, &b);
        for j in 0..n {
            let old = if problem.beta == 0.0 { 0.0 } else { problem.beta * f64::from(d[i * n + j]) };
            for term in [old, bias.get(j).map_or(0.0, |&x| x.into())] {
                values[j] += term;
                magnitudes[j] += term.abs();
            }
            if problem.gelu {
                values[j] = gelu(values[j]);
            }
        }
    }
    product
}

/// Adds a row of `A` times `B` to the values, and its magnitudes to the others, with the widest vectors that the machine has.
#[multiversion::multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
fn add_row(values: &mut [f64], magnitudes: &mut [f64], row: &[f64], b: &[f64]) {
    for (a, b) in row.iter().zip(b.chunks_exact(values.len().max(1))) {
        for ((value, magnitude), b) in values.iter_mut().zip(&mut *magnitudes).zip(b) {
            *value += a * b;
            *magnitude += (a * b).abs();
        }
    }
}

/// Hendrycks and Gimpel, "Gaussian Error Linear Units", section 2, the approximation by tanh.
fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_hand() {
        // [1 2 3; 4 5 6] times [1 0; 0 1; 1 1] is [4 5; 10 11].
        let (a, b, d) = ([1., 2., 3., 4., 5., 6.], [1., 0., 0., 1., 1., 1.], [1., 2., 3., 4.]);
        let plain = Problem { shape: [2, 2, 3], transposed: [false; 2], alpha: 1.0, beta: 0.0, gelu: false };
        assert_eq!(gemm(&plain, &a, &b, &d, &[]).values, [4.0, 5.0, 10.0, 11.0]);
        let full = Problem { alpha: 2.0, beta: -1.0, ..plain };
        assert_eq!(gemm(&full, &a, &b, &d, &[10.0, 20.0]).values, [17.0, 28.0, 27.0, 38.0]);
        let transposed = Problem { transposed: [true; 2], ..plain };
        let (at, bt) = ([1., 4., 2., 5., 3., 6.], [1., 0., 1., 0., 1., 1.]);
        assert_eq!(gemm(&transposed, &at, &bt, &d, &[]).values, [4.0, 5.0, 10.0, 11.0]);
        assert_eq!(gemm(&plain, &[1., -2., 0., 0., 0., 0.], &b, &d, &[]).magnitudes, [1.0, 2.0, 0.0, 0.0]);
    }

    #[test]
    fn gelu_is_the_known_function() {
        assert_eq!(gelu(0.0), 0.0);
        assert!((gelu(1.0) - 0.841_192).abs() < 1e-6 && (gelu(-1.0) + 0.158_808).abs() < 1e-6, "{} {}", gelu(1.0), gelu(-1.0));
        assert!((gelu(6.0) - 6.0).abs() < 1e-6);
    }
}
