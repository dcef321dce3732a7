//! Products of groups of rows, such as those of experts, by one launch.

use std::fmt;
use std::marker::PhantomData;

use oxtile_kernels::gemm::{GemmGrouped, GemmGroupedArgs, TileLoops};
use oxtile_tile::arch::MatrixElement;
use oxtile_tile::launch::{DeviceView, DeviceViewMut, Kernel};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::num::Pod;
use oxtile_tile::register_tile::StoredElement;
use oxtile_tile::tensor_map::MAP_ROWS;

use super::choice::{GemmKernel, GemmTile, wgmma_of};
use super::config::GemmConfig;
use super::product::Gemm;
use super::table::{AnyGrouped, GemmOperands};
use crate::choice::{Choice, Entry};
use crate::runtime::{Bound, Error, Loaded, Result, Runtime, Stream};
use crate::tensor::shape::numel;
use crate::tensor::{GroupRows, TensorMap, TensorMapMut, Uploads};

/// A product for each group of tokens, by one launch: `D_g = alpha A_g B_g + beta D_g`, then GELU if asked for. How many tokens a group has, only the device knows:
/// an array of so many `u32`, which may be 0.
///
/// [`by_rows`](Self::by_rows), such as the layers of experts and the gradients of their inputs: tokens are rows. `A` is `[m, k]` and `D` is `[m, n]`, where `m` is the
/// number of all tokens, those of the first group first; `B` is `[groups, k, n]`, or `[groups, n, k]` with `transpose_b`.
///
/// [`by_sum`](Self::by_sum), the gradients of weights: tokens are summed over. `A` is `[k, m]` and `B` is `[k, n]`, where `k` is the number of all tokens; `D` is
/// `[groups, m, n]`. The result of a group without tokens is `beta D`, also where no group has any.
///
/// Rows of `D` beyond all groups stay as they were. Of sizes whose sum is more than all tokens, what is more is left out. A group's result has the bits of a
/// [`Gemm`](super::Gemm) of its own with whole tiles of the same size.
///
/// Takes `bf16` into `bf16` and `e4m3` (with `transpose_b`) into `bf16` by rows, and `bf16` into `f32` by the sum, on Hopper.
///
/// ```
/// use oxtile::gemm::{GemmConfig, GroupedGemm};
/// use oxtile::num::bf16;
/// use oxtile::{Buffer, Result, Runtime};
///
/// # fn main() -> Result<()> {
/// let runtime = Runtime::checked(1)?; // or Runtime::cuda()
/// let stream = runtime.device(0)?.stream()?;
/// // Three experts share 16 tokens: 4, none, and 12 of them.
/// let config = GemmConfig { m: 16, n: 8, k: 8, transpose_b: true, ..GemmConfig::default() };
/// let experts = GroupedGemm::<bf16, bf16>::by_rows(&runtime, config, 3)?;
///
/// let tokens = Buffer::from_slice(&stream, &[half::bf16::ONE; 16 * 8])?;
/// let weights: Vec<_> = (0..3 * 8 * 8).map(|i| half::bf16::from_f32([1.0, 2.0, 3.0][i / 64])).collect();
/// let (weights, sizes) = (Buffer::from_slice(&stream, &weights)?, Buffer::from_slice(&stream, &[4_u32, 0, 12])?);
/// let mut d = Buffer::<bf16>::zeros(&stream, 16 * 8)?;
/// experts.run(&stream, tokens.view(), weights.view(), sizes.view(), d.view_mut())?;
///
/// let d: Vec<half::bf16> = d.to_vec_as(&stream)?;
/// assert_eq!((d[0].to_f32(), d[4 * 8].to_f32()), (8.0, 24.0));
/// # Ok(()) }
/// ```
pub struct GroupedGemm<T: GemmOperands<O>, O: 'static> {
    config: GemmConfig,
    groups: u64,
    choice: Choice<GemmKernel>,
    instance: Option<AnyGrouped<T, O>>,
    /// Of sums of no products, where no token is there.
    of_nothing: Option<Gemm<T, O>>,
}

/// Rows of a group in the mean up to which tiles of 64 rows are taken: between 64, of which they take 0.87 to 0.91 of the time of tiles of 128 rows, and 128, of which they take 1.02 to 1.04
/// (docs/performance/gemm.md). How rows are divided, only the device knows.
const FEW_ROWS: u64 = 96;

/// What is multiplied.
#[doc(hidden)]
pub struct GroupedMatrices<'a, A, B, O> {
    a: DeviceView<'a, A>,
    b: DeviceView<'a, B>,
    scales: Option<[DeviceView<'a, f32>; 2]>,
    sizes: DeviceView<'a, u32>,
    d: DeviceViewMut<'a, O>,
}

/// A loaded kernel of groups.
#[doc(hidden)]
pub trait GroupedInstance<A, B, O>: Send + Sync {
    fn bind<'a>(&'a self, stream: &Stream, config: GemmConfig, groups: u64, matrices: GroupedMatrices<'a, A, B, O>) -> Result<Bound<'a>>;
}

impl<T: GemmOperands<O>, O: Pod> GroupedGemm<T, O> {
    /// Checks the configuration, of which `m` is the number of all tokens, and loads its kernel.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a configuration with `transpose_a`, sizes that TMA does not take, elements without a kernel, or another device than one of Hopper;
    /// as [`Runtime::load`].
    pub fn by_rows(runtime: &Runtime, config: GemmConfig, groups: u64) -> Result<Self> {
        if config.transpose_a {
            return Err(invalid("tokens are rows of A by rows: no transpose_a, or by_sum".to_owned()));
        }
        Self::chosen(runtime, config, groups, None)
    }

    /// Checks the configuration, of which `k` is the number of all tokens, and loads its kernel.
    ///
    /// # Errors
    /// As [`by_rows`](Self::by_rows), but for one without `transpose_a`, or with `transpose_b`.
    pub fn by_sum(runtime: &Runtime, config: GemmConfig, groups: u64) -> Result<Self> {
        if !config.transpose_a || config.transpose_b {
            return Err(invalid("tokens are rows of A and of B by the sum: transpose_a, and no transpose_b".to_owned()));
        }
        Self::chosen(runtime, config, groups, None)
    }

    /// As [`by_sum`](Self::by_sum) with `transpose_a`, or else [`by_rows`](Self::by_rows), with tiles of a size: to measure them, or to pin one.
    ///
    /// # Errors
    /// As those; [`Error::Invalid`] for a tile without a kernel.
    pub fn tiled(runtime: &Runtime, config: GemmConfig, groups: u64, tile: GemmTile) -> Result<Self> {
        Self::chosen(runtime, config, groups, Some(tile))
    }

    fn chosen(runtime: &Runtime, config: GemmConfig, groups: u64, tile: Option<GemmTile>) -> Result<Self> {
        let choice = Self::choose(config, groups, tile, wgmma_of(runtime.device(0)?.capability())).map_err(invalid)?;
        let instance = choice.load(T::GROUPED, runtime)?;
        let is_of_nothing = config.k == 0 && config.transpose_a && [groups, config.m, config.n].iter().all(|size| *size > 0);
        // All results as one matrix.
        let all = || Gemm::new(runtime, GemmConfig { m: numel(&[groups, config.m])?, ..config });
        let of_nothing = is_of_nothing.then(all).transpose()?;
        Ok(Self { config, groups, choice, instance, of_nothing })
    }

    /// The kernel, and why, or why there is none.
    fn choose(config: GemmConfig, groups: u64, tile: Option<GemmTile>, wgmma: Result<(), String>) -> Result<Choice<GemmKernel>, String> {
        let GemmConfig { m, n, k, transpose_a: by_sum, .. } = config;
        let [m_major, n_major] = config.majors();
        if m == 0 || n == 0 || groups == 0 {
            let (decision, why) = (GemmKernel::Any, "the result is empty".to_owned());
            return Ok(Choice { decision, kernel: None, why, refused: Vec::new() });
        }
        wgmma?;
        config.activation.check_alone()?;
        if k == 0 && !by_sum {
            return Err("k is 0: rows of groups have nothing to multiply".to_owned());
        }
        if k == 0 {
            let (decision, why) = (GemmKernel::Any, "k is 0: the result is that of no products".to_owned());
            return Ok(Choice { decision, kernel: None, why, refused: Vec::new() });
        }
        if let Some((field, size)) = [("m", m), ("n", n), ("k", k)].into_iter().find(|(_, size)| *size > u64::from(MAP_ROWS)) {
            return Err(format!("{field} is {size}: at most {MAP_ROWS}"));
        }
        let weights = if by_sum {
            m
        } else if n_major {
            k
        } else {
            n
        };
        if groups.saturating_mul(weights) > i32::MAX as u64 {
            return Err(format!("{groups} groups of {weights} rows of weights: at most {} rows in all", i32::MAX));
        }
        let [a, b] = [if m_major { ("m", m) } else { ("k", k) }, if n_major { ("n", n) } else { ("k", k) }];
        for ((field, size), bytes) in [(a, T::BYTES), (b, T::BYTES), (("n", n), size_of::<O>() as u64)] {
            if !(size * bytes).is_multiple_of(16) {
                return Err(format!("{field} is {size}, no multiple of {}: TMA takes rows of a multiple of 16 bytes", 16 / bytes));
            }
        }
        let (first, why) = match tile {
            Some(tile) => (tile, "as asked for"),
            // A cluster's tile is 256x256.
            None if by_sum && m.is_multiple_of(256) && n.is_multiple_of(256) => {
                (GemmTile::Tile128x256, "the tile for groups of the sum, whose results are whole tiles of clusters")
            }
            None if by_sum => (GemmTile::Tile128x128, "the tile for groups of the sum"),
            None if m <= FEW_ROWS.saturating_mul(groups) => {
                (GemmTile::Tile64x128, "the tile for groups of few rows, which leave half of a tile of 128 rows empty")
            }
            None => (GemmTile::Tile128x128, "the tile for groups of rows"),
        };
        let decision = GemmKernel::Wgmma { tile: first, m_major, n_major };
        match Entry::find(T::GROUPED, &decision) {
            Ok(Entry { name, .. }) => Ok(Choice { decision, kernel: Some(*name), why: why.to_owned(), refused: Vec::new() }),
            Err(_) => {
                let kernels: Vec<_> = T::GROUPED.iter().copied().flatten().map(|entry| entry.name).collect();
                Err(format!("no kernel of groups takes these elements in this layout with {first:?}: there are {kernels:?}"))
            }
        }
    }

    /// The kernel, and why.
    pub fn choice(&self) -> &Choice<GemmKernel> {
        &self.choice
    }

    /// Binds matrices and the array of sizes; encodes tensor maps and copies those to the device, in stream order: the host does not wait.
    ///
    /// # Errors
    /// [`Error::Length`] if a view does not have the configuration's size; as [`TensorMap::new`].
    pub fn bind<'a>(
        &'a self,
        stream: &Stream,
        a: DeviceView<'a, T::A>,
        b: DeviceView<'a, T::B>,
        sizes: DeviceView<'a, u32>,
        d: DeviceViewMut<'a, O>,
    ) -> Result<Bound<'a>> {
        self.bind_matrices(stream, GroupedMatrices { a, b, scales: None, sizes, d })
    }

    /// As [`bind`](Self::bind), with a factor of each operand in device memory, one element each: every product is multiplied by both.
    ///
    /// # Errors
    /// As [`bind`](Self::bind); [`Bound::run`] fails for scales of other than one element.
    pub fn bind_scaled<'a>(
        &'a self,
        stream: &Stream,
        (a, b): (DeviceView<'a, T::A>, DeviceView<'a, T::B>),
        scales: [DeviceView<'a, f32>; 2],
        sizes: DeviceView<'a, u32>,
        d: DeviceViewMut<'a, O>,
    ) -> Result<Bound<'a>> {
        self.bind_matrices(stream, GroupedMatrices { a, b, scales: Some(scales), sizes, d })
    }

    fn bind_matrices<'a>(&'a self, stream: &Stream, matrices: GroupedMatrices<'a, T::A, T::B, O>) -> Result<Bound<'a>> {
        let (GemmConfig { m, n, k, transpose_a: by_sum, .. }, groups) = (self.config, self.groups);
        let [of_b, of_d] = if by_sum { [1, groups] } else { [groups, 1] };
        let GroupedMatrices { a, b, sizes, d, .. } = &matrices;
        let lengths = [
            ("GroupedGemm, a", [1, m, k], a.len()),
            ("GroupedGemm, b", [of_b, k, n], b.len()),
            ("GroupedGemm, d", [of_d, m, n], d.len()),
            ("GroupedGemm, sizes", [1, 1, groups], sizes.len()),
        ];
        for (what, shape, found) in lengths {
            Error::check_length(what, numel(&shape)?, found)?;
        }
        match (&self.instance, &self.of_nothing) {
            (Some(instance), _) => instance.bind(stream, self.config, groups, matrices),
            (None, Some(gemm)) => {
                let GroupedMatrices { a, b, d, .. } = matrices;
                gemm.bind(stream, a, b, None, d)
            }
            (None, None) => Ok(Bound::in_turn(Vec::new())),
        }
    }

    /// Binds matrices and multiplies them once.
    ///
    /// # Errors
    /// As [`bind`](Self::bind) and [`Bound::run`].
    pub fn run(
        &self,
        stream: &Stream,
        a: DeviceView<'_, T::A>,
        b: DeviceView<'_, T::B>,
        sizes: DeviceView<'_, u32>,
        d: DeviceViewMut<'_, O>,
    ) -> Result<()> {
        self.bind(stream, a, b, sizes, d)?.run(stream)
    }
}

fn invalid(why: String) -> Error {
    Error::Invalid { what: "GroupedGemm", why }
}

impl<A, B, const DEPTH: usize, O, const WIDTH: usize, S, const BY_SUM: bool, const M_MAJOR: bool, const N_MAJOR: bool>
    GroupedInstance<A, B, O> for Loaded<GemmGrouped<A, B, DEPTH, O, WIDTH, S, BY_SUM, M_MAJOR, N_MAJOR>>
where
    A: MatrixElement,
    B: MatrixElement,
    O: StoredElement,
    S: TileLoops,
    GemmGrouped<A, B, DEPTH, O, WIDTH, S, BY_SUM, M_MAJOR, N_MAJOR>: Kernel,
{
    fn bind<'a>(&'a self, stream: &Stream, config: GemmConfig, groups: u64, matrices: GroupedMatrices<'a, A, B, O>) -> Result<Bound<'a>> {
        let (GemmConfig { m, n, k, .. }, GroupedMatrices { a, b, scales, sizes, d }) = (config, matrices);
        let rows = |rows, width| GroupRows { rows, width };
        let [of_a, of_b, of_d] = match (BY_SUM, N_MAJOR) {
            (true, _) => [rows(k, m), rows(k, n), rows(groups * m, n)],
            (false, true) => [rows(m, k), rows(groups * k, n), rows(m, n)],
            (false, false) => [rows(m, k), rows(groups * n, k), rows(m, n)],
        };
        let (mut uploads, result) = (Uploads::default(), (d.access("old"), d.len()));
        let a = TensorMap::<_, 64, DEPTH, Swizzle128, 4>::with(&mut uploads, stream, a, of_a)?;
        let b = TensorMap::<_, 64, DEPTH, Swizzle128, 4>::with(&mut uploads, stream, b, of_b)?;
        let mut d = TensorMapMut::<_, 64, WIDTH, Swizzle128, 4>::with(&mut uploads, stream, d, of_d)?;
        uploads.copy(stream)?;
        Ok(Bound::new(move |stream| {
            let (memory, length) = result;
            // SAFETY: the map `d` holds the only view of this memory, and is borrowed with it. The kernels read an element of the matrix as it was before
            // they store that element, in the same warpgroup.
            let old = unsafe { DeviceViewMut::from_raw(memory.address, length, memory.owner) };
            let (shape, fusion) = (config.shape(), config.fusion(scales, None));
            let args = GemmGroupedArgs { a: a.view(), b: b.view(), d: d.view_mut(), old, shape, fusion, sizes, marker: PhantomData };
            self.launch(stream, args)
        }))
    }
}

impl<T: GemmOperands<O>, O> fmt::Debug for GroupedGemm<T, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { config, groups, choice, .. } = self;
        f.debug_struct("GroupedGemm").field("config", config).field("groups", groups).field("choice", choice).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use oxtile_tile::num::bf16;

    use super::*;

    #[test]
    fn groups_of_few_rows_have_tiles_of_64() {
        let tile_of = |m, transpose_a| {
            let config = GemmConfig { m, n: 256, k: 512, transpose_a, transpose_b: !transpose_a, ..GemmConfig::default() };
            let choice = match transpose_a {
                true => GroupedGemm::<bf16, f32>::choose(config, 8, None, Ok(())),
                false => GroupedGemm::<bf16, bf16>::choose(config, 8, None, Ok(())),
            };
            choice.unwrap().decision.tile()
        };
        assert_eq!(tile_of(8 * 96, false), Some(GemmTile::Tile64x128));
        assert_eq!(tile_of(8 * 96 + 1, false), Some(GemmTile::Tile128x128));
        assert_eq!(tile_of(256, true), Some(GemmTile::Tile128x256));
    }
}
