//! Attention to a whole sequence in `f64`, one row after another: what ranks are held against.

use oxtile::attention::{AttentionConfig, Layout, Mask, Sink};
use oxtile_oracle::rows::{add, dot};

/// Sequences in tensors of rows: valid rows of queries and of keys, and where they begin.
#[derive(Clone, Debug)]
pub struct Sequence {
    pub queries: [usize; 2],
    pub keys: [usize; 2],
}

/// A whole problem.
#[derive(Clone, Debug)]
pub struct Whole {
    pub config: AttentionConfig,
    /// Packed sequences: each is rows from the second number on, as many as the first.
    pub sequences: Vec<Sequence>,
    pub q: Vec<f64>,
    pub k: Vec<f64>,
    pub v: Vec<f64>,
    pub grad_out: Vec<f64>,
    pub sink: Vec<f64>,
}

/// Results, of the layout of the inputs.
#[derive(Clone, Debug, Default)]
pub struct Results {
    pub out: Vec<f64>,
    pub log_sum_exp: Vec<f64>,
    pub max_logit: Vec<f64>,
    pub grad_q: Vec<f64>,
    pub grad_k: Vec<f64>,
    pub grad_v: Vec<f64>,
    pub grad_sink: Vec<f64>,
}

/// Where a row of a head of a batch begins.
pub fn place(layout: Layout, [batches, rows, heads, size]: [usize; 4], [batch, row, head]: [usize; 3]) -> usize {
    let at = match layout {
        Layout::Bshd | Layout::Packed => (batch * rows + row) * heads + head,
        Layout::Sbhd => (row * batches + batch) * heads + head,
    };
    at * size
}

impl Whole {
    /// Batches, rows and heads as numbers of the host.
    fn sizes(&self) -> [usize; 7] {
        let AttentionConfig { batches, queries, keys, heads, key_heads, head_size, .. } = self.config;
        let batches = if self.config.layout == Layout::Packed { 1 } else { batches };
        [batches, queries, keys, heads, key_heads, head_size, self.config.value_size()].map(|n| n as usize)
    }

    /// All results.
    pub fn solve(&self) -> Results {
        let [batches, queries, keys, heads, key_heads, size, value] = self.sizes();
        let AttentionConfig { layout, mask, window, sink, soft_cap, .. } = self.config;
        let rows_of = |batch: usize| match layout {
            Layout::Packed => self.sequences.clone(),
            _ => vec![Sequence { queries: [queries, 0], keys: [keys, 0] }; usize::from(batch < batches)],
        };
        let mut all = Results {
            out: vec![0.0; batches * queries * heads * value],
            log_sum_exp: vec![f64::NEG_INFINITY; batches * heads * queries],
            max_logit: vec![f64::NEG_INFINITY; heads],
            grad_q: vec![0.0; self.q.len()],
            grad_k: vec![0.0; self.k.len()],
            grad_v: vec![0.0; self.v.len()],
            grad_sink: vec![0.0; heads],
        };
        let scale = self.config.scale();
        for batch in 0..batches {
            for Sequence { queries: [length, first], keys: [key_length, first_key] } in rows_of(batch) {
                for (head, i) in (0..heads).flat_map(|head| (0..length).map(move |i| (head, i))) {
                    let key_head = head / (heads / key_heads);
                    let at = |tensor: [usize; 4], row, head| place(layout, tensor, [batch, row, head]);
                    let (at_q, at_out) =
                        (at([batches, queries, heads, size], first + i, head), at([batches, queries, heads, value], first + i, head));
                    let at_k = |j| at([batches, keys, key_heads, size], first_key + j, key_head);
                    let at_v = |j| at([batches, keys, key_heads, value], first_key + j, key_head);
                    let diagonal = i as i64 + key_length as i64 - length as i64;
                    let sees = |j: usize| {
                        let j = j as i64;
                        let masked = match mask {
                            Mask::Full => true,
                            Mask::CausalTopLeft => j <= i as i64,
                            Mask::CausalBottomRight => j <= diagonal,
                        };
                        masked
                            && window.left.is_none_or(|left| j >= diagonal - left as i64)
                            && window.right.is_none_or(|right| j <= diagonal + right as i64)
                    };
                    let q = &self.q[at_q..at_q + size];
                    // Each key seen, its score, and the score's derivative by the product.
                    let score = |j: usize| {
                        let raw = dot(q, &self.k[at_k(j)..at_k(j) + size]) * scale;
                        match soft_cap.map(f64::from) {
                            Some(cap) => (j, cap * (raw / cap).tanh(), 1.0 - (raw / cap).tanh().powi(2)),
                            None => (j, raw, 1.0),
                        }
                    };
                    let scores: Vec<_> = (0..key_length).filter(|j| sees(*j)).map(score).collect();
                    let sunk = match sink {
                        Sink::None => f64::NEG_INFINITY,
                        Sink::OffByOne => 0.0,
                        Sink::Learnable => self.sink[head],
                    };
                    let top = scores.iter().map(|(_, score, _)| *score).fold(sunk, f64::max);
                    all.max_logit[head] = scores.iter().map(|(_, score, _)| *score).fold(all.max_logit[head], f64::max);
                    if top == f64::NEG_INFINITY {
                        continue;
                    }
                    let total: f64 = scores.iter().map(|(_, score, _)| (score - top).exp()).sum::<f64>() + (sunk - top).exp();
                    let log_sum = top + total.ln();
                    all.log_sum_exp[(batch * heads + head) * queries + first + i] = log_sum;
                    let weights: Vec<_> = scores.iter().map(|(j, score, slope)| (*j, (score - log_sum).exp(), *slope)).collect();
                    for (j, weight, _) in &weights {
                        add(&mut all.out[at_out..], *weight, &self.v[at_v(*j)..][..value]);
                    }
                    let grad = &self.grad_out[at_out..at_out + value];
                    let delta = dot(&all.out[at_out..at_out + value], grad);
                    for (j, weight, slope) in &weights {
                        let through = weight * (dot(grad, &self.v[at_v(*j)..at_v(*j) + value]) - delta) * slope * scale;
                        add(&mut all.grad_v[at_v(*j)..], *weight, grad);
                        add(&mut all.grad_q[at_q..], through, &self.k[at_k(*j)..][..size]);
                        add(&mut all.grad_k[at_k(*j)..], through, q);
                    }
                    all.grad_sink[head] -= (sunk - log_sum).exp() * delta;
                }
            }
        }
        all
    }
}
