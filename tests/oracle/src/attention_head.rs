//! Attention of one head of one sequence in f64, with everything that scores can be subject to.

use super::rows::{add, dot, magnitudes, rows};

/// What is computed.
#[derive(Debug, Clone, Copy)]
pub struct Head {
    /// Queries and keys.
    pub rows: [usize; 2],
    /// Elements of a row of `Q` and of `V`.
    pub sizes: [usize; 2],
    /// Whether query `i` sees no key after key `i`.
    pub top_left: bool,
    /// Keys seen before and after the diagonal that ends at the last query and the last key.
    pub window: [Option<i64>; 2],
    /// Factor of the scores.
    pub scale: f64,
    /// Scores `s` are replaced by `c tanh(s / c)`.
    pub cap: Option<f64>,
    /// A score beside those of the keys, without a value.
    pub sink: Option<f64>,
}

/// The result; a query that sees nothing has zeros and -inf, one that sees a NaN score has NaN.
pub struct Attended {
    /// `[queries, value size]`
    pub out: Vec<f64>,
    /// For each element of `out`, the weighted sum of the magnitudes of values.
    pub magnitudes: Vec<f64>,
    /// `[queries]`
    pub log_sum_exp: Vec<f64>,
    /// The largest score that any query sees, of those that are numbers.
    pub max_logit: f64,
}

impl Head {
    /// Whether query `i` sees key `j`.
    pub fn sees(&self, i: usize, j: usize) -> bool {
        let ahead = j as i64 - (i as i64 + self.rows[1] as i64 - self.rows[0] as i64);
        self.window[0].is_none_or(|left| ahead >= -left) && self.window[1].is_none_or(|right| ahead <= right) && !(self.top_left && j > i)
    }

    /// The keys that query `i` sees, each with its score: of rows of queries and keys.
    pub(crate) fn scores(&self, i: usize, q: &[f64], k: &[f64]) -> Vec<(usize, f64)> {
        let size = self.sizes[0];
        let score = |j: usize| {
            let score = self.scale * dot(&q[i * size..][..size], &k[j * size..][..size]);
            self.cap.map_or(score, |cap| cap * (score / cap).tanh())
        };
        (0..self.rows[1]).filter(|&j| self.sees(i, j)).map(|j| (j, score(j))).collect()
    }

    /// Attends; `q`, `k` and `v` give element `l` of row `i`.
    pub fn attend(&self, q: impl Fn(usize, usize) -> f64, k: impl Fn(usize, usize) -> f64, v: impl Fn(usize, usize) -> f64) -> Attended {
        let ([queries, keys], [size, value_size]) = (self.rows, self.sizes);
        self.attend_rows(&rows(queries, size, q), &rows(keys, size, k), &rows(keys, value_size, v))
    }

    fn attend_rows(&self, q: &[f64], k: &[f64], v: &[f64]) -> Attended {
        let ([queries, _], [_, value_size]) = (self.rows, self.sizes);
        let v_magnitudes = magnitudes(v);
        let zeros = vec![0.0; queries * value_size];
        let mut attended =
            Attended { out: zeros.clone(), magnitudes: zeros, log_sum_exp: Vec::with_capacity(queries), max_logit: f64::NEG_INFINITY };
        for i in 0..queries {
            let scores = self.scores(i, q, k);
            let sees_nothing = scores.is_empty() && self.sink.is_none();
            let largest = scores.iter().fold(f64::NEG_INFINITY, |largest, &(_, score)| largest.max(score));
            attended.max_logit = attended.max_logit.max(largest);
            let base = largest.max(self.sink.unwrap_or(f64::NEG_INFINITY));
            let sum =
                scores.iter().map(|&(_, score)| (score - base).exp()).sum::<f64>() + self.sink.map_or(0.0, |sink| (sink - base).exp());
            for (j, score) in scores {
                let weight = (score - base).exp() / sum;
                for (sums, values) in [(&mut attended.out, v), (&mut attended.magnitudes, &v_magnitudes)] {
                    add(&mut sums[i * value_size..][..value_size], weight, &values[j * value_size..][..value_size]);
                }
            }
            attended.log_sum_exp.push(if sees_nothing { f64::NEG_INFINITY } else { base + sum.ln() });
        }
        attended
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: Head = Head { rows: [2, 2], sizes: [1, 1], top_left: false, window: [None, None], scale: 1.0, cap: None, sink: None };

    fn attend(head: Head) -> Attended {
        // Scores [0, ln 3] and [0, 0].
        let ln3 = 3f64.ln();
        head.attend(|i, _| [1.0, 0.0][i], |j, _| [0.0, ln3][j], |j, _| [4.0, -8.0][j])
    }

    fn near(found: &[f64], expected: &[f64]) {
        assert!(found.iter().zip(expected).all(|(f, e)| f == e || (f - e).abs() < 1e-12), "{found:?}, not {expected:?}");
    }

    #[test]
    fn by_hand() {
        let full = attend(HEAD);
        near(&full.out, &[-5.0, -2.0]);
        near(&full.magnitudes, &[7.0, 6.0]);
        near(&full.log_sum_exp, &[4f64.ln(), 2f64.ln()]);
        near(&[full.max_logit], &[3f64.ln()]);
        near(&attend(Head { top_left: true, ..HEAD }).out, &[4.0, -2.0]);
        near(&attend(Head { window: [Some(0), Some(0)], ..HEAD }).out, &[4.0, -8.0]);
        let none = attend(Head { window: [Some(-1), Some(0)], ..HEAD });
        near(&none.out, &[0.0, 0.0]);
        near(&none.log_sum_exp, &[f64::NEG_INFINITY; 2]);
        // A score of 0 beside: weights of 1/5 and 3/5, then 1/3 each.
        near(&attend(Head { sink: Some(0.0), ..HEAD }).out, &[-4.0, -4.0 / 3.0]);
        // What is not a number is seen by the first query alone.
        let nan = HEAD.attend(|i, _| [f64::NAN, 0.0][i], |j, _| [1.0, 2.0][j], |j, _| [4.0, -8.0][j]);
        assert!(nan.out[0].is_nan() && nan.log_sum_exp[0].is_nan());
        near(&[nan.out[1], nan.log_sum_exp[1], nan.max_logit], &[-2.0, 2f64.ln(), 0.0]);
        let capped = attend(Head { cap: Some(1.0), ..HEAD });
        near(&[capped.max_logit], &[3f64.ln().tanh()]);
    }
}
