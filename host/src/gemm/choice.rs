//! Which kernel a product takes, and why.

use super::config::GemmConfig;
use super::table::{GemmElement, GemmEntry};
use crate::choice::{Choice, Entry};
use crate::runtime::{Device, Error, HOPPER, Result};

/// A kernel of matrix multiplication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GemmKernel {
    /// On wgmma.
    Wgmma {
        /// Whether rows of `A` lie along `m`, and not along `k`.
        m_major: bool,
        /// Whether rows of `B` lie along `n`, and not along `k`.
        n_major: bool,
    },
    /// Without tensor cores: any shape, on any GPU.
    Any,
}

impl GemmConfig {
    /// The kernel for elements of `T` into `O` on a device: the tensor cores' on Hopper, elsewhere a slow one that takes any shape.
    ///
    /// # Errors
    /// As [`choose`](Self::choose).
    pub fn choose_on<T: GemmElement<O>, O: 'static>(&self, device: &Device) -> Result<Choice<GemmKernel>> {
        self.choose_by::<T, O>(wgmma_of(device.capability()))
    }

    /// The kernel for elements of `T` into `O` on Hopper: the tensor cores', or where rows are no multiples of 16 bytes or 8-bit operands
    /// do not lie along `k`, a slow one that takes any shape.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a size beyond 2^31 - 1: the field is named.
    pub fn choose<T: GemmElement<O>, O: 'static>(&self) -> Result<Choice<GemmKernel>> {
        self.choose_by::<T, O>(Ok(()))
    }

    /// The choice of [`Gemm::portable`].
    pub(crate) fn choose_portable<T: GemmElement<O>, O: 'static>(&self) -> Result<Choice<GemmKernel>> {
        self.choose_by::<T, O>(Err("the kernel of any shape is asked for".to_owned()))
    }

    /// The choice where the kernels on wgmma can be taken, or cannot, whatever is multiplied.
    fn choose_by<T: GemmElement<O>, O: 'static>(&self, wgmma: Result<(), String>) -> Result<Choice<GemmKernel>> {
        let refuse = |why: String| Err(Error::Invalid { what: "GemmConfig", why });
        if let Some((field, size)) =
            [("m", self.m), ("n", self.n), ("k", self.k)].into_iter().find(|(_, size)| i32::try_from(*size).is_err())
        {
            return refuse(format!("{field} is {size}: at most {}", i32::MAX));
        }
        let any = GemmKernel::Any;
        if self.m == 0 || self.n == 0 {
            return Ok(Choice { decision: any, kernel: None, why: "the result is empty".to_owned(), refused: Vec::new() });
        }
        let [m_major, n_major] = self.majors();
        let decision = GemmKernel::Wgmma { m_major, n_major };
        Ok(match self.find_wgmma::<T, O>(&decision).and_then(|entry| wgmma.map(|()| entry)) {
            Ok(Entry { name, tile: [rows, columns], .. }) => {
                let why = format!("{rows} by {columns} tiles on wgmma, {}", Self::layout(m_major, n_major));
                Choice { decision, kernel: Some(name), why, refused: Vec::new() }
            }
            Err(why) => {
                let kernel = Some(Entry::find(T::KERNELS, &any)?.name);
                Choice { decision: any, kernel, why: why.clone(), refused: vec![(decision, why)] }
            }
        })
    }

    /// The kernel on wgmma, or why there is none for this configuration.
    fn find_wgmma<T: GemmElement<O>, O: 'static>(&self, decision: &GemmKernel) -> Result<&'static GemmEntry<T, O>, String> {
        if self.k == 0 {
            return Err("k is 0: nothing is multiplied".to_owned());
        }
        let [m_major, n_major] = self.majors();
        let rows = [
            if m_major { ("m", "transpose_a", self.m, T::BYTES) } else { ("k", "no transpose_a", self.k, T::BYTES) },
            if n_major { ("n", "no transpose_b", self.n, T::BYTES) } else { ("k", "transpose_b", self.k, T::BYTES) },
            ("n", "the result's rows", self.n, size_of::<O>() as u64),
        ];
        if let Some((field, of, size, bytes)) = rows.into_iter().find(|(_, _, size, bytes)| !(size * bytes).is_multiple_of(16)) {
            return Err(format!("{field} is {size}, no multiple of {} with {of}: TMA takes rows of a multiple of 16 bytes", 16 / bytes));
        }
        let entry = Entry::find(T::KERNELS, decision);
        entry.map_err(|_| "8-bit operands on the tensor cores lie along k: transpose_a false, transpose_b true".to_owned())
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
fn wgmma_of(capability: (u32, u32)) -> Result<(), String> {
    let (major, minor) = capability;
    if capability == HOPPER { Ok(()) } else { Err(format!("the tensor cores' kernels need sm_90, this is sm_{major}{minor}")) }
}

#[cfg(test)]
mod tests {
    use oxtile_kernels::gemm::GemmAny;
    use oxtile_tile::launch::Kernel;
    use oxtile_tile::num::bf16;

    use super::*;

    #[test]
    fn other_devices_take_the_kernel_of_any_shape() {
        let config = GemmConfig { m: 16, n: 16, k: 16, ..GemmConfig::default() };
        let choose = |config: GemmConfig, capability| config.choose_by::<bf16, f32>(wgmma_of(capability)).unwrap();
        let wgmma = GemmKernel::Wgmma { m_major: false, n_major: true };
        assert_eq!(choose(config, HOPPER).decision, wgmma);
        for capability in [(8, 0), (8, 9), (10, 0), (12, 0)] {
            let choice = choose(config, capability);
            assert_eq!((choice.decision, choice.kernel), (GemmKernel::Any, Some(<GemmAny<bf16, f32> as Kernel>::INFO.name)));
            assert_eq!(choose(GemmConfig { m: 0, ..config }, capability).kernel, None);
        }
        let choice = choose(config, (8, 9));
        assert!(choice.why.contains("need sm_90, this is sm_89"));
        assert_eq!(choice.refused, [(wgmma, choice.why)]);
    }
}
