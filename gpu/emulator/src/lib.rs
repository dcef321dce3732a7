//! A CPU emulator of a CUDA grid: SIMT scheduler, asynchronous engine, race detector.
