//! Numbers as the golden files hold them: little-endian, two hex digits a byte.

/// The bytes.
pub fn bytes(hex: &str) -> Vec<u8> {
    let digits = |i: usize| u8::from_str_radix(&hex[i..i + 2], 16).expect("hex digits");
    (0..hex.len()).step_by(2).map(digits).collect()
}

/// The bytes, four to an `f32`.
pub fn words(hex: &str) -> Vec<f32> {
    bytes(hex).as_chunks::<4>().0.iter().map(|&word| f32::from_le_bytes(word)).collect()
}
