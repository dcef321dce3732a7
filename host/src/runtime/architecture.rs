//! Which code runs on which device.

/// 90 for 9.0.
pub(super) const fn number((major, minor): (u32, u32)) -> u32 {
    major * 10 + minor
}

/// The architecture to build for, for a device of this compute capability.
pub(super) fn wanted(capability: (u32, u32)) -> String {
    format!("sm_{}{}", number(capability), if capability.0 >= 9 { "a" } else { "" })
}

/// `sm_90a` and its like. CUDA C++ Programming Guide, "Compute Capabilities", feature set compiler targets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Architecture {
    pub number: u32,
    pub variant: Variant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Variant {
    /// `sm_90`: PTX runs on everything newer.
    Portable,
    /// `sm_100f`: runs on newer devices of the same major version.
    Family,
    /// `sm_90a`: runs there alone.
    Exact,
}

impl Architecture {
    pub fn parse(name: &str) -> Option<Self> {
        let name = name.strip_prefix("sm_")?;
        let (digits, variant) = match name.strip_suffix('a') {
            Some(digits) => (digits, Variant::Exact),
            None => name.strip_suffix('f').map_or((name, Variant::Portable), |digits| (digits, Variant::Family)),
        };
        Some(Self { number: digits.parse().ok()?, variant })
    }

    pub fn cubin_runs_on(self, (major, minor): (u32, u32)) -> bool {
        match self.variant {
            Variant::Exact => self.number == number((major, minor)),
            Variant::Family | Variant::Portable => self.number / 10 == major && self.number % 10 <= minor,
        }
    }

    pub fn ptx_runs_on(self, capability: (u32, u32)) -> bool {
        match self.variant {
            Variant::Portable => self.number <= number(capability),
            Variant::Exact | Variant::Family => self.cubin_runs_on(capability),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(name: &str, capability: (u32, u32)) -> (bool, bool) {
        let architecture = Architecture::parse(name).unwrap();
        (architecture.cubin_runs_on(capability), architecture.ptx_runs_on(capability))
    }

    #[test]
    fn architectures_run_where_the_driver_takes_them() {
        assert_eq!(runs("sm_90a", (9, 0)), (true, true));
        assert_eq!(runs("sm_90a", (10, 0)), (false, false));
        assert_eq!(runs("sm_80", (8, 6)), (true, true));
        assert_eq!(runs("sm_86", (8, 0)), (false, false));
        assert_eq!(runs("sm_80", (9, 0)), (false, true));
        assert_eq!(runs("sm_100f", (10, 3)), (true, true));
        assert_eq!(runs("sm_100f", (12, 0)), (false, false));
        assert_eq!(runs("sm_103a", (10, 0)), (false, false));
        assert_eq!(Architecture::parse("compute_90"), None);
    }
}
