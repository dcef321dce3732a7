//! What arrives while a product runs: a compile-time policy of its kernel.

use core::marker::PhantomData;

use oxtile_tile::prelude::*;

use super::Shape;
use super::addends::{Addends, Nothing, Parts};
use super::arrival::{Arrival, Gathered, GatheredArgument, Present, RowArrival, SumArrival};

/// What arrives.
pub trait Gathering: Copy + 'static {
    /// What the producer waits by.
    type Arrival: Arrival;
    /// What is added to the product.
    type Addends: Addends;
    /// Whether the input of the activation is kept.
    const KEEPS: bool = false;
    /// Whether the rounded product is multiplied by the derivative of GELU at a matrix.
    const DERIVES: bool = false;
    /// Whether the same product of other ranks is added: a matrix a source, in place of `D` as it was.
    const ADDS: bool = false;

    /// Nothing was waited for yet, in a product of this shape and steps of `depth` elements.
    fn arrival(gathered: Gathered, shape: Shape, depth: u32) -> Self::Arrival;

    /// Nothing was added yet.
    fn addends(gathered: Gathered) -> Self::Addends;

    /// Refuses what does not fit a product of this shape and so many steps. Returns the number of flags.
    ///
    /// # Errors
    /// The first argument that does not fit.
    fn check(gathered: &GatheredArgument<'_>, shape: Shape, steps: u32) -> Result<u64, LaunchError>;
}

/// Rows of `A` arrive, which are its columns if it is stored as `[K, M]`.
#[derive(Clone, Copy)]
pub struct ByRows;

impl Gathering for ByRows {
    type Arrival = RowArrival;
    type Addends = Nothing;

    #[inline(always)]
    fn arrival(gathered: Gathered, shape: Shape, _: u32) -> RowArrival {
        RowArrival::new(gathered, shape.m)
    }

    #[inline(always)]
    fn addends(_: Gathered) -> Nothing {
        Nothing
    }

    fn check(gathered: &GatheredArgument<'_>, shape: Shape, steps: u32) -> Result<u64, LaunchError> {
        LaunchError::check_at_least("gathered.slab", 1, gathered.slab.into())?;
        LaunchError::check_limit("gathered.first", gathered.first.into(), 0)?;
        check_shards(gathered, shape.m)?;
        Ok(u64::from(steps.div_ceil(gathered.slab)) * u64::from(gathered.sources))
    }
}

/// The summed dimension arrives, of either operand or of both.
#[derive(Clone, Copy)]
pub struct BySum;

impl Gathering for BySum {
    type Arrival = SumArrival;
    type Addends = Nothing;

    #[inline(always)]
    fn arrival(gathered: Gathered, shape: Shape, depth: u32) -> SumArrival {
        SumArrival::new(gathered, shape.k, depth)
    }

    #[inline(always)]
    fn addends(_: Gathered) -> Nothing {
        Nothing
    }

    fn check(gathered: &GatheredArgument<'_>, shape: Shape, steps: u32) -> Result<u64, LaunchError> {
        LaunchError::check_limit("gathered.first", gathered.first.into(), steps.saturating_sub(1).into())?;
        check_shards(gathered, shape.k)?;
        Ok(gathered.sources.into())
    }
}

/// Operands are there. The same product of other ranks arrives, to be added before anything else follows: the second half of a product and a reduce-scatter.
#[derive(Clone, Copy)]
pub struct Summing;

impl Gathering for Summing {
    type Arrival = Present;
    type Addends = Parts;
    const ADDS: bool = true;

    #[inline(always)]
    fn arrival(_: Gathered, _: Shape, _: u32) -> Present {
        Present
    }

    #[inline(always)]
    fn addends(gathered: Gathered) -> Parts {
        Parts::new(gathered)
    }

    fn check(gathered: &GatheredArgument<'_>, shape: Shape, _: u32) -> Result<u64, LaunchError> {
        LaunchError::check_limit("gathered.first", gathered.first.into(), 0)?;
        LaunchError::check_at_least("gathered.extent", 1, gathered.extent.into())?;
        // Rows of all parts are counted in a word.
        LaunchError::check_limit("gathered.sources", u64::from(gathered.sources) * u64::from(shape.m), u32::MAX.into())?;
        Ok(u64::from(shape.m.div_ceil(gathered.extent)) * u64::from(gathered.sources))
    }
}

/// As `G`, and the input of the activation is kept.
#[derive(Clone, Copy)]
pub struct Keeping<G>(PhantomData<G>);

impl<G: Gathering> Gathering for Keeping<G> {
    type Arrival = G::Arrival;
    type Addends = G::Addends;
    const KEEPS: bool = true;

    #[inline(always)]
    fn arrival(gathered: Gathered, shape: Shape, depth: u32) -> G::Arrival {
        G::arrival(gathered, shape, depth)
    }

    #[inline(always)]
    fn addends(gathered: Gathered) -> G::Addends {
        G::addends(gathered)
    }

    fn check(gathered: &GatheredArgument<'_>, shape: Shape, steps: u32) -> Result<u64, LaunchError> {
        G::check(gathered, shape, steps)
    }
}

/// As `G`, and the rounded product is multiplied by the derivative of GELU at a matrix, which was there before the kernel began.
#[derive(Clone, Copy)]
pub struct Deriving<G>(PhantomData<G>);

impl<G: Gathering> Gathering for Deriving<G> {
    type Arrival = G::Arrival;
    type Addends = G::Addends;
    const DERIVES: bool = true;

    #[inline(always)]
    fn arrival(gathered: Gathered, shape: Shape, depth: u32) -> G::Arrival {
        G::arrival(gathered, shape, depth)
    }

    #[inline(always)]
    fn addends(gathered: Gathered) -> G::Addends {
        G::addends(gathered)
    }

    fn check(gathered: &GatheredArgument<'_>, shape: Shape, steps: u32) -> Result<u64, LaunchError> {
        G::check(gathered, shape, steps)
    }
}

/// The sources' shards cover `size` rows or elements.
fn check_shards(gathered: &GatheredArgument<'_>, size: u32) -> Result<(), LaunchError> {
    LaunchError::check_at_least("gathered.sources", 1, gathered.sources.into())?;
    LaunchError::check_at_least("gathered.extent", size.div_ceil(gathered.sources).max(1).into(), gathered.extent.into())?;
    LaunchError::check_limit("gathered.extent", gathered.extent.into(), (u32::MAX / gathered.sources).into())
}
