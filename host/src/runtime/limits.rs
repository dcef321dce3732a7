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
    if grid.cluster != 1 && info.cluster != 1 {
        return limit(format!(
            "its grid asks for clusters of {} blocks, and it is compiled for clusters of {}: leave out one of both",
            grid.cluster, info.cluster
        ));
    }
    if !(1..=8).contains(&grid.cluster) {
        return limit(format!("its grid asks for clusters of {} blocks: a device takes 1 to 8", grid.cluster));
    }
    let cluster = grid.cluster * info.cluster;
    if !grid.x.is_multiple_of(cluster) {
        return limit(format!(
            "its grid has {} blocks in x, which its clusters of {cluster} do not divide: round the grid up and let the last blocks return",
            grid.x
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
        check(&INFO, Grid::xyz(2, 65535, 65535), &LIMITS).unwrap();
        assert_eq!(
            refusal(Grid::xy(2, 65536), LIMITS),
            "kernel `some_kernel`: its grid has 65536 blocks in y, where a device takes at most 65535: split the call"
        );
        assert!(refusal(Grid::xyz(2, 1, 65536), LIMITS).contains("in z"));
        assert!(refusal(Grid::x(1 << 31), LIMITS).contains("2147483648 blocks in x"));
        assert!(refusal(Grid::x(3), LIMITS).contains("its clusters of 2 do not divide"));
        assert!(refusal(Grid::x(8).in_clusters(4), LIMITS).contains("clusters of 4 blocks, and it is compiled for clusters of 2"));
        let single = |grid| check(&KernelInfo { cluster: 1, ..INFO }, grid, &LIMITS).map_err(|error| error.to_string());
        single(Grid::x(15).in_clusters(5)).unwrap();
        assert!(single(Grid::x(14).in_clusters(5)).unwrap_err().contains("14 blocks in x, which its clusters of 5 do not divide"));
        assert!(single(Grid::x(18).in_clusters(9)).unwrap_err().contains("clusters of 9 blocks: a device takes 1 to 8"));
        assert!(single(Grid::x(0).in_clusters(0)).unwrap_err().contains("clusters of 0 blocks"));
        let small = DeviceLimits { shared_bytes_per_block: 99 << 10, ..LIMITS };
        assert!(refusal(Grid::x(2), small).contains("102400 bytes of shared memory a block, this device has 101376"));
    }
}
