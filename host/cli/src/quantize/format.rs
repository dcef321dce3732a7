//! The formats that a checkpoint can be quantized to.

use crate::safetensors::Dtype;

/// A format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// E4M3 elements, one E8M0 scale for every 32 of a row.
    Mxfp8,
    /// E2M1 elements, one E4M3 scale for every 16 of a row, one f32 for the tensor.
    Nvfp4,
}

impl Format {
    /// Every format.
    pub const ALL: [Self; 2] = [Self::Mxfp8, Self::Nvfp4];

    /// Its name on the command line and in the output's metadata.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mxfp8 => "mxfp8",
            Self::Nvfp4 => "nvfp4",
        }
    }

    /// What it is, for people.
    pub const fn description(self) -> &'static str {
        match self {
            Self::Mxfp8 => "E4M3 elements, an E8M0 scale for every 32 of a row",
            Self::Nvfp4 => "E2M1 elements, an E4M3 scale for every 16 of a row, one for the tensor",
        }
    }

    /// The type of its scales.
    pub const fn scale_dtype(self) -> Dtype {
        match self {
            Self::Mxfp8 => Dtype::F8E8M0,
            Self::Nvfp4 => Dtype::F8E4M3,
        }
    }

    /// Elements that share one scale.
    pub const fn block(self) -> u64 {
        match self {
            Self::Mxfp8 => 32,
            Self::Nvfp4 => 16,
        }
    }

    /// Bytes of the codes of so many elements.
    pub const fn data_bytes(self, elements: u64) -> u64 {
        match self {
            Self::Mxfp8 => elements,
            Self::Nvfp4 => elements / 2,
        }
    }

    /// How often a tensor is read: NVFP4 needs the largest magnitude of all of it first.
    pub const fn passes(self) -> u64 {
        match self {
            Self::Mxfp8 => 1,
            Self::Nvfp4 => 2,
        }
    }
}
