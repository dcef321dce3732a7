//! What ranks started and left behind in groups of their own (setsid(2)), whose parents are gone.
//!
//! The launcher is a subreaper, prctl(2): a descendant whose parent ends becomes its child instead of init's. So it can be found, killed, and
//! taken off the system's table. A shell that became the launcher by exec(2) has left it children of its own: these are not killed, nor is what
//! they start.

use std::{
    fs, io, ptr, thread,
    time::{Duration, Instant},
};

use oxtile::comm::bootstrap::JobId;

/// The first pause between two checks of what was killed; pauses double.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(50);

/// This process as a subreaper.
#[derive(Debug)]
pub struct Subreaper {
    /// Whether it had children before.
    has_inherited: bool,
    /// What the environment of a process of the job holds.
    mark: Vec<u8>,
    /// A child that is no rank's.
    spared: Option<u32>,
}

/// A process that was killed and is still there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Survivor {
    /// Its id.
    pub process: u32,
    /// Its program's name.
    pub name: String,
}

impl Subreaper {
    /// Makes this process a subreaper. What has `job` in its environment belongs to the job.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn new(job: &JobId) -> io::Result<Self> {
        // SAFETY: the call touches no memory.
        match unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) } {
            0 => Ok(Self { has_inherited: children().next().is_some(), mark: mark_of(job), spared: None }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Leaves a child alone.
    pub fn spare(&mut self, process: u32) {
        self.spared = Some(process);
    }

    /// Takes children that have ended off the system's table. `ranks` and the spared children are reaped elsewhere.
    pub fn reap_ended(&self, ranks: &[u32]) {
        children().filter(|child| !ranks.contains(child) && self.spared != Some(*child)).for_each(reap_if_ended);
    }

    /// Kills the adopted processes of the job, and their children as they are adopted; returns those that are there after `limit`.
    pub fn kill_adopted(&self, ranks: &[u32], limit: Duration) -> Vec<Survivor> {
        let (deadline, mut pause) = (Instant::now() + limit, FIRST_PAUSE);
        loop {
            let left: Vec<_> = children().filter(|child| !ranks.contains(child) && self.is_of_job(*child)).collect();
            left.iter().for_each(|&child| kill(child));
            self.reap_ended(ranks);
            if left.is_empty() || Instant::now() >= deadline {
                return left.into_iter().filter_map(Survivor::look).collect();
            }
            thread::sleep(pause);
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
    }

    /// Where no child was inherited, every adopted one descends from a rank. Else inherited ones, and what they have left behind, may be among
    /// them: those of the job have its mark.
    fn is_of_job(&self, child: u32) -> bool {
        self.spared != Some(child) && (!self.has_inherited || has_mark(child, &self.mark))
    }
}

/// What the environment of a process of the job holds.
pub fn mark_of(job: &JobId) -> Vec<u8> {
    format!("OXTILE_JOB_ID={}", job.as_str()).into_bytes()
}

/// Whether it is the mark of a job that a launcher named: a random name, of 32 hexadecimal digits.
pub fn is_mark(mark: &[u8]) -> bool {
    let digits = mark.strip_prefix(b"OXTILE_JOB_ID=");
    digits.is_some_and(|digits| digits.len() == 32 && digits.iter().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')))
}

/// Whether the environment that a process was started with holds the mark. That of another user's process cannot be read.
pub fn has_mark(process: u32, mark: &[u8]) -> bool {
    fs::read(format!("/proc/{process}/environ")).is_ok_and(|all| all.split(|&byte| byte == 0).any(|one| one == mark))
}

/// The processes of the system.
pub fn processes() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

impl Survivor {
    /// The process by its name; `None` if it is gone.
    fn look(process: u32) -> Option<Self> {
        let name = fs::read(format!("/proc/{process}/comm")).ok()?;
        Some(Self { process, name: String::from_utf8_lossy(&name).trim().to_owned() })
    }
}

/// The children of this process, those that have ended and were not waited for too.
fn children() -> impl Iterator<Item = u32> {
    let me = std::process::id();
    processes().filter(move |&process| parent(process) == Some(me))
}

/// The second word after the name, which stands in parentheses and may hold any character: proc_pid_stat(5).
fn parent(process: u32) -> Option<u32> {
    let stat = fs::read(format!("/proc/{process}/stat")).ok()?;
    let stat = String::from_utf8_lossy(&stat);
    stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
}

fn kill(child: u32) {
    let Ok(child) = libc::pid_t::try_from(child) else { return };
    // SAFETY: the call touches no memory. The id is that of a child that has not been waited for, hence of no other process.
    unsafe { libc::kill(child, libc::SIGKILL) };
}

fn reap_if_ended(child: u32) {
    let Ok(child) = libc::pid_t::try_from(child) else { return };
    // SAFETY: a null pointer asks for no status.
    unsafe { libc::waitpid(child, ptr::null_mut(), libc::WNOHANG) };
}
