//! A product for each shard.

use oxtile_tile::launch::{DeviceView, DeviceViewMut};
use oxtile_tile::num::Pod;

use super::schedule::Schedule;
use crate::gemm::{Gemm, GemmConfig, GemmElement, Matrices};
use crate::runtime::{Bound, Result, Runtime, Stream};

/// The products of whole shards, and of the one that is cut short.
pub(super) struct ShardProducts<T: GemmElement<O>, O: 'static> {
    whole: Gemm<T, O>,
    last: Gemm<T, O>,
}

impl<T: GemmElement<O>, O: Pod> ShardProducts<T, O> {
    /// Those of shards of the rows of a product.
    pub fn new(runtime: &Runtime, schedule: &Schedule, product: GemmConfig) -> Result<Self> {
        let rows = (0..schedule.members).map(|of| schedule.shard(of)).map(|shard| shard.end - shard.start);
        let last = rows.filter(|rows| (1..schedule.extent()).contains(rows)).max();
        let of = |m| Gemm::new(runtime, GemmConfig { m, ..product });
        Ok(Self { whole: of(schedule.extent())?, last: of(last.unwrap_or(0))? })
    }

    /// Binds them, by members, to the columns, sum and activation of a product: rows of `gathered` and of what `d` gives.
    pub fn bind<'a>(
        &'a self,
        stream: &Stream,
        schedule: &Schedule,
        GemmConfig { n, k, activation, .. }: GemmConfig,
        gathered: DeviceView<'a, T>,
        d: impl Fn() -> DeviceViewMut<'a, O>,
        matrices: impl Fn(DeviceView<'a, T>, DeviceViewMut<'a, O>) -> Matrices<'a, T, T, O>,
    ) -> Result<Vec<Bound<'a>>> {
        let of_member = |member: u32| {
            let shard = schedule.shard(member);
            if shard.is_empty() {
                return Ok(Bound::in_turn(Vec::new()));
            }
            let gemm = if shard.end - shard.start == schedule.extent() { &self.whole } else { &self.last };
            let rows = gathered.slice(shard.start * k, shard.end * k);
            let (_, d) = d().split_at(shard.start * n);
            let (d, _) = d.split_at((shard.end - shard.start) * n);
            gemm.bind_activated(stream, activation, matrices(rows, d))
        };
        (0..schedule.members).map(of_member).collect()
    }
}
