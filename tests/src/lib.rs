//! Oracles and the test binary of Oxtile.
