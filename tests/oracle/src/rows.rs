//! Rows in f64, with the widest vectors that the machine has: what the innermost loops of references are made of.

/// Sums that are added up apart: a vector's lanes.
const LANES: usize = 16;

/// The sum of products of two rows of one length.
#[multiversion::multiversion(targets("x86_64+avx512f", "x86_64+avx2+fma"))]
pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let (a, rest_of_a) = a.as_chunks::<LANES>();
    let (b, rest_of_b) = b.as_chunks::<LANES>();
    let mut sums = [0.0; LANES];
    for (a, b) in a.iter().zip(b) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    let rest = rest_of_a.iter().zip(rest_of_b).map(|(a, b)| a * b);
    sums.into_iter().chain(rest).sum()
}

/// Adds a row times a factor to the first elements of another.
#[multiversion::multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
pub fn add(to: &mut [f64], factor: f64, row: &[f64]) {
    to.iter_mut().zip(row).for_each(|(to, x)| *to += factor * x);
}

/// Rows of `size` elements one after another, of what gives element `l` of row `i`.
pub fn rows(count: usize, size: usize, element: impl Fn(usize, usize) -> f64) -> Vec<f64> {
    let mut rows = Vec::with_capacity(count * size);
    (0..count).for_each(|i| rows.extend((0..size).map(|l| element(i, l))));
    rows
}

/// Single numbers as f64.
pub fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| x.into()).collect()
}

/// The magnitudes of numbers.
pub fn magnitudes(values: &[f64]) -> Vec<f64> {
    values.iter().map(|x| x.abs()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_counts_once() {
        for len in [0, 1, LANES - 1, LANES, 3 * LANES + 5] {
            let (a, ones) = ((1..=len).map(|at| at as f64).collect::<Vec<_>>(), vec![1.0; len]);
            assert_eq!(dot(&a, &ones), (len * (len + 1) / 2) as f64, "{len}");
            let mut sums = vec![0.5; len + 1];
            add(&mut sums, 2.0, &a);
            assert!(sums.iter().take(len).enumerate().all(|(at, sum)| *sum == 2.5 + 2.0 * at as f64), "{len}");
            assert_eq!(sums[len], 0.5);
        }
    }
}
