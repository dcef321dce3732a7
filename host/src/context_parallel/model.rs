//! The time of a pass by each schedule: a pure function of sizes and of measured rates.

use super::config::{ContextParallelConfig, Schedule};
use super::head_group::groups_of;
use super::pieces::Pieces;
use super::plan::{Direction, Means};
use super::sections::{KEYS, Sections};
use crate::attention::{AttentionConfig, Layout, Window};
use crate::comm::{Rank, WorldSize};
use crate::runtime::{Kind, Stream};
use crate::thd::{Partition, Share};

/// What the model knows of devices and links: `bf16` heads of 128 on Hopper (docs/performance/attention.md), links as measured between two GPUs of one host
/// (docs/performance/context_parallel.md).
struct Rates {
    /// Operations a second of the kernels of whole sequences, in either direction.
    whole: [f64; 2],
    /// Of the kernels of steps, of those, in either direction.
    steps: [f64; 2],
    /// Bytes a second into a device: by its own copies from another one's memory, by messages of keys, and by messages of heads with all that they wait for.
    copies: f64,
    messages: f64,
    heads: f64,
    /// The time of launches of groups of heads over that of one launch, and the seconds that the copies and flags of the first and the last group take beside their bytes.
    groups: f64,
    ends: f64,
    /// The same of packed sequences, in either direction: their launches are short.
    packed_groups: [f64; 2],
    /// The seconds until the first keys are there for which a kernel waits, beyond what steps take beside their products.
    start: f64,
    /// The seconds that steps of packed sequences take beyond all else, at least: zeroing, ends of launches, flags.
    packed: f64,
    /// The share of the time of messages that kernels beside them lose, as messages take multiprocessors.
    beside: f64,
    /// Bytes a second of a device's memory, read or written.
    memory: f64,
    /// Bytes a second of copies within a device [by its engines](super::detour).
    around: f64,
}

const HOPPER: Rates = Rates {
    whole: [680e12, 560e12],
    steps: [0.97, 0.95],
    copies: 380e9,
    messages: 160e9,
    heads: 90e9,
    groups: 1.02,
    packed_groups: [1.17, 1.43],
    ends: 0.45e-3,
    start: 5e-6,
    packed: 0.14e-3,
    beside: 0.5,
    memory: 4.2e12,
    around: 150e9,
};

/// Seconds by the model.
#[derive(Clone, Copy)]
pub(super) struct Time {
    pub compute: f64,
    /// What communication adds.
    pub exposed: f64,
}

impl Time {
    pub fn total(self) -> f64 {
        self.compute + self.exposed
    }
}

impl ContextParallelConfig {
    /// Elements of a rank's queries, of its result, and of its keys and values together.
    fn elements(&self, world: WorldSize) -> [u64; 3] {
        let AttentionConfig { layout, batches, queries, keys, heads, key_heads, head_size, .. } = self.attention;
        let (value, ranks) = (self.attention.value_size(), u64::from(world.get()));
        let batches = if layout == Layout::Packed { 1 } else { batches };
        let [rows, key_rows] = [queries, keys].map(|rows| batches * rows / ranks);
        [rows * heads * head_size, rows * heads * value, key_rows * key_heads * (head_size + value)]
    }

    /// The bytes that a rank receives in a pass, of the one that receives the most.
    pub(super) fn received(&self, schedule: Schedule, direction: Direction, world: WorldSize, size: u64) -> u64 {
        let (ranks, key_heads) = (u64::from(world.get()), self.attention.key_heads);
        let [q, out, kv] = self.elements(world);
        let steps = |ranks: u64, kv: u64| match direction {
            Direction::Forward => (ranks - 1) * kv * size,
            // Gradients of the own keys come back in f32.
            Direction::Backward => (ranks - 1) * kv * (size + 4),
        };
        let trade = |ranks: u64| {
            let kv = kv / key_heads * key_heads.max(ranks);
            let elements = match direction {
                Direction::Forward => q + kv + out,
                Direction::Backward => 2 * (q + kv) + 2 * out,
            };
            elements / ranks * (ranks - 1) * size
        };
        match schedule {
            Schedule::Auto | Schedule::Ring | Schedule::Pull | Schedule::Gather => steps(ranks, kv),
            // Chunks that a window hides do not come.
            Schedule::Fused if self.window() != Window::default() && ranks > 1 && !self.is_packed() => {
                let most = world.ranks().map(|reader| self.chunks_read(world, reader)).max().unwrap_or(0);
                (steps(ranks, kv) as f64 * most as f64 / (self.partition.chunks(world) - 2) as f64) as u64
            }
            Schedule::Fused => steps(ranks, kv),
            Schedule::AllToAll => trade(ranks),
            // Each rank has the tokens of its neighbours, with a share of the heads.
            Schedule::Hierarchical { inner } => {
                let inner = u64::from(inner.get());
                trade(inner) + steps(ranks / inner, kv / key_heads * key_heads.max(inner))
            }
        }
    }

    /// Chunks of other ranks that a rank sees, of dense tensors.
    fn chunks_read(&self, world: WorldSize, reader: Rank) -> usize {
        let pieces = Pieces::new(*self, Share { world, rank: reader, partition: self.partition }, 1);
        world.ranks().filter(|owner| *owner != reader).map(|owner| pieces.seen(owner, reader).count()).sum()
    }

    /// The share of all pairs of a query and a key that are seen, of a sequence of so many tokens.
    fn seen(&self, tokens: f64) -> f64 {
        let Window { left, right } = self.window();
        let right = if self.is_causal() { Some(0) } else { right };
        // The triangles on either side of the diagonal's band.
        let hidden = |bound: Option<u64>| bound.map_or(0.0, |bound| (1.0 - bound as f64 / tokens.max(1.0)).max(0.0).powi(2) / 2.0);
        1.0 - hidden(left) - hidden(right)
    }

    /// Whether copies within a device go [around](super::detour): attention beside them takes longer than they do. On the virtual cluster, whose copies take no time, they do.
    pub(super) fn goes_around(&self, stream: &Stream, schedule: Schedule, world: WorldSize, size: u64) -> bool {
        let [q, out, kv] = self.elements(world).map(|elements| (elements * size) as f64);
        let (ranks, compute) = (f64::from(world.get()), self.compute(Direction::Forward, world));
        let (copied, arrival) = match schedule {
            // What a rank keeps of its tokens, and all results on their way from blocks.
            Schedule::AllToAll => ((q + kv + out) / ranks + out, 0.0),
            // Before others read it, while the own keys are attended to.
            _ => (ranks * kv, kv * ranks / HOPPER.copies),
        };
        stream.device().runtime().kind() == Kind::Emulated || compute > copied / HOPPER.around + arrival
    }

    /// The time of all products on each rank, by the kernels of whole sequences.
    fn compute(&self, direction: Direction, world: WorldSize) -> f64 {
        let AttentionConfig { layout, batches, queries, keys, heads, head_size, .. } = self.attention;
        let products = head_size + self.attention.value_size();
        // Of packed sequences the lengths are not known here: as if all were equal.
        let [queries, keys] = if layout == Layout::Packed { [queries, keys].map(|rows| rows / batches.max(1)) } else { [queries, keys] };
        let (at, times) = match direction {
            Direction::Forward => (0, 2.0),
            Direction::Backward => (1, 5.0),
        };
        let pairs = (batches * heads) as f64 * queries as f64 * keys as f64 * self.seen(keys as f64);
        pairs * products as f64 * times / f64::from(world.get()) / HOPPER.whole[at]
    }

    /// How much longer a chunk of packed sequences is in whole blocks, on average, if all sequences are equal.
    fn padding(&self, world: WorldSize) -> f64 {
        let AttentionConfig { keys, batches, .. } = self.attention;
        let chunk = keys as f64 / batches.max(1) as f64 / self.partition.chunks(world) as f64;
        1.0 + KEYS as f64 / 2.0 / chunk.max(1.0)
    }

    /// The time of a pass by the model.
    pub(super) fn time(&self, schedule: Schedule, direction: Direction, world: WorldSize, (means, size): (Means, u64)) -> Time {
        let (ranks, whole) = (u64::from(world.get()), self.compute(direction, world));
        let (at, seen) = (usize::from(direction == Direction::Backward), if self.is_causal() { 0.5 } else { 1.0 });
        let received = self.received(schedule, direction, world, size) as f64;
        let [q, _, kv] = self.elements(world).map(|elements| elements as f64);
        let (share, messages) = (ranks as f64, received / HOPPER.messages);
        match schedule {
            // All keys are read and written once more, in the order of tokens; so are their gradients.
            Schedule::Gather => {
                let bytes = [2.0 * size as f64, 2.0 * size as f64 + 8.0][at];
                let padding = if self.is_packed() { self.padding(world) } else { 1.0 };
                Time { compute: whole * padding, exposed: messages + kv * share * bytes / HOPPER.memory }
            }
            // The same of packed sequences, whose chunks are padded to blocks of queries and of keys; sections are equal, and what the last one brings is attended to after it.
            Schedule::Fused if self.is_packed() => {
                let sections = Sections::new(&self.attention, self.attention.key_heads, world, size).count();
                let (padded, wire) = (whole * self.padding(world).powi(2), received / HOPPER.copies);
                let (after, sums) = (padded / f64::from(sections.max(1)), [0.0, (8.0 * share + 2.0) * kv][at] / HOPPER.memory);
                let exposed = if ranks == 1 { 0.0 } else { (wire + after - padded).max(HOPPER.start) };
                Time { compute: padded + sums, exposed }
            }
            // Keys arrive while those that came before are attended to.
            Schedule::Fused => {
                // Gradients of keys are stored for each rank, and read when they are added up.
                let sums = [0.0, (8.0 * share + 2.0) * kv][at] / HOPPER.memory;
                let wire = received / HOPPER.copies;
                // Groups of heads have a launch each.
                let whole = if self.fused_groups(world, size).is_ok_and(|groups| groups > 1) { whole * HOPPER.groups } else { whole };
                Time { compute: whole + sums, exposed: if ranks == 1 { 0.0 } else { (wire - whole).max(0.0) + HOPPER.start } }
            }
            Schedule::AllToAll if self.is_in_memory(schedule, world, (means, size)) => {
                let traded = AttentionConfig { key_heads: (self.attention.key_heads / ranks).max(1), ..self.attention };
                // The heads of the first group, and the results of the last one.
                let ends = groups_of(&traded, size)[0] as f64 / traded.key_heads as f64;
                let wire = received / HOPPER.copies * ends;
                let groups = if self.is_packed() { HOPPER.packed_groups[at] } else { HOPPER.groups };
                Time { compute: whole * groups, exposed: if ranks == 1 { 0.0 } else { wire + HOPPER.ends } }
            }
            Schedule::AllToAll => Time { compute: whole, exposed: received / HOPPER.heads },
            _ => {
                let is_zigzag = self.partition == Partition::Zigzag;
                // Gradients of queries are zeroed and rounded, those of keys zeroed for each rank and added up.
                let sums = [0.0, 10.0 * q + (8.0 * share + 2.0) * kv][at] / HOPPER.memory;
                // Steps have the queries of a chunk apart, and the keys of an owner together.
                let padded = whole * self.padding(world) * f64::midpoint(1.0, self.padding(world));
                let whole = if self.is_packed() { padded + HOPPER.packed } else { whole };
                let compute = whole / HOPPER.steps[at];
                // A causal mask of contiguous parts leaves the last rank all the work.
                let compute = if self.is_causal() && !is_zigzag { 2.0 * compute } else { compute };
                let (wire, beside) = match schedule {
                    Schedule::Pull => (received / HOPPER.copies, 0.0),
                    _ => (messages, HOPPER.beside),
                };
                // The last step's gradients travel when all is computed, but for the half of the own keys that pull leaves to the end.
                let last = if at == 0 || ranks == 1 { 0.0 } else { wire * 4.0 / (size + 4) as f64 / (share - 1.0) };
                let behind = if schedule == Schedule::Pull && is_zigzag { compute / share * seen / 2.0 } else { 0.0 };
                // Keys of a step travel while those of the step before are attended to.
                let hidden = compute * (share - 1.0) / share;
                let lost = beside * (wire - last);
                Time { compute: compute + sums, exposed: (wire - last - hidden).max(0.0) + (last - behind).max(0.0) + lost }
            }
        }
    }

    /// The same in words.
    pub(super) fn times(&self, schedule: Schedule, direction: Direction, world: WorldSize, (means, size): (Means, u64)) -> String {
        let Time { compute, exposed } = self.time(schedule, direction, world, (means, size));
        let bytes = self.received(schedule, direction, world, size) as f64 / 1e6;
        format!("{schedule}: {bytes:.1} MB, {:.3} ms of which {:.3} wait", (compute + exposed) * 1e3, exposed * 1e3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::Mask;

    /// Bytes of a small case, counted by hand: 4 ranks of 16 tokens, 2 key heads of 8 elements of 2 bytes.
    #[test]
    fn bytes_are_those_that_travel() {
        let attention = AttentionConfig { queries: 64, keys: 64, heads: 4, key_heads: 4, head_size: 8, ..AttentionConfig::default() };
        let (config, world) = (ContextParallelConfig::new(attention), WorldSize::new(4).unwrap());
        let kv = 16 * 4 * 8 * 2;
        assert_eq!(config.received(Schedule::Ring, Direction::Forward, world, 2), 3 * kv * 2);
        assert_eq!(config.received(Schedule::Gather, Direction::Backward, world, 2), 3 * kv * (2 + 4));
        // Three quarters of q, k, v and out, of which a rank has 16 rows of 4 heads.
        assert_eq!(config.received(Schedule::AllToAll, Direction::Forward, world, 2), 4 * 16 * 4 * 8 * 2 * 3 / 4);
    }

    /// The share that is seen of a sequence, against a count of its pairs.
    #[test]
    fn a_window_leaves_its_share() {
        for (mask, left, right) in [
            (Mask::Full, None, None),
            (Mask::CausalBottomRight, None, None),
            (Mask::CausalBottomRight, Some(100), None),
            (Mask::Full, Some(300), Some(50)),
            (Mask::Full, None, Some(2000)),
        ] {
            let (tokens, window) = (1000_u64, Window { left, right });
            let attention = AttentionConfig { queries: tokens, keys: tokens, head_size: 64, mask, window, ..AttentionConfig::default() };
            let last = |query: u64| if mask == Mask::Full { right.map_or(tokens, |right| query + right) } else { query };
            let sees = |query: u64, key: u64| left.is_none_or(|left| key + left >= query) && key <= last(query);
            let pairs = (0..tokens).map(|query| (0..tokens).filter(|key| sees(query, *key)).count()).sum::<usize>();
            let found = ContextParallelConfig::new(attention).seen(tokens as f64);
            assert!((found - pairs as f64 / (tokens * tokens) as f64).abs() < 2e-3, "{window:?}: {found}, {pairs} pairs");
        }
    }

    /// A causal window of less than a chunk has each chunk read by the ones that follow it alone: a rank sees two chunks of others, and the first and the last rank one.
    #[test]
    fn a_window_has_few_chunks_travel() {
        let (world, window) = (WorldSize::new(4).unwrap(), Window { left: Some(5), right: None });
        let mask = Mask::CausalBottomRight;
        let attention = AttentionConfig { queries: 64, keys: 64, heads: 4, key_heads: 4, head_size: 8, mask, ..AttentionConfig::default() };
        let all = ContextParallelConfig::new(attention);
        let some = ContextParallelConfig::new(AttentionConfig { window, ..attention });
        let received = |config: &ContextParallelConfig| config.received(Schedule::Fused, Direction::Forward, world, 2);
        assert_eq!(received(&some), received(&all) / 6 * 2);
        assert_eq!(world.ranks().map(|rank| some.chunks_read(world, rank)).collect::<Vec<_>>(), [1, 2, 2, 1]);
    }
}
