//! What is computed, and by which schedule.

use std::fmt;

use super::detour::Detour;
use super::head_group::groups_of;
use super::sections::KEYS;
use crate::attention::{AttentionConfig, GradientOutput, Layout, Mask, Output, Sink, Window};
use crate::comm::WorldSize;
use crate::runtime::{Error, Result};
use crate::thd::Partition;

/// Attention over a sequence of which each rank has a part. Begin with [`new`](Self::new).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ContextParallelConfig {
    /// The attention of the whole sequence: `queries` and `keys` count the tokens of all ranks. Each rank's tensors have the same layout, and
    /// `queries / ranks` and `keys / ranks` rows.
    pub attention: AttentionConfig,
    /// Which tokens each rank has.
    pub partition: Partition,
    /// How keys and values reach the queries in the forward pass.
    pub forward: Schedule,
    /// The same in the backward pass, in which gradients of keys and values go back.
    pub backward: Schedule,
    /// Bytes of the arena that [`Fused`](Schedule::Fused) takes at most: keys and values of all ranks, and their gradients in `f32`, which count also where the backward pass takes another schedule. Groups of key heads, a launch each, then take turns in two places: the
    /// keys of a group travel while the one before it is attended to. None: all heads in one launch. Of dense tensors of one batch; other schedules do not look at it.
    pub gathered_bytes: Option<u64>,
}

/// How the keys and values of all ranks reach the queries of all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Schedule {
    /// The one that takes the least time in this pass by a model, of those that the transport has, and that have room in its arena.
    #[default]
    Auto,
    /// Each step attends to the keys of one more rank while the next rank's keys are sent. It needs two buffers for the keys of one rank. By messages, also
    /// between hosts.
    Ring,
    /// The same steps, but each rank reads the keys from the memory of their owner. By symmetric memory.
    Pull,
    /// All keys come first, then one launch attends to them: the bits of one device.
    Gather,
    /// One launch, which waits for the keys of each rank by heads while copy engines bring them: the bits of one device. In the backward pass gradients go straight to the owner of
    /// their keys. By symmetric memory.
    Fused,
    /// Ranks trade tokens for heads: each attends with some heads to the whole sequence (Ulysses). Every option of attention on one device, and its bits. By symmetric
    /// memory, where heads are put straight to their places, or else by messages.
    AllToAll,
    /// [`AllToAll`](Self::AllToAll) among `inner` neighbours, such as those of a host, and a [`Ring`](Self::Ring) between those groups.
    Hierarchical {
        /// Ranks that trade heads; it divides the number of ranks.
        inner: WorldSize,
    },
}

impl Schedule {
    /// Whether keys are sent by their owner: such schedules share what they need.
    pub(super) fn is_by_sent_keys(&self) -> bool {
        matches!(self, Self::Ring | Self::Gather)
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Ring => f.write_str("ring"),
            Self::Pull => f.write_str("pull"),
            Self::Gather => f.write_str("gather"),
            Self::Fused => f.write_str("fused"),
            Self::AllToAll => f.write_str("all-to-all"),
            Self::Hierarchical { inner } => write!(f, "hierarchical:{}", inner.get()),
        }
    }
}

/// Buffers of an arena lie at multiples of so many bytes.
const ALIGNED: u128 = 256;
/// Buffers that [`Schedule::Pull`] takes, and [`Schedule::AllToAll`]: for each group of heads, and for all.
const OF_PULL: u128 = 4;
const OF_GROUP: u128 = 11;
const OF_ALL_HEADS: u128 = 3;
/// And [`Schedule::Fused`].
const OF_FUSED: u128 = 4;

/// Elements of a tensor of all ranks, at most: sums of several such tensors' bytes fit 64 bits.
const MOST_ELEMENTS: u128 = 1 << 48;

/// An error that names a field of the configuration and how to mend it.
pub(super) fn refuse<T>(why: String) -> Result<T> {
    Err(Error::Invalid { what: "ContextParallelConfig", why })
}

impl ContextParallelConfig {
    /// Zigzag parts, and schedules as they suit.
    pub fn new(attention: AttentionConfig) -> Self {
        Self { attention, partition: Partition::default(), forward: Schedule::Auto, backward: Schedule::Auto, gathered_bytes: None }
    }

    /// Both passes by one schedule.
    #[must_use]
    pub fn by(self, schedule: Schedule) -> Self {
        Self { forward: schedule, backward: schedule, ..self }
    }

    /// Bytes that the schedules which reach the memory of other ranks take from each rank's arena, for elements of so many bytes: [`Pull`](Schedule::Pull) has keys and values of
    /// a rank, and gradients of them in `f32` from every rank; [`AllToAll`](Schedule::AllToAll) all tensors of both passes; [`Fused`](Schedule::Fused) keys and values
    /// of all ranks, and gradients of a rank's in `f32` from every rank.
    /// With [`Auto`](Schedule::Auto) there is room for all of them. Ask for as many in [`ArenaOptions::bytes`](crate::symmetric::ArenaOptions::bytes), and for 25 signal channels an operation, of which most take fewer, in
    /// [`ArenaOptions::channels`](crate::symmetric::ArenaOptions::channels). Where fewer are left, `Auto` takes none of them, all-to-all goes by messages, and pull
    /// and fused are refused.
    pub fn arena_bytes(&self, world: WorldSize, element_bytes: u64) -> u64 {
        let asked = |schedule: &Schedule| [self.forward, self.backward].iter().any(|of| [*schedule, Schedule::Auto].contains(of));
        let schedules = [Schedule::Pull, Schedule::AllToAll, Schedule::Fused].into_iter().filter(asked);
        schedules.fold(0, |sum, schedule| self.arena_bytes_of(schedule, world, element_bytes).saturating_add(sum))
    }

    /// The same of one schedule: none, if it reaches no memory of other ranks.
    pub(super) fn arena_bytes_of(&self, schedule: Schedule, world: WorldSize, element_bytes: u64) -> u64 {
        if schedule == Schedule::Fused && self.gathered_bytes.is_some() {
            let groups = self.fused_groups(world, element_bytes).unwrap_or(1);
            return self.of_groups(groups).arena_bytes_of(schedule, world, element_bytes).saturating_mul(groups.min(2));
        }
        let AttentionConfig { layout, batches, queries, keys, heads, key_heads, head_size, .. } = self.attention;
        // Sizes that were not checked yet do not overflow.
        let [batches, queries, keys, heads, key_heads] = [batches, queries, keys, heads, key_heads].map(u128::from);
        let [head_size, value, element_bytes] = [head_size, self.attention.value_size(), element_bytes].map(u128::from);
        let (ranks, batches) = (u128::from(world.get()), if layout == Layout::Packed { 1 } else { batches });
        let product = |factors: &[u128]| factors.iter().fold(1_u128, |product, factor| product.saturating_mul(*factor));
        let (rows, key_rows) = (batches * queries / ranks, batches * keys / ranks);
        let of_keys = |key_heads: u128| product(&[key_rows, key_heads, head_size + value]);
        let of_queries = product(&[rows, heads, 2 * head_size + 3 * value]);
        // Of copies within a device, of at most one tensor at once.
        let room = |elements: u128| u128::from(Detour::room(u64::try_from(product(&[elements, element_bytes])).unwrap_or(u64::MAX)));
        let (bytes, buffers) = match schedule {
            Schedule::Pull => {
                let pulled = product(&[of_keys(key_heads), element_bytes + 4 * ranks]);
                // Batches may count as heads.
                let numbers = if self.has_numbers() { product(&[4, ranks, batches, heads]) } else { 0 };
                let room = room(product(&[key_rows, key_heads, head_size.max(value)]));
                (pulled.saturating_add(numbers).saturating_add(room), OF_PULL)
            }
            // Queries, keys and values, and their gradients; the result on its way there and back, its gradient, and two numbers for each row.
            Schedule::AllToAll => {
                let elements = of_keys(key_heads.max(ranks)).saturating_mul(2).saturating_add(of_queries);
                let traded = AttentionConfig { key_heads: (self.attention.key_heads / u64::from(world.get())).max(1), ..self.attention };
                let groups = groups_of(&traded, element_bytes as u64).len() as u64;
                let bytes = product(&[elements, element_bytes]).saturating_add(product(&[2 * 4, heads, rows + 1]));
                let tensor = product(&[batches, queries.max(keys), heads, head_size.max(value)]);
                (bytes.saturating_add(room(tensor)), OF_GROUP * u128::from(groups) + OF_ALL_HEADS)
            }
            // Of both passes: a slot of gradients in `f32` from each rank.
            Schedule::Fused => {
                let chunks = u128::from(2 * if self.is_packed() && self.has_slots() { self.attention.batches } else { 0 });
                // Of packed sequences each chunk has blocks of its own there.
                let padding = product(&[u128::from(KEYS), chunks, ranks, key_heads, head_size + value, 4]);
                let numbers = if self.has_numbers() { product(&[4, ranks, heads]) } else { 0 };
                let keys = product(&[key_rows, ranks, key_heads, head_size + value, element_bytes + 4]);
                (keys.saturating_add(padding).saturating_add(numbers), OF_FUSED)
            }
            _ => return 0,
        };
        u64::try_from(bytes.saturating_add(ALIGNED * buffers)).unwrap_or(u64::MAX)
    }

    /// What all schedules ask for.
    pub(super) fn validate(&self, world: WorldSize) -> Result<()> {
        let AttentionConfig { layout, batches, queries, keys, heads, key_heads, head_size, .. } = self.attention;
        let AttentionConfig { output, gradients, diagonals, key_parts, mask, .. } = self.attention;
        self.attention.validate()?;
        let chunks = self.partition.chunks(world);
        for (name, tokens) in [("queries", queries), ("keys", keys)] {
            if !tokens.is_multiple_of(chunks) {
                let next = tokens.next_multiple_of(chunks);
                return refuse(format!(
                    "attention.{name} is {tokens}: with {} parts on {world} it is a multiple of {chunks}; pad the sequence to {next}",
                    self.partition
                ));
            }
        }
        let (batches, ranks) = (if layout == Layout::Packed { 1 } else { batches }, world.get());
        for (name, tokens, heads) in [("queries", queries, heads), ("keys", keys, key_heads)] {
            // The numbers of dimensions are below 2^30, so their products fit 128 bits.
            let rows = u128::from(batches) * u128::from(tokens);
            let elements = rows * u128::from(heads) * u128::from(head_size + self.attention.value_size());
            // Rows of sbhd are those of one batch, whose heads are those of all.
            let counted = if layout == Layout::Sbhd { tokens.into() } else { rows };
            if counted > u128::from(u32::MAX) || elements > MOST_ELEMENTS {
                return refuse(format!(
                    "attention.{name} is {tokens}, in all {rows} rows of {heads} heads on {ranks} ranks: at most {} rows, and {MOST_ELEMENTS} elements; take fewer batches or shorter sequences",
                    u32::MAX
                ));
            }
        }
        if mask != Mask::Full && queries != keys {
            return refuse(format!(
                "attention.mask is {mask:?} with {queries} queries and {keys} keys: a causal mask needs as many keys as queries, token by token"
            ));
        }
        let left = [
            ("output", output != Output::Rounded, "Rounded: ranks merge their results themselves"),
            ("gradients", gradients != GradientOutput::Rounded, "Rounded: ranks add them up themselves"),
            ("diagonals", diagonals, "false: they follow from the parts"),
            ("key_parts", key_parts.is_some_and(|parts| parts > 1), "1 or none"),
        ];
        match left.into_iter().find(|(_, is_set, _)| *is_set) {
            Some((field, _, allowed)) => refuse(format!("attention.{field} is left at its default: {allowed}")),
            None => Ok(()),
        }
    }

    /// Whether a query sees no key after it.
    pub(super) fn is_causal(&self) -> bool {
        self.attention.mask != Mask::Full
    }

    /// The window, without a bound that the mask has.
    pub(super) fn window(&self) -> Window {
        let Window { left, right } = self.attention.window;
        Window { left, right: right.filter(|_| !self.is_causal()) }
    }

    /// Whether ranks have a share in numbers of heads: largest scores, or the gradient of a sink.
    pub(super) fn has_numbers(&self) -> bool {
        self.attention.max_logit || self.attention.sink == Sink::Learnable
    }

    /// Whether slots of a fused backward pass of packed sequences are mostly keys: each chunk has blocks of its own.
    pub(super) fn has_slots(&self) -> bool {
        self.attention.batches.saturating_mul(2 * KEYS) <= self.attention.keys
    }

    /// Whether the lengths of sequences are known on the device alone.
    pub(super) fn is_packed(&self) -> bool {
        self.attention.layout == Layout::Packed
    }
}
