//! Rotary position embedding in f64: a complex product.

/// Turns each pair of elements of a head by its angle, given as cosine and sine; `pair` gives the elements of pair `i`.
pub fn turn(head: &[f64], angles: &[(f64, f64)], pair: impl Fn(usize) -> [usize; 2]) -> Vec<f64> {
    let mut turned = head.to_vec();
    for (i, (cosine, sine)) in angles.iter().enumerate() {
        let [a, b] = pair(i);
        // (x + iy)(cos + i sin).
        (turned[a], turned[b]) = (head[a] * cosine - head[b] * sine, head[a] * sine + head[b] * cosine);
    }
    turned
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quarter_turn_swaps_and_negates() {
        assert_eq!(turn(&[1.0, 2.0, 3.0, 4.0], &[(0.0, 1.0), (1.0, 0.0)], |i| [i, i + 2]), [-3.0, 2.0, 1.0, 4.0]);
        assert_eq!(turn(&[1.0, 2.0, 3.0, 4.0], &[(0.0, 1.0), (1.0, 0.0)], |i| [2 * i, 2 * i + 1]), [-2.0, 1.0, 3.0, 4.0]);
    }
}
