//! Which kernel a product takes, and why.

use oxtile_kernels::gemm::CLUSTER_PARTS;

use super::config::GemmConfig;
use super::plan::{GemmPlan, MOST_PARTS, Problem, transposing};
use super::table::GemmOperands;
use crate::choice::{Choice, Entry};
use crate::runtime::{Device, Error, HOPPER, Result};

/// A kernel of matrix multiplication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GemmKernel {
    /// On wgmma.
    Wgmma {
        /// The tile of a block.
        tile: GemmTile,
        /// Whether rows of `A` lie along `m`, and not along `k`.
        m_major: bool,
        /// Whether rows of `B` lie along `n`, and not along `k`.
        n_major: bool,
    },
    /// On wgmma, of 8-bit operands of which some do not lie along `k`, as the instruction takes them: these are transposed first, at each run, by `fp8_transpose`
    /// into memory that belongs to the binding ([`Gemm::transposed_bytes`](super::Gemm::transposed_bytes)).
    WgmmaTransposed {
        /// The tile of a block.
        tile: GemmTile,
        /// Whether `A` is transposed, whose rows lie along `m`.
        a: bool,
        /// Whether `B` is transposed, whose rows lie along `n`.
        b: bool,
    },
    /// On `mma.sync`: 16-bit operands of any shape, on any GPU from sm_80 on.
    Portable {
        /// Whether the operands' rows are multiples of 16 bytes and `n` is even; else elements are copied one by one.
        aligned: bool,
    },
    /// Without tensor cores: 8-bit operands of any shape, on any GPU.
    Any,
}

/// The tile of the result that a block computes at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GemmTile {
    /// 128 rows and 256 columns, in clusters of two blocks that are 256 rows high.
    Tile128x256,
    /// 128 rows and 192 columns.
    Tile128x192,
    /// 128 rows and 176 columns.
    Tile128x176,
    /// 128 rows and columns.
    Tile128x128,
    /// 128 rows and 112 columns.
    Tile128x112,
    /// 128 rows and 96 columns.
    Tile128x96,
    /// 64 rows and 144 columns.
    Tile64x144,
    /// 64 rows and 128 columns.
    Tile64x128,
    /// 64 rows and 96 columns.
    Tile64x96,
    /// 64 rows and columns.
    Tile64x64,
}

impl GemmKernel {
    /// The tile of a kernel on wgmma; none of the others.
    pub fn tile(self) -> Option<GemmTile> {
        match self {
            Self::Wgmma { tile, .. } | Self::WgmmaTransposed { tile, .. } => Some(tile),
            Self::Portable { .. } | Self::Any => None,
        }
    }
}

impl GemmTile {
    /// All.
    pub const ALL: [Self; 10] = [
        Self::Tile128x256,
        Self::Tile128x192,
        Self::Tile128x176,
        Self::Tile128x128,
        Self::Tile128x112,
        Self::Tile128x96,
        Self::Tile64x144,
        Self::Tile64x128,
        Self::Tile64x96,
        Self::Tile64x64,
    ];
}

/// The multiprocessors of an H100 and an H200.
const MULTIPROCESSORS: u32 = 132;

impl GemmConfig {
    /// The kernel for operands `T` and results of `O` on a device: on Hopper as [`choose`](Self::choose), elsewhere one on `mma.sync`, or of
    /// 8-bit operands one without tensor cores.
    ///
    /// # Errors
    /// As [`choose`](Self::choose).
    pub fn choose_on<T: GemmOperands<O>, O: 'static>(&self, device: &Device) -> Result<Choice<GemmKernel>> {
        self.choose_by::<T, O>(wgmma_of(device.capability()), device.limits().multiprocessors).map(|(choice, _)| choice)
    }

    /// The kernel for operands `T` and results of `O` on an H100 or H200: the one on `wgmma` that a model with an H200's constants predicts to be the fastest, after 8-bit operands that do not lie along `k` are
    /// transposed; where rows are no multiples of 16 bytes (of 8-bit operands those along `k`), one on `mma.sync`, or of 8-bit operands one without tensor cores. Depends on sizes, layouts and types alone.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a size beyond 2^31 - 1: the field is named; and for operands of two types that the kernels on `wgmma` do not take.
    pub fn choose<T: GemmOperands<O>, O: 'static>(&self) -> Result<Choice<GemmKernel>> {
        self.choose_by::<T, O>(Ok(()), MULTIPROCESSORS).map(|(choice, _)| choice)
    }

    /// The choice of [`Gemm::portable`](super::Gemm::portable).
    pub(crate) fn choose_portable<T: GemmOperands<O>, O: 'static>(&self) -> Result<Choice<GemmKernel>> {
        self.plan_portable::<T, O>().map(|(choice, _)| choice)
    }

    /// The same, and the plan.
    pub(super) fn plan_portable<T: GemmOperands<O>, O: 'static>(&self) -> Result<(Choice<GemmKernel>, GemmPlan)> {
        self.choose_by::<T, O>(Err("a kernel of any GPU is asked for".to_owned()), MULTIPROCESSORS)
    }

    /// The choice on a device, and the plan.
    pub(super) fn plan_on<T: GemmOperands<O>, O: 'static>(&self, device: &Device) -> Result<(Choice<GemmKernel>, GemmPlan)> {
        self.choose_by::<T, O>(wgmma_of(device.capability()), device.limits().multiprocessors)
    }

    /// The kernel of codes with a scale for every block that the model predicts to be the fastest, and its plan, or why none takes the product.
    pub(crate) fn choose_blocks<T: GemmOperands<O>, O: 'static>(
        &self,
        multiprocessors: u32,
    ) -> Result<(Choice<GemmKernel>, GemmPlan), String> {
        self.check_sizes()?;
        self.find_wgmma::<T, O>()?;
        let problem = Problem { in_blocks: true, few: false, ..self.problem::<T, O>(multiprocessors) };
        let entries = T::BLOCKS.iter().copied().flatten();
        let plans = entries.filter_map(|entry| Some((entry.name, problem.plan(entry.decision, entry.decision.tile()?))));
        let mut plans: Vec<_> = plans.collect();
        plans.sort_by(|(_, a), (_, b)| a.microseconds.total_cmp(&b.microseconds));
        let Some(((name, plan), others)) = plans.split_first() else {
            return Err("no kernel takes these elements with scales of blocks".to_owned());
        };
        let refused = others.iter().map(|(_, other)| (other.kernel, format!("slower: {other}"))).collect();
        Ok((Choice { decision: plan.kernel, kernel: Some(name), why: plan.to_string(), refused }, *plan))
    }

    /// The kernels on wgmma that take the product.
    pub fn kernels<T: GemmOperands<O>, O: 'static>(&self) -> Vec<GemmKernel> {
        self.find_wgmma::<T, O>().map_or_else(|_| Vec::new(), |kernels| kernels.into_iter().map(|(kernel, _)| kernel).collect())
    }

    /// All plans on wgmma on a device among which the choice is made, the predicted fastest of each kernel first: to measure them, or to
    /// pin one ([`Gemm::planned`](super::Gemm::planned)). None where these kernels do not take the product.
    pub fn plans<T: GemmOperands<O>, O: 'static>(&self, device: &Device) -> Vec<GemmPlan> {
        let known = self.check_sizes().and_then(|()| wgmma_of(device.capability()));
        let Ok(kernels) = known.and_then(|()| self.find_wgmma::<T, O>()) else { return Vec::new() };
        let problem = self.problem::<T, O>(device.limits().multiprocessors);
        kernels.into_iter().flat_map(|(kernel, tile)| problem.plans(kernel, tile)).collect()
    }

    /// The microseconds that the model predicts for the fastest plan. None where the kernels on wgmma do not take the product.
    pub(crate) fn predicted<T: GemmOperands<O>, O: 'static>(&self, multiprocessors: u32) -> Option<f64> {
        let kernels = self.check_sizes().and_then(|()| self.find_wgmma::<T, O>()).ok()?;
        let problem = self.problem::<T, O>(multiprocessors);
        kernels.into_iter().map(|(kernel, tile)| problem.plan(kernel, tile).microseconds).min_by(f64::total_cmp)
    }

    /// The microseconds that the model predicts for tiles that are all computed whole.
    pub(crate) fn predicted_whole<T: GemmOperands<O>, O: 'static>(&self, tile: GemmTile, multiprocessors: u32) -> Option<f64> {
        self.whole::<T, O>(tile, multiprocessors).map(|plan| plan.microseconds)
    }

    /// The plan of tiles that are all computed whole.
    pub(crate) fn whole<T: GemmOperands<O>, O: 'static>(&self, tile: GemmTile, multiprocessors: u32) -> Option<GemmPlan> {
        let kernels = self.check_sizes().and_then(|()| self.find_wgmma::<T, O>()).ok()?;
        let (kernel, _) = kernels.into_iter().find(|(_, found)| *found == tile)?;
        Some(self.problem::<T, O>(multiprocessors).whole(kernel, tile))
    }

    /// Why the kernels on wgmma do not take the product, if they do not.
    pub(crate) fn takes_wgmma<T: GemmOperands<O>, O: 'static>(&self) -> Result<(), String> {
        self.check_sizes()?;
        self.find_wgmma::<T, O>().map(drop)
    }

    /// Why a plan does not fit the product.
    pub(super) fn check_plan<T: GemmOperands<O>, O: 'static>(&self, plan: &GemmPlan) -> Result<(), String> {
        self.check_sizes()?;
        let kernels = self.find_wgmma::<T, O>()?;
        let Some((_, tile)) = kernels.iter().find(|(kernel, _)| *kernel == plan.kernel) else {
            return Err(format!("{:?} does not multiply these operands: take one of {kernels:?}", plan.kernel));
        };
        let steps = self.problem::<T, O>(MULTIPROCESSORS).steps;
        let (tiles, &GemmPlan { whole, parts: found, in_clusters, .. }) = (tile.count([self.m, self.n]), plan);
        if in_clusters {
            let fits = CLUSTER_PARTS.iter().any(|parts| u64::from(*parts) == found) && found <= steps;
            if !tile.takes_clusters() || whole > 0 || !fits {
                return Err(format!(
                    "{whole} tiles whole and {found} parts of the others by the blocks of a cluster: none is whole, parts are of {CLUSTER_PARTS:?} and at most {steps}, and {tile:?} has none where its ring is too small"
                ));
            }
            return Ok(());
        }
        let parts = 1..=steps.min(MOST_PARTS);
        if whole > tiles || !parts.contains(&found) {
            return Err(format!("{whole} tiles whole and {found} parts of the others: there are {tiles} tiles, and {parts:?} parts"));
        }
        Ok(())
    }

    /// The choice where the kernels on wgmma can be taken, or cannot, whatever is multiplied.
    fn choose_by<T: GemmOperands<O>, O: 'static>(
        &self,
        wgmma: Result<(), String>,
        multiprocessors: u32,
    ) -> Result<(Choice<GemmKernel>, GemmPlan)> {
        self.check_sizes().map_err(|why| Error::Invalid { what: "GemmConfig", why })?;
        if self.m == 0 || self.n == 0 {
            let (decision, why) = (GemmKernel::Any, "the result is empty".to_owned());
            return Ok((Choice { decision, kernel: None, why, refused: Vec::new() }, GemmPlan::without(decision)));
        }
        match wgmma.and_then(|()| self.find_wgmma::<T, O>()) {
            Ok(kernels) => {
                let problem = self.problem::<T, O>(multiprocessors);
                let mut plans: Vec<_> = kernels.into_iter().map(|(kernel, tile)| problem.plan(kernel, tile)).collect();
                plans.sort_by(|a, b| a.microseconds.total_cmp(&b.microseconds));
                let plan = plans[0];
                let kernel = Some(Entry::find(T::KERNELS, &plan.kernel)?.name);
                let [m_major, n_major] = self.majors();
                let mut why = format!("{plan}, {}", Self::layout(m_major, n_major));
                let mut refused: Vec<_> = plans[1..].iter().map(|other| (other.kernel, format!("slower: {other}"))).collect();
                if let GemmKernel::WgmmaTransposed { tile, a, b } = plan.kernel {
                    let both = if a && b { "both " } else { "" };
                    why += &format!(": {both}transposed first, {:.1} us of it", problem.transposing / 1000.0);
                    let as_they_lie = GemmKernel::Wgmma { tile, m_major, n_major };
                    refused.insert(0, (as_they_lie, "the tensor cores take 8-bit operands along k alone".to_owned()));
                }
                Ok((Choice { decision: plan.kernel, kernel, why, refused }, plan))
            }
            Err(why) => self.choose_other::<T, O>(why).map(|choice| (choice.clone(), GemmPlan::without(choice.decision))),
        }
    }

    /// Coordinates of TMA are signed words.
    fn check_sizes(&self) -> Result<(), String> {
        match [("m", self.m), ("n", self.n), ("k", self.k)].into_iter().find(|(_, size)| i32::try_from(*size).is_err()) {
            Some((field, size)) => Err(format!("{field} is {size}: at most {}", i32::MAX)),
            None => Ok(()),
        }
    }

    /// The kernel where those on wgmma are refused: on `mma.sync` if there is one of these elements.
    fn choose_other<T: GemmOperands<O>, O: 'static>(&self, why: String) -> Result<Choice<GemmKernel>> {
        let [m_major, n_major] = self.majors();
        let wgmma = GemmKernel::Wgmma { tile: GemmTile::Tile128x256, m_major, n_major };
        let unaligned = self.why_unaligned::<T, O>();
        let portable = GemmKernel::Portable { aligned: unaligned.is_none() };
        if let Ok(Entry { name, tile: [rows, columns], .. }) = Entry::find(T::KERNELS, &portable) {
            let copies = if unaligned.is_none() { "" } else { ", element by element" };
            let reason = format!("{rows} by {columns} tiles on mma.sync, {}{copies}: {why}", Self::layout(m_major, n_major));
            let unaligned = unaligned.map(|why| (GemmKernel::Portable { aligned: true }, why));
            let refused = [(wgmma, why)].into_iter().chain(unaligned).collect();
            return Ok(Choice { decision: portable, kernel: Some(*name), why: reason, refused });
        }
        let decision = GemmKernel::Any;
        match Entry::find(T::KERNELS, &decision) {
            Ok(Entry { name, .. }) => Ok(Choice { decision, kernel: Some(*name), why: why.clone(), refused: vec![(wgmma, why)] }),
            Err(_) => {
                let why = format!("{why}; operands of two types have kernels on wgmma alone: convert one, or both to bf16");
                Err(Error::Invalid { what: "GemmConfig", why })
            }
        }
    }

    /// Why 16 bytes of a row, or pairs of the result, cannot be copied at a time.
    fn why_unaligned<T: GemmOperands<O>, O: 'static>(&self) -> Option<String> {
        let [(a, of_a, a_width), (b, of_b, b_width)] = self.rows();
        let rows = [(a, of_a, a_width, 16 / T::BYTES), (b, of_b, b_width, 16 / T::BYTES), ("n", "the result's rows", self.n, 2)];
        let (field, of, size, multiple) = rows.into_iter().find(|(.., size, multiple)| !size.is_multiple_of(*multiple))?;
        Some(format!("{field} is {size}, no multiple of {multiple} with {of}: elements are copied one by one"))
    }

    /// The field that is the width of the rows of `A` and of `B`, why, and its value.
    fn rows(&self) -> [(&'static str, &'static str, u64); 2] {
        let [m_major, n_major] = self.majors();
        [
            if m_major { ("m", "transpose_a", self.m) } else { ("k", "no transpose_a", self.k) },
            if n_major { ("n", "no transpose_b", self.n) } else { ("k", "transpose_b", self.k) },
        ]
    }

    /// The kernels on wgmma, or why there is none for this configuration.
    fn find_wgmma<T: GemmOperands<O>, O: 'static>(&self) -> Result<Vec<(GemmKernel, GemmTile)>, String> {
        if self.m == 0 || self.n == 0 {
            return Err("the result is empty".to_owned());
        }
        if self.k == 0 {
            return Err("k is 0: nothing is multiplied".to_owned());
        }
        let [m_major, n_major] = self.majors();
        let transposes = T::BYTES == 1 && (m_major || n_major);
        let [(a, of_a, a_width), (b, of_b, b_width)] =
            if transposes { [("k", "8-bit operands, transposed or not", self.k); 2] } else { self.rows() };
        let result = ("n", "the result's rows", self.n, size_of::<O>() as u64);
        let rows = [(a, of_a, a_width, T::BYTES), (b, of_b, b_width, T::BYTES), result];
        if let Some((field, of, size, bytes)) = rows.into_iter().find(|(_, _, size, bytes)| !(size * bytes).is_multiple_of(16)) {
            return Err(format!("{field} is {size}, no multiple of {} with {of}: TMA takes rows of a multiple of 16 bytes", 16 / bytes));
        }
        let of = |tile| match transposes {
            true => GemmKernel::WgmmaTransposed { tile, a: m_major, b: n_major },
            false => GemmKernel::Wgmma { tile, m_major, n_major },
        };
        let all = GemmTile::ALL.map(|tile| (of(tile), tile));
        let kernels: Vec<_> = all.into_iter().filter(|(kernel, _)| Entry::find(T::KERNELS, kernel).is_ok()).collect();
        if kernels.is_empty() {
            return Err("no kernel on wgmma has a result of these elements".to_owned());
        }
        Ok(kernels)
    }

    /// The product in units of the kernels.
    pub(super) fn problem<T: GemmOperands<O>, O: 'static>(&self, multiprocessors: u32) -> Problem {
        let transposed = self.majors().into_iter().zip([self.m, self.n]).filter(|(lies_across, _)| T::BYTES == 1 && *lies_across);
        Problem {
            m: self.m,
            n: self.n,
            steps: (self.k * T::BYTES).div_ceil(128),
            result_bytes: size_of::<O>() as u64,
            multiprocessors: multiprocessors.into(),
            few: T::BYTES == 1 || !self.transpose_a,
            narrow: T::BYTES == 1,
            in_blocks: false,
            transposing: transposed.map(|(_, outer)| transposing(outer.saturating_mul(self.k))).sum(),
        }
    }

    fn layout(m_major: bool, n_major: bool) -> &'static str {
        match (m_major, n_major) {
            (false, false) => "both operands along k",
            (true, false) => "A along m",
            (false, true) => "B along n",
            (true, true) => "A along m, B along n",
        }
    }
}

/// Whether a device of a capability has the kernels on wgmma.
pub(crate) fn wgmma_of(capability: (u32, u32)) -> Result<(), String> {
    let (major, minor) = capability;
    if capability == HOPPER { Ok(()) } else { Err(format!("the kernels on wgmma need sm_90, this is sm_{major}{minor}")) }
}

#[cfg(test)]
mod tests {
    use oxtile_kernels::gemm::{GemmAny, GemmPortable};
    use oxtile_tile::launch::Kernel;
    use oxtile_tile::num::{bf16, e4m3, e5m2, f16};

    use super::*;

    #[test]
    fn other_devices_take_the_kernels_on_mma_sync() {
        let config = GemmConfig { m: 16, n: 16, k: 16, ..GemmConfig::default() };
        let choose = |config: GemmConfig, capability| config.choose_by::<bf16, f32>(wgmma_of(capability), 132).unwrap().0;
        let wgmma = |tile| GemmKernel::Wgmma { tile, m_major: false, n_major: true };
        let aligned = GemmKernel::Portable { aligned: true };
        assert_eq!(choose(config, HOPPER).decision, wgmma(GemmTile::Tile64x128));
        for capability in [(8, 0), (8, 9), (10, 0), (12, 0)] {
            let choice = choose(config, capability);
            assert_eq!((choice.decision, choice.kernel), (aligned, Some(<GemmPortable<bf16, f32, true> as Kernel>::INFO.name)));
            assert_eq!(choose(GemmConfig { m: 0, ..config }, capability).kernel, None);
        }
        let choice = choose(config, (8, 9));
        assert_eq!(choice.why, "256 by 128 tiles on mma.sync, B along n: the kernels on wgmma need sm_90, this is sm_89");
        assert_eq!(choice.refused, [(wgmma(GemmTile::Tile128x256), "the kernels on wgmma need sm_90, this is sm_89".to_owned())]);
        for odd in [GemmConfig { k: 12, transpose_b: true, ..config }, GemmConfig { n: 17, ..config }] {
            let choice = choose(odd, HOPPER);
            assert_eq!((choice.decision, choice.refused.len()), (GemmKernel::Portable { aligned: false }, 2), "{choice:?}");
        }
        // A result's rows of 8 bytes are too narrow for TMA alone.
        assert_eq!(choose(GemmConfig { n: 2, transpose_b: true, ..config }, HOPPER).decision, aligned);
    }

    #[test]
    fn elements_without_a_kernel_on_wgmma() {
        let config = GemmConfig { m: 16, n: 16, k: 16, ..GemmConfig::default() };
        let choice = config.choose::<f16, f32>().unwrap();
        assert_eq!(choice.decision, GemmKernel::Portable { aligned: true });
        assert_eq!(choice.refused[0].1, "no kernel on wgmma has a result of these elements");
        let choice = GemmConfig { k: 8, ..config }.choose::<e4m3, f32>().unwrap();
        assert_eq!((choice.decision, choice.kernel), (GemmKernel::Any, Some(<GemmAny<e4m3, f32> as Kernel>::INFO.name)));
    }

    #[test]
    fn operands_of_8_bits_across_k_are_transposed_first() {
        let config = GemmConfig { m: 4096, n: 14336, k: 8192, ..GemmConfig::default() };
        let along_k = GemmConfig { transpose_b: true, ..config };
        let (plain, plan) = along_k.choose_by::<e4m3, bf16>(Ok(()), 132).unwrap();
        let GemmKernel::Wgmma { tile, m_major: false, n_major: false } = plain.decision else { panic!("{plain:?}") };
        for (transpose_a, transpose_b, why, bytes) in [
            (false, false, ", B along n: transposed first, 63.1 us of it", 14336 * 8192),
            (true, true, ", A along m: transposed first, 18.9 us of it", 4096 * 8192),
            (true, false, ", A along m, B along n: both transposed first, 82.0 us of it", (4096 + 14336) * 8192),
        ] {
            let config = GemmConfig { transpose_a, transpose_b, ..config };
            let (choice, with) = config.choose_by::<e4m3, bf16>(Ok(()), 132).unwrap();
            let [a, b] = config.majors();
            assert_eq!((choice.decision, choice.kernel), (GemmKernel::WgmmaTransposed { tile, a, b }, plain.kernel));
            assert!(choice.why.contains(" tiles on wgmma, ") && choice.why.ends_with(why), "{choice:?}");
            let as_they_lie = GemmKernel::Wgmma { tile, m_major: a, n_major: b };
            assert_eq!(choice.refused[0], (as_they_lie, "the tensor cores take 8-bit operands along k alone".to_owned()));
            assert!(choice.refused[1..].iter().all(|(_, why)| why.starts_with("slower: ")), "{choice:?}");
            let transposing = 2.0 * bytes as f64 / 3.8e6 + 1.25 * f64::from(u8::from(a) + u8::from(b));
            assert!((with.microseconds - plan.microseconds - transposing).abs() < 1e-6, "{with}");
            assert_eq!(config.check_plan::<e4m3, bf16>(&with), Ok(()));
            // Operands of two types have no other kernel.
            let pair = config.choose::<(e5m2, e4m3), bf16>().unwrap().decision;
            assert!(matches!(pair, GemmKernel::WgmmaTransposed { a: of_a, b: of_b, .. } if [of_a, of_b] == [a, b]), "{pair:?}");
            assert!(config.choose_by::<(e5m2, e4m3), bf16>(wgmma_of((8, 9)), 132).is_err());
            assert_eq!(config.choose_by::<e4m3, bf16>(wgmma_of((8, 9)), 132).unwrap().0.decision, GemmKernel::Any);
            // Rows of 16-bit operands may lie in any direction.
            assert!(matches!(config.choose::<bf16, bf16>().unwrap().decision, GemmKernel::Wgmma { .. }));
        }
        // Only the sum must be whole vectors, after the transposition.
        let ragged = GemmConfig { m: 77, n: 136, k: 48, transpose_a: true, ..config };
        assert!(matches!(ragged.choose::<e4m3, bf16>().unwrap().decision, GemmKernel::WgmmaTransposed { a: true, b: true, .. }));
        let Choice { decision, why, .. } = GemmConfig { k: 40, ..ragged }.choose::<e4m3, bf16>().unwrap();
        assert!(decision == GemmKernel::Any && why.starts_with("k is 40, no multiple of 16 with 8-bit operands"), "{why}");
    }

    /// Coordinates of TMA from 2^31 on are negative: such rows would be read as zero and not be stored.
    #[test]
    fn a_given_plan_is_held_to_the_sizes_of_a_choice() {
        let small = GemmConfig { m: 16, n: 16, k: 16, ..GemmConfig::default() };
        let plan = small.choose_by::<bf16, f32>(Ok(()), 132).unwrap().1;
        assert_eq!(small.check_plan::<bf16, f32>(&plan), Ok(()));
        let refused = GemmConfig { m: (1 << 31) + 256, ..small }.check_plan::<bf16, f32>(&plan);
        assert_eq!(refused, Err("m is 2147483904: at most 2147483647".to_owned()));
    }
}
