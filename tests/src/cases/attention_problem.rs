//! A problem of attention in any layout: the configuration, where sequences lie, and what f64 makes of a head.

use oxtile::attention::{AttentionConfig, Layout, Mask, Padding};
use oxtile_tests::oracle::attention_head::Head;

/// A problem: the configuration, and where sequences lie.
#[derive(Clone)]
pub(super) struct Problem {
    pub config: AttentionConfig,
    /// First row and rows of each sequence, of queries and of keys. For a packed layout; else the configuration says it.
    pub sequences: Vec<[[usize; 2]; 2]>,
    pub padding: Padding,
    /// The key that query 0 of each sequence is aligned with, if the configuration asks for diagonals.
    pub diagonals: Vec<i32>,
    /// Whether values name their key instead of being random.
    pub one_hot: bool,
    /// Number with which the sums of lengths begin.
    pub first: u32,
    /// Of the first sequence, the row that is not a number, a query, a key or a value.
    pub nan: Option<Row>,
}

/// A row of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Row {
    Query(usize),
    Key(usize),
    Value(usize),
}

/// Where an element lies.
#[derive(Clone, Copy)]
pub(super) struct Place {
    row: usize,
    head: usize,
    start: usize,
}

impl Place {
    pub fn at(self, row: usize, head: usize, element: usize) -> usize {
        self.start + row * self.row + head * self.head + element
    }
}

impl Problem {
    pub fn dense(config: AttentionConfig) -> Self {
        Self { config, sequences: Vec::new(), padding: Padding::Kept, diagonals: Vec::new(), one_hot: false, first: 0, nan: None }
    }

    /// The tensors end some rows after the last sequence.
    pub fn packed(config: AttentionConfig, sequences: Vec<[[usize; 2]; 2]>) -> Self {
        let rows = |side: usize| sequences.iter().map(|s| s[side][0] + s[side][1]).max().unwrap_or(0) as u64 + 9;
        let config = AttentionConfig { batches: sequences.len() as u64, queries: rows(0), keys: rows(1), ..config };
        Self { config, sequences, padding: Padding::Zeroed, diagonals: Vec::new(), one_hot: false, first: 0, nan: None }
    }

    /// Dense, or packed with one sequence.
    pub fn of(config: AttentionConfig) -> Self {
        match config.layout {
            Layout::Packed => Self::packed(config, vec![[[0, config.queries as usize], [0, config.keys as usize]]]),
            Layout::Bshd | Layout::Sbhd => Self::dense(config),
        }
    }

    /// Queries and keys of sequence `batch`.
    pub fn lengths(&self, batch: usize) -> [usize; 2] {
        match self.config.layout {
            Layout::Packed => self.sequences[batch].map(|[_, rows]| rows),
            _ => [self.config.queries as usize, self.config.keys as usize],
        }
    }

    /// Where the sequence's rows lie on a side (0 for queries, 1 for keys) of so many heads of so many elements.
    pub fn place(&self, batch: usize, side: usize, heads: usize, size: usize) -> Place {
        let (batches, rows) = (self.config.batches as usize, [self.config.queries, self.config.keys][side] as usize);
        let row = heads * size;
        match self.config.layout {
            Layout::Bshd => Place { row, head: size, start: batch * rows * row },
            Layout::Sbhd => Place { row: batches * row, head: size, start: batch * row },
            Layout::Packed => Place { row, head: size, start: self.sequences[batch][side][0] * row },
        }
    }

    /// Where row 0 of a head is in the log-sum-exp.
    pub fn statistics(&self, batch: usize, head: usize) -> usize {
        let (queries, heads) = (self.config.queries as usize, self.config.heads as usize);
        match self.config.layout {
            Layout::Packed => head * queries + self.sequences[batch][0][0],
            _ => (batch * heads + head) * queries,
        }
    }

    /// A running result before the first merge, whose log-sum-exp is -inf: NaN, which must count as zeros, in the rows that see a key, and zeros in
    /// those that nothing is merged into.
    pub fn running(&self, elements: usize) -> Vec<f32> {
        let mut values = vec![0.0; elements];
        let [heads, size] = [self.config.heads, self.config.value_size()].map(|n| n as usize);
        for batch in 0..self.config.batches as usize {
            let ([queries, keys], place, of_one) = (self.lengths(batch), self.place(batch, 0, heads, size), self.head(batch, None));
            for row in (0..queries).filter(|&row| (0..keys).any(|key| of_one.sees(row, key))) {
                for (_, head, element) in each([1, heads, size]) {
                    values[place.at(row, head, element)] = f32::NAN;
                }
            }
        }
        values
    }

    pub fn head(&self, batch: usize, sink: Option<f64>) -> Head {
        let AttentionConfig { mask, window, head_size, soft_cap, .. } = self.config;
        let right = window.right.map(|right| right as i64);
        let right = if mask == Mask::CausalBottomRight { Some(right.map_or(0, |right| right.min(0))) } else { right };
        Head {
            rows: self.lengths(batch),
            sizes: [head_size as usize, self.config.value_size() as usize],
            top_left: mask == Mask::CausalTopLeft,
            window: [window.left.map(|left| left as i64), right],
            scale: self.config.scale.map_or((head_size as f64).powf(-0.5), f64::from),
            cap: soft_cap.map(f64::from),
            sink,
        }
    }

    /// Sums of queries and of keys, and offsets of both.
    pub fn arrays(&self) -> [Vec<u32>; 4] {
        let sums = |side: usize| {
            let ends = self.sequences.iter().scan(self.first, |end, s| {
                *end += s[side][1] as u32;
                Some(*end)
            });
            [self.first].into_iter().chain(ends).collect::<Vec<u32>>()
        };
        let offsets = |side: usize| {
            let last = self.sequences.last().map_or(0, |s| s[side][0] + s[side][1] + 5) as u32;
            self.sequences.iter().map(|s| s[side][0] as u32).chain([last]).collect::<Vec<u32>>()
        };
        [sums(0), sums(1), offsets(0), offsets(1)]
    }

    /// Whether a row of a side is padding that becomes zero.
    pub fn is_zeroed(&self, side: usize, row: usize) -> bool {
        let inside = |pair: &[[[usize; 2]; 2]]| (pair[0][side][0] + pair[0][side][1]..pair[1][side][0]).contains(&row);
        let after = |s: &[[usize; 2]; 2]| (s[side][0] + s[side][1]..s[side][0] + s[side][1] + 5).contains(&row);
        self.padding == Padding::Zeroed && (self.sequences.windows(2).any(inside) || self.sequences.last().is_some_and(after))
    }
}

/// All indices of three dimensions.
pub(super) fn each([a, b, c]: [usize; 3]) -> impl Iterator<Item = (usize, usize, usize)> {
    (0..a).flat_map(move |i| (0..b).flat_map(move |j| (0..c).map(move |k| (i, j, k))))
}
