//! What attention loses if its weights of at most 1 are rounded to 8 bits, in f64.

use super::attention::Problem;
use super::attention_head::Head;
use super::formats::E4M3;
use super::rows::{add, dot, rows, wide};

/// As [`attention`](super::attention::attention), with weights of at most 1 rounded to e4m3 before they meet the values. Their sum
/// is of the unrounded ones.
pub fn with_rounded_weights(problem: &Problem, q: &[f32], k: &[f32], v: &[f32]) -> Vec<f64> {
    let Problem { batches, queries, keys, heads, key_heads, head_size, scale, .. } = *problem;
    let (q, k, v) = (wide(q), wide(k), wide(v));
    let mut out = vec![0.0; batches * queries * heads * head_size];
    for (at, row) in out.chunks_exact_mut(head_size).enumerate() {
        let (head, i, batch) = (at % heads, at / heads % queries, at / heads / queries);
        let query = &q[at * head_size..][..head_size];
        let of_key = |j: usize| ((batch * keys + j) * key_heads + head * key_heads / heads) * head_size;
        let score = |j: usize| dot(query, &k[of_key(j)..][..head_size]) * scale;
        let scores: Vec<(usize, f64)> = (0..keys).filter(|&j| problem.sees(i, j)).map(|j| (j, score(j))).collect();
        let largest = scores.iter().fold(f64::NEG_INFINITY, |largest, &(_, score)| largest.max(score));
        let sum: f64 = scores.iter().map(|&(_, score)| (score - largest).exp()).sum();
        for (j, score) in scores {
            let weight = E4M3.round((score - largest).exp()) / sum;
            add(row, weight, &v[of_key(j)..]);
        }
    }
    out
}

/// The same of one head of one sequence, with everything that scores can be subject to: `[queries, value size]`. A sink takes part in the sum alone.
pub fn head_with_rounded_weights(
    head: &Head,
    q: impl Fn(usize, usize) -> f64,
    k: impl Fn(usize, usize) -> f64,
    v: impl Fn(usize, usize) -> f64,
) -> Vec<f64> {
    let ([queries, keys], [size, value_size]) = (head.rows, head.sizes);
    let (q, k, v) = (rows(queries, size, q), rows(keys, size, k), rows(keys, value_size, v));
    let mut out = vec![0.0; queries * value_size];
    for (i, row) in out.chunks_exact_mut(value_size).enumerate() {
        let scores = head.scores(i, &q, &k);
        let largest = scores.iter().fold(f64::NEG_INFINITY, |largest, &(_, score)| largest.max(score));
        let sum =
            scores.iter().map(|&(_, score)| (score - largest).exp()).sum::<f64>() + head.sink.map_or(0.0, |sink| (sink - largest).exp());
        for (j, score) in scores {
            let weight = E4M3.round((score - largest).exp()) / sum;
            add(row, weight, &v[j * value_size..]);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_by_hand() {
        let head = Head { rows: [1, 2], sizes: [1, 1], top_left: false, window: [None, None], scale: 1.0, cap: None, sink: Some(0.0) };
        let found = head_with_rounded_weights(&head, |_, _| 1.0, |j, _| [0.0, 0.3_f64.ln()][j], |j, _| [1.0, 10.0][j]);
        assert!((found[0] - (1.0 + 3.125) / 2.3).abs() < 1e-12, "{found:?}");
        let alone = head_with_rounded_weights(&Head { window: [Some(0), None], ..head }, |_, _| 1.0, |_, _| 0.5, |j, _| [1.0, 10.0][j]);
        let one_of_two = 10.0 / (1.0 + (-0.5_f64).exp());
        assert!((alone[0] - one_of_two).abs() < 1e-12, "{alone:?}");
    }

    #[test]
    fn by_hand() {
        let problem = Problem { batches: 1, queries: 1, keys: 2, heads: 1, key_heads: 1, head_size: 1, diagonal: None, scale: 1.0 };
        // A weight of 0.3 is 0.3125 in e4m3, of a sum of 1.3.
        let found = with_rounded_weights(&problem, &[1.0], &[0.0, 0.3_f32.ln()], &[1.0, 10.0]);
        assert!((found[0] - (1.0 + 3.125) / 1.3).abs() < 1e-6, "{found:?}");
    }
}
