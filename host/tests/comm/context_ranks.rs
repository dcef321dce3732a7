//! The ranks of a problem of context parallelism, on the virtual cluster.

use oxtile::comm::{Communicator, EmulatedCommunicator, Member, Rank, Team, WorldSize};
use oxtile::context_parallel::{ContextParallel, ContextParallelConfig, Schedule, Transport};
use oxtile::num::bf16;
use oxtile::runtime::Mode;
use oxtile::symmetric::Arena;
use oxtile::{EmulatedOptions, Result};

use crate::context_case::{Case, Element, Tensors};
use crate::support::World;
use crate::whole_attention::{Results, Whole};

impl Case {
    /// The forward pass in one launch, the backward pass by steps.
    pub fn fused(self) -> Self {
        Self { config: ContextParallelConfig { forward: Schedule::Fused, backward: Schedule::Ring, ..self.config }, ..self }
    }

    /// Whether ranks reach each other's memory.
    pub fn has_arena(&self) -> bool {
        self.has_puts || self.schedules().iter().any(|schedule| [Schedule::Pull, Schedule::Fused].contains(schedule))
    }

    /// A rank's communicators among neighbours and between groups of them, if the schedule has groups.
    pub fn grid(&self, rank: &EmulatedCommunicator) -> Result<Option<[EmulatedCommunicator; 2]>> {
        let of_groups = |schedule| if let Schedule::Hierarchical { inner } = schedule { Some(inner) } else { None };
        let Some(inner) = self.schedules().into_iter().find_map(of_groups) else { return Ok(None) };
        let (size, outer) = (self.world(), WorldSize::new(self.ranks / inner.get()).unwrap());
        let at = rank.rank().index();
        let near = Team::strided(size, Rank::new(at / inner.get() * inner.get(), size).unwrap(), 1, inner)?;
        let far = Team::strided(size, Rank::new(at % inner.get(), size).unwrap(), inner.get(), outer)?;
        Ok(Some([rank.team(&near)?.unwrap(), rank.team(&far)?.unwrap()]))
    }

    /// Runs it, and holds every rank's part against the whole.
    pub fn run(&self) -> Result<()> {
        let whole = self.whole();
        let expected = whole.solve();
        for (rank, found) in self.world().ranks().zip(self.results_of(&whole)?) {
            self.compare(rank, &found, &expected);
        }
        Ok(())
    }

    /// What every rank finds by an eager call of each pass.
    pub fn results_of(&self, whole: &Whole) -> Result<Vec<Results>> {
        self.results_in::<bf16>(whole)
    }

    /// The same of tensors of other elements.
    pub fn results_in<T: Element>(&self, whole: &Whole) -> Result<Vec<Results>> {
        Ranks::new(self)?.run::<T>(whole)
    }
}

/// The ranks of a case.
pub struct Ranks {
    case: Case,
    pub world: World,
    grids: Vec<Option<[EmulatedCommunicator; 2]>>,
    pub members: Vec<Member>,
    pub arenas: Vec<Arena>,
}

impl Ranks {
    pub fn new(case: &Case) -> Result<Self> {
        let options = EmulatedOptions { devices: case.ranks, mode: case.mode, seed: Some(case.seed), ..EmulatedOptions::default() };
        Self::over(case, World::with(options))
    }

    /// In a world that is there.
    pub fn over(case: &Case, world: World) -> Result<Self> {
        let grids = world.ranks.iter().map(|rank| case.grid(rank)).collect::<Result<_>>()?;
        let members = world.size().ranks().map(|rank| Team::all(world.size()).member(rank).unwrap()).collect();
        let arenas = match case.has_arena() {
            true => world.ranks.iter().map(|rank| Arena::open(rank, case.options())).collect::<Result<Vec<_>>>()?,
            false => Vec::new(),
        };
        Ok(Self { case: case.clone(), world, grids, members, arenas })
    }

    /// Fills the memory of all operations with NaN, and waits until all have.
    fn spoil<T: Element>(&self, operations: &[ContextParallel<'_, T>]) -> Result<()> {
        let each = || operations.iter().zip(&self.world.streams);
        each().try_for_each(|(operation, stream)| self.case.spoil(operation, stream))?;
        each().try_for_each(|(_, stream)| stream.synchronize())
    }

    pub fn transport(&self, at: usize) -> Transport<'_> {
        match (self.arenas.get(at), &self.grids[at]) {
            (Some(arena), _) => Transport::both(&self.world.ranks[at], arena, &self.members[at]),
            (None, Some([near, far])) => Transport::collective(&self.world.ranks[at]).with_grid(near, far),
            (None, None) => Transport::collective(&self.world.ranks[at]),
        }
    }

    pub fn operations<T: Element>(&self) -> Result<Vec<ContextParallel<'_, T>>> {
        let make = |(at, stream)| ContextParallel::new(stream, self.transport(at), self.case.config);
        self.world.streams.iter().enumerate().map(make).collect()
    }

    pub fn tensors<T: Element>(&self, whole: &Whole) -> Result<Vec<Tensors<T>>> {
        self.world.size().ranks().zip(&self.world.streams).map(|(rank, stream)| Tensors::new(&self.case, whole, rank, stream)).collect()
    }

    /// Says where packed sequences lie, if there are any.
    pub fn set_sequences<T: Element>(&self, operations: &[ContextParallel<'_, T>], tensors: &[Tensors<T>]) -> Result<()> {
        let each = operations.iter().zip(tensors).zip(&self.world.streams);
        each.into_iter().try_for_each(|((operation, tensors), stream)| tensors.set_sequences(&self.case, operation, stream))
    }

    /// What every rank finds by an eager call of each pass.
    pub fn run<T: Element>(self, whole: &Whole) -> Result<Vec<Results>> {
        let (case, operations, mut tensors) = (&self.case, self.operations::<T>()?, self.tensors::<T>(whole)?);
        for is_backward in [false, true] {
            if case.puts_heads() && case.mode == Mode::Fast {
                // Other ranks put into this memory as soon as they begin: all spoil it first.
                self.spoil(&operations)?;
            }
            for ((operation, stream), tensors) in operations.iter().zip(&self.world.streams).zip(&mut tensors) {
                if !case.puts_heads() {
                    case.spoil(operation, stream)?;
                }
                if is_backward {
                    tensors.backward(case, operation, stream)?.run(stream)?;
                } else {
                    tensors.set_sequences(case, operation, stream)?;
                    tensors.forward(case, operation, stream)?.run(stream)?;
                }
            }
        }
        let found = tensors.iter().zip(&self.world.streams).map(|(tensors, stream)| tensors.results(stream)).collect();
        drop(operations);
        self.close()?;
        found
    }

    pub fn close(self) -> Result<()> {
        let closing = self.arenas.into_iter().map(|arena| Ok(arena.close()?)).collect::<Result<Vec<_>>>()?;
        closing.into_iter().try_for_each(|arena| arena.finish())
    }
}
