//! Packed sequences that ranks share: which token is where, by lists of all rows, and what is seen, by single pairs of a query and a key.

use std::collections::BTreeSet;

/// Sequences and the ranks that share them.
#[derive(Clone, Debug)]
pub struct Shared {
    /// Valid and padded rows of each sequence.
    pub lengths: Vec<[usize; 2]>,
    /// Rows of the tensor after those of the sequences.
    pub tail: usize,
    /// Ranks.
    pub world: usize,
    /// Whether a rank has a chunk from either end of a sequence.
    pub is_zigzag: bool,
}

impl Shared {
    /// The natural rows that a rank has, in its order; of each whether it is of a late chunk.
    pub fn rows_of(&self, rank: usize) -> Vec<(usize, bool)> {
        let (mut rows, mut start) = (Vec::new(), 0);
        for &[_, padded] in &self.lengths {
            let natural: Vec<usize> = (start..start + padded).collect();
            let mut chunks: Vec<&[usize]> = vec![&[]; self.world * if self.is_zigzag { 2 } else { 1 }];
            if padded > 0 {
                chunks = natural.chunks(padded / chunks.len()).collect();
            }
            rows.extend(chunks[rank].iter().map(|&row| (row, false)));
            if self.is_zigzag {
                chunks.reverse();
                rows.extend(chunks[rank].iter().map(|&row| (row, true)));
            }
            start += padded;
        }
        let of_tail = self.tail / self.world;
        rows.extend((start + rank * of_tail..start + (rank + 1) * of_tail).map(|row| (row, false)));
        rows
    }

    /// The sequence and the position in it of a natural row, if it is valid.
    pub fn token(&self, row: usize) -> Option<(usize, usize)> {
        let mut start = 0;
        for (number, &[length, padded]) in self.lengths.iter().enumerate() {
            if row < start + padded {
                return Some((number, row - start)).filter(|token| token.1 < length);
            }
            start += padded;
        }
        None
    }

    /// Rows of the sequences.
    pub fn rows(&self) -> usize {
        self.lengths.iter().map(|rows| rows[1]).sum()
    }

    /// Running sums of the valid rows, and of all.
    pub fn sums(&self) -> [Vec<u32>; 2] {
        [0, 1].map(|which| {
            let sums = self.lengths.iter().scan(0, |sum, rows| {
                *sum += rows[which] as u32;
                Some(*sum)
            });
            [0].into_iter().chain(sums).collect()
        })
    }
}

/// A row of a step's tensors, which have all rows of each sequence or those of a half.
#[derive(Clone, Copy, Debug)]
pub struct StepRow {
    /// Its sequence.
    pub sequence: usize,
    /// The row in the tensor of the rank.
    pub row: usize,
    /// The row in the rank's part of the sequence.
    pub within: usize,
    /// The row in the step's part of the sequence.
    pub within_step: usize,
    /// Whether it is of the late half.
    pub is_late: bool,
}

impl Shared {
    /// The rows of a step in their order, of all rows or of those of the late or the early half.
    pub fn step_rows(&self, late: Option<bool>) -> Vec<StepRow> {
        let rows = self.rows_of(0);
        let mut found: Vec<StepRow> = Vec::new();
        for (row, &(natural, is_late)) in rows.iter().enumerate().filter(|(_, row)| row.0 < self.rows()) {
            let whole = Self { lengths: self.lengths.iter().map(|rows| [rows[1]; 2]).collect(), ..self.clone() };
            let Some((sequence, _)) = whole.token(natural) else { continue };
            let within = row - self.lengths[..sequence].iter().map(|rows| rows[1] / self.world).sum::<usize>();
            if late.is_none_or(|late| late == is_late) {
                let within_step = found.iter().filter(|other| other.sequence == sequence).count();
                found.push(StepRow { sequence, row, within, within_step, is_late });
            }
        }
        found
    }
}

/// Which keys are in a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keys {
    /// Those of a rank.
    Owners,
    /// Those of a chunk.
    Chunks,
    /// All.
    Whole,
}

/// A pass of attention on one rank.
pub struct Pass<'a> {
    /// Queries.
    pub queries: &'a Shared,
    /// Keys.
    pub keys: &'a Shared,
    /// The rank that has the queries.
    pub rank: usize,
    /// Which keys are in a set.
    pub of: Keys,
    /// Keys before and after the diagonal that a query sees.
    pub bounds: [Option<u64>; 2],
}

/// A sequence, a query in it and a key.
type Pair = (usize, usize, usize);

impl Pass<'_> {
    fn sees(&self, (sequence, query, key): Pair) -> bool {
        let [queries, keys] = [self.queries, self.keys].map(|shared| shared.lengths[sequence][0] as i64);
        let distance = key as i64 - (query as i64 + keys - queries);
        self.bounds[0].is_none_or(|left| distance >= -(left as i64)) && self.bounds[1].is_none_or(|right| distance <= right as i64)
    }

    /// The rows of a set's keys, in the order of the tensor where they lie, and the rank that has them.
    fn keys_of(&self, set: usize) -> (Vec<(usize, bool)>, Option<usize>) {
        let owner = match self.of {
            Keys::Whole => return ((0..self.keys.rows()).map(|row| (row, false)).collect(), None),
            Keys::Chunks if self.keys.is_zigzag => set / 2,
            Keys::Owners | Keys::Chunks => set,
        };
        (self.keys.rows_of(owner), Some(owner))
    }

    /// Whether the key at this row of the set's tensor is of the set.
    fn is_of(&self, set: usize, is_late: bool) -> bool {
        self.of != Keys::Chunks || !self.keys.is_zigzag || is_late == set.is_multiple_of(2)
    }

    /// Reads the arrays as attention does, and compares what is seen with what should be.
    ///
    /// # Errors
    /// The first thing that differs.
    pub fn judge(&self, arrays: &[u32], diagonals: &[i32]) -> Result<(), String> {
        let sequences = 2 * self.queries.lengths.len();
        let own = self.queries.rows_of(self.rank);
        let sets = diagonals.len().checked_div(sequences).unwrap_or(0);
        let mut seen = BTreeSet::new();
        for set in 0..sets {
            let of_set = &arrays[set * 4 * (sequences + 1)..][..4 * (sequences + 1)];
            let [query_ends, key_ends, query_offsets, key_offsets] = [0, 1, 2, 3].map(|i| &of_set[i * (sequences + 1)..][..=sequences]);
            let (rows, owner) = self.keys_of(set);
            let ends = [query_offsets[sequences] as usize, key_offsets[sequences] as usize];
            let key_rows = self.keys.rows() / if owner.is_some() { self.keys.world } else { 1 };
            if ends != [self.queries.rows() / self.queries.world, key_rows] || query_ends[0] != 0 || key_ends[0] != 0 {
                return Err(format!("set {set}: rows {ends:?}, first ends {} and {}", query_ends[0], key_ends[0]));
            }
            for number in 0..sequences {
                let (batch, is_late) = (number % self.queries.lengths.len(), number < self.queries.lengths.len());
                let what = format!("set {set}, sequence {batch}, late: {is_late}");
                let count = |ends: &[u32]| (ends[number + 1] - ends[number]) as usize;
                let (queries, keys) = (count(query_ends), count(key_ends));
                let tokens: Vec<usize> = own
                    .iter()
                    .filter(|row| row.1 == is_late)
                    .filter_map(|row| self.queries.token(row.0))
                    .filter_map(|(of, position)| (of == batch).then_some(position))
                    .collect();
                let of_set: Vec<usize> = rows
                    .iter()
                    .filter(|row| self.is_of(set, row.1))
                    .filter_map(|row| self.keys.token(row.0))
                    .filter_map(|(of, position)| (of == batch).then_some(position))
                    .collect();
                let sees_any = tokens.iter().any(|&query| of_set.iter().any(|&key| self.sees((batch, query, key))));
                // With a full mask those that see any key are in the set of every owner, and see nothing where the sequence has no key.
                let is_of_all = self.of == Keys::Owners && self.bounds[1].is_none() && self.keys.lengths[batch][0] > 0;
                let expected = if sees_any || is_of_all || self.of == Keys::Whole { tokens.len() } else { 0 };
                if queries != expected {
                    return Err(format!("{what}: {queries} queries, expected {expected}"));
                }
                for query in 0..queries {
                    let row = own[query_offsets[number] as usize + query].0;
                    if self.queries.token(row) != Some((batch, tokens[query])) {
                        return Err(format!("{what}: query {query} is at row {row}, expected token {}", tokens[query]));
                    }
                    for key in 0..keys {
                        let row = rows[key_offsets[number] as usize + key].0;
                        let Some((of, position)) = self.keys.token(row).filter(|token| token.0 == batch) else {
                            return Err(format!("{what}: key {key} is at row {row}, which is not one of the sequence"));
                        };
                        if self.mask_shows(owner, query, key, diagonals[set * sequences + number])
                            && !seen.insert((of, tokens[query], position))
                        {
                            return Err(format!("{what}: query {} sees key {position} again", tokens[query]));
                        }
                    }
                }
            }
        }
        let mut expected = BTreeSet::new();
        for (batch, query) in own.iter().filter_map(|row| self.queries.token(row.0)) {
            let keys = (0..self.keys.lengths[batch][0]).map(|key| (batch, query, key));
            expected.extend(keys.filter(|&pair| self.sees(pair)));
        }
        match seen.symmetric_difference(&expected).next() {
            None => Ok(()),
            Some(pair) => {
                Err(format!("sequence, query and key {pair:?}: seen {}, expected {}", seen.contains(pair), expected.contains(pair)))
            }
        }
    }

    /// Whether the mask of a set's launch shows the key to the query.
    fn mask_shows(&self, owner: Option<usize>, query: usize, key: usize, diagonal: i32) -> bool {
        let distance = key as i64 - query as i64 - i64::from(diagonal);
        match self.of {
            // The rank's own keys by a causal mask; of others, all.
            Keys::Owners => self.bounds[1].is_none() || owner != Some(self.rank) || distance <= 0,
            Keys::Chunks | Keys::Whole => {
                self.bounds[0].is_none_or(|left| distance >= -(left as i64)) && self.bounds[1].is_none_or(|right| distance <= right as i64)
            }
        }
    }
}
