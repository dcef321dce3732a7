//! Attention of a rank's queries to keys which come from their owners: what ring, pull and gather have in common.

use std::sync::{Arc, Mutex};

use oxtile_tile::launch::{DeviceView, DeviceViewMut};

use super::arrays::Arrays;
use super::config::ContextParallelConfig;
use super::element::{ContextElement, Sum};
use super::gathered::Gathered;
use super::launches::{Launch, Program};
use super::local::Local;
use super::memory::{Scratch, copy, spoil};
use super::mover::{Mover, Reads, is};
use super::numbers::Numbers;
use super::plan::Direction;
use super::sinks::SinkMemory;
use crate::attention::{Attention, AttentionBackward, AttentionConfig, GradientOutput, Order, Output, Sink};
use crate::runtime::runtime::lock;
use crate::runtime::{Error, Loaded, Result, Stream};
use crate::sum_parts::LargestPart;
use crate::symmetric::Rows;
use crate::tensor::Strided;
use crate::thd::{Packed, Share};
use oxtile_kernels::fill::FillRows;

/// How keys reach a rank's queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    /// Those of one owner after another.
    Steps,
    /// All of them first.
    AtOnce,
}

/// Attention of one rank's queries, each pass by its route.
pub(super) struct Core<'t, T: ContextElement> {
    pub config: ContextParallelConfig,
    pub local: Local,
    pub mover: Mover<'t>,
    /// Numbers of heads that all ranks have a share in, if there are any.
    pub numbers: Option<Numbers<'t>>,
    pub forward: Pass<T, Attention<T>>,
    pub backward: Pass<T, AttentionBackward<T>>,
    pub sum: Sum<f32, T>,
    pub largest: LargestPart,
    pub fill: Loaded<FillRows>,
    /// What a log-sum-exp begins with, if the caller does not say.
    pub nothing: Scratch<f32>,
    /// Carries keys, values and gradients.
    pub comm: Stream,
    /// Results in `f32`: of the forward pass, and the gradient of the queries.
    pub running: Scratch<f32>,
    pub gradient: Scratch<f32>,
    /// A number for each head and row.
    pub log_sum_exp: Scratch<f32>,
    pub deltas: Scratch<f32>,
    /// The largest scores of each head, of one launch of the forward pass after another.
    pub max_logit: Scratch<f32>,
    /// Keys and values without gaps.
    pub own: [Scratch<T>; 2],
    /// Those of other ranks, in turn.
    pub slots: [[Scratch<T>; 2]; 2],
    /// Their gradients, in turn.
    pub parts: [[Scratch<f32>; 2]; 2],
    /// Gradients from all ranks, in their order.
    pub returned: [Scratch<f32>; 2],
    /// Results without gaps, on their way into tensors with some.
    pub staged: Scratch<T>,
    /// What the gradient of a learnable sink takes.
    pub sink: Option<SinkMemory>,
    /// Keys and values of all ranks, for passes that have them at once.
    pub gathered: Option<Gathered<T>>,
    /// Held while a pass is enqueued: passes share all of this memory.
    pub turn: Mutex<()>,
}

/// The launches of a pass, and their kernels.
pub(super) struct Pass<T, K> {
    pub route: Route,
    pub program: Program,
    pub reads: Reads,
    pub arrays: Arrays,
    kernels: Vec<(AttentionConfig, K)>,
    element: std::marker::PhantomData<T>,
}

impl<T, K> Pass<T, K> {
    /// Chooses the launches, uploads their arrays if lengths are known, and loads the kernels.
    fn new(
        stream: &Stream,
        config: &ContextParallelConfig,
        local: &Local,
        route: Route,
        prepare: impl Fn(Program, Option<&[u32]>) -> Program,
        complete: impl Fn(AttentionConfig) -> AttentionConfig,
        load: impl Fn(AttentionConfig) -> Result<K>,
    ) -> Result<Self> {
        let of = |share: Share| -> Result<Program> {
            let program = match route {
                Route::Steps => Program::by_steps(config, share),
                Route::AtOnce => Program::at_once(share),
            };
            let arrays = Arrays::on_host(config, &Local { share, ..*local }, program.keys)?;
            Ok(prepare(program, arrays.as_ref().map(|(arrays, _)| &arrays[..])))
        };
        let program = of(local.share)?;
        let all = local.share.world.ranks().map(|rank| of(Share { rank, ..local.share })).collect::<Result<Vec<_>>>()?;
        let reads = all.iter().map(|program| local.share.world.ranks().map(|owner| program.reads(owner)).collect()).collect();
        let arrays = Arrays::new(stream, config, local, program.keys)?;
        let mut kernels: Vec<(AttentionConfig, K)> = Vec::new();
        for launch in &program.launches {
            let needed = complete(launch.config(config, local.packed, program.keys, keys_of(local, route)));
            if !kernels.iter().any(|(config, _)| *config == needed) {
                kernels.push((needed, load(needed)?));
            }
        }
        Ok(Self { route, program, reads, arrays, kernels, element: std::marker::PhantomData })
    }

    /// The kernel of a launch.
    pub fn kernel(&self, needed: AttentionConfig) -> &K {
        let found = self.kernels.iter().find(|(config, _)| *config == needed);
        &found.unwrap_or_else(|| panic!("a kernel of each launch was loaded: {needed:?}")).1
    }

    /// The kernels' names, each once.
    pub fn kernels(&self) -> impl Iterator<Item = &K> {
        self.kernels.iter().map(|(_, kernel)| kernel)
    }

    /// The launches of a step.
    pub fn of_step(&self, step: u32) -> impl Iterator<Item = &Launch> {
        self.program.launches.iter().filter(move |launch| launch.step == step)
    }
}

/// Rows of the tensors of keys that a launch reads.
fn keys_of(local: &Local, route: Route) -> u64 {
    match route {
        Route::Steps => local.packed.keys,
        Route::AtOnce => local.tokens[1],
    }
}

impl<'t, T: ContextElement> Core<'t, T> {
    /// Takes memory, and loads kernels.
    pub fn new(
        stream: &Stream,
        config: ContextParallelConfig,
        share: Share,
        mover: Mover<'t>,
        comm: Stream,
        [forward, backward]: [Route; 2],
    ) -> Result<Self> {
        let (local, runtime) = (Local::new(&config, share), stream.device().runtime());
        let passes = Passes { runtime: &runtime, config: &config, local: &local };
        let AttentionConfig { queries, heads, .. } = local.packed;
        let [q, k, v] = local.packed.whole_inputs().map(elements);
        let (out, statistics, ranks) = (elements(local.packed.whole_result()), queries * heads, u64::from(share.world.get()));
        let has = |route| [forward, backward].contains(&route);
        let of = |name, len| Scratch::<f32>::new(stream, name, len);
        // Steps alone have the keys of one rank at a time.
        let one = if has(Route::Steps) && ranks > 1 { [k, v] } else { [0, 0] };
        let given = if backward == Route::Steps { one } else { [0, 0] };
        let keys =
            |name, [k, v]: [u64; 2]| -> Result<[Scratch<T>; 2]> { Ok([Scratch::new(stream, name, k)?, Scratch::new(stream, name, v)?]) };
        let sums = |name, [k, v]: [u64; 2]| -> Result<[Scratch<f32>; 2]> { Ok([of(name, k)?, of(name, v)?]) };
        let returned = match &mover {
            Mover::Pull(pull) => pull.slots()?,
            Mover::Messages(_) => sums("gradients of all ranks", [ranks * k, ranks * v])?,
        };
        // Ranks that do not read keys of this one give no gradients.
        returned.iter().try_for_each(|slots| slots.zero(stream))?;
        let numbers = match &mover {
            _ if !config.has_numbers() => None,
            Mover::Pull(pull) => Some(pull.numbers(stream, heads)?),
            Mover::Messages(messages) => Some(Numbers::by_messages(stream, *messages, heads)?),
        };
        let forward_pass = passes.forward(stream, forward)?;
        let of_launches = if config.attention.max_logit { heads * forward_pass.program.launches.len() as u64 } else { 0 };
        let gathered = if has(Route::AtOnce) { Some(Gathered::new(stream, &config, &local, backward == Route::AtOnce)?) } else { None };
        Ok(Self {
            forward: forward_pass,
            backward: passes.backward(stream, backward)?,
            sum: T::load_sum(&runtime)?,
            largest: LargestPart::new(&runtime)?,
            fill: runtime.load()?,
            nothing: Scratch::of(crate::Buffer::from_slice(stream, &[f32::NEG_INFINITY, 0.0])?),
            running: of("running result", if forward == Route::Steps { out } else { 0 })?,
            gradient: of("gradient of queries", q)?,
            log_sum_exp: of("log-sum-exp of packed rows", statistics)?,
            deltas: of("row sums", statistics)?,
            max_logit: of("largest scores", of_launches)?,
            own: keys("own keys and values", [k, v])?,
            slots: [keys("keys and values of a rank", one)?, keys("keys and values of a rank", one)?],
            parts: [sums("gradients for a rank", given)?, sums("gradients for a rank", given)?],
            staged: Scratch::new(stream, "result without gaps", q.max(out).max(k).max(v))?,
            sink: SinkMemory::new(stream, &config, &local)?,
            returned,
            gathered,
            turn: Mutex::default(),
            config,
            local,
            mover,
            numbers,
            comm,
        })
    }

    /// The kernels of a pass, and its launches.
    pub fn kernels(&self, direction: Direction) -> (Vec<&'static str>, u32) {
        let names: Vec<_> = match direction {
            Direction::Forward => self.forward.kernels().filter_map(|kernel| kernel.choice().kernel).collect(),
            Direction::Backward => self.backward.kernels().filter_map(|kernel| kernel.choice().kernel).collect(),
        };
        let launches = match direction {
            Direction::Forward => &self.forward.program.launches,
            Direction::Backward => &self.backward.program.launches,
        };
        (names, launches.len() as u32)
    }

    /// Bytes that this rank receives in a pass: keys and values of those that it reads, and gradients of its own from those that read them.
    pub fn received(&self, direction: Direction) -> u64 {
        let (reads, is_backward) = match direction {
            Direction::Forward => (&self.forward.reads, false),
            Direction::Backward => (&self.backward.reads, true),
        };
        let [_, k, v] = self.local.packed.whole_inputs().map(elements);
        let me = self.local.share.rank;
        let others = || self.local.share.world.ranks().filter(|rank| *rank != me);
        let owners = others().filter(|owner| is(reads, me, *owner)).count() as u64;
        let readers = others().filter(|reader| is_backward && is(reads, *reader, me)).count() as u64;
        (k + v) * (owners * size_of::<T>() as u64 + readers * 4)
    }

    /// Device memory that some passes use, which may share it.
    pub fn memory(&self, passes: &[Direction]) -> u64 {
        let Self { nothing, running, gradient, log_sum_exp, deltas, max_logit, own, slots, parts, returned, staged, gathered, .. } = self;
        let sum = |numbers: &[&Scratch<f32>]| numbers.iter().map(|memory| memory.bytes()).sum::<u64>();
        let of_pull = match &self.mover {
            Mover::Pull(pull) => pull.shard_bytes(),
            Mover::Messages(_) => 0,
        };
        let always = sum(&[nothing, log_sum_exp])
            + self.numbers.as_ref().map_or(0, Numbers::bytes)
            + own.iter().chain([staged]).map(Scratch::bytes).sum::<u64>()
            + of_pull;
        let of_pass = |pass: &Direction| match pass {
            Direction::Forward => sum(&[running, max_logit]) + self.forward.arrays.bytes(),
            Direction::Backward => {
                let returning = parts.as_flattened().iter().chain(returned).map(Scratch::bytes).sum::<u64>();
                let others = self.sink.as_ref().map_or(0, SinkMemory::bytes) + gathered.as_ref().map_or(0, Gathered::gradient_bytes);
                sum(&[gradient, deltas]) + returning + others + self.backward.arrays.bytes()
            }
        };
        // Keys of other ranks lie in memory that all passes of a route share.
        let route = |pass: &Direction| match pass {
            Direction::Forward => self.forward.route,
            Direction::Backward => self.backward.route,
        };
        let keys = |of| match of {
            Route::Steps => slots.as_flattened().iter().map(Scratch::bytes).sum::<u64>(),
            Route::AtOnce => gathered.as_ref().map_or(0, Gathered::key_bytes),
        };
        let routes = [Route::Steps, Route::AtOnce].into_iter().filter(|of| passes.iter().any(|pass| route(pass) == *of));
        always + passes.iter().map(of_pass).sum::<u64>() + routes.map(keys).sum::<u64>()
    }

    /// Fills what no pass may read before it has written it with NaN, in stream order.
    pub fn spoil(&self, stream: &Stream) -> Result<()> {
        let _turn = lock(&self.turn);
        let Self { running, gradient, log_sum_exp, deltas, max_logit, own, slots, parts, staged, gathered, sink, local, .. } = self;
        let numbers = [running, gradient, log_sum_exp, deltas, max_logit].into_iter().chain(parts.as_flattened());
        numbers.chain(sink.iter().map(|sink| &sink.scores)).try_for_each(|memory| memory.spoil(stream))?;
        own.iter().chain(slots.as_flattened()).chain([staged]).try_for_each(|memory| memory.spoil(stream))?;
        gathered.iter().try_for_each(|gathered| gathered.spoil(stream))?;
        self.numbers.iter().try_for_each(|numbers| numbers.spoil(stream))?;
        // Those of ranks that do not read keys of this one stay zero.
        let readers = local.share.world.ranks().filter(|reader| is(&self.backward.reads, *reader, local.share.rank));
        readers.flat_map(|reader| self.slot(reader)).try_for_each(|slot| spoil(stream, slot))
    }

    /// Where the sequences of a batch lie, in stream order.
    pub fn set_sequences(&self, stream: &Stream, queries: Packed<DeviceView<'_, u32>>, keys: Packed<DeviceView<'_, u32>>) -> Result<()> {
        let _turn = lock(&self.turn);
        let arrays = [&self.forward.arrays, &self.backward.arrays].into_iter().chain(self.sink.as_ref().map(|sink| &sink.arrays));
        arrays.into_iter().try_for_each(|arrays| arrays.update(stream, queries, keys))?;
        match self.gathered.as_ref().and_then(|gathered| gathered.offsets.as_ref()) {
            Some(offsets) => copy(stream, keys.cu_seqlens_padded, offsets.lend()),
            None => Ok(()),
        }
    }

    /// What a launch of the forward pass computes.
    pub fn forward_config(&self, launch: &Launch) -> AttentionConfig {
        let Self { config, local, forward, .. } = self;
        complete_forward(config, forward.route, launch.config(config, local.packed, forward.program.keys, keys_of(local, forward.route)))
    }

    /// What a launch of the backward pass computes.
    pub fn backward_config(&self, launch: &Launch) -> AttentionConfig {
        let Self { config, local, backward, .. } = self;
        complete_backward(launch.config(config, local.packed, backward.program.keys, keys_of(local, backward.route)))
    }

    /// Rounds `f32` results into a tensor.
    pub fn round(&self, stream: &Stream, running: &Scratch<f32>, layout: Strided<4>, target: DeviceViewMut<'_, T>) -> Result<()> {
        self.sum(stream, running.view(), 1, layout, target)
    }

    /// Adds `count` parts into a tensor.
    pub fn sum(
        &self,
        stream: &Stream,
        parts: DeviceView<'_, f32>,
        count: u32,
        layout: Strided<4>,
        mut target: DeviceViewMut<'_, T>,
    ) -> Result<()> {
        let len = elements(layout);
        if Local::is_gapless(layout) {
            return (self.sum)(stream, parts, count, len, target);
        }
        (self.sum)(stream, parts, count, len, self.staged.lend_part(0..len))?;
        self.unstage(stream, layout, target.reborrow())
    }

    /// Copies a result without gaps into its tensor.
    pub fn unstage(&self, stream: &Stream, layout: Strided<4>, target: DeviceViewMut<'_, T>) -> Result<()> {
        let staged = self.staged.part(0..elements(layout));
        Rows::copy_all(stream, "ContextParallel, a result", staged, target, &Local::gapless(layout))
    }
}

/// Refuses a pass of which one stream is captured, and the one that carries what it needs is not.
pub(super) fn check_captures(stream: &Stream, comm: &Stream) -> Result<()> {
    match (stream.0.capture(), comm.0.capture()) {
        (None, None) => Ok(()),
        (Some(one), Some(other)) if Arc::ptr_eq(&one, &other) => Ok(()),
        _ => {
            let why = "one of the stream and those that carry keys is being captured: name ContextParallel::streams in Graph::capture too";
            Err(Error::Invalid { what: "ContextParallel", why: why.to_owned() })
        }
    }
}

/// Elements of rows of heads.
pub(super) fn elements(Strided { shape, .. }: Strided<4>) -> u64 {
    shape.iter().product()
}

/// What is the same of all launches of a forward pass.
fn complete_forward(config: &ContextParallelConfig, route: Route, launch: AttentionConfig) -> AttentionConfig {
    let launch = AttentionConfig { max_logit: config.attention.max_logit, ..launch };
    match route {
        Route::Steps => launch,
        // As on one device.
        Route::AtOnce => AttentionConfig { sink: config.attention.sink, ..launch },
    }
}

/// The same of a backward pass.
fn complete_backward(launch: AttentionConfig) -> AttentionConfig {
    AttentionConfig { gradients: GradientOutput::Added, output: Output::Rounded, ..launch }
}

/// What passes are made of.
struct Passes<'p> {
    runtime: &'p crate::Runtime,
    config: &'p ContextParallelConfig,
    local: &'p Local,
}

impl Passes<'_> {
    fn forward<T: ContextElement>(&self, stream: &Stream, route: Route) -> Result<Pass<T, Attention<T>>> {
        let complete = |launch| complete_forward(self.config, route, launch);
        let sequences = self.local.sequences();
        let prepare = |program: Program, arrays: Option<&[u32]>| {
            let program = program.without_idle(arrays, sequences);
            // Kernels with options have neither a first nor a last step; the score of a sink is there before the first one. Of packed sequences too, each query that sees a key of
            // any owner is of every launch of its half.
            let has_ends = |launch: &Launch| {
                let config = complete(launch.config(self.config, self.local.packed, program.keys, keys_of(self.local, route)));
                AttentionConfig { output: Output::Last, ..config }.choose_on::<T>(&stream.device()).is_ok()
            };
            match route {
                Route::Steps if program.launches.iter().all(has_ends) => program.with_ends(self.config.attention.sink == Sink::None),
                Route::Steps | Route::AtOnce => program,
            }
        };
        Pass::new(stream, self.config, self.local, route, prepare, complete, |config| Attention::new(self.runtime, config))
    }

    fn backward<T: ContextElement>(&self, stream: &Stream, route: Route) -> Result<Pass<T, AttentionBackward<T>>> {
        // Its launches are run one after another.
        let workspace = Arc::default();
        let load = |config| Ok(AttentionBackward::new(self.runtime, config, Order::Deterministic)?.sharing(&workspace));
        let prepare = |program: Program, arrays: Option<&[u32]>| program.backward().without_idle(arrays, self.local.sequences());
        Pass::new(stream, self.config, self.local, route, prepare, complete_backward, load)
    }
}
