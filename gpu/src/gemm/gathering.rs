//! What arrives while a product runs: a compile-time policy of its kernel.

use oxtile_tile::prelude::*;

use super::Shape;
use super::arrival::{Arrival, Gathered, GatheredArgument, RowArrival, SumArrival};

/// What arrives.
pub trait Gathering: Copy + 'static {
    /// What the producer waits by.
    type Arrival: Arrival;

    /// Nothing was waited for yet, in a product of this shape and steps of `depth` elements.
    fn arrival(gathered: Gathered, shape: Shape, depth: u32) -> Self::Arrival;

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

    #[inline(always)]
    fn arrival(gathered: Gathered, shape: Shape, _: u32) -> RowArrival {
        RowArrival::new(gathered, shape.m)
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

    #[inline(always)]
    fn arrival(gathered: Gathered, shape: Shape, depth: u32) -> SumArrival {
        SumArrival::new(gathered, shape.k, depth)
    }

    fn check(gathered: &GatheredArgument<'_>, shape: Shape, steps: u32) -> Result<u64, LaunchError> {
        LaunchError::check_limit("gathered.first", gathered.first.into(), steps.saturating_sub(1).into())?;
        check_shards(gathered, shape.k)?;
        Ok(gathered.sources.into())
    }
}

/// The sources' shards cover `size` rows or elements.
fn check_shards(gathered: &GatheredArgument<'_>, size: u32) -> Result<(), LaunchError> {
    LaunchError::check_at_least("gathered.sources", 1, gathered.sources.into())?;
    LaunchError::check_at_least("gathered.extent", size.div_ceil(gathered.sources).max(1).into(), gathered.extent.into())?;
    LaunchError::check_limit("gathered.extent", gathered.extent.into(), (u32::MAX / gathered.sources).into())
}
