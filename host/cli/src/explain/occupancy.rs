//! How many blocks of a kernel a multiprocessor holds at once, and what limits them.

/// What a multiprocessor has (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability").
struct Multiprocessor {
    threads: u32,
    blocks: u32,
    shared_bytes: u32,
}

/// Registers of a multiprocessor, of every architecture here.
const REGISTERS: u32 = 64 << 10;
/// Shared memory that the system takes of each block.
const SYSTEM_BYTES: u32 = 1 << 10;

/// What a block of a kernel needs.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    /// Threads.
    pub threads: u32,
    /// Registers a thread.
    pub registers: u32,
    /// Bytes of shared memory, dynamic and static.
    pub shared_bytes: u32,
}

/// What a multiprocessor holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Occupancy {
    /// Blocks at once.
    pub blocks: u32,
    /// Their warps.
    pub warps: u32,
    /// The most warps that it can hold.
    pub most_warps: u32,
    /// What keeps it from holding another block.
    pub limit: &'static str,
}

impl Occupancy {
    /// On an architecture such as `sm_90a`; none if nothing is known of it.
    pub fn of(arch: &str, block: Block) -> Option<Self> {
        let number: String = arch.chars().filter(char::is_ascii_digit).collect();
        let has = |threads, blocks, shared_kib: u32| Some(Multiprocessor { threads, blocks, shared_bytes: shared_kib << 10 });
        let there = match number.as_str() {
            "80" => has(2048, 32, 164),
            "86" => has(1536, 16, 100),
            "89" => has(1536, 24, 100),
            "90" | "100" | "103" => has(2048, 32, 228),
            "120" => has(1536, 24, 100),
            _ => None,
        }?;
        let warps = block.threads.div_ceil(32).max(1);
        // Registers are given out by warp, in units of 256; a quarter of the warps has a quarter of them.
        let by_registers = 4 * (REGISTERS / 4 / (block.registers.max(1) * 32).next_multiple_of(256)) / warps;
        let limits = [
            (there.threads / (warps * 32), "threads"),
            (by_registers, "registers"),
            (there.shared_bytes / (block.shared_bytes + SYSTEM_BYTES).next_multiple_of(128), "shared memory"),
            (there.blocks, "blocks"),
        ];
        let (blocks, limit) = limits.into_iter().min_by_key(|limit| limit.0)?;
        Some(Self { blocks, warps: blocks * warps, most_warps: there.threads / 32, limit })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scarcest_thing_limits() {
        let of = |arch, threads, registers, shared_bytes| {
            let Occupancy { blocks, warps, limit, .. } = Occupancy::of(arch, Block { threads, registers, shared_bytes }).unwrap();
            (blocks, warps, limit)
        };
        assert_eq!(of("sm_90a", 256, 32, 0), (8, 64, "threads"));
        assert_eq!(of("sm_90a", 256, 255, 0), (1, 8, "registers"));
        assert_eq!(of("sm_90a", 384, 168, 200 << 10), (1, 12, "registers"));
        assert_eq!(of("sm_90a", 128, 32, 100 << 10), (2, 8, "shared memory"));
        assert_eq!(of("sm_90a", 352, 88, 0), (1, 11, "registers"));
        assert_eq!(of("sm_90a", 32, 32, 32_300), (6, 6, "shared memory"));
        assert_eq!(of("sm_89", 32, 16, 0), (24, 24, "blocks"));
        assert!(Occupancy::of("sm_10", Block { threads: 32, registers: 32, shared_bytes: 0 }).is_none());
    }
}
