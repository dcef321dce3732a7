//! The largest magnitude of a tensor.

/// The largest magnitude; NaN elements are skipped, and a tensor of NaN or without elements has 0
/// (TransformerEngine: `fmaxf` and `__hmax` from a start of 0).
pub fn amax(x: &[f32]) -> f32 {
    let mut largest = 0.0;
    for value in x {
        if value.abs() > largest {
            largest = value.abs();
        }
    }
    largest
}

#[cfg(test)]
mod tests {
    use super::amax;

    #[test]
    fn specials() {
        assert_eq!(amax(&[]), 0.0);
        assert_eq!(amax(&[f32::NAN, f32::NAN]), 0.0);
        assert_eq!(amax(&[1.0, f32::NAN, -2.0]), 2.0);
        assert_eq!(amax(&[-0.0]).to_bits(), 0);
        assert_eq!(amax(&[1.0, f32::NEG_INFINITY]), f32::INFINITY);
        assert_eq!(amax(&[-f32::from_bits(1)]).to_bits(), 1);
    }
}
