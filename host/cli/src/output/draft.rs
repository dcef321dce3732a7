//! A file while it is made.

use std::{
    ffi::CString,
    fs::{File, OpenOptions, Permissions},
    io,
    os::{
        fd::AsRawFd,
        unix::{
            ffi::OsStrExt,
            fs::{OpenOptionsExt, PermissionsExt},
        },
    },
    path::Path,
};

use tempfile::NamedTempFile;

use super::target::Target;
use crate::interrupt::{self, Registration};

/// What any file has that a program creates, less the user's umask.
pub const MODE: u32 = 0o666;

/// A file that does not have its name yet.
#[derive(Debug)]
pub enum Draft {
    /// Without any name: the system removes it with its last descriptor, however the process ends.
    Unnamed(File),
    /// Where the file system has no files without a name.
    Named {
        temporary: NamedTempFile,
        // After `temporary`, hence dropped after it: the file is on the list for as long as it exists.
        registered: Registration,
    },
}

impl Draft {
    /// Begins a file in a folder.
    pub fn new(folder: &Path, mode: u32) -> io::Result<Self> {
        match Self::unnamed(folder) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR | libc::EINVAL)) => Self::named(folder, mode),
            unnamed => unnamed,
        }
    }

    fn unnamed(folder: &Path) -> io::Result<Self> {
        // It gets its name through there.
        if !Path::new("/proc/self/fd").is_dir() {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        }
        let file = OpenOptions::new().read(true).write(true).mode(MODE).custom_flags(libc::O_TMPFILE).open(folder)?;
        Ok(Self::Unnamed(file))
    }

    fn named(folder: &Path, mode: u32) -> io::Result<Self> {
        let (temporary, registered) =
            interrupt::removed_on_signal(|| names().permissions(Permissions::from_mode(mode)).tempfile_in(folder))?;
        Ok(Self::Named { temporary, registered })
    }

    /// The file, to be written.
    pub fn file(&self) -> &File {
        match self {
            Self::Unnamed(file) => file,
            Self::Named { temporary, .. } => temporary.as_file(),
        }
    }

    /// Gives it the name of its target, replacing what stood there.
    pub fn publish(self, target: &Target) -> io::Result<()> {
        match self {
            Self::Named { temporary, registered } => {
                temporary.persist(&target.file)?;
                drop(registered);
            }
            Self::Unnamed(file) => match link(&file, &target.file) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    // A link replaces nothing, and a rename does.
                    let (temporary, registered) =
                        interrupt::removed_on_signal(|| names().make_in(&target.folder, |path| link(&file, path)))?;
                    temporary.persist(&target.file)?;
                    drop(registered);
                }
                linked => linked?,
            },
        }
        Ok(())
    }
}

/// Temporary names.
fn names() -> tempfile::Builder<'static, 'static> {
    let mut names = tempfile::Builder::new();
    names.prefix(".oxtile-").suffix(".partial");
    names
}

/// Gives a file without a name one that is free.
fn link(file: &File, path: &Path) -> io::Result<()> {
    let [from, to] = [format!("/proc/self/fd/{}", file.as_raw_fd()).as_bytes(), path.as_os_str().as_bytes()].map(CString::new);
    let (from, to) = (from?, to?);
    // SAFETY: both are strings that end with a zero byte and live until the call returns.
    match unsafe { libc::linkat(libc::AT_FDCWD, from.as_ptr(), libc::AT_FDCWD, to.as_ptr(), libc::AT_SYMLINK_FOLLOW) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead, BufReader},
        os::unix::process::ExitStatusExt,
        process::{Command, Stdio},
    };

    use super::*;

    /// What makes a process of [`signals_remove_a_file_with_a_temporary_name`] the one that is ended: the folder.
    const VICTIM: &str = "OXTILE_TEST_DRAFT_FOLDER";

    fn names_in(folder: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(folder).expect("a folder");
        entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn both_kinds_replace_a_file_and_leave_nothing_else() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("out");
        for begin in [Draft::unnamed, |folder: &Path| Draft::named(folder, MODE)] {
            for before in [None, Some("before")] {
                let _ = std::fs::remove_file(&path);
                before.inspect(|text| std::fs::write(&path, text).expect("a writable folder"));
                let target = Target::find(&path, &[]).expect("a target");
                drop(begin(folder.path()).expect("a file"));
                assert_eq!(names_in(folder.path()).len(), usize::from(before.is_some()), "one that is dropped leaves nothing");
                let draft = begin(folder.path()).expect("a file");
                std::io::Write::write_all(&mut draft.file(), b"after").expect("writable");
                draft.publish(&target).expect("a name");
                assert_eq!((names_in(folder.path()), std::fs::read(&path).expect("the file")), (vec!["out".into()], b"after".to_vec()));
            }
        }
    }

    #[test]
    fn signals_remove_a_file_with_a_temporary_name() {
        if let Some(folder) = std::env::var_os(VICTIM) {
            // SAFETY: the call takes no pointer. Under nohup(1) the signal would be ignored.
            unsafe { libc::signal(libc::SIGHUP, libc::SIG_DFL) };
            interrupt::install().expect("handlers");
            let _draft = Draft::named(Path::new(&folder), MODE).expect("a file");
            // Before the name of the test, which the harness prints without a line's end.
            println!("\nit is there");
            std::thread::sleep(std::time::Duration::from_secs(60));
            unreachable!("a signal ends it");
        }
        let signals = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT, libc::SIGALRM, libc::SIGUSR1, libc::SIGUSR2];
        let others = [libc::SIGXCPU, libc::SIGVTALRM, libc::SIGPROF, libc::SIGIO, libc::SIGPWR, libc::SIGRTMIN(), libc::SIGRTMAX()];
        for signal in signals.into_iter().chain(others) {
            let folder = tempfile::tempdir().expect("a temporary folder");
            let mut victim = Command::new(std::env::current_exe().expect("this program"))
                .args(["--exact", "--nocapture", "output::draft::tests::signals_remove_a_file_with_a_temporary_name"])
                .env(VICTIM, folder.path())
                .stdout(Stdio::piped())
                .spawn()
                .expect("this program again");
            let mut lines = BufReader::new(victim.stdout.take().expect("its output")).lines();
            assert!(lines.any(|line| line.expect("text") == "it is there"), "signal {signal}");
            assert_eq!(names_in(folder.path()).len(), 1, "the file has a name");
            let id = libc::pid_t::try_from(victim.id()).expect("a process id");
            // SAFETY: `kill` touches no memory; the id is that of a child that has not been waited for.
            assert_eq!(unsafe { libc::kill(id, signal) }, 0);
            assert_eq!(victim.wait().expect("it ends").signal(), Some(signal), "it ends as the signal would have ended it");
            assert!(names_in(folder.path()).is_empty(), "signal {signal}");
        }
    }
}
