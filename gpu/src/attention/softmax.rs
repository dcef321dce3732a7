//! The softmax of rows whose scores come block by block.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::num::{exp2, fma, log2, max, min, reciprocal};
use oxtile_tile::register_tile::{RegisterTile, Rows, THREAD_ROWS, quad_max, quad_sum};
use oxtile_tile::warp;

/// A row's maximum before it has one. Finite, so that no difference is NaN; lower scores count as masked.
const LOWEST: f32 = -1e30;

/// A maximum is kept until it is exceeded by so many powers of two: the weights stay below 2^8, and what was accumulated
/// is rarely scaled. The result is the same but for rounding, as maximum and sum belong together.
const MARGIN: f32 = 8.0;

/// Where weights are lifted, a maximum is raised if its weight is more than this many times the sum over a thread's columns, a
/// quarter of a row's.
const LARGE_SHARE: f32 = 1.0 / 8.0;

/// The same for a block in which no maximum is looked for: of one of 32 normal scores a row and lane, the second rarely comes to twice
/// the first.
const FOLLOWED_SHARE: f32 = 2.0;

/// A thread's share of a sum of weights up to which none of them is above 2^[`MARGIN`].
const SMALL_SUM: f32 = 256.0;

/// For the two rows of a thread: `sum` of `exp2(scale * score + offset)`, over the thread's own columns, where `offset` makes the weight of
/// a row's maximum `2^lift`.
pub struct Softmax {
    /// The offset; if `sparing`, the maximum, from which it is computed for each block.
    kept: Rows,
    sum: Rows,
    scale: f32,
    margin: f32,
    lift: f32,
    /// How many times a thread's sum a weight may be before the maximum is raised to it, beside the margin: a constant.
    share: f32,
    /// The largest score so far, of those that are not masked.
    largest: Rows,
    /// Scores beyond which a maximum is raised.
    limit: Rows,
    /// Whether maxima are looked for only where weights are large: a constant.
    sparing: bool,
}

/// What rows come to.
pub struct Finished {
    /// The factor that makes weights sum to 1; 0 for a row that sees nothing.
    pub factor: Rows,
    /// The logarithm to base 2 of the sum of the exponentials; -inf for such a row.
    pub log_sum: Rows,
    /// The largest score, times the scale; -inf for such a row.
    pub largest: Rows,
}

impl Softmax {
    /// No scores yet. `scale` is positive and has the factor `log2(e)`.
    #[inline(always)]
    pub fn new(scale: f32) -> Self {
        let (kept, largest) = ([-LOWEST * scale; THREAD_ROWS], [f32::NEG_INFINITY; THREAD_ROWS]);
        let (sum, limit) = ([0.0; THREAD_ROWS], [LOWEST; THREAD_ROWS]);
        Self { kept, sum, scale, margin: MARGIN, lift: 0.0, share: f32::INFINITY, largest, limit, sparing: false }
    }

    /// The same where there are registers for weights beside scores: blocks after the first [`follow`](Self::follow).
    ///
    /// It keeps maxima. Kept offsets spare two multiplications a block and take 1 to 3 % at head size 64, by how ptxas orders what follows.
    #[inline(always)]
    pub fn sparing(scale: f32) -> Self {
        Self { kept: [LOWEST; THREAD_ROWS], sparing: true, ..Self::new(scale) }
    }

    /// The same with maxima raised to scores whose weights are more than twice, where causal 8 times, the sum over a thread's columns, a quarter
    /// of a row's: what is most of a row is 1 then, which rounding leaves as it is. With less the error where one weight is most of a row is that
    /// of exact maxima, with more fewer maxima are raised; causal tiles begin with a block of which rows see little. The bound is
    /// [set](Self::settle) after the first block, and where a maximum is raised: the sum only grows, so it is never too high.
    #[inline(always)]
    pub fn raising(scale: f32, causal: bool) -> Self {
        Self { share: if causal { 8.0 } else { 2.0 }, ..Self::new(scale) }
    }

    /// The same with a zero that the compiler does not know: it then holds no results of rows that see nothing in registers.
    #[inline(always)]
    pub fn with_zero(self, zero: u32) -> Self {
        Self { sum: [f32::from_bits(zero); THREAD_ROWS], ..self }
    }

    /// Called after the first block.
    #[inline(always)]
    pub fn settle(&mut self) {
        if self.share != f32::INFINITY {
            self.limit = [0, 1].map(|half| self.limit(half));
        }
    }

    /// Whether blocks after the first [`follow`](Self::follow).
    #[inline(always)]
    pub fn is_sparing(&self) -> bool {
        self.sparing
    }

    /// The same with all weights times `2^lift`, for a coarse format: few weights are subnormal then, and still they stay below
    /// 2^8. A maximum is raised at once if its weight is a good part of the sum, so that rounding leaves it as it is.
    #[inline(always)]
    pub fn lifted(scale: f32, lift: f32) -> Self {
        Self { margin: MARGIN - lift, lift, share: LARGE_SHARE, ..Self::new(scale) }
    }

    /// A score beside those of the keys, already scaled and times `log2(e)`; -inf is none.
    #[inline(always)]
    pub fn with_sink(scale: f32, sink: f32) -> Self {
        if sink > LOWEST {
            // Each of the row's four lanes counts a quarter of it.
            Self { kept: [-sink; THREAD_ROWS], sum: [0.25; THREAD_ROWS], ..Self::new(scale) }
        } else {
            Self::new(scale)
        }
    }

    /// Turns scores into weights and counts them; gives the factors for what was accumulated with earlier weights, if the
    /// warp has any. All lanes of the warp call it.
    #[inline(always)]
    #[track_caller]
    pub fn update<const KEYS: usize>(&mut self, scores: &mut RegisterTile<KEYS>) -> Option<Rows>
    where
        Columns<KEYS>: MatrixColumns,
    {
        let found = maxima(scores);
        self.largest = [0, 1].map(|half| max(self.largest[half], found[half]));
        let mut factors = None;
        // The whole warp takes one way: multiplications are in flight.
        let rises = |half: usize| match self.sparing {
            true => (found[half] - self.kept[half]) * self.scale > self.margin,
            false => found[half] > self.limit[half],
        };
        if warp::any(rises(0) | rises(1)) {
            factors = Some([0, 1].map(|half| self.raise(half, found[half])));
        }
        let mut half = 0;
        while half < THREAD_ROWS {
            let offset = self.offset(half);
            let mut sums = [0.0; 2];
            let mut pair = 0;
            while pair < RegisterTile::<KEYS>::PAIRS {
                let weights = scores.pair(half, pair).map(|score| exp2(fma(score, self.scale, offset)));
                scores.set_pair(half, pair, weights);
                sums = [sums[0] + weights[0], sums[1] + weights[1]];
                pair += 1;
            }
            self.sum[half] += sums[0] + sums[1];
            half += 1;
        }
        factors
    }

    /// As [`update`](Self::update), for a block after the first, with the weights as `pack` has them. A maximum is looked for only if
    /// weights by the old one come to 2^8, or lifted ones to a good part of the row's sum: that spares a comparison a score and the wait for the
    /// largest, and holds the scores in registers beside the weights. The largest score is then not known.
    #[inline(always)]
    #[track_caller]
    pub fn follow<const KEYS: usize, W>(
        &mut self,
        scores: &RegisterTile<KEYS>,
        pack: impl Fn(&RegisterTile<KEYS>) -> W,
    ) -> (W, Option<Rows>)
    where
        Columns<KEYS>: MatrixColumns,
    {
        let weigh = |softmax: &Self| {
            let (weights, sums) = softmax.weigh(scores);
            (pack(&weights), sums)
        };
        let (mut weights, mut sums) = weigh(self);
        // No weight is above the thread's share of their sum. That of a row that saw nothing so far is inf; NaN stay NaN.
        let large = |half: usize| sums[half] > min(max(self.sum[half] * FOLLOWED_SHARE, power_of_two(self.lift)), SMALL_SUM);
        let any_large = if self.sparing { max(sums[0], sums[1]) > SMALL_SUM } else { large(0) | large(1) };
        let mut factors = None;
        if warp::any(any_large) {
            let found = maxima(scores);
            factors = Some([0, 1].map(|half| self.raise(half, found[half])));
            (weights, sums) = weigh(self);
        }
        self.sum = [0, 1].map(|half| self.sum[half] + sums[half]);
        (weights, factors)
    }

    /// The weights of scores by the maximum so far, and a thread's share of each row's sum of them.
    #[inline(always)]
    fn weigh<const KEYS: usize>(&self, scores: &RegisterTile<KEYS>) -> (RegisterTile<KEYS>, Rows)
    where
        Columns<KEYS>: MatrixColumns,
    {
        let (mut weights, mut sums, offsets) = (*scores, [[0.0; 2]; THREAD_ROWS], [0, 1].map(|half| self.offset(half)));
        let mut pair = 0;
        while pair < RegisterTile::<KEYS>::PAIRS {
            let mut half = 0;
            while half < THREAD_ROWS {
                let [a, b] = scores.pair(half, pair).map(|score| exp2(fma(score, self.scale, offsets[half])));
                weights.set_pair(half, pair, [a, b]);
                sums[half] = [sums[half][0] + a, sums[half][1] + b];
                half += 1;
            }
            pair += 1;
        }
        (weights, sums.map(|[a, b]| a + b))
    }

    /// What is added to scaled scores.
    #[inline(always)]
    fn offset(&self, half: usize) -> f32 {
        if self.sparing { -(self.kept[half] * self.scale) } else { self.kept[half] }
    }

    /// The score above the maximum by the margin, or by less if its weight is a good part of the row's sum.
    #[inline(always)]
    fn limit(&self, half: usize) -> f32 {
        let per_score = reciprocal(self.scale);
        let share = if self.share == f32::INFINITY { self.margin } else { log2(self.sum[half] * self.share) - self.lift };
        (min(max(share, 0.0), self.margin) + self.lift - self.kept[half]) * per_score
    }

    /// Raises a row's maximum; gives the factor for what was accumulated.
    #[inline(always)]
    fn raise(&mut self, half: usize, found: f32) -> f32 {
        let (kept, factor) = if self.sparing {
            let maximum = max(found, self.kept[half]);
            (maximum, exp2((self.kept[half] - maximum) * self.scale))
        } else {
            let offset = min(fma(-found, self.scale, self.lift), self.kept[half]);
            (offset, exp2(offset - self.kept[half]))
        };
        self.kept[half] = kept;
        self.sum[half] *= factor;
        if !self.sparing {
            self.limit[half] = self.limit(half);
        }
        factor
    }

    /// All scores have come. All lanes of the warp call it.
    #[inline(always)]
    #[track_caller]
    pub fn finish(self) -> Finished {
        let sum = self.sum.map(quad_sum);
        Finished {
            factor: sum.map(|sum| if sum == 0.0 { 0.0 } else { reciprocal(sum) }),
            log_sum: [0, 1].map(|half| match sum[half] == 0.0 {
                true => f32::NEG_INFINITY,
                false if self.sparing => fma(self.kept[half], self.scale, log2(sum[half])),
                false => log2(sum[half]) - self.kept[half],
            }),
            largest: self.largest.map(|largest| largest * self.scale),
        }
    }
}

impl Finished {
    /// With a score beside those of the keys, already scaled and times `log2(e)`; -inf is none. It scales no weights: those of a coarse format are
    /// rounded by the keys' largest score alone.
    #[inline(always)]
    pub fn and_sink(mut self, sink: f32) -> Self {
        if sink > LOWEST {
            let mut half = 0;
            while half < THREAD_ROWS {
                let log_sum = self.log_sum[half];
                let largest = max(log_sum, sink);
                let both = largest + log2(exp2(log_sum - largest) + exp2(sink - largest));
                self.factor[half] *= exp2(log_sum - both);
                self.log_sum[half] = both;
                half += 1;
            }
        }
        self
    }

    /// Turns a sum of values into their weighted means. A row that sees nothing gets zeros, whatever there is to multiply by none.
    #[inline(always)]
    pub fn divide<const V: usize>(&self, sum: &mut RegisterTile<V>)
    where
        Columns<V>: MatrixColumns,
    {
        self.divide_times(sum, 1.0);
    }

    /// The same, times what the values are worth.
    #[inline(always)]
    pub fn divide_times<const V: usize>(&self, sum: &mut RegisterTile<V>, worth: f32)
    where
        Columns<V>: MatrixColumns,
    {
        sum.scale_rows(self.factor.map(|factor| factor * worth));
        // Zero times what is no finite number is none.
        if self.factor[0] == 0.0 || self.factor[1] == 0.0 {
            sum.map_pairs(|half, _, values| if self.factor[half] == 0.0 { [0.0; 2] } else { values });
        }
    }

    /// The natural logarithm of the sum of the exponentials.
    #[inline(always)]
    pub fn log_sum_exp(&self) -> Rows {
        self.log_sum.map(|log| log * core::f32::consts::LN_2)
    }

    /// The largest score of all rows of the warp, in each of its lanes.
    #[inline(always)]
    #[track_caller]
    pub fn largest_of_warp(&self) -> f32 {
        // The four lanes of a row have the same.
        warp_max(max(self.largest[0], self.largest[1]), 4)
    }

    /// With rows for which `is_query` (given the thread's row, 0 or 1) does not hold as if they saw nothing.
    #[inline(always)]
    pub fn of_rows(mut self, is_query: impl Fn(u32) -> bool) -> Self {
        let mut half = 0;
        while half < THREAD_ROWS {
            if !is_query(half as u32) {
                self.factor[half] = 0.0;
                self.log_sum[half] = f32::NEG_INFINITY;
                self.largest[half] = f32::NEG_INFINITY;
            }
            half += 1;
        }
        self
    }
}

/// `2^lift` of a whole number: a constant of a constant, which [`exp2`] is not.
#[inline(always)]
const fn power_of_two(lift: f32) -> f32 {
    f32::from_bits(((127 + lift as i32) as u32) << 23)
}

/// The largest score of each row; two chains a row, so that one does not wait for itself.
#[inline(always)]
#[track_caller]
fn maxima<const KEYS: usize>(scores: &RegisterTile<KEYS>) -> Rows
where
    Columns<KEYS>: MatrixColumns,
{
    [0, 1].map(|half| {
        let mut found = scores.pair(half, 0);
        let mut pair = 1;
        while pair < RegisterTile::<KEYS>::PAIRS {
            let [a, b] = scores.pair(half, pair);
            found = [max(found[0], a), max(found[1], b)];
            pair += 1;
        }
        quad_max(max(found[0], found[1]))
    })
}

/// The largest value of a warp's lanes, in each of them, of which each `alike` neighbours, a power of two, have the same.
#[inline(always)]
#[track_caller]
pub fn warp_max(mut value: f32, alike: u32) -> f32 {
    let mut flip = alike;
    while flip < warp::LANES {
        value = max(value, warp::shuffle_xor(value, flip));
        flip *= 2;
    }
    value
}
