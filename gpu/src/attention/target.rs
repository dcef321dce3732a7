//! Where the result of forward attention goes: a compile-time policy.
//!
//! | target | the result is |
//! |---|---|
//! | [`Rounded`] | rounded to the inputs' type and stored through shared memory by TMA |
//! | [`RingStep`](super::RingStep) | merged in `f32` into that of the keys seen before: the first step of a ring stores, the last one rounds |
//! | [`Chosen`] | one of them, by whether there is a running result |

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{RegisterElement, RegisterTile, Rows, StoredElement};
use oxtile_tile::shared::SharedStorage;
use oxtile_tile::tensor_map::TensorMapMut;

use super::epilogue::{store, store_rows};
use super::problem::Staging;
use super::running::{NO_LOGS, Running};
use super::schedule::ToldTile;
use super::shape::{Checked, check_one};
use super::softmax::Finished;
use super::warpgroup_roles::{Part, WARPGROUP_QUERIES, WarpgroupRoles};

/// Where a warpgroup's rows go.
pub struct Spot<const RANK: usize> {
    /// The coordinates of the first of them in the tensor map of the result.
    pub at: [u32; RANK],
    /// The batch, or the sequence.
    pub batch: u32,
    /// The query head, of those of the tensors' rows.
    pub head: u32,
    /// The tensors' row of the sequence's first query.
    pub first: u32,
    /// The first of the rows, counted from the sequence's first query.
    pub row: u32,
    /// Rows of it that are written: queries, and padding.
    pub rows: u32,
    /// The element of the log-sum-exp of the sequence's first query.
    pub statistics: u64,
}

/// Where the result goes.
pub trait Target<T: RegisterElement, const V: usize, const RANK: usize>: Parameter
where
    Columns<V>: MatrixColumns,
{
    /// Whether results are stored by TMA, whose reads of shared memory must be waited for.
    const BY_TMA: bool = true;

    /// How a tile of dense tensors is handed over.
    type Told: ToldTile;

    /// Where results wait in shared memory.
    type Staging<G: WarpgroupRoles>: SharedStorage + Copy;

    /// Readies it. All threads of warpgroup `part` call it first.
    #[inline(always)]
    fn begin<G: WarpgroupRoles>(_: Self::Staging<G>, _part: u32) {}

    /// Fetches what is there, early. All threads of warpgroup `part` call it.
    #[inline(always)]
    fn fetch<G: WarpgroupRoles>(&self, _: &Spot<RANK>, _: Self::Staging<G>, _part: u32) {}

    /// Loads the log-sum-exps that are there, of a thread's rows, for the `store` that follows.
    #[inline(always)]
    fn logs(&self, _: &Spot<RANK>) -> Rows {
        NO_LOGS
    }

    /// Stores a warpgroup's sum of values, before it is divided by the sum of weights, and its log-sum-exp. All its threads call it.
    fn store<G: WarpgroupRoles, const D: usize>(
        &self,
        sum: RegisterTile<V>,
        finished: Finished,
        spot: Spot<RANK>,
        staging: Staging<T, D, Self::Staging<G>>,
    );

    /// Waits for what a warpgroup stored. All its threads call it last.
    #[inline(always)]
    fn end<G: WarpgroupRoles>(_: Self::Staging<G>) {}

    /// Checks the argument of a launch whose log-sum-exp has `statistics` elements, and whose tensor `[batches, heads, rows]`.
    fn check(argument: &Self::Argument<'_>, statistics: u64, extent: [u64; 3]) -> Checked;
}

/// To a tensor of the inputs' type, rounded.
#[derive(Parameter)]
#[parameter(optional)]
pub struct Rounded<T: RegisterElement, const V: usize, const RANK: usize> {
    /// The result.
    pub out: TensorMapMut<T, WARPGROUP_QUERIES, V, Swizzle128, RANK>,
    /// The natural logarithm of each row's sum of exponentials.
    pub log_sum_exp: GlobalMut<f32>,
}

impl<T: RegisterElement + StoredElement, const V: usize> Target<T, V, 4> for Rounded<T, V, 4>
where
    Columns<V>: MatrixColumns,
{
    type Told = SharedArray<u32, 1>;
    type Staging<G: WarpgroupRoles> = G::Staging<Part<T, V>>;

    #[inline(always)]
    #[track_caller]
    fn store<G: WarpgroupRoles, const D: usize>(
        &self,
        mut sum: RegisterTile<V>,
        finished: Finished,
        spot: Spot<4>,
        staging: Staging<T, D, G::Staging<Part<T, V>>>,
    ) {
        finished.divide(&mut sum);
        store::<G, _, _, _>(&self.out, &sum, staging.of_result::<G, V>(), staging.part, spot.at);
        store_rows(&self.log_sum_exp, spot.statistics, spot.row, spot.rows, finished.log_sum_exp());
    }

    fn check(argument: &Self::Argument<'_>, statistics: u64, _: [u64; 3]) -> Checked {
        LaunchError::check_length("target.log_sum_exp", statistics, argument.log_sum_exp.len())
    }
}

/// A tile of a sequence may end in rows of padding, which become zeros whatever was computed of them.
impl<T: RegisterElement + StoredElement, const V: usize> Target<T, V, 5> for Rounded<T, V, 5>
where
    Columns<V>: MatrixColumns,
{
    type Told = SharedArray<u32, 1>;
    type Staging<G: WarpgroupRoles> = G::Staging<Part<T, V>>;

    #[inline(always)]
    #[track_caller]
    fn store<G: WarpgroupRoles, const D: usize>(
        &self,
        mut sum: RegisterTile<V>,
        finished: Finished,
        spot: Spot<5>,
        staging: Staging<T, D, G::Staging<Part<T, V>>>,
    ) {
        finished.divide(&mut sum);
        store::<G, _, _, _>(&self.out, &sum, staging.of_result::<G, V>(), staging.part, spot.at);
        store_rows(&self.log_sum_exp, spot.statistics, spot.row, spot.rows, finished.log_sum_exp());
    }

    fn check(argument: &Self::Argument<'_>, statistics: u64, _: [u64; 3]) -> Checked {
        LaunchError::check_length("target.log_sum_exp", statistics, argument.log_sum_exp.len())
    }
}

/// A running result if there is one, else a rounded one.
#[derive(Parameter)]
pub struct Chosen<T: RegisterElement, const V: usize> {
    /// The running result.
    pub running: Option<Running<T, false>>,
    /// The rounded one.
    pub rounded: Option<Rounded<T, V, 5>>,
}

impl<T: RegisterElement + StoredElement, const V: usize> Target<T, V, 5> for Chosen<T, V>
where
    Columns<V>: MatrixColumns,
{
    type Told = SharedArray<u32, 1>;
    type Staging<G: WarpgroupRoles> = G::Staging<Part<T, V>>;

    #[inline(always)]
    #[track_caller]
    fn store<G: WarpgroupRoles, const D: usize>(
        &self,
        sum: RegisterTile<V>,
        finished: Finished,
        spot: Spot<5>,
        staging: Staging<T, D, G::Staging<Part<T, V>>>,
    ) {
        if let Some(rounded) = &self.rounded {
            rounded.store::<G, D>(sum, finished, spot, staging);
        } else if let Some(running) = &self.running {
            running.merge(&sum, &finished, running.place(&spot), spot.row);
        }
    }

    fn check(argument: &Self::Argument<'_>, statistics: u64, extent: [u64; 3]) -> Checked {
        check_one("target.rounded", [argument.rounded.is_some(), argument.running.is_some()])?;
        if let Some(running) = &argument.running {
            running.check(V, statistics)?;
            running.check_room(extent)?;
        }
        argument.rounded.as_ref().map_or(Ok(()), |rounded| <Rounded<T, V, 5> as Target<T, V, 5>>::check(rounded, statistics, extent))
    }
}
