//! Ranks of context parallelism that end, or are late, in each phase of it: the others return an error that names the rank, in time.

use std::thread;
use std::time::{Duration, Instant};

use oxtile::attention::{AttentionConfig, Kernels, Layout};
use oxtile::comm::{Communicator, EmulatedCommunicator, Team, WorldSize};
use oxtile::context_parallel::{ContextParallel, Schedule, Transport};
use oxtile::num::bf16;
use oxtile::symmetric::{Arena, ArenaOptions};
use oxtile::{EmulatedOptions, Graph, Result, Runtime};

use crate::context_case::{Case, Tensors};
use crate::context_parallel::BASE;
use crate::support::is_long;
use crate::threads::{End, LONG, run};

/// What a rank does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// It binds tensors for the first time, which compares what ranks made.
    Bind,
    Forward,
    Backward,
    /// It adds up gradients in the backward pass, after it gave other ranks theirs.
    Sum,
    /// The same passes again.
    Again,
    /// A graph of the forward pass.
    Replay,
}

const PHASES: [Phase; 5] = [Phase::Bind, Phase::Forward, Phase::Backward, Phase::Again, Phase::Replay];

const SMALL: AttentionConfig =
    AttentionConfig { queries: 8, keys: 8, heads: 2, key_heads: 2, head_size: 8, kernels: Kernels::Portable, ..BASE };

/// The rank that ends, or is late.
const VICTIM: u32 = 1;

/// Longer than ranks take to come to a phase on a machine that has much else to do: what is late is a rank, not the machine.
const DEADLINE: Duration = Duration::from_secs(20);
/// What a phase may take beside its wait: less than a second deadline.
const MARGIN: Duration = Duration::from_secs(10);

/// One way to reach other ranks.
#[derive(Clone, Copy, Debug)]
enum Way {
    Ring,
    Pull,
    Gather,
    Heads,
    Puts,
    Fused,
    Packed,
    /// Four ranks.
    Groups,
}

const WAYS: [Way; 8] = [Way::Ring, Way::Pull, Way::Gather, Way::Heads, Way::Puts, Way::Fused, Way::Packed, Way::Groups];

impl Way {
    fn case(self) -> Case {
        let case = Case { deadline: DEADLINE, ..Case::new(2, SMALL) };
        match self {
            Self::Ring => case,
            Self::Pull => case.by(Schedule::Pull),
            Self::Gather => case.by(Schedule::Gather),
            Self::Heads => case.by(Schedule::AllToAll),
            Self::Puts => case.by_puts(),
            // Chunks of whole blocks of keys.
            Self::Fused => {
                let attention = AttentionConfig { queries: 512, keys: 512, head_size: 64, kernels: Kernels::Fastest, ..SMALL };
                Case { deadline: DEADLINE, ..Case::new(2, attention) }.by(Schedule::Fused)
            }
            Self::Packed => {
                let attention = AttentionConfig { layout: Layout::Packed, batches: 2, ..Self::Fused.case().config.attention };
                Case { lengths: vec![[500, 504], [3, 8]], deadline: DEADLINE, ..Case::new(2, attention) }.by(Schedule::Fused)
            }
            Self::Groups => {
                let inner = WorldSize::new(2).unwrap();
                Case { ranks: 4, ..case }.by(Schedule::Hierarchical { inner })
            }
        }
    }

    /// Whether an error names the victim. Of groups each rank is told which calls of teams have not begun: those of the victim's neighbour.
    fn names(self, text: &str) -> bool {
        match self {
            Self::Groups => text.contains("Team[0, 1] of 4 ranks from rank 0 to rank 1") && text.contains("only rank 0 came"),
            _ => text.contains("rank 1"),
        }
    }

    fn has_arena(self) -> bool {
        matches!(self, Self::Pull | Self::Puts | Self::Fused | Self::Packed)
    }
}

/// A rank's program; `strike` ends the victim before a phase.
fn program(way: Way, rank: &EmulatedCommunicator, phase: Phase, deadline: Duration, strike: &dyn Fn()) -> Result<()> {
    let case = way.case();
    let (whole, stream) = (case.whole(), rank.device().stream()?);
    let options = ArenaOptions { deadline, ..case.options() };
    let arena = if way.has_arena() { Some(Arena::open(rank, options)?) } else { None };
    let member = Team::all(case.world()).member(rank.rank()).expect("of the world");
    let grid = case.grid(rank)?;
    let transport = match (&arena, &grid) {
        (Some(arena), _) => Transport::symmetric(arena, &member),
        (None, Some([near, far])) => Transport::collective(rank).with_grid(near, far),
        (None, None) => Transport::collective(rank),
    };
    let mut operation = ContextParallel::<bf16>::new(&stream, transport, case.config)?;
    if phase == Phase::Sum && rank.rank().index() == VICTIM {
        operation.replace_sum(|| Box::new(|_, _, _, _, _| std::panic::resume_unwind(Box::new("meant"))));
    }
    let mut tensors = Tensors::<bf16>::new(&case, &whole, rank.rank(), &stream)?;
    tensors.set_sequences(&case, &operation, &stream)?;
    let before = |next: Phase| {
        if next == phase {
            strike();
        }
        Instant::now()
    };
    let wait = || match &arena {
        Some(arena) => arena.ticket(&stream)?.wait(),
        None => stream.synchronize(),
    };
    // The host waits after each phase; the one that fails lasts as long as it may.
    let in_time = |start: Instant, done: Result<()>| {
        done.inspect_err(|error| assert!(start.elapsed() < deadline + MARGIN, "{way:?}, {phase:?}: {error} after {:?}", start.elapsed()))
    };
    let start = before(Phase::Bind);
    in_time(start, tensors.forward(&case, &operation, &stream).map(drop))?;
    for [forward, backward] in [[Phase::Forward, Phase::Backward], [Phase::Again, Phase::Again]] {
        let start = before(forward);
        in_time(start, tensors.forward(&case, &operation, &stream)?.run(&stream).and_then(|()| wait()))?;
        let start = if backward == Phase::Backward { before(backward) } else { Instant::now() };
        in_time(start, tensors.backward(&case, &operation, &stream)?.run(&stream).and_then(|()| wait()))?;
    }
    let streams: Vec<_> = std::iter::once(&stream).chain(operation.streams()).collect();
    let mut pass = tensors.forward(&case, &operation, &stream)?;
    let graph = Graph::capture(&streams, || pass.run(&stream))?;
    drop(pass);
    graph.replay(&stream)?;
    wait()?;
    let start = before(Phase::Replay);
    in_time(start, graph.replay(&stream).and_then(|()| wait()))
}

fn check(way: Way, phase: Phase, end: End) {
    let deadline = if end == End::Stop { DEADLINE } else { LONG };
    let world = way.case().world();
    let runtime =
        Runtime::emulated_with(EmulatedOptions { devices: world.get(), patience: deadline, ..EmulatedOptions::default() }).unwrap();
    let ranks = EmulatedCommunicator::world_of(&runtime, world).unwrap();
    let start = Instant::now();
    let results = run(ranks, VICTIM as usize, end, |rank, strike| program(way, rank, phase, deadline, strike));
    for (error, _) in results {
        let text = error.to_string();
        assert!(way.names(&text), "{way:?}, {phase:?}, {end:?}: {text}");
    }
    assert!(end == End::Stop || start.elapsed() < LONG, "{way:?}, {phase:?}, {end:?} after {:?}", start.elapsed());
}

/// A rank that ends is known at once, however long the deadline.
#[test]
fn a_rank_that_ends_is_named() {
    for way in WAYS {
        PHASES.into_iter().for_each(|phase| check(way, phase, End::Panic));
    }
}

/// A rank that ends inside of a pass, after it gave gradients away and before it added up its own: the others have theirs, and name it in the next pass.
#[test]
fn a_rank_that_ends_before_its_sum_is_named() {
    [Way::Ring, Way::Pull, Way::Gather].into_iter().for_each(|way| check(way, Phase::Sum, End::Panic));
}

/// A rank that is late is named when the deadline is over; in quick runs each way in one phase, and each phase by one way.
#[test]
fn a_rank_that_is_late_is_named() {
    let all =
        WAYS.into_iter().zip(0..).flat_map(|(way, at)| PHASES.into_iter().zip(0..).map(move |(phase, of)| (way, phase, (at + of) % 5)));
    let cases: Vec<_> = all.filter(|(.., turn)| is_long() || *turn == 0).collect();
    // Side by side: they wait, mostly.
    for together in cases.chunks(WAYS.len()) {
        thread::scope(|scope| {
            for (way, phase, _) in together {
                scope.spawn(|| check(*way, *phase, End::Stop));
            }
        });
    }
}
