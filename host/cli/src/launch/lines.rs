//! The output of all ranks as lines of one, each with the rank in front.

use std::{
    fmt,
    io::{self, BufRead, BufReader, Read, Write, stderr, stdout},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use super::error::Left;

/// The longest piece that is kept for the sake of one line.
const LONGEST: usize = 1 << 16;

/// Which of the launcher's streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// Standard output.
    Output,
    /// Standard error.
    Error,
}

impl fmt::Display for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Output => "standard output",
            Self::Error => "standard error",
        })
    }
}

/// How lines of the ranks are marked.
#[derive(Debug)]
pub struct Lines {
    /// Characters of the largest rank.
    width: usize,
    /// How many have been passed on, of all ranks.
    passed_on: Arc<AtomicU64>,
    /// The first line that a stream did not take, though it may have a reader.
    lost: Arc<OnceLock<Left>>,
}

impl Lines {
    /// For a world of so many ranks.
    pub fn new(ranks: u32) -> Self {
        Self { width: ranks.saturating_sub(1).to_string().len(), passed_on: Arc::default(), lost: Arc::default() }
    }

    /// How many lines have been passed on: while it grows, the output is read.
    pub fn passed_on(&self) -> u64 {
        self.passed_on.load(Ordering::Relaxed)
    }

    /// What could not be written, for example to a full disk. A reader that has closed its pipe wants no more: that is not a loss.
    pub fn lost(&self) -> Option<Left> {
        self.lost.get().cloned()
    }

    /// Copies a rank's output to a stream of the launcher, line by line, until its end, which `silent` reports.
    ///
    /// # Errors
    /// If the system has no thread.
    pub fn copy(
        &self,
        rank: u32,
        source: impl Read + Send + 'static,
        stream: Stream,
        silent: impl FnOnce() + Send + 'static,
    ) -> io::Result<()> {
        let prefix = format!("[rank {rank:>width$}] ", width = self.width);
        let (passed_on, lost) = (Arc::clone(&self.passed_on), Arc::clone(&self.lost));
        let thread = thread::Builder::new().name(format!("output of rank {rank}"));
        thread.spawn(move || {
            each_line(source, &prefix, |line| {
                // One call, under the stream's lock: no other rank's line comes between. Where there is no reader any more, the rank must
                // still be able to write.
                let written = match stream {
                    Stream::Output => write_at_once(&mut stdout().lock(), line),
                    Stream::Error => write_at_once(&mut stderr().lock(), line),
                };
                if let Err(error) = written.or_else(may_be_closed) {
                    let _ = lost.set(Left::Unwritten { stream, rank, why: error.to_string() });
                }
                passed_on.fetch_add(1, Ordering::Relaxed);
            });
            silent();
        })?;
        Ok(())
    }
}

fn may_be_closed(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::BrokenPipe { Ok(()) } else { Err(error) }
}

fn write_at_once(stream: &mut impl Write, line: &[u8]) -> io::Result<()> {
    stream.write_all(line)?;
    stream.flush()
}

/// Gives every line with the prefix and with a line end, also where the last has none; longer ones in pieces.
fn each_line(source: impl Read, prefix: &str, mut each: impl FnMut(&[u8])) {
    let mut source = BufReader::with_capacity(LONGEST, source);
    let mut line = prefix.as_bytes().to_vec();
    loop {
        let read = source.by_ref().take(LONGEST as u64).read_until(b'\n', &mut line);
        if line.len() > prefix.len() {
            if line.last() != Some(&b'\n') {
                line.push(b'\n');
            }
            each(&line);
            line.truncate(prefix.len());
        }
        match read {
            Ok(0) => return,
            Err(error) if error.kind() != io::ErrorKind::Interrupted => return,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(source: &[u8]) -> Vec<String> {
        let mut found = Vec::new();
        each_line(source, "[rank 0] ", |line| found.push(String::from_utf8_lossy(line).into_owned()));
        found
    }

    #[test]
    fn every_line_has_its_rank_and_its_end() {
        assert_eq!(lines(b"a\n\nb"), ["[rank 0] a\n", "[rank 0] \n", "[rank 0] b\n"]);
        assert_eq!(lines(b""), [""; 0]);
        assert_eq!(lines(b"\xff\n"), ["[rank 0] \u{fffd}\n"]);
        let long = vec![b'x'; LONGEST + 10];
        let pieces = lines(&long);
        assert_eq!(pieces.iter().map(|piece| piece.len() - 10).collect::<Vec<_>>(), [LONGEST, 10]);
    }
}
