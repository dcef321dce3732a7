//! GPU architectures by the names of ptxas.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::Error;

/// A GPU architecture, for example `sm_90a` (H100, H200).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Arch(String);

impl Arch {
    /// Hopper with its architecture-specific instructions (wgmma, TMA, setmaxnreg): the default.
    pub fn hopper() -> Self {
        Self("sm_90a".into())
    }

    /// The architecture to build for a GPU of this compute capability, as nvidia-smi prints it (`9.0`): with its
    /// architecture-specific instructions where it has any. `None` for an architecture that the pinned compiler and ptxas do not know.
    pub fn of_capability(capability: &str) -> Option<Self> {
        let digits = capability.trim().replace('.', "");
        let suffix = match digits.as_str() {
            "80" | "86" | "87" | "89" => "",
            "90" | "100" | "103" | "120" | "121" => "a",
            _ => return None,
        };
        Some(Self(format!("sm_{digits}{suffix}")))
    }

    /// The name, `sm_90a`.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether code that says `requires = needed` runs here: architecture-specific features (a trailing letter)
    /// run on that architecture alone, the others on it and on its successors.
    pub fn satisfies(&self, needed: &str) -> bool {
        if needed.ends_with(|c: char| c.is_ascii_alphabetic()) {
            return self.0 == needed;
        }
        match (number(&self.0), number(needed)) {
            (Some(have), Some(need)) => have >= need,
            _ => false,
        }
    }
}

fn number(name: &str) -> Option<u32> {
    name.strip_prefix("sm_")?.trim_end_matches(|c: char| c.is_ascii_alphabetic()).parse().ok()
}

impl FromStr for Arch {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        let digits = name.strip_prefix("sm_").unwrap_or_default().trim_end_matches(['a', 'f']);
        if (2..=3).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_digit()) {
            return Ok(Self(name.into()));
        }
        Err(Error::Arch { name: name.into() })
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architecture_specific_features_run_there_only() {
        let arch = |s: &str| s.parse::<Arch>().unwrap();
        assert!(arch("sm_90a").satisfies("sm_90a"));
        assert!(!arch("sm_100a").satisfies("sm_90a"));
        assert!(arch("sm_100a").satisfies("sm_90"));
        assert!(!arch("sm_80").satisfies("sm_90"));
    }

    #[test]
    fn a_gpu_has_an_architecture() {
        let of = |capability| Arch::of_capability(capability).map(|arch| arch.to_string());
        assert_eq!(of("9.0\n").as_deref(), Some("sm_90a"));
        assert_eq!(of("8.6").as_deref(), Some("sm_86"));
        assert_eq!(of("12.0").as_deref(), Some("sm_120a"));
        assert_eq!((of("7.5"), of("[N/A]")), (None, None));
    }

    #[test]
    fn wrong_names_are_errors() {
        for name in ["90a", "sm_", "sm_9x", "compute_90", "sm_90b"] {
            assert!(name.parse::<Arch>().is_err(), "{name}");
        }
    }
}
