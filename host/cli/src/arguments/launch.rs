//! `oxtile launch`.

use std::{
    ffi::{OsStr, OsString},
    time::Duration,
};

use clap::{Args, ValueHint};
use oxtile::comm::WorldSize;

use super::values;

/// `oxtile launch`.
#[derive(Args, Debug, PartialEq)]
#[command(after_help = MORE)]
pub struct Launch {
    /// How many processes, from 1 to 4096
    #[arg(short = 'n', long, value_name = "RANKS", allow_negative_numbers = true)]
    #[arg(value_parser = |text: &str| values::ranks(text).map(WorldSize::get))]
    pub ranks: u32,
    /// How long ranks have to end when they are asked to, before they are killed: 0 to 3600
    #[arg(long, value_name = "SECONDS", default_value = "5", allow_negative_numbers = true, value_parser = wait)]
    pub grace: Duration,
    /// How long their last output waits for a reader that takes nothing: 0 to 3600
    #[arg(long, value_name = "SECONDS", default_value = "60", allow_negative_numbers = true, value_parser = wait)]
    pub drain: Duration,
    /// Print a line also when all went well (default: only what went wrong)
    #[arg(long)]
    pub verbose: bool,
    /// What each rank runs, and its arguments: all that follows its name
    #[arg(value_name = "PROGRAM", required = true, trailing_var_arg = true, value_hint = ValueHint::CommandWithArguments)]
    pub command: Vec<OsString>,
}

const MORE: &str = "\
Each process has RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT (as torchrun sets them) and
OXTILE_JOB_ID, which is random, nothing on its standard input, and `[rank r] ` before each line of its output. SIGINT, SIGTERM,
SIGHUP (not under nohup), SIGQUIT and SIGALRM go on to all ranks, which have the grace to end; a second one kills them. SIGUSR1,
SIGUSR2, SIGWINCH, SIGTSTP (Ctrl-Z) and SIGCONT go on to all ranks, too, and end none. When a rank fails the others get SIGTERM,
and after the grace SIGKILL. What ranks started and left behind is killed, also where the launcher is. The status is 0 if all
ranks' are, else that of the first that failed (128 and the number of a signal). A process that SIGKILL does not end within 10
seconds, and output that is not read or cannot be written, are named on standard error, and the status is not 0.

Examples:
  oxtile launch -n 4 -- ./train --steps 100
  OXTILE_TRACE=trace.json oxtile launch -n 4 -- ./train --steps 3";

/// The longest wait that makes sense, in seconds: an hour.
const LONGEST_WAIT: f64 = 3600.0;

impl Launch {
    /// What each rank runs.
    pub fn program(&self) -> &OsStr {
        self.command.first().map_or(OsStr::new(""), OsString::as_os_str)
    }

    /// Its arguments.
    pub fn arguments(&self) -> &[OsString] {
        self.command.get(1..).unwrap_or_default()
    }

    pub(super) fn check(&self) -> Result<(), String> {
        if self.program().is_empty() {
            return Err("PROGRAM is \"\", which names nothing: name a program".to_owned());
        }
        Ok(())
    }
}

/// A time to wait.
fn wait(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|wait| (0.0..=LONGEST_WAIT).contains(wait));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| format!("it is not a number of seconds from 0 to {LONGEST_WAIT}"))
}
