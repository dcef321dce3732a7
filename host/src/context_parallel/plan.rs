//! Which schedule each pass takes, and why: a pure function of sizes and of what the transport has.

use std::fmt;

use super::config::{ContextParallelConfig, Schedule, refuse};
use super::head_group::groups_of;
use crate::attention::{AttentionConfig, Layout};
use crate::comm::WorldSize;
use crate::runtime::{Kind, Result, Stream};
use crate::thd::Partition;

/// What a context-parallel operation does. It prints as a line a pass.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The forward pass.
    pub forward: PassPlan,
    /// The backward pass.
    pub backward: PassPlan,
    /// Bytes of device memory that the operation took.
    pub bytes: u64,
}

/// What a pass does.
#[derive(Clone, Debug, PartialEq)]
pub struct PassPlan {
    /// How keys reach queries; never [`Auto`](Schedule::Auto).
    pub schedule: Schedule,
    /// The attention kernels, each once.
    pub kernels: Vec<&'static str>,
    /// Their launches in a pass of this rank.
    pub launches: u32,
    /// Bytes that this rank receives in a pass.
    pub received: u64,
    /// Bytes of device memory that the pass uses. Both passes may use the same: [`Plan::bytes`] counts that once.
    pub memory: u64,
    /// Why this schedule, with the times by a model.
    pub why: String,
    /// Schedules that cannot be taken, and why.
    pub refused: Vec<(Schedule, String)>,
}

/// A schedule that is taken.
pub(super) struct Chosen {
    pub schedule: Schedule,
    /// Whether it reaches the memory of other ranks.
    pub in_memory: bool,
    pub why: String,
    /// Those that cannot be taken, each with why.
    pub refused: Vec<(Schedule, String)>,
}

/// A pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Forward,
    Backward,
}

impl Direction {
    pub const BOTH: [Self; 2] = [Self::Forward, Self::Backward];
}

/// What a transport has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Means {
    pub messages: bool,
    /// Bytes of the arena that are not taken, if there is one.
    pub room: Option<u64>,
    /// The schedule of the other pass, whose part of the arena is counted already.
    pub held: Option<Schedule>,
    pub grid: bool,
}

impl Means {
    /// What is left for the other pass.
    pub fn after(self, config: &ContextParallelConfig, chosen: &Chosen, world: WorldSize, size: u64) -> Self {
        if !chosen.in_memory {
            return self;
        }
        let taken = config.arena_bytes_of(chosen.schedule, world, size);
        Self { room: self.room.map(|room| room.saturating_sub(taken)), held: Some(chosen.schedule), ..self }
    }
}

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
    /// The share of the time of messages that kernels beside them lose, as messages take multiprocessors.
    beside: f64,
    /// Bytes a second of a device's memory, read or written.
    memory: f64,
    /// Bytes a second of copies within a device [by its engines](crate::symmetric::detour).
    around: f64,
}

const HOPPER: Rates = Rates {
    whole: [680e12, 560e12],
    steps: [0.97, 0.95],
    copies: 380e9,
    messages: 160e9,
    heads: 90e9,
    groups: 1.02,
    ends: 0.45e-3,
    beside: 0.5,
    memory: 4.2e12,
    around: 150e9,
};

/// The schedules among which one is chosen, the better one of equals first.
const CANDIDATES: [Schedule; 4] = [Schedule::AllToAll, Schedule::Gather, Schedule::Ring, Schedule::Pull];

impl ContextParallelConfig {
    /// The schedule of a pass, why, and why not others.
    pub(super) fn choose(&self, direction: Direction, world: WorldSize, means: Means, size: u64) -> Result<Chosen> {
        let asked = match direction {
            Direction::Forward => self.forward,
            Direction::Backward => self.backward,
        };
        let chosen = |schedule, why: String, refused| {
            let in_memory = self.is_in_memory(schedule, world, (means, size));
            // Messages in the place of memory are slower: the reason is stated.
            let full = means
                .room
                .filter(|_| schedule == Schedule::AllToAll && !in_memory)
                .map(|room| self.why_full(schedule, world, (room, size)));
            let why = full.map_or_else(|| why.clone(), |full| format!("{why}; by messages, as {full}"));
            Chosen { schedule, in_memory, why, refused }
        };
        if asked != Schedule::Auto {
            return match self.why_not(asked, direction, world, (means, size)) {
                Some(why) => refuse(format!("{asked} cannot be taken: {why}")),
                None => Ok(chosen(asked, format!("asked for; {}", self.times(asked, direction, world, (means, size))), Vec::new())),
            };
        }
        let mut refused = Vec::new();
        let mut possible = Vec::new();
        for schedule in CANDIDATES {
            match self.why_not(schedule, direction, world, (means, size)) {
                Some(why) => refused.push((schedule, why)),
                None => possible.push(schedule),
            }
        }
        let time = |schedule: &Schedule| self.time(*schedule, direction, world, (means, size)).total();
        let best = possible.iter().copied().min_by(|a, b| time(a).total_cmp(&time(b)));
        let Some(best) = best else {
            let all: Vec<_> = refused.iter().map(|(schedule, why)| format!("{schedule}: {why}")).collect();
            return refuse(format!("no schedule can be taken. {}", all.join(". ")));
        };
        let times: Vec<_> = possible.iter().map(|schedule| self.times(*schedule, direction, world, (means, size))).collect();
        Ok(chosen(best, times.join("; "), refused))
    }

    /// Whether a schedule reaches the memory of other ranks: where there is room for what it takes.
    fn is_in_memory(&self, schedule: Schedule, world: WorldSize, (means, size): (Means, u64)) -> bool {
        let reaches = matches!(schedule, Schedule::Pull | Schedule::AllToAll);
        let fits = |room| means.held == Some(schedule) || self.arena_bytes_of(schedule, world, size) <= room;
        reaches && means.room.is_some_and(fits)
    }

    /// Why it does not, if there is an arena.
    fn why_full(&self, schedule: Schedule, world: WorldSize, (room, size): (u64, u64)) -> String {
        let needed = self.arena_bytes_of(schedule, world, size);
        format!(
            "the arena has {room} bytes left, and it takes {needed}: open it with as many more (ArenaOptions::bytes, ContextParallelConfig::arena_bytes)"
        )
    }

    /// Why a schedule cannot be taken, and what to take instead.
    fn why_not(&self, schedule: Schedule, direction: Direction, world: WorldSize, (means, size): (Means, u64)) -> Option<String> {
        let AttentionConfig { layout, batches, heads, key_heads, max_logit, .. } = self.attention;
        let ranks = u64::from(world.get());
        let no_messages = || "the transport has no messages: give Transport::collective or Transport::both".to_owned();
        // The forward pass alone has them.
        let max_logit = max_logit && direction == Direction::Forward;
        let by_steps = || {
            let why = "max_logit is of all keys at once: take gather or all-to-all";
            max_logit.then(|| why.to_owned())
        };
        let trades = |ranks: u64| {
            if !heads.is_multiple_of(ranks) {
                return Some(format!("heads is {heads}, no multiple of {ranks} ranks that trade heads: take ring or gather"));
            }
            // Of fewer key heads than ranks, several ranks have each.
            let odd = !key_heads.is_multiple_of(ranks) && !ranks.is_multiple_of(key_heads);
            odd.then(|| {
                format!("key_heads is {key_heads}, neither a multiple nor a divisor of {ranks} ranks that trade heads: take ring or gather")
            })
        };
        let in_memory = self.is_in_memory(schedule, world, (means, size));
        match schedule {
            Schedule::Auto => None,
            Schedule::Ring if !means.messages => Some(no_messages()),
            Schedule::Ring => by_steps(),
            Schedule::Pull => match means.room {
                None => Some("the transport has no memory of other ranks: give Transport::symmetric or Transport::both".to_owned()),
                Some(room) if !in_memory => Some(self.why_full(schedule, world, (room, size))),
                Some(_) => by_steps(),
            },
            Schedule::Gather if !means.messages => Some(no_messages()),
            Schedule::Gather if max_logit && layout == Layout::Sbhd && batches > 1 => {
                Some("max_logit of layout sbhd, whose batches count as heads: take all-to-all, or layout bshd".to_owned())
            }
            Schedule::Gather => None,
            Schedule::AllToAll if !means.messages && !in_memory => match means.room {
                Some(room) => Some(self.why_full(schedule, world, (room, size))),
                None => Some(no_messages()),
            },
            Schedule::AllToAll => trades(ranks),
            Schedule::Hierarchical { inner } if !ranks.is_multiple_of(inner.get().into()) => {
                Some(format!("{} neighbours do not divide {world}: take a divisor", inner.get()))
            }
            Schedule::Hierarchical { .. } if !means.grid => {
                Some("it takes messages among neighbours and between groups of them: give Transport::with_grid".to_owned())
            }
            Schedule::Hierarchical { .. } if layout == Layout::Packed => {
                Some("packed sequences are not cut for both at once: take ring, or all-to-all".to_owned())
            }
            Schedule::Hierarchical { inner } => trades(inner.get().into()).or_else(by_steps),
        }
    }

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
            Schedule::AllToAll => trade(ranks),
            // Each rank has the tokens of its neighbours, with a share of the heads.
            Schedule::Hierarchical { inner } => {
                let inner = u64::from(inner.get());
                trade(inner) + steps(ranks / inner, kv / key_heads * key_heads.max(inner))
            }
        }
    }

    /// Whether copies within a device go [around](crate::symmetric::detour): attention beside them takes longer than they do. On the virtual cluster, whose copies take no time, they do.
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
        let seen = if self.is_causal() { 0.5 } else { 1.0 };
        let (at, times) = match direction {
            Direction::Forward => (0, 2.0),
            Direction::Backward => (1, 5.0),
        };
        let pairs = (batches * heads) as f64 * queries as f64 * keys as f64 * seen;
        pairs * products as f64 * times / f64::from(world.get()) / HOPPER.whole[at]
    }

    /// The time of a pass by the model.
    fn time(&self, schedule: Schedule, direction: Direction, world: WorldSize, (means, size): (Means, u64)) -> Time {
        let (ranks, whole) = (u64::from(world.get()), self.compute(direction, world));
        let (at, seen) = (usize::from(direction == Direction::Backward), if self.is_causal() { 0.5 } else { 1.0 });
        let received = self.received(schedule, direction, world, size) as f64;
        let [q, _, kv] = self.elements(world).map(|elements| elements as f64);
        let (share, messages) = (ranks as f64, received / HOPPER.messages);
        match schedule {
            // All keys are read and written once more, in the order of tokens; so are their gradients.
            Schedule::Gather => {
                let bytes = [2.0 * size as f64, 2.0 * size as f64 + 8.0][at];
                Time { compute: whole, exposed: messages + kv * share * bytes / HOPPER.memory }
            }
            Schedule::AllToAll if self.is_in_memory(schedule, world, (means, size)) => {
                let traded = AttentionConfig { key_heads: (self.attention.key_heads / ranks).max(1), ..self.attention };
                let wire = received / HOPPER.copies / groups_of(&traded, size) as f64;
                Time { compute: whole * HOPPER.groups, exposed: if ranks == 1 { 0.0 } else { wire + HOPPER.ends } }
            }
            Schedule::AllToAll => Time { compute: whole, exposed: received / HOPPER.heads },
            _ => {
                let is_zigzag = self.partition == Partition::Zigzag;
                // Gradients of queries are zeroed and rounded, those of keys zeroed for each rank and added up.
                let sums = [0.0, 10.0 * q + (8.0 * share + 2.0) * kv][at] / HOPPER.memory;
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
    fn times(&self, schedule: Schedule, direction: Direction, world: WorldSize, (means, size): (Means, u64)) -> String {
        let Time { compute, exposed } = self.time(schedule, direction, world, (means, size));
        let bytes = self.received(schedule, direction, world, size) as f64 / 1e6;
        format!("{schedule}: {bytes:.1} MB, {:.3} ms of which {:.3} wait", (compute + exposed) * 1e3, exposed * 1e3)
    }
}

/// Seconds by the model.
#[derive(Clone, Copy)]
struct Time {
    compute: f64,
    /// What communication adds.
    exposed: f64,
}

impl Time {
    fn total(self) -> f64 {
        self.compute + self.exposed
    }
}

impl fmt::Display for PassPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { schedule, kernels, launches, received, memory, why, .. } = self;
        let kernels = if kernels.is_empty() { "nothing to compute".to_owned() } else { kernels.join(" and ") };
        write!(f, "{schedule}, {launches} launches of {kernels}, {received} bytes received, {memory} of memory ({why})")
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { forward, backward, bytes } = self;
        write!(f, "forward: {forward}\nbackward: {backward}\nmemory: {bytes} bytes")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::Mask;

    const ALL: Means = Means { messages: true, room: Some(u64::MAX), held: None, grid: true };

    fn config(queries: u64, heads: u64, key_heads: u64) -> ContextParallelConfig {
        let mask = Mask::CausalBottomRight;
        let attention = AttentionConfig { queries, keys: queries, heads, key_heads, head_size: 128, mask, ..AttentionConfig::default() };
        ContextParallelConfig::new(attention)
    }

    fn chosen(config: &ContextParallelConfig, ranks: u32, means: Means) -> (Schedule, Vec<(Schedule, String)>) {
        let chosen = config.choose(Direction::Forward, WorldSize::new(ranks).unwrap(), means, 2).unwrap();
        (chosen.schedule, chosen.refused)
    }

    /// Steps by the memory of owners hide their wire and slow no kernel; by messages steps hide theirs where sequences are long.
    #[test]
    fn auto_takes_the_fastest_there_is() {
        let long = config(128 << 10, 16, 16);
        assert_eq!(chosen(&long, 4, ALL).0, Schedule::Pull);
        let messages = Means { room: None, grid: false, ..ALL };
        assert_eq!(chosen(&long, 4, messages).0, Schedule::Ring);
        // Between short steps nothing is hidden, and fewer bytes are sooner there.
        assert_eq!(chosen(&config(512, 16, 16), 4, messages).0, Schedule::AllToAll);
        // 6 key heads on 4 ranks cannot be traded.
        let (schedule, refused) = chosen(&config(128 << 10, 24, 6), 4, ALL);
        assert_eq!(schedule, Schedule::Pull);
        assert_eq!(refused[0].0, Schedule::AllToAll);
        assert!(refused[0].1.contains("key_heads is 6"), "{refused:?}");
        let alone = Means { messages: false, grid: false, ..ALL };
        assert_eq!(chosen(&long, 4, alone).0, Schedule::Pull);
    }

    /// A refusal names what to take instead; so does a choice that is not there.
    #[test]
    fn what_is_asked_for_is_taken_or_refused() {
        let world = WorldSize::new(4).unwrap();
        let ask = |config: ContextParallelConfig, schedule, means| config.by(schedule).choose(Direction::Backward, world, means, 2);
        let refused = |chosen: Result<Chosen>| chosen.map(|chosen| chosen.schedule).unwrap_err().to_string();
        assert_eq!(ask(config(64, 6, 2), Schedule::Ring, ALL).unwrap().schedule, Schedule::Ring);
        let error = refused(ask(config(64, 6, 2), Schedule::AllToAll, ALL));
        assert!(error.contains("heads is 6") && error.contains("ring or gather"), "{error}");
        let inner = WorldSize::new(3).unwrap();
        let error = refused(ask(config(64, 6, 6), Schedule::Hierarchical { inner }, ALL));
        assert!(error.contains("3 neighbours do not divide 4 ranks"), "{error}");
        let none = Means { messages: false, room: None, grid: false, ..ALL };
        let error = refused(config(64, 4, 4).choose(Direction::Forward, world, none, 2));
        assert!(error.contains("no schedule can be taken") && error.contains("Transport::collective"), "{error}");
    }

    /// An arena without room is no memory of other ranks: what can go by messages does, and what cannot is refused with the bytes that are missing. Both passes by one schedule take
    /// their part once.
    #[test]
    fn an_arena_without_room_is_not_taken() {
        let world = WorldSize::new(4).unwrap();
        let (long, few) = (config(128 << 10, 16, 16), Means { room: Some(1 << 20), ..ALL });
        let (schedule, refused) = chosen(&long, 4, few);
        let needed = long.arena_bytes_of(Schedule::Pull, world, 2);
        assert_eq!((schedule, refused[0].0), (Schedule::Ring, Schedule::Pull));
        assert!(
            refused[0].1.contains(&format!("1048576 bytes left, and it takes {needed}")) && refused[0].1.contains("ArenaOptions::bytes")
        );
        let asked = long.by(Schedule::AllToAll);
        let by_messages = asked.choose(Direction::Forward, world, few, 2).unwrap();
        assert!(
            !by_messages.in_memory && by_messages.why.contains("by messages, as the arena has 1048576 bytes left"),
            "{}",
            by_messages.why
        );
        let error = |means| asked.choose(Direction::Forward, world, means, 2).map(|chosen| chosen.schedule).unwrap_err().to_string();
        assert!(error(Means { messages: false, ..few }).contains("ArenaOptions::bytes"));
        // Room for one of the two.
        let room = Means { messages: false, room: Some(asked.arena_bytes_of(Schedule::AllToAll, world, 2)), ..ALL };
        let forward = asked.choose(Direction::Forward, world, room, 2).unwrap();
        let after = room.after(&asked, &forward, world, 2);
        assert_eq!(after.room, Some(0));
        assert!(forward.in_memory && asked.choose(Direction::Backward, world, after, 2).unwrap().in_memory);
        let mixed = ContextParallelConfig { backward: Schedule::Pull, ..asked };
        assert!(mixed.choose(Direction::Backward, world, after, 2).is_err());
    }

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
}
