//! What ranks started and left behind in groups of its own (setsid(2)), its parents gone.
//!
//! The launcher is its subreaper, prctl(2): what would become init's child becomes the launcher's. So it can be found, ended, and taken off
//! the system's table.

use std::{io, ptr};

/// Has what the descendants of this process leave behind become its children.
///
/// # Errors
/// If the system refuses.
pub fn adopt() -> io::Result<()> {
    // SAFETY: the call touches no memory.
    match unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Takes those that have ended off the system's table; `ranks`, children too, are somebody else's.
pub fn reap(ranks: &[u32]) {
    children().filter(|child| !ranks.contains(child)).for_each(|child| wait(child, libc::WNOHANG));
}

/// Ends every child of this process, and theirs as they become its own.
pub fn kill() {
    loop {
        let killed: Vec<_> = children().filter(|&child| kill_one(child)).collect();
        if killed.is_empty() {
            return;
        }
        killed.into_iter().for_each(|child| wait(child, 0));
    }
}

/// The children of this process, those that have ended and were not waited for too.
fn children() -> impl Iterator<Item = u32> {
    let me = std::process::id();
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let processes = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    processes.filter(move |&process| parent(process) == Some(me))
}

/// The second word behind the name, which stands in parentheses and may hold any character: proc_pid_stat(5).
fn parent(process: u32) -> Option<u32> {
    let stat = std::fs::read(format!("/proc/{process}/stat")).ok()?;
    let stat = String::from_utf8_lossy(&stat);
    stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
}

fn kill_one(child: u32) -> bool {
    let Ok(child) = libc::pid_t::try_from(child) else { return false };
    // SAFETY: the call touches no memory. The id is that of a child that nobody has waited for, hence of nobody else.
    unsafe { libc::kill(child, libc::SIGKILL) == 0 }
}

fn wait(child: u32, options: libc::c_int) {
    let Ok(child) = libc::pid_t::try_from(child) else { return };
    // SAFETY: a null pointer asks for no status.
    unsafe { libc::waitpid(child, ptr::null_mut(), options) };
}
