//! One rank's process, and all that it starts.

use std::{
    io,
    os::unix::process::{CommandExt, ExitStatusExt},
    process::{Child, Command, Stdio},
    sync::mpsc::Sender,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use oxtile::comm::bootstrap::OVERRIDES_OF_MASTER_PORT;

use super::{
    Event,
    lines::{Lines, Stream},
};
use crate::arguments::Launch;

/// Between two looks whether a process has ended.
const PAUSE: Duration = Duration::from_millis(1);

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// By itself, with this status.
    Exited(i32),
    /// By this signal.
    Killed(i32),
}

/// A rank's process, the leader of its own process group.
#[derive(Debug)]
pub struct RankProcess {
    /// Its number.
    pub rank: u32,
    /// Its id, which is that of its group.
    pub process: u32,
    /// Set until it is reaped: so long its id, which is its group's, is no other process's.
    child: Option<Child>,
    /// Waits for its end.
    waiter: Option<JoinHandle<()>>,
}

impl RankProcess {
    /// Its output and its errors.
    pub const STREAMS: usize = 2;

    /// Starts the program, with nothing to read and with its output as lines of the launcher's. The events are its end, once
    /// what is left of its group has been killed, and that of each of its streams.
    ///
    /// # Errors
    /// If the system cannot start it.
    pub fn start(rank: u32, request: &Launch, variables: &[(&str, String)], lines: &Lines, events: &Sender<Event>) -> io::Result<Self> {
        let mut command = Command::new(request.program());
        command.args(request.arguments()).envs(variables.iter().map(|(name, value)| (name, value)));
        // Of a launcher around this one.
        OVERRIDES_OF_MASTER_PORT.iter().for_each(|name| _ = command.env_remove(name));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let launcher = std::process::id();
        // SAFETY: between fork and exec only system calls that touch no memory but their arguments: prctl(2), getppid(2), _exit(2).
        unsafe { command.pre_exec(move || end_with(launcher)) };
        let mut child = command.spawn()?;
        let (process, stdout, stderr) = (child.id(), child.stdout.take(), child.stderr.take());
        let mut rank_process = Self { rank, process, child: Some(child), waiter: None };
        let silent = || {
            let events = events.clone();
            move || drop(events.send(Event::Silent))
        };
        if let (Some(stdout), Some(stderr)) = (stdout, stderr) {
            lines.copy(rank, stdout, Stream::Output, silent())?;
            lines.copy(rank, stderr, Stream::Error, silent())?;
        }
        let events = events.clone();
        let waiter = thread::Builder::new().name(format!("rank {rank}"));
        rank_process.waiter = Some(waiter.spawn(move || {
            wait_for_end(process);
            drop(events.send(Event::Ended(rank)));
        })?);
        Ok(rank_process)
    }

    /// Whether it has not been reaped.
    pub fn is_running(&self) -> bool {
        self.child.is_some()
    }

    /// Sends a signal to the process and all that it started; to none once it is reaped.
    pub fn signal(&self, signal: i32) {
        if self.is_running() {
            signal_group(self.process, signal);
        }
    }

    /// Waits until it has ended, and what was left of its group has been killed, and gives up its id. Returns whether that was before the deadline.
    pub fn ends_by(&mut self, deadline: Instant) -> bool {
        // It signals the group, whose id is the process's until that is reaped.
        while self.waiter.as_ref().is_some_and(|waiter| !waiter.is_finished()) {
            if Instant::now() >= deadline {
                return false;
            }
            thread::sleep(PAUSE);
        }
        self.reap();
        true
    }

    /// Waits for its end and gives up its id.
    pub fn reap(&mut self) -> Ended {
        match self.child.take().map(|mut child| child.wait()) {
            Some(Ok(status)) => status.signal().map_or_else(|| Ended::Exited(status.code().unwrap_or(1)), Ended::Killed),
            _ => Ended::Exited(1),
        }
    }
}

/// Does not wait: that is what [`RankProcess::ends_by`] is for.
impl Drop for RankProcess {
    fn drop(&mut self) {
        self.signal(libc::SIGKILL);
    }
}

/// Has the kernel kill this process when the launcher ends, however that ends.
fn end_with(launcher: u32) -> io::Result<()> {
    // SAFETY: neither call touches memory.
    let (result, parent) = unsafe { (libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL), libc::getppid()) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    if u32::try_from(parent) != Ok(launcher) {
        // It ended before the call.
        return Err(io::Error::from_raw_os_error(libc::ESRCH));
    }
    Ok(())
}

/// Waits for the end of a child that is not reaped meanwhile, and kills what is left of its group.
fn wait_for_end(process: u32) {
    loop {
        let mut information = std::mem::MaybeUninit::<libc::siginfo_t>::zeroed();
        // SAFETY: the pointer is to a live value of the type that waitid(2) writes; the process is a child, whose owner reaps it only
        // when this function is done.
        let result = unsafe { libc::waitid(libc::P_PID, process, information.as_mut_ptr(), libc::WEXITED | libc::WNOWAIT) };
        if result == 0 {
            return signal_group(process, libc::SIGKILL);
        }
        if io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            // It is no child, and its id may be another process's.
            return;
        }
    }
}

fn signal_group(process: u32, signal: i32) {
    let Ok(group) = libc::pid_t::try_from(process) else { return };
    // SAFETY: `killpg` touches no memory. The group's id is that of a child that has not been reaped (see `RankProcess::child`), hence
    // of no other process.
    unsafe { libc::killpg(group, signal) };
}
