//! A process that ends a job whose launcher was killed.
//!
//! The kernel then kills the ranks, but not what they have started: under `sh -c` that is the program itself. So a launcher has a process of its own program
//! beside it, which reads a pipe that no other process writes to. When the pipe ends, and the guardian was not killed before, the launcher is gone, and
//! every process with the job's id in its environment is killed.

use std::{
    ffi::OsString,
    io::{self, BufRead, BufReader, Read, Write},
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    os::unix::process::CommandExt,
    process::{Child, Command, Stdio},
    ptr, thread,
    time::Duration,
};

use oxtile::comm::bootstrap::JobId;

use super::subreaper::{has_mark, is_mark, mark_of, processes};

/// What makes this program a guardian: its only argument.
const ARGUMENT: &str = "--guardian-of-a-launch";
/// The time between two checks of what was killed.
const PAUSE: Duration = Duration::from_millis(5);
/// How often it looks for processes: those that start while it kills are killed in the next round.
const LOOKS: u32 = 400;

/// A guardian, which is killed when this is dropped: the job has then come to its end.
#[derive(Debug)]
pub struct Guardian {
    child: Child,
}

impl Guardian {
    /// Starts one for a job.
    ///
    /// # Errors
    /// If the system has no process or pipe.
    pub fn start(job: &JobId) -> io::Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        // Not in the launcher's group, which a terminal or a shell ends as one, and not of the job, nor of one around it.
        command.arg(ARGUMENT).env_clear().process_group(0).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut guardian = Self { child: command.spawn()? };
        let pipe = guardian.child.stdin.as_mut().ok_or(io::ErrorKind::BrokenPipe)?;
        // Not among its arguments: anyone who knows the id can join, and those are for all to read.
        pipe.write_all(&[&mark_of(job)[..], b"\n"].concat())?;
        Ok(guardian)
    }

    /// Its process.
    pub fn process(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Guardian {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.try_wait();
    }
}

/// Does a guardian's work, if that is what this process was started for.
pub fn is_done(mut arguments: impl Iterator<Item = OsString>) -> bool {
    if arguments.next().is_none_or(|argument| argument != ARGUMENT) || arguments.next().is_some() {
        return false;
    }
    let (mut input, mut mark) = (BufReader::new(io::stdin()), Vec::new());
    // A launcher that was killed before it had named the job had started no rank.
    // Any other line would be the mark of processes that are none of a job's.
    if input.read_until(b'\n', &mut mark).is_ok() && mark.pop() == Some(b'\n') && is_mark(&mark) {
        let _ = input.read_to_end(&mut Vec::new());
        kill_all(&mark);
    }
    true
}

/// Kills every process that has the mark, and what it starts meanwhile.
fn kill_all(mark: &[u8]) {
    for _ in 0..LOOKS {
        if processes().filter(|process| kill(*process, mark)).count() == 0 {
            return;
        }
        thread::sleep(PAUSE);
    }
}

/// Kills a process, if it has the mark. Returns whether it has. By the descriptor it is the same process in both steps.
fn kill(process: u32, mark: &[u8]) -> bool {
    if !has_mark(process, mark) {
        return false;
    }
    // SAFETY: the call touches no memory; it gives a new descriptor, or -1.
    let descriptor = unsafe { libc::syscall(libc::SYS_pidfd_open, process, 0) };
    let Some(descriptor) = i32::try_from(descriptor).ok().filter(|descriptor| *descriptor >= 0) else { return false };
    // SAFETY: the descriptor is open, and has no other owner.
    let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
    if !has_mark(process, mark) {
        return false;
    }
    // SAFETY: a null pointer is no information to send with the signal.
    unsafe { libc::syscall(libc::SYS_pidfd_send_signal, descriptor.as_raw_fd(), libc::SIGKILL, ptr::null::<libc::siginfo_t>(), 0) };
    true
}
