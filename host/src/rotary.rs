//! Rotary position embedding: each pair of elements of a head turns by an angle that grows with the row.
//!
//! Tensors are [`Heads`] of `bf16` or `f16`, with any strides of whole 16-byte vectors; the size of a head is a multiple of 16. What is to stay as it is
//! beside the turned elements of a head is left out by [`Heads::strided`].
//!
//! ```
//! use oxtile::num::bf16;
//! use oxtile::rotary::{Angles, Pairing, Rotary};
//! use oxtile::tensor::{Heads, HeadsMut};
//! use oxtile::{Buffer, Result, Runtime};
//!
//! # fn main() -> Result<()> {
//! let runtime = Runtime::checked(1)?; // or Runtime::cuda()
//! let stream = runtime.device(0)?.stream()?;
//! // Two sequences of 8 tokens, each with 4 heads of 64 elements.
//! let shape = [2, 8, 4, 64];
//! let queries = Buffer::<bf16>::zeros(&stream, 2 * 8 * 4 * 64)?;
//! let mut turned = Buffer::<bf16>::uninitialised(&stream, queries.len())?;
//! let (cosines, sines) = Angles::tables(0..8, 64, 10_000.0);
//! let (cosines, sines) = (Buffer::from_slice(&stream, &cosines)?, Buffer::from_slice(&stream, &sines)?);
//!
//! let rotary = Rotary::<bf16>::new(&runtime, Pairing::Halves)?;
//! let angles = Angles { cosines: cosines.view(), sines: sines.view() };
//! rotary.turn(&stream, Heads::bshd(queries.view(), shape)?, HeadsMut::bshd(turned.view_mut(), shape)?, angles)?;
//! rotary.turn_back_in_place(&stream, HeadsMut::bshd(turned.view_mut(), shape)?, angles)?;
//! # Ok(()) }
//! ```

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

use oxtile_kernels::rotary::{self as kernels, AnglesArgument, Halves, Neighbours, RotaryArgs, Sizes, Strides};
use oxtile_tile::launch::{DeviceView, DeviceViewMut, Kernel, Signature};
use oxtile_tile::num::{Half, bf16, f16};

use crate::runtime::{Error, Loaded, Result, Runtime, Stream};
use crate::tensor::{Heads, HeadsMut};

/// Which elements of a head are a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairing {
    /// Element `i` with element `i + size / 2`: GPT-NeoX, Llama in Hugging Face's layout.
    Halves,
    /// Element `2 i` with element `2 i + 1`: the original, GPT-J.
    Neighbours,
}

/// The angles of each row: cosines and sines, `[rows, size / 2]` each.
#[derive(Clone, Copy)]
pub struct Angles<'a> {
    /// Cosines.
    pub cosines: DeviceView<'a, f32>,
    /// Sines.
    pub sines: DeviceView<'a, f32>,
}

impl Angles<'_> {
    /// Cosines and sines for these positions and heads of `size` elements: pair `i` turns by `position / base^(2 i / size)`. Computed in `f64`.
    pub fn tables(positions: Range<u64>, size: u64, base: f64) -> (Vec<f32>, Vec<f32>) {
        let frequencies: Vec<f64> = (0..size / 2).map(|i| base.powf(-2.0 * i as f64 / size as f64)).collect();
        let angles = positions.flat_map(|position| frequencies.iter().map(move |frequency| position as f64 * frequency));
        angles.map(|angle| (angle.cos() as f32, angle.sin() as f32)).unzip()
    }
}

/// Turns tensors of heads.
pub struct Rotary<T: RotaryElement>(Kernels<T>);

enum Kernels<T: RotaryElement> {
    Halves(Loaded<T::Halves>),
    Neighbours(Loaded<T::Neighbours>),
}

impl<T: RotaryElement> Rotary<T> {
    /// Loads the kernel.
    ///
    /// # Errors
    /// As [`Runtime::load`].
    pub fn new(runtime: &Runtime, pairing: Pairing) -> Result<Self> {
        Ok(Self(match pairing {
            Pairing::Halves => Kernels::Halves(runtime.load()?),
            Pairing::Neighbours => Kernels::Neighbours(runtime.load()?),
        }))
    }

    /// Enqueues the turn of each pair `(x, y)` to `(x cos - y sin, y cos + x sin)`, in `f32`, rounded once.
    ///
    /// # Errors
    /// [`Error::Invalid`] for tensors of different shapes, or of 2^32 and more of anything; as [`Loaded::launch`].
    pub fn turn(&self, stream: &Stream, input: Heads<'_, T>, output: HeadsMut<'_, T>, angles: Angles<'_>) -> Result<()> {
        self.launch(stream, Some(input), output, angles, 1.0)
    }

    /// The turn by the same angles the other way, which is also the gradient of [`turn`](Self::turn).
    ///
    /// # Errors
    /// As [`turn`](Self::turn).
    pub fn turn_back(&self, stream: &Stream, input: Heads<'_, T>, output: HeadsMut<'_, T>, angles: Angles<'_>) -> Result<()> {
        self.launch(stream, Some(input), output, angles, -1.0)
    }

    /// As [`turn`](Self::turn), in place.
    ///
    /// # Errors
    /// As [`turn`](Self::turn).
    pub fn turn_in_place(&self, stream: &Stream, tensor: HeadsMut<'_, T>, angles: Angles<'_>) -> Result<()> {
        self.launch(stream, None, tensor, angles, 1.0)
    }

    /// As [`turn_back`](Self::turn_back), in place.
    ///
    /// # Errors
    /// As [`turn`](Self::turn).
    pub fn turn_back_in_place(&self, stream: &Stream, tensor: HeadsMut<'_, T>, angles: Angles<'_>) -> Result<()> {
        self.launch(stream, None, tensor, angles, -1.0)
    }

    fn launch(
        &self,
        stream: &Stream,
        input: Option<Heads<'_, T>>,
        output: HeadsMut<'_, T>,
        Angles { cosines, sines }: Angles<'_>,
        turn: f32,
    ) -> Result<()> {
        let (shape, of_output) = (output.shape(), output.strides());
        let invalid = |why| Error::Invalid { what: "Rotary", why };
        if let Some(of_input) = input.map(|input| input.shape()).filter(|of_input| *of_input != shape) {
            let why = format!("an input of [batches, rows, heads, size] {of_input:?} and an output of {shape:?}: give both one shape");
            return Err(invalid(why));
        }
        let sizes = shape.map(|size| u32::try_from(size).map_err(|_| invalid(format!("{shape:?} has 2^32 of something: split it"))));
        let [batches, rows, heads, size] = sizes;
        let sizes = Sizes { batches: batches?, rows: rows?, heads: heads?, size: size? };
        let strides = |[batch, row, head]: [u64; 3]| Strides { batch, row, head };
        let input_strides = strides(input.map_or(of_output, |input| input.strides()));
        let problem = Problem {
            input: input.map(|input| input.view()),
            input_strides,
            output: output.into_view(),
            strides: strides(of_output),
            angles: AnglesArgument { cosines, sines },
            sizes,
            turn,
        };
        match &self.0 {
            Kernels::Halves(kernel) => kernel.launch(stream, T::halves(problem)),
            Kernels::Neighbours(kernel) => kernel.launch(stream, T::neighbours(problem)),
        }
    }
}

impl<T: RotaryElement> fmt::Debug for Rotary<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pairing = match self.0 {
            Kernels::Halves(_) => Pairing::Halves,
            Kernels::Neighbours(_) => Pairing::Neighbours,
        };
        f.debug_tuple("Rotary").field(&pairing).finish()
    }
}

/// The arguments of a launch.
#[doc(hidden)]
pub struct Problem<'a, T> {
    input: Option<DeviceView<'a, T>>,
    input_strides: Strides,
    output: DeviceViewMut<'a, T>,
    strides: Strides,
    angles: AnglesArgument<'a>,
    sizes: Sizes,
    turn: f32,
}

/// An element of heads: `bf16` or `f16`.
pub trait RotaryElement: Half {
    /// The kernel for [`Pairing::Halves`].
    #[doc(hidden)]
    type Halves: Kernel + Signature;
    /// The kernel for [`Pairing::Neighbours`].
    #[doc(hidden)]
    type Neighbours: Kernel + Signature;
    /// Its arguments.
    #[doc(hidden)]
    fn halves(problem: Problem<'_, Self>) -> <Self::Halves as Signature>::Args<'_>;
    /// Its arguments.
    #[doc(hidden)]
    fn neighbours(problem: Problem<'_, Self>) -> <Self::Neighbours as Signature>::Args<'_>;
}

macro_rules! elements {
    ($($t:ty)*) => { $(
        impl RotaryElement for $t {
            type Halves = kernels::Rotary<Self, Halves>;
            type Neighbours = kernels::Rotary<Self, Neighbours>;

            fn halves(problem: Problem<'_, Self>) -> RotaryArgs<'_, Self, Halves> {
                arguments(problem)
            }

            fn neighbours(problem: Problem<'_, Self>) -> RotaryArgs<'_, Self, Neighbours> {
                arguments(problem)
            }
        }
    )* };
}
elements! { bf16 f16 }

fn arguments<T: Half, P: kernels::Pairing>(problem: Problem<'_, T>) -> RotaryArgs<'_, T, P> {
    let Problem { input, input_strides, output, strides, angles, sizes, turn } = problem;
    RotaryArgs { input, input_strides, output, strides, angles, sizes, turn, marker: PhantomData }
}
