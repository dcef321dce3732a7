//! The time of a pass by each schedule: a pure function of sizes and of measured rates.

use super::config::{ContextParallelConfig, Schedule};
use super::head_group::groups_of;
use super::pieces::Pieces;
use super::plan::{Direction, Means};
use super::sections::{KEYS, Sections};
use crate::attention::{ArrivingAttention, AttentionConfig, Layout, Window};
use crate::comm::{Rank, WorldSize};
use crate::runtime::{Kind, Stream};
use crate::thd::{Partition, Share};
use oxtile_tile::num::bf16;

/// What the model knows of devices and links: `bf16` heads on Hopper (docs/performance/attention.md), links as measured between two GPUs of one host, what passes took in the sweep of
/// `Auto` on two H200s, and five rows on four (docs/performance/context_parallel.md).
struct Rates {
    /// Operations a second of the kernels of whole sequences, in either direction: of heads of up to 64 elements, and of larger ones.
    whole: [[f64; 2]; 2],
    /// Of kernels that cap scores, of those.
    capped: [f64; 2],
    /// Of the forward kernels of steps, of those: under a causal mask and a full one, of smaller heads and of larger ones. And of the backward kernels.
    steps: [[f64; 2]; 2],
    steps_back: f64,
    /// The same of forward kernels with options, which merge every step.
    merged: f64,
    /// Operations a second of a multiprocessor that has the longest tile of keys in the backward pass, of smaller heads and of larger ones.
    tile: [f64; 2],
    /// Bytes a second into a device: by its own copies from another one's memory, by messages of keys, and by messages of heads with all that they wait for.
    copies: f64,
    messages: f64,
    heads: f64,
    /// The time of launches of groups of heads over that of one launch.
    groups: f64,
    /// The seconds that copies and flags of a traded group take beside their bytes; the seconds in which the host enqueues a group, in either direction.
    of_group: f64,
    group_calls: [f64; 2],
    /// The seconds that the first and the last group of packed sequences take beside their bytes; the time of its launches over one of all heads, in either direction: they are short.
    ends: f64,
    packed_groups: [f64; 2],
    /// The seconds that steps take beyond a pass in one launch, in either direction: launches, sums, flags; and each section of heads after the first in one launch.
    launches: [f64; 2],
    section: f64,
    /// The seconds that steps of packed sequences take beyond all else, at least: zeroing, ends of launches, flags.
    packed: f64,
    /// The time of packed sequences in one launch without a mask, over what it is by their products: steps do not have it.
    packed_full: f64,
    /// The share of the time of messages that kernels beside them lose, as messages take multiprocessors.
    beside: f64,
    /// One launch on four ranks, in either direction: how many times the time of its bytes it waits beyond all else, less this share of its products. Keys and gradients of several ranks meet there.
    several: [[f64; 2]; 2],
    /// Bytes a second of a device's memory, read or written.
    memory: f64,
    /// Bytes a second of copies within a device [by its engines](super::detour).
    around: f64,
}

const HOPPER: Rates = Rates {
    whole: [[488e12, 518e12], [680e12, 560e12]],
    capped: [0.64, 0.74],
    steps: [[1.03, 1.07], [0.99, 1.015]],
    steps_back: 0.95,
    merged: 0.87,
    tile: [4.16e12, 5.17e12],
    copies: 380e9,
    messages: 160e9,
    heads: 90e9,
    groups: 1.02,
    of_group: 0.09e-3,
    group_calls: [0.11e-3, 0.22e-3],
    ends: 0.45e-3,
    packed_groups: [1.17, 1.43],
    launches: [11e-6, 0.3e-3],
    section: 14e-6,
    packed: 0.1e-3,
    packed_full: 1.2,
    beside: 0.5,
    several: [[1.0, 0.14], [1.9, 0.21]],
    memory: 4.2e12,
    around: 150e9,
};

/// Queries of a block in the backward pass.
const BLOCK: u64 = 64;

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

/// What one launch waits for more than two ranks, where its bytes take so long and its products so long.
fn wait_for_several(ranks: u64, direction: Direction, [wire, compute]: [f64; 2]) -> f64 {
    let [times, hidden] = HOPPER.several[usize::from(direction == Direction::Backward)];
    (times * wire - hidden * compute).max(0.0) * ranks.saturating_sub(2) as f64 / 2.0
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

    /// Chunks of other ranks that a rank reads, of dense tensors.
    fn chunks_read(&self, world: WorldSize, reader: Rank) -> usize {
        let block = ArrivingAttention::<bf16>::block_of(&self.attention).unwrap_or(KEYS);
        let pieces = Pieces::new(*self, Share { world, rank: reader, partition: self.partition }, block);
        world.ranks().filter(|owner| *owner != reader).map(|owner| pieces.seen(owner, reader).count()).sum()
    }

    /// Pairs of a query and a key that are seen, of the first `rows` queries of a sequence of so many queries and keys.
    fn pairs(&self, rows: f64, [queries, keys]: [f64; 2]) -> f64 {
        let Window { left, right } = self.window();
        let (right, shift) = (if self.is_causal() { Some(0) } else { right }, keys - queries);
        // Query `i` sees keys from `i + shift - left` to `i + shift + right`, of those there are.
        let triangle = |side: f64| side.max(0.0).powi(2) / 2.0;
        let before = left.map(|left| shift - left as f64).map_or(0.0, |first| triangle(first + rows) - triangle(first));
        let after = right.map(|right| keys - shift - right as f64).map_or(0.0, |last| triangle(last) - triangle(last - rows));
        (rows * keys - before - after).max(0.0)
    }

    /// Pairs of all sequences and heads that the rank with the most of them has.
    fn most_pairs(&self, world: WorldSize) -> f64 {
        let AttentionConfig { layout, batches, queries, keys, heads, .. } = self.attention;
        // Of packed sequences the lengths are not known here: as if all were equal.
        let [queries, keys] = if layout == Layout::Packed { [queries, keys].map(|rows| rows / batches.max(1)) } else { [queries, keys] };
        let (rows, ranks) = (queries as f64, f64::from(world.get()));
        let sizes = [rows, keys as f64];
        let all = self.pairs(rows, sizes) / ranks;
        let pairs = match self.partition {
            // Without a window each rank has the same.
            Partition::Zigzag if self.window() != Window::default() && queries == keys => {
                let chunk = rows / self.partition.chunks(world) as f64;
                let of = |number: u64| self.pairs(chunk * (number + 1) as f64, sizes) - self.pairs(chunk * number as f64, sizes);
                let last = self.partition.chunks(world) - 1;
                world.ranks().map(|rank| u64::from(rank.index())).map(|rank| of(rank) + of(last - rank)).fold(all, f64::max)
            }
            _ => all,
        };
        pairs * (batches * heads) as f64
    }

    /// Whether heads are larger than 64 elements.
    fn is_wide(&self) -> usize {
        usize::from(self.attention.head_size > 64)
    }

    /// The time of the longest tile of keys in the backward pass, whose keys so many queries of so many heads see: no launch is shorter.
    fn longest(&self, queries: u64, heads: u64) -> f64 {
        let Window { left, right } = self.window();
        let right = if self.is_causal() { Some(0) } else { right };
        let near = left.zip(right).map_or(queries, |(left, right)| (left + right + KEYS).min(queries));
        let products = self.attention.head_size + self.attention.value_size();
        (near * heads * KEYS * products * 5) as f64 / HOPPER.tile[self.is_wide()]
    }

    /// Whether copies within a device go [around](super::detour): attention beside them takes longer than they do. On the virtual cluster, whose copies take no time, they do.
    pub(super) fn goes_around(&self, stream: &Stream, schedule: Schedule, world: WorldSize, size: u64) -> bool {
        stream.device().runtime().kind() == Kind::Emulated || self.hides_copies(schedule, world, size)
    }

    /// Whether attention takes longer than copies within a device by its engines.
    fn hides_copies(&self, schedule: Schedule, world: WorldSize, size: u64) -> bool {
        let [q, out, kv] = self.elements(world).map(|elements| (elements * size) as f64);
        let (ranks, compute) = (f64::from(world.get()), self.compute(Direction::Forward, world));
        let (copied, arrival) = match schedule {
            // What a rank keeps of its tokens, and all results on their way from blocks.
            Schedule::AllToAll => ((q + kv + out) / ranks + out, 0.0),
            // Before others read it, while the own keys are attended to.
            _ => (ranks * kv, kv * ranks / HOPPER.copies),
        };
        compute > copied / HOPPER.around + arrival
    }

    /// The time of all products on a rank, by the kernels of whole sequences.
    fn compute(&self, direction: Direction, world: WorldSize) -> f64 {
        let products = self.attention.head_size + self.attention.value_size();
        let (at, times) = match direction {
            Direction::Forward => (0, 2.0),
            Direction::Backward => (1, 5.0),
        };
        let capped = if self.attention.soft_cap.is_some() { HOPPER.capped[at] } else { 1.0 };
        self.most_pairs(world) * products as f64 * times / HOPPER.whole[self.is_wide()][at] / capped
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
        let AttentionConfig { batches, queries, .. } = self.attention;
        let (of_rank, group) = (queries / ranks, self.attention.heads / self.attention.key_heads.max(1));
        // Of packed sequences lengths are not known, and the forward pass has a tile for each head.
        let longest = |queries: u64, heads: u64| if at == 0 || self.is_packed() { 0.0 } else { self.longest(queries, heads) };
        let full = if at == 0 && !self.is_causal() { HOPPER.packed_full } else { 1.0 };
        match schedule {
            // All keys are read and written once more, in the order of tokens; so are their gradients.
            Schedule::Gather => {
                let bytes = [2.0 * size as f64, 2.0 * size as f64 + 8.0][at];
                let padding = if self.is_packed() { self.padding(world) * full } else { 1.0 };
                let compute = (whole * padding).max(longest(of_rank, group));
                Time { compute: compute + HOPPER.launches[at], exposed: messages + kv * share * bytes / HOPPER.memory }
            }
            // The same of packed sequences, whose chunks are padded to blocks of queries and of keys; sections are equal, and what the last one brings is attended to after it.
            Schedule::Fused if self.is_packed() => {
                let sections = Sections::new(&self.attention, self.attention.key_heads, world, size).count();
                let (padded, wire) = (whole * self.padding(world).powi(2) * full, received / HOPPER.copies);
                let (after, sums) = (padded / f64::from(sections.max(1)), [0.0, (8.0 * share + 2.0) * kv][at] / HOPPER.memory);
                let exposed = if ranks == 1 { 0.0 } else { (wire + after - padded).max(0.0) };
                // Backward it was not seen.
                let several = if at == 0 { wait_for_several(ranks, direction, [wire, padded]) } else { 0.0 };
                Time { compute: padded + sums, exposed: exposed + several }
            }
            // Keys arrive while those that came before are attended to.
            Schedule::Fused => {
                // Gradients of keys are stored for each rank, and read when they are added up.
                let sums = [0.0, (8.0 * share + 2.0) * kv][at] / HOPPER.memory;
                let wire = received / HOPPER.copies;
                let sections = Sections::new(&self.attention, batches * self.attention.key_heads, world, size).count();
                let compute = whole.max(longest(of_rank, group));
                // Groups of heads have a launch each.
                let compute = if self.fused_groups(world, size).is_ok_and(|groups| groups > 1) { compute * HOPPER.groups } else { compute };
                let exposed = (wire + HOPPER.section * f64::from(sections.saturating_sub(1)) - compute).max(0.0);
                let several = wait_for_several(ranks, direction, [wire, compute]);
                Time { compute: compute + sums, exposed: if ranks == 1 { 0.0 } else { exposed + several } }
            }
            Schedule::AllToAll if self.is_in_memory(schedule, world, (means, size)) => {
                let traded = AttentionConfig { key_heads: (self.attention.key_heads / ranks).max(1), ..self.attention };
                // The heads of the first group, and the results of the last one.
                let groups = groups_of(&traded, size);
                let (ends, count) = (groups[0] as f64 / traded.key_heads as f64, groups.len() as f64);
                let wire = received / HOPPER.copies * ends;
                if self.is_packed() {
                    return Time { compute: whole * HOPPER.packed_groups[at], exposed: if ranks == 1 { 0.0 } else { wire + HOPPER.ends } };
                }
                // A launch for each group, whose tiles are those of one device.
                let of_rank = AttentionConfig { heads: self.attention.heads / ranks, ..traded };
                let one = if self.attention.key_heads < ranks { of_rank } else { self.attention };
                let of_tile = of_rank.heads / of_rank.key_heads / if at == 1 { one.group_parts(BLOCK) } else { 1 };
                let compute = whole.max(count * longest(self.attention.queries, of_tile)) * HOPPER.groups;
                let exposed = (wire + count * HOPPER.of_group).max(count * HOPPER.group_calls[at] - compute);
                Time { compute, exposed: if ranks == 1 { 0.0 } else { exposed } }
            }
            Schedule::AllToAll => Time { compute: whole, exposed: received / HOPPER.heads },
            _ => {
                let is_zigzag = self.partition == Partition::Zigzag;
                // Gradients of queries are zeroed and rounded, those of keys zeroed for each rank and added up.
                let sums = [0.0, 10.0 * q + (8.0 * share + 2.0) * kv][at] / HOPPER.memory;
                // Steps have the queries of a chunk apart, and the keys of an owner together.
                let padded = whole * self.padding(world) * f64::midpoint(1.0, self.padding(world));
                let whole = if self.is_packed() { padded + HOPPER.packed } else { whole };
                let AttentionConfig { soft_cap, max_logit, .. } = self.attention;
                let rate = match at {
                    1 => HOPPER.steps_back,
                    _ if soft_cap.is_some() || max_logit || self.window() != Window::default() => HOPPER.merged,
                    _ => HOPPER.steps[self.is_wide()][usize::from(!self.is_causal())],
                };
                let compute = (whole / rate).max(share * longest(of_rank, group)) + HOPPER.launches[at];
                // A causal mask of contiguous parts leaves the last rank all the work.
                let compute = if self.is_causal() && !is_zigzag { 2.0 * compute } else { compute };
                let (wire, beside) = match schedule {
                    Schedule::Pull => (received / HOPPER.copies, 0.0),
                    _ => (messages, HOPPER.beside),
                };
                // The last step's gradients travel when all is computed, but for the half of the own keys that pull leaves to the end.
                let last = if at == 0 || ranks == 1 { 0.0 } else { wire * 4.0 / (size + 4) as f64 / (share - 1.0) };
                let behind = if schedule == Schedule::Pull && is_zigzag { compute / share * seen / 2.0 } else { 0.0 };
                // Keys of a step travel while those of the step before are attended to; by pull, once the owner's copy is there, which a short pass has by its multiprocessors.
                let is_hidden = schedule != Schedule::Pull || self.is_packed() || self.hides_copies(schedule, world, size);
                let hidden = if is_hidden { compute * (share - 1.0) / share } else { 0.0 };
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

    /// Pairs that are seen, against a count of them: also of fewer queries than keys, or more.
    #[test]
    fn a_window_leaves_its_share() {
        let causal = Mask::CausalBottomRight;
        for (mask, left, right, [queries, keys]) in [
            (Mask::Full, None, None, [1000, 1000]),
            (causal, None, None, [1000, 1000]),
            (causal, Some(100), None, [1000, 1000]),
            (Mask::Full, Some(300), Some(50), [1000, 1000]),
            (Mask::Full, None, Some(2000), [1000, 1000]),
            (Mask::Full, Some(100), Some(20), [200, 1000]),
            (Mask::Full, Some(100), None, [200, 1000]),
        ] {
            let window = Window { left, right };
            let attention = AttentionConfig { queries, keys, head_size: 64, mask, window, ..AttentionConfig::default() };
            let sees = |query: u64, key: u64| {
                let (place, key) = (query as i64 + keys as i64 - queries as i64, key as i64);
                let last = if mask == Mask::Full { right.map_or(i64::MAX, |right| place + right as i64) } else { place };
                left.is_none_or(|left| key + left as i64 >= place) && key <= last
            };
            let config = ContextParallelConfig::new(attention);
            for rows in [1, queries / 4, queries] {
                let pairs = (0..rows).map(|query| (0..keys).filter(|key| sees(query, *key)).count()).sum::<usize>() as f64;
                let found = config.pairs(rows as f64, [queries as f64, keys as f64]);
                assert!((found - pairs).abs() <= 2.0 * rows as f64, "{window:?}, {rows} rows: {found}, {pairs} pairs");
            }
        }
        // Far fewer keys than queries: most of these see nothing.
        let window = Window { left: Some(128), right: None };
        let attention = AttentionConfig { queries: 4096, keys: 1024, head_size: 64, window, ..AttentionConfig::default() };
        let config = ContextParallelConfig::new(attention);
        assert!((0.0..=4096.0 * 1024.0).contains(&config.pairs(4096.0, [4096.0, 1024.0])));
    }

    /// A causal window of less than a chunk has each chunk read by the ones that follow it alone: a rank sees two chunks of others, and the first and the last rank one.
    #[test]
    fn a_window_has_few_chunks_travel() {
        let (world, window) = (WorldSize::new(4).unwrap(), Window { left: Some(5), right: None });
        let mask = Mask::CausalBottomRight;
        let attention =
            AttentionConfig { queries: 1024, keys: 1024, heads: 4, key_heads: 4, head_size: 64, mask, ..AttentionConfig::default() };
        let all = ContextParallelConfig::new(attention);
        let some = ContextParallelConfig::new(AttentionConfig { window, ..attention });
        let received = |config: &ContextParallelConfig| config.received(Schedule::Fused, Direction::Forward, world, 2);
        assert_eq!(received(&some), received(&all) / 6 * 2);
        assert_eq!(world.ranks().map(|rank| some.chunks_read(world, rank)).collect::<Vec<_>>(), [1, 2, 2, 1]);
        // Where chunks are no whole blocks of keys, all of them travel.
        let [all, some] = [all, some]
            .map(|config| ContextParallelConfig { attention: AttentionConfig { queries: 800, keys: 800, ..config.attention }, ..config });
        assert_eq!(received(&some), received(&all));
    }
}
