//! Shapes, counted in `u64` and checked.

use crate::runtime::{Error, Result};

/// The number of elements of a shape; a shape of no dimensions has one, a dimension of zero makes it zero.
///
/// # Errors
/// [`Error::Invalid`] if the product is 2^64 or more, which no zero dimension excuses.
pub fn numel(shape: &[u64]) -> Result<u64> {
    let product = shape.iter().filter(|&&dimension| dimension != 0).try_fold(1_u64, |product, &d| product.checked_mul(d));
    match product {
        None => Err(Error::Invalid { what: "shape", why: format!("{shape:?} has 2^64 elements or more") }),
        Some(_) if shape.contains(&0) => Ok(0),
        Some(product) => Ok(product),
    }
}

/// A shape as a matrix `[product of all dimensions but the last, last]`; `[1, 1]` for a scalar.
///
/// # Errors
/// As [`numel`].
pub fn as_matrix(shape: &[u64]) -> Result<[u64; 2]> {
    numel(shape)?;
    match shape.split_last() {
        None => Ok([1, 1]),
        Some((&columns, rows)) => Ok([numel(rows)?, columns]),
    }
}

/// Bytes of `elements` of `bits` each, packed, the last byte full or not.
///
/// # Errors
/// [`Error::TooLarge`].
pub fn packed_bytes(elements: u64, bits: u32) -> Result<u64> {
    let total = u128::from(elements) * u128::from(bits);
    let too_large = |_| Error::TooLarge { what: "shape", count: elements, element_bytes: u64::from(bits.div_ceil(8)) };
    u64::try_from(total.div_ceil(8)).map_err(too_large)
}

/// The width of rows, as kernels count it.
///
/// # Errors
/// [`Error::Invalid`] of `what` for 0, and for 2^31 and more.
pub fn row_width(what: &'static str, width: u64) -> Result<u32> {
    let invalid = || Error::Invalid { what, why: format!("rows of {width} elements: give a width of 1 to {}", i32::MAX) };
    i32::try_from(width).ok().filter(|&width| width > 0).map(i32::cast_unsigned).ok_or_else(invalid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_counted_and_overflow_is_an_error() {
        assert_eq!(numel(&[]).unwrap(), 1);
        assert_eq!(numel(&[3, 4, 5]).unwrap(), 60);
        assert_eq!(numel(&[3, 0, 5]).unwrap(), 0);
        assert_eq!(numel(&[1 << 32, 1 << 31]).unwrap(), 1 << 63);
        assert!(numel(&[1 << 32, 1 << 32]).is_err());
        assert!(numel(&[1 << 32, 0, 1 << 32]).is_err(), "a zero does not hide a nonsensical shape");
    }

    #[test]
    fn the_last_dimension_is_the_row() {
        assert_eq!(as_matrix(&[]).unwrap(), [1, 1]);
        assert_eq!(as_matrix(&[7]).unwrap(), [1, 7]);
        assert_eq!(as_matrix(&[2, 3, 64]).unwrap(), [6, 64]);
        assert_eq!(as_matrix(&[0, 64]).unwrap(), [0, 64]);
    }

    #[test]
    fn packed_sizes_round_up_to_bytes() {
        assert_eq!(packed_bytes(3, 4).unwrap(), 2);
        assert_eq!(packed_bytes(5, 16).unwrap(), 10);
        assert!(packed_bytes(u64::MAX, 16).is_err());
        assert_eq!(packed_bytes(u64::MAX, 4).unwrap(), 1 << 63);
    }
}
