//! What tensors are quantized to, and how.

use clap::Args;
use oxtile::quantize::Direction;

use super::Format;
use crate::arguments::values;

/// One direction or both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Directions {
    /// By rows.
    #[default]
    Rows,
    /// By columns.
    Columns,
    /// By rows and by columns.
    Both,
}

/// A format with its options, which are those of the command line.
#[derive(Args, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recipe {
    /// mxfp8: E4M3 elements, an E8M0 scale for every 32 neighbours;
    /// nvfp4: E2M1 elements, an E4M3 scale for every 16, one more for the tensor;
    /// nvfp4-squares: the same with one scale for 16 by 16, the same values in both directions;
    /// fp8: E4M3 elements, an F32 scale for the tensor;
    /// fp8-block: E4M3 elements, an F32 scale for every 128
    #[arg(long, default_value = Format::Mxfp8.name(), value_parser = values::choice(Format::ALL.map(|format| (format.name(), format))))]
    #[arg(hide_possible_values = true, verbatim_doc_comment)]
    pub format: Format,
    /// Which neighbours share a scale
    #[arg(long = "direction", value_name = "DIRECTION", default_value = Directions::Rows.name())]
    #[arg(value_parser = values::choice(Directions::ALL.map(|directions| (directions.name(), directions))))]
    pub directions: Directions,
    /// mxfp8, nvfp4, nvfp4-squares: scales in padded tiles of 128x4, as block-scaled matrix multiplication
    /// reads them (default: one after another)
    #[arg(long, verbatim_doc_comment)]
    pub interleave: bool,
    /// nvfp4 by column or both, BF16 tensors: columns go through the random Hadamard transform before
    /// (default: as they are)
    #[arg(long, verbatim_doc_comment)]
    pub hadamard: bool,
    /// nvfp4, BF16 tensors: stochastic rounding, the same for the same seed, a number from 0 to 2^64 - 1
    /// (default: to nearest)
    #[arg(long = "stochastic", value_name = "SEED", verbatim_doc_comment)]
    #[arg(allow_negative_numbers = true, value_parser = values::number::<u64>(values::SEED, |_| true))]
    pub seed: Option<u64>,
}

/// The name of a direction on the command line and in a file's metadata.
pub const fn direction_name(direction: Direction) -> &'static str {
    match direction {
        Direction::Rows => "row",
        Direction::Columns => "column",
    }
}

impl Directions {
    /// Every choice.
    pub const ALL: [Self; 3] = [Self::Rows, Self::Columns, Self::Both];

    /// Its name on the command line and in a file's metadata.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Rows => direction_name(Direction::Rows),
            Self::Columns => direction_name(Direction::Columns),
            Self::Both => "both",
        }
    }

    /// The directions.
    pub const fn each(self) -> &'static [Direction] {
        match self {
            Self::Rows => &[Direction::Rows],
            Self::Columns => &[Direction::Columns],
            Self::Both => &[Direction::Rows, Direction::Columns],
        }
    }

    /// Whether it is one of them.
    pub fn contains(self, direction: Direction) -> bool {
        self.each().contains(&direction)
    }
}

impl Recipe {
    /// A format by rows, without options.
    pub fn of(format: Format) -> Self {
        Self { format, ..Self::default() }
    }

    /// Refuses options that do not go together.
    ///
    /// # Errors
    /// What the option goes with.
    pub fn check(&self) -> Result<(), String> {
        let has = |option: &str| format!("{option}, not with --format {}", self.format.name());
        match self {
            Self { interleave: true, format: Format::Fp8 | Format::Fp8Block, .. } => {
                Err(has("--interleave goes with --format mxfp8, nvfp4 or nvfp4-squares"))
            }
            Self { hadamard: true, format, .. } if *format != Format::Nvfp4 => Err(has("--hadamard goes with --format nvfp4")),
            Self { seed: Some(_), format, .. } if *format != Format::Nvfp4 => Err(has("--stochastic goes with --format nvfp4")),
            Self { hadamard: true, directions: Directions::Rows, .. } => {
                Err("--hadamard transforms columns: it goes with --direction column or both, not with row".into())
            }
            _ => Ok(()),
        }
    }

    /// How often a tensor is read: some formats need the largest magnitude of all of it first.
    pub const fn passes(&self) -> u64 {
        if self.format.has_tensor_amax() { 2 } else { 1 }
    }

    /// What it is, for people.
    pub fn description(&self) -> String {
        let mut words = self.format.description().to_owned();
        match self.directions {
            Directions::Rows => {}
            Directions::Columns => words.push_str("; by columns"),
            Directions::Both => words.push_str("; by rows and by columns"),
        }
        if self.interleave {
            words.push_str("; scales interleaved");
        }
        if self.hadamard {
            words.push_str("; columns Hadamard-transformed");
        }
        if let Some(seed) = self.seed {
            words.push_str(&format!("; stochastic rounding, seed {seed}"));
        }
        words
    }
}
