//! How a product is divided among clusters, and what their producers wait for: a compile-time policy of the kernels.

use super::Shape;
use super::arrival::{Arrival, Present};
use super::order::{Order, WorkOrder};
use super::place::Place;
use super::sharing::{Complete, Sharing};
use super::split::Split;

/// What the blocks of a launch compute, and when. Matrices have tensor maps of `RANK` dimensions.
pub trait Division<const RANK: usize>: Copy {
    /// Which part of the product a cluster computes next.
    type Order: WorkOrder<Place: Place<RANK>>;
    /// When the operands of a step are there.
    type Arrival: Arrival;
    /// What ranks do with the tiles.
    type Sharing: Sharing;

    /// Whether parts of tiles may be the blocks of clusters that are made at launch.
    const IN_CLUSTERS: bool = false;

    /// The work of the calling cluster in a product of this shape, for tiles of a cluster of so many rows and columns, and steps of `depth` elements.
    fn order<const CLUSTER: u32>(&self, shape: Shape, tile: [u32; 2], depth: u32) -> Self::Order;

    /// No operand was waited for yet, in steps of `depth` elements.
    fn arrival(&self, shape: Shape, depth: u32) -> Self::Arrival;

    /// Nothing was shared yet, of a product of this shape in tiles of so many columns.
    fn sharing(&self, shape: Shape, columns: u32) -> Self::Sharing;

    /// How tiles are split.
    fn split(&self) -> Split;
}

impl Division<2> for Split {
    type Order = Order;
    type Arrival = Present;
    type Sharing = Complete;

    const IN_CLUSTERS: bool = true;

    #[inline(always)]
    #[track_caller]
    fn order<const CLUSTER: u32>(&self, shape: Shape, tile: [u32; 2], depth: u32) -> Order {
        let order = Order::new::<CLUSTER>(shape.tiles(tile), shape.k.div_ceil(depth), [self.whole, self.parts]);
        if self.is_in_clusters() { order.in_clusters() } else { order }
    }

    #[inline(always)]
    fn arrival(&self, _: Shape, _: u32) -> Present {
        Present
    }

    #[inline(always)]
    fn sharing(&self, _: Shape, _: u32) -> Complete {
        Complete
    }

    #[inline(always)]
    fn split(&self) -> Split {
        *self
    }
}
