//! Symmetric memory of mapped allocations: ranks as processes and as threads, on files in memory, with faults at every step; and on a GPU, where
//! there is one. Without a GPU those tests are skipped; `OXTILE_REQUIRE=vmm` makes that a failure, `nccl` and `nvshmem` for those of a library.
//!
//! | file | what it holds |
//! |---|---|
//! | `ranks`, `program`, `watch` | this program as the ranks of a job, what they do, and what they were doing when their time is over |
//! | `threads`, `hosts`, `board`, `connect` | ranks as threads, of two hosts; notes, and how they come together |
//! | `faults`, `deaths`, `thread_deaths`, `teams` | ranks that fail or die: before memory is mapped, at work, as threads, in a team |
//! | `gpu`, `contiguous`, `chunks`, `exchange`, `gathered`, `soak` | on GPUs: arenas, one range of addresses, rows by flags, messages, gathered products, a long run |
//! | `gathered_layouts` | on GPUs: gathered products of every layout and element, and beside collectives |
//! | `gathered_forms`, `gathered_bulk` | on GPUs: gathered products that keep the input of GELU, and those of codes and scales; calls in two halves |
//! | `sharded` | on GPUs: weights in shards |
//! | `context`, `mail` | attention over a sequence that is spread over ranks, and messages between ranks that share a GPU |
//! | `nccl`, `nvshmem` | memory of these libraries |
//! | `emulated` | memory of a virtual cluster |

mod board;
mod chunks;
mod connect;
mod context;
#[path = "../comm/context_case.rs"]
mod context_case;
mod contiguous;
mod deaths;
mod emulated;
mod exchange;
mod faults;
mod gathered;
mod gathered_bulk;
mod gathered_forms;
mod gathered_layouts;
mod gpu;
mod hosts;
mod mail;
mod nccl;
mod nvshmem;
#[path = "../comm/overlap_case.rs"]
mod overlap_case;
mod program;
mod ranks;
mod sharded;
#[path = "../comm/sharded_ranks.rs"]
mod sharded_ranks;
mod soak;
mod teams;
mod thread_deaths;
mod threads;
#[path = "../comm/values.rs"]
mod values;
mod watch;
#[path = "../comm/whole_attention.rs"]
mod whole_attention;

use std::process::ExitCode;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use libtest_mimic::{Arguments, Trial};

/// What makes this program one rank, or one program, of a test instead of the tests.
const CHILD: &str = "OXTILE_TEST_VMM";

/// Held by whatever test runs on GPUs.
static GPUS: RwLock<()> = RwLock::new(());

/// GPUs that other tests use too.
fn gpus() -> RwLockReadGuard<'static, ()> {
    GPUS.read().unwrap_or_else(PoisonError::into_inner)
}

/// GPUs that no other test uses: beside many processes that come and go NCCL takes as long as the limit to join, and to leave.
/// NVSHMEM's cases have them alone too.
fn all_gpus() -> RwLockWriteGuard<'static, ()> {
    GPUS.write().unwrap_or_else(PoisonError::into_inner)
}

fn main() -> ExitCode {
    if let Ok(what) = std::env::var(CHILD) {
        return match what.split_once(':') {
            Some(("emulated", _)) => emulated::child(),
            Some(("gpu", case)) => gpu::child(case),
            Some(("nccl", case)) => nccl::child(case),
            Some(("nvshmem", case)) => nvshmem::child(case),
            Some(("exchange", case)) => exchange::child(case),
            Some(("connect", case)) => connect::child(case),
            Some(("deaths", case)) => deaths::child(case),
            Some(("threads", case)) => threads::child(case),
            _ => faults::child(&what),
        };
    }
    let mut arguments = Arguments::from_args();
    // They wait more than they work.
    arguments.test_threads = arguments.test_threads.or(Some(6));
    let on_gpus = [gpu::trials(), nccl::trials(), nvshmem::trials(), exchange::trials()];
    let on_hosts = [board::trials(), connect::trials(), emulated::trials(), threads::trials(), thread_deaths::trials(), faults::trials()];
    let trials: Vec<Trial> = on_hosts.into_iter().chain(on_gpus).flatten().collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// A trial that fails by panicking.
fn trial(name: impl Into<String>, test: impl FnOnce() + Send + 'static) -> Trial {
    Trial::test(name, move || {
        test();
        Ok(())
    })
}
