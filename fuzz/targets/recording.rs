//! Recordings: what is read is written so that it is read again as it was.
#![no_main]

use libfuzzer_sys::fuzz_target;
use oxtile::timeline::Recording;

fuzz_target!(|input: &str| {
    if let Ok(recording) = Recording::from_json(input) {
        // Times are rounded once, when they are written first.
        let written = recording.to_json();
        let again = Recording::from_json(&written).expect("what is written is read");
        assert_eq!(again.to_json(), written);
    }
});
