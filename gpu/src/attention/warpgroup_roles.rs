//! The warpgroups that compute a tile of queries, and where the queries stay meanwhile.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::matrix::{Left, Operand};
use oxtile_tile::num::Pod;
use oxtile_tile::register_tile::{OperandTile, RegisterElement};
use oxtile_tile::shared::{SharedStorage, SharedTile, Tiles};
use oxtile_tile::warpgroup::{self, ConsumerRole, ProducerRole, Roles};

/// Queries of a warpgroup.
pub const WARPGROUP_QUERIES: usize = 64;

/// The queries of a warpgroup in shared memory, or its part of the result.
pub type Part<T, const D: usize> = SharedTile<T, WARPGROUP_QUERIES, D, Swizzle128>;

/// What a warpgroup does.
pub enum Role<Copies, Multiplies> {
    /// One of its threads copies.
    Copies(Copies),
    /// It multiplies.
    Multiplies(Multiplies),
}

/// A warpgroup that copies, and those that multiply, each for 64 queries of a tile.
pub trait WarpgroupRoles: 'static {
    /// Threads of a block.
    const THREADS: u32;
    /// Warps that multiply.
    const CONSUMER_WARPS: u32;
    /// Warpgroups that multiply.
    const PARTS: u32 = Self::CONSUMER_WARPS / 4;
    /// Queries of a tile.
    const QUERIES: u32 = Self::PARTS * WARPGROUP_QUERIES as u32;
    /// Whether the queries stay in shared memory until the result takes their place, or move to registers at once.
    const IN_PLACE: bool;
    /// Whether there are registers for weights beside scores, so that maxima are looked for only where weights are large.
    const SPARING: bool = false;

    /// One piece for each warpgroup that multiplies.
    type Parts<S: SharedStorage>: SharedStorage + Copy;
    /// Where parts of the result wait to be stored, if not in place.
    type Staging<S: SharedStorage>: SharedStorage + Copy;
    /// What stays in shared memory besides, if there is room for it.
    type Held<S: SharedStorage + Copy>: SharedStorage + Copy;
    /// A warpgroup's queries as an operand.
    type Query<T: RegisterElement, const D: usize>: Left<T, D>
    where
        Columns<D>: MatrixColumns;

    /// The piece of a warpgroup.
    fn part<S: SharedStorage>(parts: Self::Parts<S>, number: u32) -> S;

    /// The operand that a part is. All threads of the warpgroup call it.
    fn query<T: RegisterElement, const D: usize>(part: Part<T, D>) -> Self::Query<T, D>
    where
        Columns<D>: MatrixColumns;

    /// Where the result of a part waits to be stored.
    fn staging<T: Pod, const D: usize, const V: usize>(query: Part<T, D>, staging: Self::Staging<Part<T, V>>, number: u32) -> Part<T, V>;

    /// What stays besides, if there is room for it.
    fn held<S: SharedStorage + Copy>(held: Self::Held<S>) -> Option<S>;

    /// The role of the warpgroup that copies.
    type Copies;
    /// The role of a warpgroup that multiplies.
    type Multiplies;

    /// The calling warpgroup's role. Each arm of the `match` on it begins with its `begin`, so that the compiler knows how many
    /// registers the arm has.
    fn role() -> Role<Self::Copies, Self::Multiplies>;

    /// True in the one thread that copies. All threads of the warpgroup call it.
    fn begin_copies(role: Self::Copies) -> bool;

    /// The warpgroup's number among those that multiply. All its threads call it.
    fn begin_multiplies(role: Self::Multiplies) -> u32;
}

/// Two warpgroups with their queries in registers: the tensor cores read half as much shared memory for the scores, and the next
/// tile's queries are copied meanwhile. For heads of up to 128 elements.
pub struct Pair;

/// As [`Pair`], with more registers for those that multiply; the thread that copies has only 40.
pub struct Narrow;

/// Two warpgroups with their queries in shared memory: for larger heads.
pub struct Wide;

macro_rules! roles {
    ($parts:literal parts, $donor:literal and $registers:literal registers) => {
        const THREADS: u32 = Roles::<$parts, $donor, $registers>::THREADS;
        const CONSUMER_WARPS: u32 = Roles::<$parts, $donor, $registers>::CONSUMER_WARPS;

        type Parts<S: SharedStorage> = Tiles<S, $parts>;

        #[inline(always)]
        #[track_caller]
        fn part<S: SharedStorage>(parts: Tiles<S, $parts>, number: u32) -> S {
            parts.tile(number)
        }

        type Copies = ProducerRole<$donor>;
        type Multiplies = ConsumerRole<$registers>;

        #[inline(always)]
        #[track_caller]
        fn role() -> Role<Self::Copies, Self::Multiplies> {
            match Roles::<$parts, $donor, $registers>::role() {
                warpgroup::Role::Producer(role) => Role::Copies(role),
                warpgroup::Role::Consumer(role) => Role::Multiplies(role),
            }
        }

        #[inline(always)]
        #[track_caller]
        fn begin_copies(role: Self::Copies) -> bool {
            role.begin()
        }

        #[inline(always)]
        #[track_caller]
        fn begin_multiplies(role: Self::Multiplies) -> u32 {
            role.begin()
        }
    };
    (in registers, $parts:literal parts) => {
        const IN_PLACE: bool = false;

        type Staging<S: SharedStorage> = Tiles<S, $parts>;
        type Held<S: SharedStorage + Copy> = S;
        type Query<T: RegisterElement, const D: usize>
            = OperandTile<T, D>
        where
            Columns<D>: MatrixColumns;

        #[inline(always)]
        #[track_caller]
        fn query<T: RegisterElement, const D: usize>(part: Part<T, D>) -> OperandTile<T, D>
        where
            Columns<D>: MatrixColumns,
        {
            OperandTile::load(part)
        }

        #[inline(always)]
        #[track_caller]
        fn staging<T: Pod, const D: usize, const V: usize>(_: Part<T, D>, staging: Tiles<Part<T, V>, $parts>, number: u32) -> Part<T, V> {
            staging.tile(number)
        }

        #[inline(always)]
        fn held<S: SharedStorage + Copy>(held: S) -> Option<S> {
            Some(held)
        }
    };
    (in place) => {
        const IN_PLACE: bool = true;

        type Staging<S: SharedStorage> = ();
        type Held<S: SharedStorage + Copy> = ();
        type Query<T: RegisterElement, const D: usize>
            = Operand<T, WARPGROUP_QUERIES, D, false>
        where
            Columns<D>: MatrixColumns;

        #[inline(always)]
        fn query<T: RegisterElement, const D: usize>(part: Part<T, D>) -> Operand<T, WARPGROUP_QUERIES, D, false>
        where
            Columns<D>: MatrixColumns,
        {
            part.k_major()
        }

        #[inline(always)]
        fn staging<T: Pod, const D: usize, const V: usize>(query: Part<T, D>, (): (), _: u32) -> Part<T, V> {
            const { assert!(V <= D, "the result fits where the queries were") };
            // SAFETY: the part's memory has room for it, and no warp reads the queries any more.
            unsafe { SharedStorage::at(query.address()) }
        }

        #[inline(always)]
        fn held<S: SharedStorage + Copy>((): ()) -> Option<S> {
            None
        }
    };
}

impl WarpgroupRoles for Pair {
    roles!(2 parts, 56 and 224 registers);
    roles!(in registers, 2 parts);
}

impl WarpgroupRoles for Narrow {
    const SPARING: bool = true;

    roles!(2 parts, 40 and 232 registers);
    roles!(in registers, 2 parts);
}

impl WarpgroupRoles for Wide {
    roles!(2 parts, 56 and 224 registers);
    roles!(in place);
}
