//! NCCL on the machine's GPUs, a rank a thread: what every collective computes, and how failures end. Skipped where there are
//! no two GPUs or no NCCL; `OXTILE_REQUIRE=nccl` makes that a failure.

#[path = "comm/context_case.rs"]
#[expect(dead_code, reason = "arenas and packed sequences are for others")]
mod context_case;
#[path = "comm/schedules.rs"]
mod schedules;
#[path = "comm/values.rs"]
mod values;
#[path = "comm/whole_attention.rs"]
mod whole_attention;

use std::process::ExitCode;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Failed, Trial};
use oxtile::attention::{AttentionConfig, Mask, Sink, Window};
use oxtile::comm::bootstrap::{Store, threads};
use oxtile::comm::{Communicator, NcclCommunicator, NcclOptions, Rank, ReduceMax, ReduceOp, WorldSize};
use oxtile::context_parallel::{ContextParallel, Schedule, Transport};
use oxtile::num::bf16;
use oxtile::timeline::{Activity, Timeline};
use oxtile::{Buffer, Error, Graph, Result, Runtime, Stream};

use crate::context_case::{Case, Tensors};

/// The deadline of ranks that all come.
const PATIENT: Duration = Duration::from_secs(60);
/// The deadline of ranks that wait for one which does not, and until when that must have been noticed.
const SHORT: Duration = Duration::from_secs(8);
const SLACK: Duration = Duration::from_secs(1);

/// What one rank does in a test.
type Test = fn(&Member) -> Result<()>;

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let found = devices();
    let required = std::env::var("OXTILE_REQUIRE").is_ok_and(|required| required == "nccl");
    let missing = found.as_ref().err().filter(|_| !required);
    let worlds: Vec<u32> = [2, 4].into_iter().filter(|world| found.as_ref().map_or(*world == 2, |count| world <= count)).collect();
    let tests: [(&str, Test); 18] = [
        ("reductions", reductions),
        ("gathers_and_broadcasts", gathers_and_broadcasts),
        ("rings_and_exchanges", rings_and_exchanges),
        ("rings_in_a_group", |member| schedule(&schedules::Rings, member)),
        ("calls_of_every_kind_in_a_group", |member| schedule(&schedules::Together, member)),
        ("a_group_on_two_streams", |member| schedule(&schedules::TwoStreams, member)),
        ("parts_by_colour_and_key", |member| schedule(&schedules::Halves, member)),
        ("parts_by_teams", |member| schedule(&schedules::Teams, member)),
        ("misuse_of_groups", |member| schedule(&schedules::Misuse, member)),
        ("every_type_is_reduced", |member| schedule(&schedules::Dtypes, member)),
        ("a_body_that_fails", |member| schedule(&schedules::Failed, member)),
        ("attention_by_a_ring", |member| attention(member, Schedule::Ring)),
        ("attention_to_gathered_keys", |member| attention(member, Schedule::Gather)),
        ("attention_by_traded_heads", |member| attention(member, Schedule::AllToAll)),
        ("a_collective_in_a_graph", a_collective_in_a_graph),
        ("collectives_are_recorded", collectives_are_recorded),
        ("wrong_arguments_enqueue_nothing", wrong_arguments_enqueue_nothing),
        ("an_aborted_rank_returns_its_reason", an_aborted_rank_returns_its_reason),
    ];
    let mut trials = Vec::new();
    for &world in &worlds {
        for (name, test) in tests {
            trials.push(Trial::test(format!("{name}::{world}"), move || run(world, PATIENT, test)));
        }
    }
    trials.push(Trial::test("a_rank_that_never_joins", || a_rank_that_never_joins().map_err(Failed::from)));
    trials.push(Trial::test("calls_that_differ_are_named", || calls_that_differ().map_err(Failed::from)));
    trials.push(Trial::test("a_rank_that_stays_away", || a_rank_that_stays_away().map_err(Failed::from)));
    if let Some(reason) = missing {
        eprintln!("nccl: {} tests skipped: {reason}", trials.len());
    }
    let trials = trials.into_iter().map(|trial| trial.with_ignored_flag(missing.is_some())).collect();
    // One at a time: each uses all GPUs.
    libtest_mimic::run(&Arguments { test_threads: Some(1), ..arguments }, trials).exit_code()
}

/// How many GPUs there are, if at least two, and NCCL.
fn devices() -> std::result::Result<u32, String> {
    let count = Runtime::cuda().map_err(|error| error.to_string())?.device_count();
    let version = NcclCommunicator::version().map_err(|error| error.to_string())?;
    eprintln!("{version}, {count} GPU(s)");
    if count < 2 { Err("there is one GPU: two ranks need two".into()) } else { Ok(count) }
}

/// A place where ranks that are threads wait for each other on the host. What takes memory, loads kernels or waits on the host may stand until the kernels of
/// every device are done: no rank may do so while the kernels of another wait for it.
struct Meeting {
    world: u32,
    /// The ranks that have come, of all meetings together.
    come: Mutex<u32>,
    all: Condvar,
}

impl Meeting {
    fn new(world: WorldSize) -> Arc<Self> {
        Arc::new(Self { world: world.get(), come: Mutex::default(), all: Condvar::new() })
    }

    /// Waits until all ranks have come as often as this one.
    fn wait(&self) {
        let mut come = self.come.lock().unwrap_or_else(PoisonError::into_inner);
        *come += 1;
        self.all.notify_all();
        let needed = come.next_multiple_of(self.world);
        let (come, late) = self.all.wait_timeout_while(come, PATIENT, |come| *come < needed).unwrap_or_else(PoisonError::into_inner);
        assert!(!late.timed_out(), "{} of {needed} ranks came to a meeting within {PATIENT:?}", *come);
    }
}

/// What a rank begins with.
#[derive(Clone)]
struct Seat {
    id: oxtile::comm::UniqueId,
    rank: Rank,
    world: WorldSize,
    meeting: Arc<Meeting>,
}

/// One rank of a world and its stream.
struct Member {
    comm: NcclCommunicator,
    stream: Stream,
    meeting: Arc<Meeting>,
}

impl Member {
    fn join(seat: &Seat, deadline: Duration) -> Result<Self> {
        // A runtime each, as `NcclCommunicator` asks for.
        let device = Runtime::cuda()?.device(seat.rank.index())?;
        let options = NcclOptions { deadline, ..NcclOptions::default() };
        let comm = NcclCommunicator::join(&device, seat.id, seat.rank, seat.world, &options)?;
        Ok(Self { comm, stream: device.stream()?, meeting: Arc::clone(&seat.meeting) })
    }

    /// Waits for what this rank has enqueued, then for the other ranks.
    fn settle(&self) -> Result<()> {
        self.comm.synchronize(&self.stream)?;
        self.meeting.wait();
        Ok(())
    }

    fn rank(&self) -> u32 {
        self.comm.rank().index()
    }

    fn world(&self) -> u32 {
        self.comm.world().get()
    }

    fn check<T: oxtile::HostElement<Device = T> + oxtile::num::Pod + PartialEq + std::fmt::Debug>(
        &self,
        found: &Buffer<T>,
        expected: &[T],
    ) -> Result<()> {
        self.comm.synchronize(&self.stream)?;
        assert_eq!(found.to_vec(&self.stream)?, expected, "{}", self.comm.rank());
        Ok(())
    }
}

/// Runs a rank on a thread each; the first error of any is the result.
fn run(world: u32, deadline: Duration, test: Test) -> std::result::Result<(), Failed> {
    let results = ranks(world, |seat| Member::join(seat, deadline).and_then(|member| test(&member)));
    results?.into_iter().collect::<Result<Vec<()>>>().map(|_| ()).map_err(|error| error.to_string().into())
}

fn ranks<R: Send>(world: u32, body: impl Fn(&Seat) -> R + Sync) -> std::result::Result<Vec<R>, String> {
    let world = WorldSize::new(world).expect("at least one rank");
    let id = NcclCommunicator::unique_id().map_err(|error| error.to_string())?;
    let meeting = Meeting::new(world);
    std::thread::scope(|scope| {
        let threads: Vec<_> = world
            .ranks()
            .map(|rank| {
                let (seat, body) = (Seat { id, rank, world, meeting: Arc::clone(&meeting) }, &body);
                scope.spawn(move || body(&seat))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().map_err(|_| "a rank panicked".to_owned())).collect()
    })
}

fn reductions(member: &Member) -> Result<()> {
    let (rank, world, stream) = (member.rank(), member.world(), &member.stream);
    let triangle = world * (world - 1) / 2;
    let mut sum = Buffer::from_slice(stream, &[rank; 1000])?;
    member.comm.all_reduce(stream, &mut sum, ReduceOp::Sum)?;
    member.check(&sum, &[triangle; 1000])?;
    let mut slots = Buffer::from_slice(stream, &[rank as f32, 1.0 / (rank + 1) as f32, 0.0])?;
    member.comm.reduce_max(stream, &mut slots)?;
    member.check(&slots, &[(world - 1) as f32, 1.0, 0.0])?;
    member.comm.reduce_max(stream, &mut Buffer::zeros(stream, 0)?)?;
    let input: Vec<f64> = (0..world * 7).map(|i| f64::from(i * (rank + 1))).collect();
    let input = Buffer::from_slice(stream, &input)?;
    let mut shard = Buffer::<f64>::zeros(stream, 7)?;
    member.comm.reduce_scatter(stream, &input, &mut shard, ReduceOp::Sum)?;
    let expected: Vec<f64> = (rank * 7..rank * 7 + 7).map(|i| f64::from(i * (triangle + world))).collect();
    member.check(&shard, &expected)
}

fn gathers_and_broadcasts(member: &Member) -> Result<()> {
    let (rank, world, stream) = (member.rank(), member.world(), &member.stream);
    let shard = Buffer::from_slice(stream, &[rank as u8; 33])?;
    let mut whole = Buffer::<u8>::zeros(stream, 33 * u64::from(world))?;
    member.comm.all_gather(stream, &shard, &mut whole)?;
    let expected: Vec<u8> = (0..world).flat_map(|rank| [rank as u8; 33]).collect();
    member.check(&whole, &expected)?;
    for root in member.comm.world().ranks() {
        let mut value = Buffer::from_slice(stream, &[u64::from(rank) << 40; 5])?;
        member.comm.broadcast(stream, &mut value, root)?;
        member.check(&value, &[u64::from(root.index()) << 40; 5])?;
    }
    member.comm.barrier(stream)?;
    member.comm.synchronize(stream)
}

fn rings_and_exchanges(member: &Member) -> Result<()> {
    let (rank, world, stream) = (member.rank(), member.world(), &member.stream);
    let neighbour = |by: u32| Rank::new((rank + by) % world, member.comm.world()).expect("of this world");
    let mine = Buffer::from_slice(stream, &vec![rank; 1 << 20])?;
    let mut theirs = Buffer::<u32>::zeros(stream, 1 << 20)?;
    member.comm.exchange(stream, &[(neighbour(1), mine.view())], &[(neighbour(world - 1), theirs.view_mut())])?;
    member.check(&theirs, &vec![neighbour(world - 1).index(); 1 << 20])?;
    let parts: Vec<u32> = (0..world).flat_map(|to| [100 * rank + to; 3]).collect();
    let parts = Buffer::from_slice(stream, &parts)?;
    let mut turned = Buffer::<u32>::zeros(stream, parts.len())?;
    member.comm.all_to_all(stream, &parts, &mut turned)?;
    let expected: Vec<u32> = (0..world).flat_map(|from| [100 * from + rank; 3]).collect();
    member.check(&turned, &expected)
}

/// What the virtual cluster is asked too.
fn schedule(case: &impl schedules::Case, member: &Member) -> Result<()> {
    case.run(&member.comm, [&member.stream, &member.stream.device().stream()?])
}

/// Attention over a sequence that the ranks share, eager and as a graph, with a window and without: against the whole sequence.
fn attention(member: &Member, by: Schedule) -> Result<()> {
    let causal = AttentionConfig {
        batches: 2,
        queries: 384,
        keys: 384,
        heads: 4,
        key_heads: 4,
        head_size: 128,
        mask: Mask::CausalBottomRight,
        ..AttentionConfig::default()
    };
    let windowed =
        AttentionConfig { mask: Mask::Full, window: Window { left: Some(100), right: Some(30) }, sink: Sink::Learnable, ..causal };
    for config in [causal, windowed] {
        let case = Case::new(member.world(), config).by(by);
        let (whole, stream, rank) = (case.whole(), &member.stream, Communicator::rank(&member.comm));
        member.settle()?;
        let operation = ContextParallel::<bf16>::new(stream, Transport::collective(&member.comm), case.config)?;
        member.settle()?;
        let mut tensors = Tensors::new(&case, &whole, rank, stream)?;
        for is_backward in [false, true] {
            let mut pass =
                if is_backward { tensors.backward(&case, &operation, stream)? } else { tensors.forward(&case, &operation, stream)? };
            member.settle()?;
            pass.run(stream)?;
            member.settle()?;
        }
        case.compare(rank, &tensors.results(stream)?, &whole.solve());
        // Captured, and replayed with other inputs.
        let streams: Vec<_> = std::iter::once(stream).chain(operation.streams()).collect();
        let mut forward = tensors.forward(&case, &operation, stream)?;
        let mut graphs = vec![Graph::capture(&streams, || forward.run(stream))?];
        drop(forward);
        let mut backward = tensors.backward(&case, &operation, stream)?;
        graphs.push(Graph::capture(&streams, || backward.run(stream))?);
        drop(backward);
        for seed in 2..5 {
            let whole = Case { seed, ..case.clone() }.whole();
            tensors.renew(&case, &whole, rank, stream)?;
            member.settle()?;
            graphs.iter_mut().try_for_each(|graph| graph.replay(stream))?;
            member.settle()?;
            case.compare(rank, &tensors.results(stream)?, &whole.solve());
        }
    }
    Ok(())
}

fn a_collective_in_a_graph(member: &Member) -> Result<()> {
    let (world, stream) = (member.world(), &member.stream);
    let mut sum = Buffer::from_slice(stream, &[1_u32; 64])?;
    member.comm.all_reduce(stream, &mut sum, ReduceOp::Sum)?;
    let graph = Graph::capture(&[stream], || member.comm.all_reduce(stream, &mut sum, ReduceOp::Sum))?;
    for _ in 0..3 {
        graph.replay(stream)?;
    }
    member.check(&sum, &[world.pow(4); 64])
}

/// The process is recorded by its first rank; calls of a group are one span.
fn collectives_are_recorded(member: &Member) -> Result<()> {
    let (world, stream) = (member.world(), &member.stream);
    let timeline = if member.rank() == 0 { Some(Timeline::start(&Runtime::cuda()?)?) } else { None };
    let shard = Buffer::from_slice(stream, &[1_u8; 1 << 10])?;
    let mut whole = Buffer::<u8>::zeros(stream, u64::from(world) << 10)?;
    member.comm.barrier(stream)?;
    member.comm.all_gather(stream, &shard, &mut whole)?;
    let mut sums = [1_u32, 2].map(|value| Buffer::from_slice(stream, &[value]).expect("device memory"));
    member.comm.group(|| sums.iter_mut().try_for_each(|sum| member.comm.all_reduce(stream, sum, ReduceOp::Sum)))?;
    member.check(&sums[1], &[2 * world])?;
    let Some(timeline) = timeline else { return Ok(()) };
    let recording = timeline.finish()?;
    let collectives: Vec<_> = recording.spans.iter().filter(|s| s.rank == 0 && s.activity == Activity::Collective).collect();
    let found: Vec<_> = collectives.iter().map(|span| (span.name.as_str(), span.bytes, span.is_finished)).collect();
    let bytes = u64::from(world) << 10;
    let expected = [("all_reduce", Some(1), true), ("all_gather", Some(bytes), true), ("all_reduce + all_reduce", Some(8), true)];
    assert_eq!(found, expected);
    assert!(collectives.iter().all(|s| s.duration() > 0.0 && s.at.as_ref().is_some_and(|at| at.contains("nccl.rs:"))), "{collectives:?}");
    assert!(collectives.is_sorted_by(|a, b| a.end <= b.start), "{collectives:?}");
    Ok(())
}

fn wrong_arguments_enqueue_nothing(member: &Member) -> Result<()> {
    let (world, stream) = (member.world(), &member.stream);
    let shard = Buffer::<f32>::zeros(stream, 3)?;
    let mut whole = Buffer::<f32>::zeros(stream, 3)?;
    let error = member.comm.all_gather(stream, &shard, &mut whole).unwrap_err();
    assert!(matches!(error, Error::Length { found: 3, expected, .. } if expected == 3 * u64::from(world)), "{error}");
    let foreign = Rank::new(world, WorldSize::new(world + 1).unwrap()).unwrap();
    let error = member.comm.broadcast(stream, &mut whole, foreign).unwrap_err().to_string();
    assert!(error.starts_with("Communicator::broadcast: ") && error.contains("is not of this world"), "{error}");
    let elsewhere = Runtime::cuda()?.device(member.rank())?.stream()?;
    assert!(matches!(member.comm.barrier(&elsewhere), Err(Error::Invalid { .. })));
    member.comm.barrier(stream)?;
    member.comm.synchronize(stream)
}

fn an_aborted_rank_returns_its_reason(member: &Member) -> Result<()> {
    member.comm.barrier(&member.stream)?;
    member.comm.synchronize(&member.stream)?;
    member.comm.abort("the test ends it");
    let error = member.comm.barrier(&member.stream).unwrap_err().to_string();
    assert!(error.ends_with("was aborted: the test ends it"), "{error}");
    Ok(())
}

fn a_rank_that_never_joins() -> std::result::Result<(), String> {
    let results = ranks(2, |seat| {
        let start = Instant::now();
        let joined = (seat.rank == Rank::ZERO).then(|| Member::join(seat, SHORT).map(|_| ()));
        (joined, start.elapsed())
    })?;
    let (joined, elapsed) = &results[0];
    match joined {
        Some(Err(Error::Deadline { .. })) if *elapsed < SHORT + SLACK => Ok(()),
        other => Err(format!("rank 0 got {other:?} after {elapsed:?}")),
    }
}

/// Ranks that come together over a store. What fits goes on, in parts too; a call that differs is the same error on both, before NCCL could
/// hang in it.
fn calls_that_differ() -> std::result::Result<(), String> {
    let stores = threads(WorldSize::new(2).expect("two"), PATIENT).map_err(|error| error.to_string())?;
    let meeting = Meeting::new(WorldSize::new(2).expect("two"));
    let rank = |store: Store| -> Result<String> {
        let (rank, options) = (store.rank().index(), NcclOptions { deadline: PATIENT, compare_calls: true });
        let device = Runtime::cuda()?.device(rank)?;
        let comm = NcclCommunicator::from_store(store, &device, &options)?;
        let member = Member { stream: device.stream()?, comm, meeting: Arc::clone(&meeting) };
        let mut sum = Buffer::from_slice(&member.stream, &[rank + 1])?;
        member.comm.all_reduce(&member.stream, &mut sum, ReduceOp::Sum)?;
        member.check(&sum, &[3])?;
        let turned = member.comm.split(Some(0), 1 - rank)?.expect("a part");
        assert_eq!(turned.rank().index(), 1 - rank);
        turned.barrier(&member.stream)?;
        let mut longer = Buffer::<u32>::zeros(&member.stream, u64::from(4 + rank))?;
        let error = member.comm.all_reduce(&member.stream, &mut longer, ReduceOp::Sum).expect_err("lengths differ");
        assert!(matches!(error, Error::Mismatch { sequence: 2, .. }), "{error}");
        turned.synchronize(&member.stream)?;
        Ok(error.to_string())
    };
    let errors = std::thread::scope(|scope| {
        let threads: Vec<_> = stores.into_iter().map(|store| scope.spawn(|| rank(store))).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().map_err(|_| "a rank panicked".to_owned()))
            .collect::<std::result::Result<Vec<_>, _>>()
    })?;
    let errors = errors.into_iter().collect::<Result<Vec<_>>>().map_err(|error| error.to_string())?;
    let expected = "rank 1 called all_reduce (Sum of U32) of 20 bytes, rank 0 called all_reduce (Sum of U32) of 16 bytes";
    if errors.iter().all(|error| error.contains(expected)) { Ok(()) } else { Err(format!("{errors:?}")) }
}

/// Rank 1 leaves out a collective: rank 0 has an error within its deadline, the same again for each later call, and both can make a
/// new world.
fn a_rank_that_stays_away() -> std::result::Result<(), String> {
    let again = NcclCommunicator::unique_id().map_err(|error| error.to_string())?;
    let results = ranks(2, |seat| -> Result<()> {
        let member = Member::join(seat, SHORT)?;
        let mut sum = Buffer::from_slice(&member.stream, &[1_u32; 100])?;
        if seat.rank == Rank::ZERO {
            let start = Instant::now();
            let reduce = member.comm.all_reduce(&member.stream, &mut sum, ReduceOp::Sum);
            let error = reduce.and_then(|()| member.comm.synchronize(&member.stream)).expect_err("no rank answers");
            assert!(matches!(error, Error::Deadline { .. }), "{error}");
            assert!(start.elapsed() < SHORT + SLACK, "{:?}", start.elapsed());
            assert_eq!(member.comm.barrier(&member.stream).unwrap_err().to_string(), error.to_string());
        }
        let member = Member::join(&Seat { id: again, ..seat.clone() }, PATIENT)?;
        member.comm.all_reduce(&member.stream, &mut Buffer::from_slice(&member.stream, &[1_u32])?, ReduceOp::Sum)?;
        member.comm.synchronize(&member.stream)
    })?;
    results.into_iter().collect::<Result<Vec<()>>>().map(|_| ()).map_err(|error| error.to_string())
}
