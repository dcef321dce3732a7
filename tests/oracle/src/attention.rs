//! Attention in f64.

use super::rows::{add, dot, magnitudes, wide};

/// What is computed: `softmax(scale Q K^T + mask) V` for tensors of `[batches, rows, heads, head_size]`.
#[derive(Debug, Clone, Copy)]
pub struct Problem {
    /// Batches.
    pub batches: usize,
    /// Rows of `Q`.
    pub queries: usize,
    /// Rows of `K` and `V`.
    pub keys: usize,
    /// Heads of `Q`.
    pub heads: usize,
    /// Heads of `K` and `V`; neighbouring query heads share one.
    pub key_heads: usize,
    /// Elements of a row of a head.
    pub head_size: usize,
    /// The last key that query 0 sees, if there is a causal mask.
    pub diagonal: Option<i64>,
    /// Factor of the scores.
    pub scale: f64,
}

impl Problem {
    /// Whether query `i` sees key `j`.
    pub fn sees(&self, i: usize, j: usize) -> bool {
        self.diagonal.is_none_or(|diagonal| j as i64 <= i as i64 + diagonal)
    }
}

/// The result. A query that sees no key has zeros and -inf, one that sees a NaN score has NaN.
pub struct Attended {
    /// `[batches, queries, heads, head_size]`
    pub out: Vec<f64>,
    /// For each element of `out`, the weighted sum of the magnitudes of values, which errors are measured by.
    pub magnitudes: Vec<f64>,
    /// `[batches, heads, queries]`
    pub log_sum_exp: Vec<f64>,
}

/// Attends, one query at a time.
pub fn attention(problem: &Problem, q: &[f32], k: &[f32], v: &[f32]) -> Attended {
    let Problem { batches, queries, keys, heads, key_heads, head_size, scale, .. } = *problem;
    let (q, k, v) = (wide(q), wide(k), wide(v));
    let v_magnitudes = magnitudes(&v);
    let mut attended = Attended {
        out: vec![0.0; batches * queries * heads * head_size],
        magnitudes: vec![0.0; batches * queries * heads * head_size],
        log_sum_exp: Vec::with_capacity(batches * heads * queries),
    };
    for batch in 0..batches {
        for head in 0..heads {
            for i in 0..queries {
                let row = ((batch * queries + i) * heads + head) * head_size;
                let of_key = |j: usize| ((batch * keys + j) * key_heads + head * key_heads / heads) * head_size;
                let score = |j: usize| dot(&q[row..][..head_size], &k[of_key(j)..][..head_size]) * scale;
                let scores: Vec<(usize, f64)> = (0..keys).filter(|&j| problem.sees(i, j)).map(|j| (j, score(j))).collect();
                let largest = scores.iter().fold(f64::NEG_INFINITY, |largest, &(_, score)| largest.max(score));
                let sum: f64 = scores.iter().map(|&(_, score)| (score - largest).exp()).sum();
                for (j, score) in scores {
                    let weight = (score - largest).exp() / sum;
                    for (sums, values) in [(&mut attended.out, &v), (&mut attended.magnitudes, &v_magnitudes)] {
                        add(&mut sums[row..][..head_size], weight, &values[of_key(j)..][..head_size]);
                    }
                }
                attended.log_sum_exp.push(if sum == 0.0 { f64::NEG_INFINITY } else { largest + sum.ln() });
            }
        }
    }
    attended
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_hand() {
        let problem = Problem { batches: 1, queries: 2, keys: 2, heads: 1, key_heads: 1, head_size: 1, diagonal: None, scale: 1.0 };
        let ln3 = 3f32.ln();
        // Scores [0, ln 3] and [0, 0]: weights [1/4, 3/4] and [1/2, 1/2].
        let (q, k, v) = ([1.0, 0.0], [0.0, ln3], [4.0, -8.0]);
        let near = |found: &[f64], expected: &[f64]| {
            assert!(found.iter().zip(expected).all(|(f, e)| (f - e).abs() < 1e-6), "{found:?}, expected {expected:?}");
        };
        let full = attention(&problem, &q, &k, &v);
        near(&full.out, &[-5.0, -2.0]);
        near(&full.magnitudes, &[7.0, 6.0]);
        near(&full.log_sum_exp, &[4f64.ln(), 2f64.ln()]);
        near(&attention(&Problem { diagonal: Some(0), ..problem }, &q, &k, &v).out, &[4.0, -2.0]);
        let none = attention(&Problem { diagonal: Some(-1), ..problem }, &q, &k, &v);
        near(&none.out, &[0.0, 4.0]);
        assert_eq!(none.log_sum_exp[0], f64::NEG_INFINITY);
    }

    #[test]
    fn heads_share_keys() {
        let problem = Problem { batches: 2, queries: 1, keys: 1, heads: 4, key_heads: 2, head_size: 1, diagonal: None, scale: 1.0 };
        let found = attention(&problem, &[1.0; 8], &[1.0; 4], &[1.0, 2.0, 3.0, 4.0]);
        assert_eq!(found.out, [1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0]);
    }
}
