//! Clusters of blocks.

use core::arch::asm;

use super::{Nvptx, intrinsics};
use crate::arch::Cluster;

// SAFETY (all of this block): the caller vouches for addresses; that all threads come to the barrier is the kernel's
// contract, which the emulator checks.
impl Cluster for Nvptx {
    #[inline(always)]
    fn rank() -> u32 {
        let rank: u32;
        // SAFETY: reading a special register has no precondition.
        unsafe { asm!("mov.u32 {0}, %cluster_ctarank;", out(reg32) rank, options(pure, nomem, nostack)) };
        rank
    }

    #[inline(always)]
    fn wait_for_launches() {
        // SAFETY: a wait has no precondition.
        unsafe { asm!("griddepcontrol.wait;", options(nostack)) };
    }

    #[inline(always)]
    fn sync() {
        // SAFETY: see above.
        unsafe {
            intrinsics::cluster_arrive();
            intrinsics::cluster_wait();
        }
    }

    #[inline(always)]
    unsafe fn store_vector_to(address: u32, rank: u32, [a, b, c, d]: [u32; 4]) {
        // SAFETY: see above.
        unsafe {
            asm!("{{ .reg .b32 remote; mapa.shared::cluster.u32 remote, {4}, {5}; st.shared::cluster.v4.b32 [remote], {{{0}, {1}, {2}, {3}}}; }}",
                in(reg32) a, in(reg32) b, in(reg32) c, in(reg32) d, in(reg32) address, in(reg32) rank, options(nostack));
        }
    }

    #[inline(always)]
    unsafe fn arrive_remote_if(address: u32, rank: u32, predicate: bool) {
        // SAFETY: see above.
        unsafe {
            asm!("{{ .reg .pred p; .reg .b32 remote; setp.ne.u32 p, {2}, 0; @p mapa.shared::cluster.u32 remote, {0}, {1};",
                "@p mbarrier.arrive.shared::cluster.b64 _, [remote]; }}",
                in(reg32) address, in(reg32) rank, in(reg32) u32::from(predicate), options(nostack));
        }
    }

    #[inline(always)]
    unsafe fn load_tensor_multicast<const RANK: usize>(shared: u32, map: u64, at: [u32; RANK], mbarrier: u32, blocks: u16) {
        macro_rules! load {
            ($form:literal, $coordinates:literal, [$($index:literal)*]) => {
                // SAFETY: see above.
                unsafe {
                    asm!(concat!("cp.async.bulk.tensor.", $form,
                            ".shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [{shared}], [{map}, {{",
                            $coordinates, "}}], [{mbarrier}], {blocks};"),
                        $(in(reg32) at[$index],)* shared = in(reg32) shared, map = in(reg64) map, mbarrier = in(reg32) mbarrier,
                        blocks = in(reg16) blocks, options(nostack))
                }
            };
        }
        match RANK {
            2 => load!("2d", "{0}, {1}", [0 1]),
            3 => load!("3d", "{0}, {1}, {2}", [0 1 2]),
            4 => load!("4d", "{0}, {1}, {2}, {3}", [0 1 2 3]),
            _ => load!("5d", "{0}, {1}, {2}, {3}, {4}", [0 1 2 3 4]),
        }
    }
}
