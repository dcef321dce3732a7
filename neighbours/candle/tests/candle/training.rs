//! A block trained with Oxtile's attention and with candle's own.

use candle_core::Result;

use crate::attention_block::{Kind, train};
use crate::devices;

/// The losses of a mean over 2 x 80 x 96 numbers: of roundings to BF16, each of at most 1/256, little more than one remains. At most 4e-5 were measured.
const BOUND: f32 = 1.0 / 1024.0;

#[test]
fn losses_are_those_of_candles_own_attention() -> Result<()> {
    for device in devices()? {
        let (ours, own) = (train(Kind::Oxtile, 6, 80, &device)?, train(Kind::Candle, 6, 80, &device)?);
        for (step, (ours, own)) in ours.iter().zip(&own).enumerate() {
            assert!((ours - own).abs() < BOUND * own, "step {step}: {ours} and {own}");
        }
        assert!(ours[5] < 0.9 * ours[0], "it learns nothing: {ours:?}");
    }
    Ok(())
}
