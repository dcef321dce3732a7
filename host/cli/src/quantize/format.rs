//! The formats that a checkpoint can be quantized to.

use oxtile::num::e4m3;
use oxtile::quantize::{Format as _, Fp8BlockFormat, Fp8Format, Mxfp8Format, Nvfp4Format, Shapes};

use crate::safetensors::Dtype;

/// A format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Format {
    /// E4M3 elements, one E8M0 scale for 32 neighbours.
    #[default]
    Mxfp8,
    /// E2M1 elements, one E4M3 scale for 16 neighbours, one f32 for the tensor.
    Nvfp4,
    /// The same with one scale for 16 by 16 elements, repeated for each of their rows, or columns: both directions have the same values.
    Nvfp4Squares,
    /// E4M3 elements, one f32 scale for the tensor.
    Fp8,
    /// E4M3 elements, one f32 scale for 128 neighbours.
    Fp8Block,
}

impl Format {
    /// Every format.
    pub const ALL: [Self; 5] = [Self::Mxfp8, Self::Nvfp4, Self::Nvfp4Squares, Self::Fp8, Self::Fp8Block];

    /// Its name on the command line and in the output's metadata.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mxfp8 => "mxfp8",
            Self::Nvfp4 => "nvfp4",
            Self::Nvfp4Squares => "nvfp4-squares",
            Self::Fp8 => "fp8",
            Self::Fp8Block => "fp8-block",
        }
    }

    /// What it is, for people.
    pub const fn description(self) -> &'static str {
        match self {
            Self::Mxfp8 => "E4M3 elements, an E8M0 scale for every 32 of a row",
            Self::Nvfp4 => "E2M1 elements, an E4M3 scale for every 16 of a row, one for the tensor",
            Self::Nvfp4Squares => "E2M1 elements, an E4M3 scale for every 16x16, one for the tensor",
            Self::Fp8 => "E4M3 elements, an F32 scale for the tensor",
            Self::Fp8Block => "E4M3 elements, an F32 scale for every 128 of a row",
        }
    }

    /// The type that its codes have in a file.
    pub const fn code_dtype(self) -> Dtype {
        match self {
            Self::Nvfp4 | Self::Nvfp4Squares => Dtype::U8,
            _ => Dtype::F8E4M3,
        }
    }

    /// The type of its scales.
    pub const fn scale_dtype(self) -> Dtype {
        match self {
            Self::Mxfp8 => Dtype::F8E8M0,
            Self::Nvfp4 | Self::Nvfp4Squares => Dtype::F8E4M3,
            Self::Fp8 | Self::Fp8Block => Dtype::F32,
        }
    }

    /// What the shapes of its codes and scales follow from.
    pub const fn shapes(self) -> Shapes {
        match self {
            Self::Mxfp8 => Mxfp8Format::<e4m3>::SHAPES,
            Self::Nvfp4 | Self::Nvfp4Squares => Nvfp4Format::SHAPES,
            Self::Fp8 => Fp8Format::<e4m3>::SHAPES,
            Self::Fp8Block => Fp8BlockFormat::<e4m3>::SHAPES,
        }
    }

    /// What rows (and columns, where those are quantized) are a multiple of: whole blocks, or the vectors of the kernels.
    pub const fn granule(self) -> u64 {
        match self {
            Self::Fp8Block => 8,
            _ => self.shapes().alignment(),
        }
    }

    /// Whether its scales follow from the largest magnitude of the whole tensor.
    pub const fn has_tensor_amax(self) -> bool {
        self.is_nvfp4() || matches!(self, Self::Fp8)
    }

    /// Whether its codes and scales are those of NVFP4.
    pub const fn is_nvfp4(self) -> bool {
        matches!(self, Self::Nvfp4 | Self::Nvfp4Squares)
    }

    /// Whether rows and columns share their scales: then both must be whole blocks, whichever direction is made.
    pub const fn is_square(self) -> bool {
        matches!(self, Self::Nvfp4Squares)
    }

    /// The format with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.name() == name)
    }
}
