//! Attention over a sequence that is spread over ranks, on memory that they map: each rank's part against the whole sequence in `f64`. By memory alone, and by
//! messages over memory ([`Mail`]), since NCCL refuses ranks that share a GPU.
//!
//! Both passes are graphs, captured before any call and replayed with other inputs; then two layers take turns. All ranks meet on the host before and
//! after whatever takes memory, loads kernels or waits: ranks that are threads share what the driver has of a device.

use oxtile::attention::{AttentionConfig, Layout, Mask, Sink, Window};
use oxtile::comm::{HostRank, Member, Rank, Team, WorldSize};
use oxtile::context_parallel::{ContextParallel, ContextParallelConfig, Partition, Schedule, Transport};
use oxtile::num::{bf16, f16};
use oxtile::runtime::Kind;
use oxtile::symmetric::{Arena, ArenaOptions, BackendName};
use oxtile::{Graph, Result, Stream};

use crate::context_case::{Case, Element, Tensors};
use crate::gpu::meet;
use crate::mail::Mail;
use crate::watch::{doing, settle};
use crate::whole_attention::{Results, Whole};

/// Which schedules a program runs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum By {
    /// Those that read memory of other ranks.
    Memory,
    /// Those that put heads there.
    Puts,
    /// Those that send messages.
    Messages,
}

/// Every case of a program, in order.
///
/// # Errors
/// What ended an arena.
pub fn program(rank: HostRank, options: ArenaOptions, by: By) -> Result<()> {
    let is_virtual = rank.device().runtime().kind() == Kind::Emulated;
    let ranks = rank.world().get();
    let cases = cases(ranks, by, is_virtual, &options);
    if !is_virtual {
        Side::open(&rank, &options, cases[0].clone())?.run::<f16>()?;
    }
    // Virtual ranks take a second or so for each; `tests/comm` has more of them.
    let step = if is_virtual { 2 * (ranks as usize - 1) } else { 1 };
    for case in cases.into_iter().step_by(step) {
        Side::open(&rank, &options, case)?.run::<bf16>()?;
    }
    rank.close()
}

/// Sequences are short on virtual GPUs, and longer than the tiles of kernels on others.
fn cases(ranks: u32, by: By, is_virtual: bool, options: &ArenaOptions) -> Vec<Case> {
    let scale = if is_virtual { 1 } else { 8 };
    let (tokens, heads) = (48 * scale, [4, 2]);
    let causal = AttentionConfig { mask: Mask::CausalBottomRight, ..config(tokens, heads) };
    let window = |left: u64, right: Option<u64>| Window { left: Some(left * scale), right: right.map(|right| right * scale) };
    let both_sides =
        AttentionConfig { layout: Layout::Sbhd, batches: 2, soft_cap: Some(3.0), window: window(5, Some(7)), ..config(tokens, heads) };
    let past = AttentionConfig { window: window(20, None), head_size: if is_virtual { 64 } else { 128 }, ..causal };
    let sunk = AttentionConfig { sink: Sink::OffByOne, ..config(tokens, heads) };
    let learnt = AttentionConfig { sink: Sink::Learnable, ..sunk };
    // One sequence is empty, and the last rows are in none.
    let lengths: Vec<_> = [[7, 12], [0, 0], [24, 24], [1, 12]].map(|lengths: [u64; 2]| lengths.map(|rows| rows * scale)).into();
    let (batches, rows) = (lengths.len() as u64, 60 * scale);
    let packed = |config| AttentionConfig { layout: Layout::Packed, batches, queries: rows, keys: rows, ..config };
    let case = |config: AttentionConfig, schedule| {
        let lengths = if config.layout == Layout::Packed { lengths.clone() } else { Vec::new() };
        Case { lengths, ..Case::new(ranks, config).by(schedule) }
    };
    let contiguous = |case: Case| Case { config: ContextParallelConfig { partition: Partition::Contiguous, ..case.config }, ..case };
    match by {
        By::Memory => {
            // Steps of packed sequences merge with a window, and begin and round without one.
            let steps = packed(config(tokens, heads));
            // Largest scores and gradients of sinks are numbers of heads, which ranks put too.
            let numbers = AttentionConfig { max_logit: true, ..learnt };
            let all = [packed(past), steps, past, both_sides, causal, numbers].map(|config| case(config, Schedule::Pull));
            // Chunks of whole blocks of keys, in one launch.
            let whole = 256 * u64::from(ranks);
            // Windows of less than a chunk, and of more.
            let near = AttentionConfig { window: Window { left: Some(100), right: None }, max_logit: true, ..causal };
            let far = Window { left: Some(200), right: Some(150) };
            let fused = [
                AttentionConfig { head_size: 128, ..causal },
                AttentionConfig { layout: Layout::Sbhd, batches: 2, ..config(0, heads) },
                near,
                AttentionConfig { window: far, batches: 2, ..numbers },
                AttentionConfig { head_size: 128, soft_cap: Some(2.0), sink: Sink::Learnable, ..near },
            ];
            let fused = fused.map(|config| case(AttentionConfig { queries: whole, keys: whole, ..config }, Schedule::Fused));
            // Chunks of several blocks, of which some are seen in part; and groups of heads that take turns.
            let long = AttentionConfig { queries: 3 * whole, keys: 3 * whole, heads: 8, key_heads: 4, ..near };
            let seen_in_part = case(long, Schedule::Fused);
            let bytes = seen_in_part.config.arena_bytes(seen_in_part.world(), 2);
            let capped = Case {
                config: ContextParallelConfig { gathered_bytes: Some(bytes * 51 / 100), ..seen_in_part.config },
                ..seen_in_part.clone()
            };
            let fused: Vec<_> = fused.into_iter().chain([seen_in_part, capped]).collect();
            // They want one range of addresses of all ranks, and a GPU each.
            let has_range = !options.share_devices && options.backend == BackendName::Vmm;
            let fused = fused.into_iter().filter(|_| is_virtual || has_range);
            all.into_iter().chain([contiguous(case(sunk, Schedule::Pull))]).chain(fused).collect()
        }
        By::Puts => {
            let configs = [packed(past), AttentionConfig { max_logit: true, ..past }, both_sides, sunk];
            let heads = 2 * u64::from(ranks).max(2);
            let traded =
                configs.map(|config| case(AttentionConfig { heads, key_heads: heads / 2, ..config }, Schedule::AllToAll).by_puts());
            // Two ranks have each key head.
            let shared = case(AttentionConfig { key_heads: u64::from(ranks).div_ceil(2), ..causal }, Schedule::AllToAll).by_puts();
            traded.into_iter().chain([shared]).collect()
        }
        By::Messages => {
            let inner = WorldSize::new(2).expect("not zero");
            let of_grid = [causal, packed(AttentionConfig { max_logit: true, ..causal })];
            let grid = of_grid.map(|config| case(config, Schedule::Hierarchical { inner })).into_iter().filter(|_| ranks == 4);
            let largest = AttentionConfig { max_logit: true, ..past };
            let ring = [causal, both_sides, packed(causal), largest].map(|config| case(config, Schedule::Ring));
            let gather = [largest, packed(past)].map(|config| case(config, Schedule::Gather));
            let traded = [AttentionConfig { max_logit: true, ..learnt }, packed(causal)].map(|config| case(config, Schedule::AllToAll));
            ring.into_iter().chain(gather).chain(traded).chain([case(learnt, Schedule::Pull)]).chain(grid).collect()
        }
    }
}

/// Attention to all keys.
fn config(tokens: u64, [heads, key_heads]: [u64; 2]) -> AttentionConfig {
    AttentionConfig { queries: tokens, keys: tokens, heads, key_heads, head_size: 64, mask: Mask::Full, ..AttentionConfig::default() }
}

/// Bytes of all that a rank sends to another in one call, at most.
fn room(case: &Case) -> u64 {
    let AttentionConfig { layout, batches, queries, keys, heads, key_heads, head_size, .. } = case.config.attention;
    let batches = if layout == Layout::Packed { 1 } else { batches };
    let rows = batches * queries.max(keys) / u64::from(case.ranks);
    // Gradients in `f32`; tensors of queries and of results; operations, as text.
    (rows * (3 * heads + 2 * key_heads) * head_size * size_of::<f32>() as u64 + 4096).next_multiple_of(256)
}

/// Messages of a rank: to all, and among neighbours and between groups of them.
struct Messages {
    all: Mail,
    grid: Option<[Mail; 2]>,
}

/// A rank of a case.
struct Side<'r> {
    rank: &'r HostRank,
    case: Case,
    stream: Stream,
    arena: Arena,
    member: Member,
    messages: Option<Messages>,
    /// Problems of other values, and what they come to. The last one tells ranks apart.
    wholes: Vec<(Whole, Results)>,
}

impl<'r> Side<'r> {
    fn open(rank: &'r HostRank, options: &ArenaOptions, case: Case) -> Result<Self> {
        let (me, world, stream) = (rank.rank(), rank.world(), rank.device().stream()?);
        doing(me, format!("opening its arena for {case:?}"));
        let is_learnable = case.config.attention.sink == Sink::Learnable;
        let has_messages =
            is_learnable || !(case.puts_heads() || [Schedule::Pull, Schedule::Fused].iter().any(|by| case.schedules() == [*by; 2]));
        let room = room(&case);
        let mail = if has_messages { 3 * Mail::bytes(world, room) } else { 0 };
        let arena = Arena::open(rank, ArenaOptions { bytes: case.options().bytes + mail, ..options.clone() })?;
        let member = Team::all(world).member(me).expect("of the world");
        let mail = |member: &Member| Mail::new(&arena, member, &stream, room);
        let grid = match case.config.forward {
            Schedule::Hierarchical { inner } => {
                let (first, place) = (me.index() / inner.get() * inner.get(), me.index() % inner.get());
                let outer = WorldSize::new(world.get() / inner.get()).expect("not zero");
                let team = |first, stride, size| Team::strided(world, Rank::new(first, world).expect("of the world"), stride, size);
                let [near, far] =
                    [team(first, 1, inner)?, team(place, inner.get(), outer)?].map(|team| team.member(me).expect("of its team"));
                Some([mail(&near)?, mail(&far)?])
            }
            _ => None,
        };
        let messages = if has_messages { Some(Messages { all: mail(&member)?, grid }) } else { None };
        let mut wholes = [1, 2].map(|seed| Case { seed, ..case.clone() }.whole());
        case.tell_ranks_apart(&mut wholes[1]);
        let solve = |whole: Whole| (whole.clone(), whole.solve());
        Ok(Self { rank, stream, arena, member, messages, wholes: wholes.map(solve).into(), case })
    }

    fn transport(&self) -> Transport<'_> {
        match &self.messages {
            None => Transport::symmetric(&self.arena, &self.member),
            Some(Messages { all, grid }) => match grid {
                None => Transport::both(all, &self.arena, &self.member),
                Some([near, far]) => Transport::both(all, &self.arena, &self.member).with_grid(near, far),
            },
        }
    }

    fn run<T: Element>(self) -> Result<()> {
        let operation = ContextParallel::<T>::new(&self.stream, self.transport(), self.case.config)?;
        self.replays(&operation)?;
        self.layers(&operation)?;
        drop(operation);
        self.meet("closing")?;
        let Self { arena, messages, .. } = self;
        drop(messages);
        arena.close()?.finish()
    }

    /// Waits until all ranks are here.
    fn meet(&self, next: &str) -> Result<()> {
        doing(self.rank.rank(), format!("{next} of {:?}", self.case));
        meet(self.rank)
    }

    /// Waits for what this rank has enqueued, then for the other ranks.
    fn settle(&self, next: &str) -> Result<()> {
        settle(&self.stream)?;
        self.meet(next)
    }

    fn tensors<T: Element>(&self, of: usize) -> Result<Tensors<T>> {
        Tensors::new(&self.case, &self.wholes[of].0, self.rank.rank(), &self.stream)
    }

    fn compare<T: Element>(&self, tensors: &Tensors<T>, of: usize) -> Result<()> {
        self.case.compare(self.rank.rank(), &tensors.results(&self.stream)?, &self.wholes[of].1);
        Ok(())
    }

    /// A graph of each pass, captured before any call, and replayed with other inputs. What a pass may not read is NaN before each.
    fn replays<T: Element>(&self, operation: &ContextParallel<'_, T>) -> Result<()> {
        let Self { case, stream, rank, .. } = self;
        let mut tensors = self.tensors(0)?;
        tensors.set_sequences(case, operation, stream)?;
        self.settle("binding and capturing")?;
        let streams: Vec<_> = std::iter::once(stream).chain(operation.streams()).collect();
        let mut bound = tensors.forward(case, operation, stream)?;
        let forward = Graph::capture(&streams, || bound.run(stream))?;
        drop(bound);
        let mut bound = tensors.backward(case, operation, stream)?;
        let backward = Graph::capture(&streams, || bound.run(stream))?;
        drop(bound);
        for (round, (whole, _)) in self.wholes.iter().enumerate() {
            tensors.renew(case, whole, rank.rank(), stream)?;
            case.spoil(operation, stream)?;
            self.settle("replays")?;
            // The host does not wait between the passes.
            forward.replay(stream)?;
            backward.replay(stream)?;
            self.settle("comparing replays")?;
            self.compare(&tensors, round)?;
        }
        Ok(())
    }

    /// Two layers share the operation: both forward passes, then both backward passes in the other order.
    fn layers<T: Element>(&self, operation: &ContextParallel<'_, T>) -> Result<()> {
        let Self { case, stream, .. } = self;
        let [mut one, mut two] = [self.tensors(0)?, self.tensors(1)?];
        {
            let mut passes = [one.forward(case, operation, stream)?, two.forward(case, operation, stream)?];
            case.spoil(operation, stream)?;
            self.settle("forward passes of two layers")?;
            passes.iter_mut().try_for_each(|pass| pass.run(stream))?;
            self.settle("binding backward passes of two layers")?;
        }
        {
            let mut passes = [two.backward(case, operation, stream)?, one.backward(case, operation, stream)?];
            case.spoil(operation, stream)?;
            self.settle("backward passes of two layers")?;
            passes.iter_mut().try_for_each(|pass| pass.run(stream))?;
            self.settle("comparing two layers")?;
        }
        self.compare(&one, 0)?;
        self.compare(&two, 1)
    }
}
