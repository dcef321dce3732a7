//! Which schedule each pass takes, and why: a pure function of sizes and of what the transport has. Times are those of the model (`model`).

use std::fmt;

use oxtile_kernels::thd::MOST_ROWS;
use oxtile_tile::num::bf16;

use super::config::{ContextParallelConfig, Schedule, refuse};
use super::fused;
use crate::attention::{AttentionConfig, Layout};
use crate::comm::WorldSize;
use crate::runtime::Result;

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
    /// Whether kernels on the device can wait for keys.
    pub waits: bool,
    /// Whether the ranks are all of the arena's, whose memory lies in one range of addresses.
    pub contiguous: bool,
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

/// The schedules among which one is chosen, the better one of equals first.
const CANDIDATES: [Schedule; 5] = [Schedule::AllToAll, Schedule::Gather, Schedule::Ring, Schedule::Pull, Schedule::Fused];

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
    pub(super) fn is_in_memory(&self, schedule: Schedule, world: WorldSize, (means, size): (Means, u64)) -> bool {
        let reaches = matches!(schedule, Schedule::Pull | Schedule::AllToAll | Schedule::Fused);
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
        let AttentionConfig { heads, key_heads, queries, keys, batches, layout, .. } = self.attention;
        let ranks = u64::from(world.get());
        let too_many = || {
            // Rows of sbhd are those of one batch.
            let rows = queries.max(keys).saturating_mul(if layout == Layout::Bshd { batches } else { 1 });
            let why = || {
                format!(
                    "{rows} rows of all ranks, and arrays of steps and orders of rows count {MOST_ROWS}: take all-to-all of dense tensors, or fewer batches"
                )
            };
            (rows > MOST_ROWS.into()).then(why)
        };
        let no_messages = || "the transport has no messages: give Transport::collective or Transport::both".to_owned();
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
        let no_memory = || match means.room {
            None => Some("the transport has no memory of other ranks: give Transport::symmetric or Transport::both".to_owned()),
            Some(room) if !in_memory => Some(self.why_full(schedule, world, (room, size))),
            Some(_) => None,
        };
        match schedule {
            Schedule::Auto => None,
            Schedule::Fused if !means.waits => {
                Some("kernels that wait for keys need sm_90, and a GPU for each rank: take gather or pull".to_owned())
            }
            Schedule::Fused => fused::why_not::<bf16>(self, direction, world)
                .or_else(|| self.fused_groups(world, size).err())
                .or_else(no_memory)
                .or_else(|| {
                    let why =
                        "gradients go to all ranks of an arena in one range of addresses: take a team of all ranks in their order, and vmm, or all-to-all";
                    (direction == Direction::Backward && !means.contiguous).then(|| why.to_owned())
                }),
            Schedule::Ring if !means.messages => Some(no_messages()),
            Schedule::Ring => too_many(),
            Schedule::Pull => no_memory().or_else(too_many),
            Schedule::Gather if !means.messages => Some(no_messages()),
            Schedule::Gather => too_many(),
            Schedule::AllToAll if !means.messages && !in_memory => match means.room {
                Some(room) => Some(self.why_full(schedule, world, (room, size))),
                None => Some(no_messages()),
            },
            Schedule::AllToAll if self.is_packed() => trades(ranks).or_else(too_many),
            Schedule::AllToAll => trades(ranks),
            Schedule::Hierarchical { inner } if !ranks.is_multiple_of(inner.get().into()) => {
                Some(format!("{} neighbours do not divide {world}: take a divisor", inner.get()))
            }
            Schedule::Hierarchical { .. } if !means.grid => {
                Some("it takes messages among neighbours and between groups of them: give Transport::with_grid".to_owned())
            }
            Schedule::Hierarchical { inner } => trades(inner.get().into()).or_else(too_many),
        }
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
    use crate::attention::{Layout, Mask, Window};

    const ALL: Means = Means { messages: true, room: Some(u64::MAX), held: None, grid: true, waits: false, contiguous: false };

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

    /// One launch, where a kernel can wait and its chunks are blocks of keys; it is refused where it is asked for and cannot be.
    #[test]
    fn one_launch_is_taken_where_it_can_be() {
        let (world, waits) = (WorldSize::new(4).unwrap(), Means { waits: true, contiguous: true, ..ALL });
        for config in [config(128 << 10, 16, 16), config(128 << 10, 32, 8), config(8 << 10, 32, 8)] {
            let choose = |direction, means| config.choose(direction, world, means, 2).unwrap().schedule;
            assert_eq!(Direction::BOTH.map(|direction| choose(direction, waits)), [Schedule::Fused; 2]);
            assert_ne!(choose(Direction::Backward, Means { contiguous: false, ..waits }), Schedule::Fused);
            let error = config.by(Schedule::Fused).choose(Direction::Forward, world, ALL, 2).map(|chosen| chosen.schedule).unwrap_err();
            assert!(error.to_string().contains("sm_90"), "{error}");
        }
        // Packed sequences, 12 in 32k tokens, as measured on two H200s. Among four all-to-all moves fewer bytes, where gradients of as many key heads as query heads bind the wire.
        let (causal, full) = (Mask::CausalBottomRight, Mask::Full);
        for (mask, heads, key_heads, [two, four]) in [
            (causal, 16, 16, [Schedule::Fused, Schedule::AllToAll]),
            (full, 16, 16, [Schedule::Fused, Schedule::AllToAll]),
            (causal, 32, 8, [Schedule::Fused; 2]),
            (full, 32, 8, [Schedule::Fused; 2]),
        ] {
            let of = config(32 << 10, heads, key_heads);
            let packed = |batches| {
                let attention = AttentionConfig { layout: Layout::Packed, batches, mask, ..of.attention };
                ContextParallelConfig { attention, ..of }
            };
            for (ranks, backward) in [(2, two), (4, four)] {
                let world = WorldSize::new(ranks).unwrap();
                let choose = |batches, direction| packed(batches).choose(direction, world, waits, 2).unwrap();
                // Without a mask steps are sooner, and among four.
                let forward = if mask == full || ranks == 4 { Schedule::Pull } else { Schedule::Fused };
                for (direction, expected) in Direction::BOTH.into_iter().zip([forward, backward]) {
                    let chosen = choose(12, direction);
                    assert_eq!(chosen.schedule, expected, "{mask:?}, {heads} on {key_heads}, {ranks} ranks, {direction:?}: {}", chosen.why);
                }
                // Slots of short sequences would be padding.
                let refused = choose(2048, Direction::Backward).refused;
                assert!(
                    refused.iter().any(|(schedule, why)| *schedule == Schedule::Fused && why.contains("2048 sequences")),
                    "{refused:?}"
                );
            }
        }
        // Chunks of 125 rows.
        let odd = config(1000, 16, 16).by(Schedule::Fused);
        assert!(odd.choose(Direction::Forward, world, waits, 2).is_ok());
        let error = odd.choose(Direction::Backward, world, waits, 2).map(|chosen| chosen.schedule).unwrap_err();
        assert!(error.to_string().contains("chunks are of 125 rows"), "{error}");
    }

    /// What was the fastest in the sweep on two H200s, by 5 % or more (`context_parallel_auto_two_h200_e85a1d6e.json`).
    #[test]
    fn the_fastest_of_the_sweep_is_taken() {
        let (world, waits) = (WorldSize::new(2).unwrap(), Means { waits: true, contiguous: true, grid: false, ..ALL });
        let (causal, full, none) = (Mask::CausalBottomRight, Mask::Full, Window::default());
        let window = Window { left: Some(1024), right: None };
        let rows = [
            // One key head has few tiles of keys, each of which all queries see; a head of one device is split among tiles.
            ((8 << 10, [8, 1], 128), (causal, none), [Schedule::Fused, Schedule::AllToAll]),
            ((2 << 10, [32, 8], 64), (causal, none), [Schedule::Fused; 2]),
            ((4 << 10, [16, 16], 128), (causal, none), [Schedule::Fused; 2]),
            ((8 << 10, [16, 16], 128), (full, none), [Schedule::Fused; 2]),
            ((32 << 10, [16, 16], 64), (full, none), [Schedule::Pull, Schedule::Fused]),
            ((32 << 10, [16, 16], 128), (causal, window), [Schedule::Fused; 2]),
        ];
        for ((tokens, [heads, key_heads], head_size), (mask, window), expected) in rows {
            let attention = AttentionConfig { head_size, mask, window, ..config(tokens, heads, key_heads).attention };
            let of = ContextParallelConfig::new(attention);
            for (direction, expected) in Direction::BOTH.into_iter().zip(expected) {
                let chosen = of.choose(direction, world, waits, 2).unwrap();
                assert_eq!(chosen.schedule, expected, "{attention:?}, {direction:?}: {}", chosen.why);
            }
        }
    }

    /// What took at most 4 % longer than the fastest on four H200s, causal (`context_parallel_*_four_h200_8275a8f2.json`): ms of fused, all-to-all and pull, forward and backward.
    #[test]
    fn the_fastest_on_four_gpus_is_taken() {
        const SCHEDULES: [Schedule; 3] = [Schedule::Fused, Schedule::AllToAll, Schedule::Pull];
        let (world, waits) = (WorldSize::new(4).unwrap(), Means { waits: true, contiguous: true, grid: false, ..ALL });
        let rows = [
            ((32 << 10, [16, 16], 1), [[1.912, 2.352, 1.850], [7.212, 5.977, 6.579]]),
            ((32 << 10, [32, 8], 1), [[3.457, 3.648, 3.446], [9.859, 10.443, 11.119]]),
            ((8 << 10, [32, 8], 1), [[0.324, 0.490, 0.326], [0.731, 2.364, 1.727]]),
            ((32 << 10, [16, 16], 12), [[1.073, 1.127, 0.873], [3.092, 2.508, 3.881]]),
            ((32 << 10, [32, 8], 12), [[0.868, 1.169, 0.885], [2.282, 3.386, 3.509]]),
        ];
        for ((tokens, [heads, key_heads], batches), measured) in rows {
            let layout = if batches > 1 { Layout::Packed } else { Layout::Bshd };
            let attention = AttentionConfig { layout, batches, ..config(tokens, heads, key_heads).attention };
            for (direction, measured) in Direction::BOTH.into_iter().zip(measured) {
                let chosen = ContextParallelConfig::new(attention).choose(direction, world, waits, 2).unwrap();
                let taken = SCHEDULES.iter().position(|schedule| *schedule == chosen.schedule).expect("one that was measured");
                let fastest = measured.into_iter().fold(f64::INFINITY, f64::min);
                assert!(measured[taken] <= 1.04 * fastest, "{tokens} tokens, {heads} on {key_heads}, {direction:?}: {}", chosen.why);
            }
        }
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
}
