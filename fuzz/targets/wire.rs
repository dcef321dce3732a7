//! Frames of the rendezvous, before and after the proof: what is read is written as it was, and no length is believed.
#![no_main]

use libfuzzer_sys::fuzz_target;
use oxtile::bootstrap::parsed;

fuzz_target!(|input: &[u8]| {
    parsed::frames(input);
    parsed::bodies(input);
});
