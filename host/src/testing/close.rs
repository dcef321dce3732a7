//! Comparison of results with an oracle.

use oxtile_tile::num::Float;

/// Compares results with an oracle in `f64`, element by element. Two are close if they differ by at most `bound`, are equal, or are both NaN.
///
/// ```
/// use oxtile::testing;
///
/// let oracle = [0.1_f64, 0.2, 0.3];
/// testing::assert_close(&oracle.map(|x| x as f32), &oracle, 1e-7);
/// ```
///
/// # Panics
/// If the lengths differ or elements are too far apart: with the first of these and its index, the farthest, and how many there are.
#[track_caller]
pub fn assert_close<T: Float>(found: &[T], oracle: &[f64], bound: f64) {
    assert!(found.len() == oracle.len(), "{} elements were found, the oracle has {}", found.len(), oracle.len());
    let value = |i: usize| f64::from(found[i].to_f32());
    let difference = |i: usize| (value(i) - oracle[i]).abs();
    let is_close = |i: usize| difference(i) <= bound || value(i) == oracle[i] || value(i).is_nan() && oracle[i].is_nan();
    let far: Vec<usize> = (0..found.len()).filter(|&i| !is_close(i)).collect();
    let Some(&first) = far.first() else { return };
    // NaN is farther than any number.
    let farthest = far.iter().copied().max_by(|&a, &b| difference(a).total_cmp(&difference(b)).then(b.cmp(&a))).unwrap_or(first);
    let told = |i: usize| format!("[{i}] is {}, the oracle {}", found[i].to_f32(), oracle[i]);
    panic!("{} of {} elements differ by more than {bound}: {}; the farthest: {}", far.len(), found.len(), told(first), told(farthest));
}

#[cfg(test)]
mod tests {
    use oxtile_tile::num::{Float, bf16};

    use super::assert_close;

    #[test]
    fn what_is_close_passes() {
        assert_close(&[1.0_f32, f32::INFINITY, f32::NAN], &[1.25, f64::INFINITY, f64::NAN], 0.25);
        assert_close(&[bf16::from_f32(0.5)], &[0.5], 0.0);
    }

    #[test]
    #[should_panic(expected = "2 of 4 elements differ by more than 0.5: [1] is 3, the oracle 2; the farthest: [3] is 9, the oracle 4")]
    fn the_first_and_the_farthest_are_named() {
        assert_close(&[1.0_f32, 3.0, 3.0, 9.0], &[1.0, 2.0, 3.0, 4.0], 0.5);
    }

    #[test]
    #[should_panic(expected = "2 of 2 elements differ by more than 0.5: [0] is NaN, the oracle 1; the farthest: [0] is NaN")]
    fn a_nan_is_far() {
        assert_close(&[f32::NAN, 7.0], &[1.0, f64::NAN], 0.5);
    }

    #[test]
    #[should_panic(expected = "1 elements were found, the oracle has 2")]
    fn lengths_are_compared() {
        assert_close(&[1.0_f32], &[1.0, 2.0], 0.5);
    }
}
