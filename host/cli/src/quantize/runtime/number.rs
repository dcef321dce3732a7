//! The number types that every format takes.

use oxtile::{
    Error, HostElement, Result, Runtime,
    kernels::nvfp4::Nvfp4CastSquares,
    num::{bf16, e4m3, f16},
    quantize::{
        Nvfp4, Nvfp4Columns, Nvfp4Squares, Nvfp4StochasticRows,
        fp8::Fp8Number,
        mxfp8::Mxfp8Number,
        nvfp4::Nvfp4Number,
        nvfp4_columns::{Nearest, Stochastic16},
    },
};

use oxtile_tile::launch::Kernel;

use super::nvfp4::{Nvfp4Casts, SquareCast};
use crate::quantize::Recipe;

/// A number type with its kernels.
pub trait Number: Mxfp8Number<e4m3> + Nvfp4Number + Fp8Number<e4m3> + HostElement<Device = Self> {
    /// The NVFP4 casts of a recipe.
    ///
    /// # Errors
    /// As [`Runtime::load`]; [`Error::Invalid`] for a recipe that the type does not have.
    fn nvfp4(runtime: &Runtime, recipe: &Recipe) -> Result<Nvfp4Casts<Self>>;
}

/// The cast in squares, where the recipe asks for it.
fn squares<T: Nvfp4Number>(runtime: &Runtime, recipe: &Recipe) -> Result<Option<Box<dyn SquareCast<T>>>>
where
    Nvfp4CastSquares<T>: Kernel,
{
    let load = || Ok::<_, Error>(Box::new(Nvfp4Squares::<T>::new(runtime)?) as Box<dyn SquareCast<T>>);
    recipe.format.is_square().then(load).transpose()
}

macro_rules! nearest_only {
    ($($t:ty)*) => { $(
        impl Number for $t {
            fn nvfp4(runtime: &Runtime, recipe: &Recipe) -> Result<Nvfp4Casts<Self>> {
                if recipe.hadamard || recipe.seed.is_some() {
                    let why = concat!(stringify!($t), " has neither the transform nor stochastic rounding: use bf16").to_owned();
                    return Err(Error::Invalid { what: "recipe", why });
                }
                let columns = Box::new(Nvfp4Columns::<Self>::new(runtime)?);
                Ok(Nvfp4Casts { rows: Box::new(Nvfp4::<Self>::new(runtime)?), columns, squares: squares(runtime, recipe)? })
            }
        }
    )* };
}
nearest_only! { f32 f16 }

impl Number for bf16 {
    fn nvfp4(runtime: &Runtime, recipe: &Recipe) -> Result<Nvfp4Casts<Self>> {
        let stochastic = recipe.seed.is_some();
        Ok(Nvfp4Casts {
            rows: if stochastic {
                Box::new(Nvfp4StochasticRows::<Self, Stochastic16>::new(runtime)?)
            } else {
                Box::new(Nvfp4::<Self>::new(runtime)?)
            },
            columns: match (stochastic, recipe.hadamard) {
                (false, false) => Box::new(Nvfp4Columns::<Self>::new(runtime)?),
                (false, true) => Box::new(Nvfp4Columns::<Self, Nearest, true>::new(runtime)?),
                (true, false) => Box::new(Nvfp4Columns::<Self, Stochastic16, false>::new(runtime)?),
                (true, true) => Box::new(Nvfp4Columns::<Self, Stochastic16, true>::new(runtime)?),
            },
            squares: squares(runtime, recipe)?,
        })
    }
}
