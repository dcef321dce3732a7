//! What computes a pass.

use oxtile_tile::launch::DeviceView;

use super::all_to_all::{AllToAll, Inner};
use super::carrier::Reach;
use super::config::{ContextParallelConfig, Schedule};
use super::core::{Core, Route, elements};
use super::element::ContextElement;
use super::fused_groups::FusedGroups;
use super::local::Local;
use super::mover::Mover;
use super::plan::Direction;
use super::pull::Pull;
use super::transport::Transport;
use crate::attention::{BackwardInputs, Gradients, Inputs, Outputs};
use crate::runtime::{Bound, Result, Stream};
use crate::thd::{Packed, Share};

/// Attention to keys that come from their owners, by traded heads, or in one launch.
pub(super) enum Engine<'t, T: ContextElement> {
    Core(Box<Core<'t, T>>),
    AllToAll(Box<AllToAll<'t, T>>),
    Fused(Box<FusedGroups<T>>),
}

impl<'t, T: ContextElement> Engine<'t, T> {
    /// Both passes by their schedules: one and the same, or [by sent keys](Schedule::is_by_sent_keys). Those that are to be run are named.
    pub fn new(
        stream: &Stream,
        transport: Transport<'t>,
        config: ContextParallelConfig,
        share: Share,
        schedules: [Schedule; 2],
        passes: &[Direction],
    ) -> Result<Self> {
        let schedule = schedules[0];
        match schedule {
            Schedule::AllToAll => {
                let reach = match transport.memory {
                    Some((arena, member)) => Reach::Memory(arena, member),
                    None => Reach::Messages(transport.messages_for(schedule)?),
                };
                Ok(Self::AllToAll(Box::new(AllToAll::new(stream, &config, share, 1, reach, None)?)))
            }
            Schedule::Fused => {
                let (arena, member) = transport.memory_for(schedule)?;
                Ok(Self::Fused(Box::new(FusedGroups::new(stream, arena, member, config, share, passes.contains(&Direction::Backward))?)))
            }
            Schedule::Hierarchical { inner } => {
                let (near_messages, far_messages) = transport.grid_for(schedule, share, inner)?;
                let near = Share { world: inner, rank: near_messages.rank(), ..share };
                let far = Share { world: far_messages.world(), rank: far_messages.rank(), ..share };
                let (traded, groups) = (AllToAll::<T>::traded(&config, near)?, u64::from(far.world.get()));
                let (mover, comm) = (Mover::Messages(far_messages), stream.device().urgent_stream()?);
                let core = Core::new(stream, traded, far, mover, comm, [Route::Steps; 2])?;
                Ok(Self::AllToAll(Box::new(AllToAll::new(stream, &config, near, groups, Reach::Messages(near_messages), Some(core))?)))
            }
            Schedule::Auto | Schedule::Ring | Schedule::Pull | Schedule::Gather => {
                let mover = if schedules.contains(&Schedule::Pull) {
                    let (arena, member) = transport.memory_for(Schedule::Pull)?;
                    let [_, k, v] = Local::new(&config, share).packed.whole_inputs().map(elements);
                    let size = size_of::<T>() as u64;
                    let around = config.goes_around(stream, Schedule::Pull, share.world, size).then(|| k.max(v) * size);
                    Mover::Pull(Box::new(Pull::take(stream, arena, member, [k, v], size, around)?))
                } else {
                    Mover::Messages(transport.messages_for(schedule)?)
                };
                let routes = schedules.map(|schedule| if schedule == Schedule::Gather { Route::AtOnce } else { Route::Steps });
                let comm = stream.device().urgent_stream()?;
                Ok(Self::Core(Box::new(Core::new(stream, config, share, mover, comm, routes)?)))
            }
        }
    }

    pub fn set_sequences(&self, stream: &Stream, queries: Packed<DeviceView<'_, u32>>, keys: Packed<DeviceView<'_, u32>>) -> Result<()> {
        match self {
            Self::Core(core) => core.set_sequences(stream, queries, keys),
            Self::AllToAll(all_to_all) => all_to_all.set_sequences(stream, queries, keys),
            Self::Fused(fused) => fused.set_sequences(stream, queries, keys),
        }
    }

    pub fn bind_forward<'a>(&'a self, stream: &Stream, inputs: Inputs<'a, T>, outputs: Outputs<'a, T>) -> Result<Bound<'a>> {
        match self {
            Self::Core(core) => core.bind_forward(stream, inputs, outputs),
            Self::AllToAll(all_to_all) => all_to_all.bind_forward(stream, inputs, outputs),
            Self::Fused(fused) => fused.bind_forward(stream, inputs, outputs),
        }
    }

    pub fn bind_backward<'a>(&'a self, stream: &Stream, inputs: BackwardInputs<'a, T>, gradients: Gradients<'a, T>) -> Result<Bound<'a>> {
        match self {
            Self::Core(core) => core.bind_backward(stream, inputs, gradients),
            Self::AllToAll(all_to_all) => all_to_all.bind_backward(stream, inputs, gradients),
            Self::Fused(fused) => fused.bind_backward(stream, inputs, gradients),
        }
    }

    /// Meets the ranks whose memory a pass reads.
    pub fn open(&self, stream: &Stream) -> Result<()> {
        if let Self::Fused(fused) = self {
            return fused.open(stream);
        }
        let Some(core) = self.core() else { return Ok(()) };
        core.numbers.iter().try_for_each(|numbers| numbers.open(stream))?;
        match &core.mover {
            Mover::Pull(pull) => pull.open(stream),
            Mover::Messages(_) => Ok(()),
        }
    }

    /// Fills what no pass may read before it has written it with NaN, in stream order.
    pub fn spoil(&self, stream: &Stream) -> Result<()> {
        match self {
            Self::Core(core) => core.spoil(stream),
            Self::AllToAll(all_to_all) => all_to_all.spoil(stream),
            Self::Fused(fused) => fused.spoil(stream),
        }
    }

    /// The streams that carry keys or heads.
    pub fn streams(&self) -> Vec<&Stream> {
        let own = match self {
            Self::Core(_) => Vec::new(),
            Self::AllToAll(all_to_all) => all_to_all.streams().collect(),
            Self::Fused(fused) => fused.streams().collect(),
        };
        own.into_iter().chain(self.core().map(|core| &core.comm)).collect()
    }

    fn core(&self) -> Option<&Core<'t, T>> {
        match self {
            Self::Core(core) => Some(core),
            Self::Fused(_) => None,
            Self::AllToAll(all_to_all) => match all_to_all.inner() {
                Inner::Ring(core) => Some(core),
                Inner::Alone(..) => None,
            },
        }
    }

    /// The same, to be changed by tests; none where a ring is inside of traded heads.
    pub fn core_mut(&mut self) -> Option<&mut Core<'t, T>> {
        match self {
            Self::Core(core) => Some(core),
            Self::AllToAll(_) | Self::Fused(_) => None,
        }
    }

    /// The kernels of a pass, each once, and how many launches of them there are.
    pub fn kernels(&self, direction: Direction) -> (Vec<&'static str>, u32) {
        let (mut kernels, launches) = match self {
            Self::Core(core) => core.kernels(direction),
            Self::AllToAll(all_to_all) => all_to_all.kernels(direction),
            Self::Fused(fused) => {
                let (kernel, launches) = fused.kernel(direction);
                (vec![kernel], launches)
            }
        };
        kernels.sort_unstable();
        kernels.dedup();
        (kernels, launches)
    }

    /// Bytes that this rank receives in a pass, where heads are not traded.
    pub fn received(&self, direction: Direction) -> Option<u64> {
        match self {
            Self::Core(core) => Some(core.received(direction)),
            Self::AllToAll(_) => None,
            Self::Fused(fused) => Some(fused.received(direction)),
        }
    }

    /// Device memory that some passes use, which may share it.
    pub fn memory(&self, passes: &[Direction]) -> u64 {
        match self {
            Self::Core(core) => core.memory(passes),
            Self::AllToAll(all_to_all) => all_to_all.memory(passes),
            Self::Fused(fused) => fused.memory(passes),
        }
    }
}
