//! The gradients of a step: in buffers, on their way, and summed.

use std::fmt;
use std::sync::{Arc, Mutex};

use oxtile_tile::launch::DeviceViewMut;

use super::super::format::WeightFormat;
use super::super::memory::{lend, lend_first};
use super::super::weight::{Weight, WeightId};
use super::config::{GradientCarrier, GradientConfig};
use super::layout::Layout;
use super::link::Link;
use super::messages::Messages;
use super::slots::{SLOTS, Slots, slot_of};
use super::step::Steps;
use crate::comm::{Communicator, Member, Team, WorldSize};
use crate::runtime::module::{note, zero};
use crate::runtime::runtime::lock;
use crate::runtime::{Buffer, Error, Event, Result, Stream};
use crate::sum_parts::{AddParts, Addend};
use crate::symmetric::{Arena, replaced};

/// The gradients of weights whose rows are divided among the ranks of a team.
///
/// Each rank computes the whole gradient of a weight from its own tokens, in a buffer of `E`, which is `bf16` or `f32`. Copy engines put the rows to their owners. The owner adds the
/// parts of all ranks in `f32` and in the order of ranks, multiplies the sum by [`scale`](GradientConfig::scale), and adds it once to its main gradient, which is `f32`. So a
/// main gradient has the same bits in every run.
///
/// 1. All ranks of the arena make theirs ([`new`](Self::new)), which takes all memory and waits for no other rank.
/// 2. All [`open`](Self::open) it, which compares what they made.
/// 3. In each step, for each weight: write the whole gradient into its [`buffer`](Self::buffer), and [`scatter`](Self::scatter) it. The sum of a weight is enqueued when the next one
///    is scattered, so that the ranks need not be in step.
/// 4. [`finish`](Self::finish) the step: then the main gradients are complete in stream order.
///
/// All ranks scatter the same weights in one order. None of this waits on the host or allocates, and a step may be captured, the first too: name the stream of the
/// products and [`streams`](Self::streams) in [`Graph::capture`](crate::Graph::capture), and finish the step inside. Wait for a [ticket](Arena::ticket) of the stream that was
/// named to `finish`: it names a rank that did not come.
///
/// ```
/// use oxtile::comm::{EmulatedCommunicator, Team, WorldSize};
/// use oxtile::sharded::{Bf16, GradientConfig, GradientScatter, Weight};
/// use oxtile::symmetric::{Arena, ArenaOptions};
/// use oxtile::{Buffer, Result, Runtime};
/// use oxtile::kernels::copy::{CopyWords, CopyWordsArgs};
///
/// # fn main() -> Result<()> {
/// let (runtime, world) = (Runtime::checked(2)?, WorldSize::new(2).unwrap());
/// let ranks = EmulatedCommunicator::world_of(&runtime, world)?;
/// let arenas = ranks.iter().map(|rank| Arena::open(rank, ArenaOptions::default())).collect::<Result<Vec<_>>>()?;
/// let streams = ranks.iter().map(|rank| rank.device().stream()).collect::<Result<Vec<_>>>()?;
/// let weights = [Weight::new("fc1", [3, 4]), Weight::new("fc2", [4, 3])];
/// let make = |(arena, stream): (&Arena, _)| {
///     let member = Team::all(world).member(arena.rank()).unwrap();
///     GradientScatter::<f32>::new::<Bf16>(stream, arena, &member, &weights, GradientConfig::mean(world))
/// };
/// let gradients = arenas.iter().zip(&streams).map(make).collect::<Result<Vec<_>>>()?;
///
/// // In a program of one rank each of these loops is one call.
/// let product = runtime.load::<CopyWords>()?; // what computes a gradient
/// for (gradients, stream) in gradients.iter().zip(&streams) {
///     let computed = Buffer::from_slice(stream, &[2.0_f32; 12])?;
///     for id in gradients.ids().rev() {
///         let whole = gradients.buffer(id, stream)?;
///         product.launch(stream, CopyWordsArgs { source: computed.view().cast(), target: whole.cast() })?;
///         gradients.scatter(id, stream, |_| Ok(()))?;
///     }
///     gradients.finish(stream, |_| Ok(()))?;
/// }
/// for ((gradients, stream), (arena, rows)) in gradients.iter().zip(&streams).zip(arenas.iter().zip([2, 1])) {
///     arena.ticket(stream)?.wait()?;
///     let fc1 = gradients.ids().next().unwrap();
///     assert_eq!(gradients.main_grad(fc1)?.to_vec(stream)?, vec![2.0; rows * 4]);
/// }
/// # drop(gradients);
/// # let closing = arenas.into_iter().map(|arena| arena.close().unwrap()).collect::<Vec<_>>();
/// # closing.into_iter().try_for_each(|arena| arena.finish())
/// # }
/// ```
///
/// # Protocol
/// Weights take slots and buffers in turn, by their numbers: neighbours in the list of weights have different ones. The call of weight `i` comes after that of `i - 1` here.
///
/// | call | the caller's stream | the stream that sends | the stream that sums |
/// |---|---|---|---|
/// | `buffer` | after all that used the buffer, which the sum of `i - 2` is the last of | | |
/// | `scatter` | after the puts of `i - 1`, whose buffer is next | for each owner: take FREE, put its rows, set READY | take READY of all, add the own rows where they were computed and the parts of `i - 1`, set FREE |
/// | `finish` | after the last sum | | the same for the last weight |
pub struct GradientScatter<E: Addend> {
    pub(super) weights: Vec<Weight>,
    pub(super) layouts: Vec<Layout>,
    pub(super) member: Member,
    pub(super) scale: f32,
    /// None where messages carry the rows.
    arena: Option<Arena>,
    pub(super) add: AddParts<E>,
    /// Whole gradients of this rank.
    pub(super) whole: [Buffer<E>; SLOTS],
    pub(super) main: Vec<Buffer<f32>>,
    pub(super) send: Stream,
    pub(super) sum: Stream,
    /// What the ranks compare.
    note: String,
    pub(super) state: Mutex<State<E>>,
}

/// What changes from call to call.
pub(super) struct State<E> {
    pub steps: Steps,
    /// When the whole gradient of the weight that was sent last was computed; none once it is summed.
    pub written: Option<Event>,
    /// None in a world of one rank.
    pub link: Option<Box<dyn Link<E>>>,
    /// Whether the order of a step was declared.
    pub is_declared: bool,
}

impl<E: Addend> GradientScatter<E> {
    /// Takes all memory for the gradients of these weights, whose rows are divided as those of the format, and loads the kernel. Main gradients are zero, after the earlier work of
    /// `stream`. Every rank of the arena makes it, in one order with all else that it takes from the arena. Waits for no other rank.
    ///
    /// Of the arena it takes [`arena_bytes`](Self::arena_bytes) and 4 channels, on the device beside it two buffers of the largest whole gradient, and the main gradients
    /// ([`bytes`](Self::bytes)).
    ///
    /// # Errors
    /// [`Error::Invalid`] for a weight that the format cannot hold, a scale that is no finite number, slots that are too small, or a member of another world; as
    /// [`Arena::buffer`] and [`Arena::flags`]; out of memory.
    pub fn new<F: WeightFormat>(
        stream: &Stream,
        arena: &Arena,
        member: &Member,
        weights: &[Weight],
        config: GradientConfig,
    ) -> Result<Self> {
        const WHAT: &str = "GradientScatter::new";
        arena.check_member("GradientScatter::new", member)?;
        arena.check_stream(stream)?;
        config.check(WHAT)?;
        let layouts = Self::layouts::<F>(weights, member.team().size())?;
        let note = format!(
            "gradients of {} as {}, {config:?}, of {:?} by rows of {}",
            describe(weights),
            std::any::type_name::<E>(),
            member.team(),
            F::NAME
        );
        let link: Option<Box<dyn Link<E>>> = if arena.world() == WorldSize::ONE {
            None
        } else {
            let slots = Slots::take(arena, member, config.slot_elements(Self::slot_elements(&layouts), size_of::<E>() as u64)?)?;
            slots.check_stream(stream, WHAT)?;
            slots.declare(&note)?;
            Some(Box::new(slots))
        };
        Self::build(stream, (Some(arena.clone()), member.clone()), (weights, layouts), config, (note, link))
    }

    /// The same without an arena, as across hosts: the messages of a communicator carry the rows, by one all-to-all a weight, on [`streams`](Self::streams). The owner adds the parts up in
    /// the order of ranks as well, so main gradients have the same bits as by an arena; a library's reduce-scatter has an order of its own, and is not used. All ranks of the communicator
    /// make it and scatter the same weights in one order: that of the first step that no graph has is compared, and another one is an error of a later call. A step is in a graph on all of them or on none; nothing else calls the communicator meanwhile on another stream. It is of its ranks alone: for a team take
    /// [`Communicator::team`]. Instead of slots in an arena it takes as much device memory, and a buffer for rows that do not lie as their owners follow one another (experts).
    ///
    /// The communicator watches its own calls: [wait](Communicator::wait) for the stream that was named to [`finish`](Self::finish) by it.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a weight that the format cannot hold, a scale that is no finite number, or bytes of an arena; out of memory; an error of the driver.
    pub fn by_messages<F: WeightFormat, C: Communicator + Send + Sync + 'static>(
        stream: &Stream,
        comm: &Arc<C>,
        weights: &[Weight],
        config: GradientConfig,
    ) -> Result<Self> {
        const WHAT: &str = "GradientScatter::by_messages";
        config.check(WHAT)?;
        if config.arena_bytes.is_some() {
            let why = "`arena_bytes` is for slots in an arena: leave it out, messages take what their weights need".to_owned();
            return Err(Error::Invalid { what: WHAT, why });
        }
        let team = Team::all(comm.world());
        let member =
            team.member(comm.rank()).ok_or_else(|| Error::Invalid { what: WHAT, why: "the rank is not of its world".to_owned() })?;
        let layouts = Self::layouts::<F>(weights, comm.world())?;
        let link: Option<Box<dyn Link<E>>> = match comm.world() {
            WorldSize::ONE => None,
            _ => Some(Box::new(Messages::new(stream, comm, (weights, &layouts))?)),
        };
        Self::build(stream, (None, member), (weights, layouts), config, (String::new(), link))
    }

    fn build(
        stream: &Stream,
        (arena, member): (Option<Arena>, Member),
        (weights, layouts): (&[Weight], Vec<Layout>),
        config: GradientConfig,
        (note, link): (String, Option<Box<dyn Link<E>>>),
    ) -> Result<Self> {
        let device = stream.device();
        let add = AddParts::new(&device.runtime())?;
        add.prepare(&device)?;
        // What is sent where it lies includes the padding of the last shard, which is zero until another weight was there, and read by no rank.
        let sent =
            |layout: &Layout| if arena.is_none() && layout.is_in_parts() { layout.parts().max(layout.whole()) } else { layout.whole() };
        let largest = layouts.iter().map(sent).max().unwrap_or(0);
        let whole = || -> Result<Buffer<E>> {
            let buffer = Buffer::named(stream, "whole gradient", largest)?;
            arena.as_ref().map_or_else(|| zero(stream, lend(&buffer)), |_| Ok(()))?;
            Ok(buffer)
        };
        let me = member.rank().index() as usize;
        let main = layouts.iter().map(|layout| Buffer::zeros(stream, layout.part(me))).collect::<Result<_>>()?;
        Ok(Self {
            weights: weights.to_vec(),
            whole: [whole()?, whole()?],
            layouts,
            member,
            scale: config.scale,
            arena,
            add,
            main,
            send: device.urgent_stream()?,
            sum: device.urgent_stream()?,
            note,
            state: Mutex::new(State { steps: Steps::default(), written: None, link, is_declared: false }),
        })
    }

    /// Compares what the members of the team made, and tells them that the slots of this rank are empty. Waits for them. The first [`buffer`](Self::buffer) does it too, but in a
    /// graph, which cannot. Does nothing the second time, nor by messages.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for other weights, another order of them or another configuration on another rank; by messages, for another order of the first step, once that is known;
    /// ranks that do not come; [`Error::NotCapturable`].
    pub fn open(&self) -> Result<()> {
        self.open_slots(&mut lock(&self.state))
    }

    fn open_slots(&self, state: &mut State<E>) -> Result<()> {
        match &mut state.link {
            Some(link) if !self.is_alone() => link.open(&self.sum, &self.note),
            _ => Ok(()),
        }
    }

    /// The weights, in the order in which they were named.
    pub fn ids(&self) -> impl DoubleEndedIterator<Item = WeightId> + ExactSizeIterator + use<E> {
        (0..self.weights.len()).map(|weight| self.id(weight)).collect::<Vec<_>>().into_iter()
    }

    /// The memory in which the whole gradient of a weight is computed, `[experts, rows, columns]`: the same at every call. So a product may be bound to it before the first step. It
    /// is written between [`buffer`](Self::buffer) and [`scatter`](Self::scatter) alone: other weights have the same memory in their turn, and what is written at another time spoils
    /// their gradients.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a weight of another set.
    pub fn target(&self, id: WeightId) -> Result<DeviceViewMut<'_, E>> {
        let weight = self.index("GradientScatter::target", id)?;
        Ok(lend_first(&self.whole[slot_of(weight)], self.layouts[weight].whole()))
    }

    /// Begins a step whose sums replace what the main gradients hold: they have the bits that they would have after [`zero_grads`](Self::zero_grads), and are written once and not read. It is
    /// for the first step (micro-batch) after the optimizer's; steps that are begun by [`buffer`](Self::buffer) alone add to the main gradients. Those of weights that the step does not scatter
    /// are zero in the end. May be captured with the step: then each replay of the graph replaces them.
    ///
    /// # Errors
    /// [`Error::Invalid`] inside of a step; as [`open`](Self::open), the first time; what ended the arena.
    pub fn replace_grads(&self, compute: &Stream) -> Result<()> {
        const WHAT: &str = "GradientScatter::replace_grads";
        let state = &mut *lock(&self.state);
        let capture = self.capture(WHAT, compute)?;
        self.open_slots(state)?;
        state.steps.replace(capture).map_err(|why| Error::Invalid { what: WHAT, why })?;
        self.begin_sums()
    }

    /// Fails where a buffer of another length was assigned to a main gradient: the other ranks send parts of this one's.
    fn check_main(&self, what: &'static str) -> Result<()> {
        let me = self.member.rank().index() as usize;
        match self.main.iter().zip(&self.layouts).all(|(main, layout)| main.len() == layout.part(me)) {
            true => Ok(()),
            false => Err(replaced(what, "what main_grad_mut lends, of another length")),
        }
    }

    /// The sums of a step come after what has read the main gradients, and not after what is enqueued there from now on.
    fn begin_sums(&self) -> Result<()> {
        note(&self.sum, &self.main.iter().map(|main| lend(main).access("main gradient")).collect::<Vec<_>>())
    }

    /// Later work of `compute` may write the whole gradient of a weight, all elements of it, into what this returns. Then [`scatter`](Self::scatter) it. What was there
    /// before is not kept. May be captured.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a weight of another set, one that was scattered in this step already, a second buffer while one is out, or where a buffer of another length was assigned to a main gradient; as [`open`](Self::open), the first time;
    /// what ended the arena.
    pub fn buffer(&self, id: WeightId, compute: &Stream) -> Result<DeviceViewMut<'_, E>> {
        const WHAT: &str = "GradientScatter::buffer";
        let (weight, state) = (self.index(WHAT, id)?, &mut *lock(&self.state));
        let capture = self.capture(WHAT, compute)?;
        self.check_main(WHAT)?;
        self.open_slots(state)?;
        let begins = state.steps.is_between();
        state.steps.give(&self.weights, weight, capture).map_err(|why| Error::Invalid { what: WHAT, why })?;
        if begins {
            self.begin_sums()?;
        }
        let room = self.make_room(state, weight);
        self.ended(WHAT, room)?;
        let whole = lend_first(&self.whole[slot_of(weight)], self.layouts[weight].whole());
        note(compute, &[whole.access("gradient")])?;
        Ok(whole)
    }

    /// Sends the rows of a gradient to their owners, after the work of `compute` so far, and adds up that of the weight before, which `hook` is then told of: once a step for each
    /// weight, when its sum was enqueued. What the hook enqueues on [`main_grad`](Self::main_grad) comes after the sum, on any stream. In a graph the hook is called when the graph is
    /// captured, and not when it is replayed. May be captured.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a weight whose [`buffer`](Self::buffer) is not out, or a capture that not all streams are part of; what the hook returned; what ended the arena.
    pub fn scatter(&self, id: WeightId, compute: &Stream, hook: impl FnOnce(WeightId) -> Result<()>) -> Result<()> {
        const WHAT: &str = "GradientScatter::scatter";
        let weight = self.index(WHAT, id)?;
        let summed = {
            let state = &mut *lock(&self.state);
            let capture = self.capture(WHAT, compute)?;
            let before = state.steps.send(&self.weights, weight, capture).map_err(|why| Error::Invalid { what: WHAT, why })?;
            let done = self.exchange(state, compute, weight, before);
            self.ended(WHAT, done)?
        };
        summed.map_or(Ok(()), |weight| hook(self.id(weight)))
    }

    /// Ends a step: adds up the last weight, which `hook` is told of as by [`scatter`](Self::scatter). Later work of `stream`, which may be any stream of the device, finds the main
    /// gradients complete. May be captured.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a [`buffer`](Self::buffer) that is out; as [`scatter`](Self::scatter).
    pub fn finish(&self, stream: &Stream, hook: impl FnOnce(WeightId) -> Result<()>) -> Result<()> {
        const WHAT: &str = "GradientScatter::finish";
        let ended = {
            let state = &mut *lock(&self.state);
            let capture = self.capture(WHAT, stream)?;
            let ended = state.steps.finish(&self.weights, capture).map_err(|why| Error::Invalid { what: WHAT, why })?;
            let done = self.complete(state, stream, &ended);
            self.ended(WHAT, done)?;
            ended
        };
        ended.last.map_or(Ok(()), |weight| hook(self.id(weight)))
    }

    /// The streams that send and that sum: a graph that has a step captures them too.
    pub fn streams(&self) -> [&Stream; 2] {
        [&self.send, &self.sum]
    }

    /// What carries the rows to their owners.
    pub fn carrier(&self) -> GradientCarrier {
        match &self.arena {
            _ if self.is_alone() => GradientCarrier::Nothing,
            Some(_) => GradientCarrier::CopyEngines,
            None => GradientCarrier::Messages,
        }
    }

    /// Passes on how a call ended that all ranks make: one that failed ends the arena for the others.
    fn ended<R>(&self, what: &'static str, done: Result<R>) -> Result<R> {
        match &self.arena {
            Some(arena) => arena.or_abort(&self.send, what, done),
            None => done,
        }
    }

    fn id(&self, weight: usize) -> WeightId {
        WeightId::new(weight, &self.weights[weight])
    }

    pub(super) fn index(&self, what: &'static str, id: WeightId) -> Result<usize> {
        id.find(&self.weights, |weight| weight).map(|_| id.index()).map_err(|why| Error::Invalid { what, why })
    }

    /// The graph that is captured, of which all streams are part, or none.
    fn capture(&self, what: &'static str, stream: &Stream) -> Result<Option<u64>> {
        self.whole[0].check_stream(stream, what)?;
        let [number, send, sum] = [stream, &self.send, &self.sum].map(|stream| stream.0.capture().map(|capture| capture.number));
        if number == send && number == sum {
            return Ok(number);
        }
        let why = "one of the stream and those of the gradients is being captured: name GradientScatter::streams in Graph::capture too"
            .to_owned();
        Err(Error::Invalid { what, why })
    }
}

/// Names and shapes, in order.
fn describe(weights: &[Weight]) -> String {
    let of = |Weight { name, experts, rows, columns, .. }: &Weight| format!("{name} [{experts}, {rows}, {columns}]");
    weights.iter().map(of).collect::<Vec<_>>().join(", ")
}

impl<E: Addend> fmt::Debug for GradientScatter<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GradientScatter").field("weights", &self.weights.len()).field("member", &self.member).finish_non_exhaustive()
    }
}
