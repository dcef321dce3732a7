//! Embedding: the rows of a table that tokens name, and the gradient of the table.
//!
//! ```
//! use oxtile::embedding::Embedding;
//! use oxtile::num::bf16;
//! use oxtile::{Buffer, Result, Runtime};
//!
//! # fn main() -> Result<()> {
//! let runtime = Runtime::checked(1)?; // or Runtime::cuda()
//! let stream = runtime.device(0)?.stream()?;
//! let rows: Vec<half::bf16> = (0..3 * 8).map(|i| half::bf16::from_f32((i / 8) as f32)).collect();
//! let (table, tokens) = (Buffer::from_slice(&stream, &rows)?, Buffer::from_slice(&stream, &[2_u32, 0, 2])?);
//! let mut output = Buffer::<bf16>::uninitialised(&stream, 3 * 8)?;
//!
//! let embedding = Embedding::<bf16>::new(&runtime, 8)?;
//! embedding.forward(&stream, table.view(), tokens.view(), output.view_mut())?;
//! let firsts: Vec<f32> = output.to_vec_as::<half::bf16>(&stream)?.iter().step_by(8).map(|x| x.to_f32()).collect();
//! assert_eq!(firsts, [2.0, 0.0, 2.0]);
//!
//! let mut gradient = Buffer::<f32>::zeros(&stream, 3 * 8)?;
//! embedding.backward(&stream, output.view(), tokens.view(), gradient.view_mut())?;
//! assert_eq!(gradient.to_vec(&stream)?[2 * 8], 2.0 + 2.0);
//! # Ok(()) }
//! ```

use std::fmt;
use std::marker::PhantomData;

use oxtile_kernels::embedding::{self as kernels, EmbeddingArgs, EmbeddingBackwardArgs};
use oxtile_kernels::row::{ByBlock, ByElements, ByWarp, Split};
use oxtile_tile::launch::{DeviceView, DeviceViewMut, Kernel, Signature};
use oxtile_tile::num::{Half, bf16, f16};

use crate::runtime::{Loaded, Result, Runtime, Stream};
use crate::tensor::shape::row_width;

/// The embedding of tokens in rows of one width. Rows of whole 16-byte vectors that begin at multiples of 16 bytes, up to 8192 elements, are fast.
///
/// A token that the table does not have ends the launch with an error: on a GPU the whole process loses its device.
pub struct Embedding<T: EmbeddingElement> {
    width: u32,
    /// One for each policy of rows: the first that takes the rows at hand is launched. The last one takes all.
    entries: Vec<Entry<T>>,
    backward: Loaded<T::Backward>,
}

impl<T: EmbeddingElement> Embedding<T> {
    /// Loads the kernels, for rows of `width` elements.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for a width of 0, or of 2^31 and more; as [`Runtime::load`].
    pub fn new(runtime: &Runtime, width: u64) -> Result<Self> {
        let width = row_width("Embedding", width)?;
        Ok(Self { width, entries: T::entries(runtime)?, backward: runtime.load()? })
    }

    /// Enqueues `output[i] = table[tokens[i]]`, rows of `[vocabulary, width]` to rows of `[tokens, width]`.
    ///
    /// # Errors
    /// As [`Loaded::launch`]: [`Error::Argument`](crate::Error::Argument) names what does not fit.
    pub fn forward(
        &self,
        stream: &Stream,
        table: DeviceView<'_, T>,
        tokens: DeviceView<'_, u32>,
        output: DeviceViewMut<'_, T>,
    ) -> Result<()> {
        let takes = |entry: &&Entry<T>| (entry.takes)(self.width.into(), &[table.address(), output.address()]);
        let entry = self.entries.iter().find(takes).or(self.entries.last()).expect("an element has kernels");
        (entry.launch)(stream, Gather { table, tokens, output, width: self.width })
    }

    /// Enqueues the addition of each row of `gradient`, `[tokens, width]`, to the row of `table_gradient`, `[vocabulary, width]`, that its token
    /// names. What is there before stays in the sums. They are atomic, in `f32`: their order varies, and with it the last bits of rows that several
    /// tokens name.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn backward(
        &self,
        stream: &Stream,
        gradient: DeviceView<'_, T>,
        tokens: DeviceView<'_, u32>,
        table_gradient: DeviceViewMut<'_, f32>,
    ) -> Result<()> {
        self.backward.launch(stream, EmbeddingBackwardArgs { gradient, tokens, table_gradient, width: self.width })
    }
}

impl<T: EmbeddingElement> fmt::Debug for Embedding<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Embedding").field("width", &self.width).finish_non_exhaustive()
    }
}

/// An element of the table: `bf16` or `f16`.
pub trait EmbeddingElement: Half {
    /// The kernel of the backward pass.
    #[doc(hidden)]
    type Backward: Kernel + for<'a> Signature<Args<'a> = EmbeddingBackwardArgs<'a, Self>>;
    /// The kernel of the forward pass for each policy of rows.
    #[doc(hidden)]
    fn entries(runtime: &Runtime) -> Result<Vec<Entry<Self>>>;
}

/// The arguments of a forward pass.
#[doc(hidden)]
pub struct Gather<'a, T> {
    table: DeviceView<'a, T>,
    tokens: DeviceView<'a, u32>,
    output: DeviceViewMut<'a, T>,
    width: u32,
}

/// Launches a kernel.
type Launch<T> = Box<dyn Fn(&Stream, Gather<'_, T>) -> Result<()> + Send + Sync>;

/// The kernel for one policy of rows.
#[doc(hidden)]
pub struct Entry<T> {
    takes: fn(u64, &[u64]) -> bool,
    launch: Launch<T>,
}

fn entry<T: Half, S: Split>(runtime: &Runtime) -> Result<Entry<T>>
where
    kernels::Embedding<T, S>: Kernel,
{
    let kernel = runtime.load::<kernels::Embedding<T, S>>()?;
    let launch: Launch<T> = Box::new(move |stream, Gather { table, tokens, output, width }| {
        kernel.launch(stream, EmbeddingArgs { table, tokens, output, width, marker: PhantomData })
    });
    Ok(Entry { takes: S::takes, launch })
}

macro_rules! elements {
    ($($t:ty)*) => { $(
        impl EmbeddingElement for $t {
            type Backward = kernels::EmbeddingBackward<Self>;

            fn entries(runtime: &Runtime) -> Result<Vec<Entry<Self>>> {
                Ok(vec![
                    entry::<Self, ByWarp<2>>(runtime)?,
                    entry::<Self, ByBlock<128, 2>>(runtime)?,
                    entry::<Self, ByBlock<256, 4>>(runtime)?,
                    entry::<Self, ByElements>(runtime)?,
                ])
            }
        }
    )* };
}
elements! { bf16 f16 }
