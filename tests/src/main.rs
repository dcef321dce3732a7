//! The test binary: every case on every back end that is there.
//!
//! A case is a name, a size and a function of a [`Runtime`](oxtile::Runtime). Small cases run on the
//! emulator with every check on, under seeds of their own; large ones in its fast mode; all of them on a GPU
//! where there is one. Options are libtest's; the environment adds
//!
//! | variable | meaning |
//! |---|---|
//! | `OXTILE_REQUIRE=cuda` | a missing GPU is a failure, not a skip |
//! | `OXTILE_SEED=N` | this one seed, to replay |
//! | `OXTILE_LONG=1` | 64 seeds, full sweeps, the largest shapes (`cargo xtask test --long`) |
//! | `OXTILE_TIMES=FILE` | append seconds and name of every case |
//! | `OXTILE_LAUNCHES=FILE`, `OXTILE_KERNEL=NAME` | note which kernels each case launches, and run the cases of one kernel alone |
//! | `OXTILE_REPLACEMENT=LIBRARY`, `OXTILE_REPLACED=NAME,NAME` | these kernels of a library in place of the program's own, on the emulator; `OXTILE_CHANGED=FAMILY,FAMILY`: no other kernel of these families may be launched. Exit status 75 if one is, or the library cannot be loaded |
//! | `OXTILE_GOLDEN_OUT=FILE` | write the GPU's bytes of the conformance kernels there, compare nothing |

mod backend;
mod case;
mod cases;
mod coverage;
mod golden;
mod mutation;
mod replacement;
mod sweep;
mod times;

use std::process::ExitCode;

use oxtile_tests::launches::{self, Selection};

/// Checked runs allocate at every operation: a tenth of their time by the system's allocator.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    const QUEUES: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
    if std::env::var_os(QUEUES).is_none() {
        // SAFETY: no other thread of this program runs yet, which could read its variables. Streams that wait need hardware queues of their own.
        unsafe { std::env::set_var(QUEUES, "32") };
    }
    let arguments = libtest_mimic::Arguments::from_args();
    if let Err(error) = replacement::load() {
        eprintln!("OXTILE_REPLACEMENT: {error}");
        return ExitCode::from(replacement::UNLOADABLE);
    }
    let selection = match Selection::from_environment() {
        Ok(selection) => selection,
        Err(error) => {
            eprintln!("OXTILE_KERNEL: {error}");
            return ExitCode::FAILURE;
        }
    };
    let cases = cases::all().into_iter().filter(|case| selection.has(&case.name)).collect();
    let trials = backend::trials(cases).into_iter().chain(mutation::trials()).chain(sweep::trials()).collect();
    let conclusion = libtest_mimic::run(&arguments, trials);
    if let Err(error) = launches::finish() {
        eprintln!("OXTILE_LAUNCHES: {error}");
        return ExitCode::FAILURE;
    }
    if let Err(error) = golden::finish(&backend::device_line()) {
        eprintln!("OXTILE_GOLDEN_OUT: {error}");
        return ExitCode::FAILURE;
    }
    if let Err(error) = coverage::finish(&cases::all()) {
        eprintln!("{error}");
        return ExitCode::FAILURE;
    }
    conclusion.exit_code()
}
