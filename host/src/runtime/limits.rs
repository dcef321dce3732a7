//! The limits of a device, checked before a launch: the driver's own error is only `invalid argument`.

use oxtile_tile::launch::{DeviceLimits, Grid, KernelInfo};

use super::error::{Error, Result};

/// Fails unless the device can run this grid of the kernel's blocks. Threads, clusters and the shared memory that no
/// GPU has are refused where the kernel is compiled.
///
/// Limits: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
pub(super) fn check(info: &KernelInfo, grid: Grid, limits: &DeviceLimits) -> Result<()> {
    let limit = |what: String| Err(Error::Limit { kernel: info.name, what });
    let axes = [("x", grid.x, i32::MAX.cast_unsigned()), ("y", grid.y, 65535), ("z", grid.z, 65535)];
    if let Some((axis, found, most)) = axes.into_iter().find(|(_, found, most)| found > most) {
        return limit(format!("its grid has {found} blocks in {axis}, where a device takes at most {most}: split the call"));
    }
    if !grid.x.is_multiple_of(info.cluster) {
        return limit(format!(
            "its grid has {} blocks in x, which its clusters of {} do not divide: round the grid up and let the last blocks return",
            grid.x, info.cluster
        ));
    }
    if info.shared_bytes > limits.shared_bytes_per_block {
        return limit(format!(
            "it needs {} bytes of shared memory a block, this device has {}: use a kernel with smaller tiles or fewer stages",
            info.shared_bytes, limits.shared_bytes_per_block
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const INFO: KernelInfo = KernelInfo {
        name: "some_kernel",
        family: "some",
        package: "some-kernels",
        source_hash: &"",
        threads: 128,
        min_blocks: 1,
        cluster: 2,
        shared_bytes: 100 << 10,
        requires: "",
        parameters: &[],
        words: 0,
    };
    const LIMITS: DeviceLimits = DeviceLimits { multiprocessors: 132, shared_bytes_per_block: 227 << 10 };

    fn refusal(grid: Grid, limits: DeviceLimits) -> String {
        check(&INFO, grid, &limits).unwrap_err().to_string()
    }

    #[test]
    fn what_a_device_cannot_run_is_an_error_that_says_why() {
        check(&INFO, Grid { x: 2, y: 65535, z: 65535 }, &LIMITS).unwrap();
        assert_eq!(
            refusal(Grid::xy(2, 65536), LIMITS),
            "kernel `some_kernel`: its grid has 65536 blocks in y, where a device takes at most 65535: split the call"
        );
        assert!(refusal(Grid { x: 2, y: 1, z: 65536 }, LIMITS).contains("in z"));
        assert!(refusal(Grid::x(1 << 31), LIMITS).contains("2147483648 blocks in x"));
        assert!(refusal(Grid::x(3), LIMITS).contains("its clusters of 2 do not divide"));
        let small = DeviceLimits { shared_bytes_per_block: 99 << 10, ..LIMITS };
        assert!(refusal(Grid::x(2), small).contains("102400 bytes of shared memory a block, this device has 101376"));
    }
}
