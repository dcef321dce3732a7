//! Codes and their scales, which a kernel of two outputs takes as one parameter.

use oxtile_tile::num::Pod;
use oxtile_tile::prelude::*;

/// One output of a cast, such as the rows of a matrix or its transpose.
#[derive(Clone, Copy, Parameter)]
#[parameter(optional)]
pub struct Codes<C: Pod, S: Pod> {
    /// The codes.
    pub data: GlobalMut<C>,
    /// What the codes are multiplied by, one for each block: scales, or in FP8 the inverses of scales.
    pub scales: GlobalMut<S>,
}
