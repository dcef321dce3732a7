//! A progress bar on standard error, drawn only where that is a terminal.

use std::{
    io::{IsTerminal, Write, stderr},
    time::{Duration, Instant},
};

use crate::text::{bytes, printable};

/// Time between two drawings.
const PERIOD: Duration = Duration::from_millis(100);

/// Cells of the bar.
const CELLS: u64 = 30;

/// Progress of a job in bytes of input. Errors in drawing are ignored: the job matters more.
#[derive(Debug)]
pub struct Progress {
    visible: bool,
    total: u64,
    done: u64,
    current: String,
    drawn: Option<Instant>,
}

impl Progress {
    /// A bar that is drawn if standard error is a terminal.
    pub fn on_terminal() -> Self {
        let mut progress = Self::hidden();
        progress.visible = stderr().is_terminal();
        progress
    }

    /// A bar that is never drawn.
    pub fn hidden() -> Self {
        Self { visible: false, total: 0, done: 0, current: String::new(), drawn: None }
    }

    /// Sets what counts as all.
    pub fn expect(&mut self, total: u64) {
        self.total = total;
    }

    /// Names the tensor at hand.
    pub fn start(&mut self, tensor: &str) {
        self.current = printable(tensor).into_owned();
        self.draw();
    }

    /// Names what is waited for, which has no bytes of its own: drawn at once, since no byte will do it.
    pub fn wait_for(&mut self, work: &str) {
        self.drawn = self.drawn.take().and_then(|drawn| drawn.checked_sub(PERIOD));
        self.start(work);
    }

    /// Adds to what is done.
    pub fn advance(&mut self, by: u64) {
        self.done += by;
        self.draw();
    }

    /// Wipes the bar, so that what follows starts on a clean line.
    pub fn clear(&mut self) {
        if self.drawn.take().is_some() {
            let _ = write!(stderr(), "\r\x1b[K");
        }
    }

    fn draw(&mut self) {
        let due = self.drawn.is_none_or(|drawn| drawn.elapsed() >= PERIOD);
        if self.visible && due {
            // Erased to the end of the line and not wrapped: `\x1b[?7l` keeps a long name on a narrow terminal.
            let _ = write!(stderr(), "\r\x1b[?7l{}\x1b[K\x1b[?7h", self.line());
            self.drawn = Some(Instant::now());
        }
    }

    fn line(&self) -> String {
        let total = self.total.max(1);
        let share = (self.done.min(total) as f64) / total as f64;
        let full = (share * CELLS as f64) as usize;
        format!(
            "[{}{}] {:3.0} %  {} of {}  {}",
            "=".repeat(full),
            " ".repeat(CELLS as usize - full),
            (share * 100.0).floor(),
            bytes(self.done),
            bytes(self.total),
            self.current
        )
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_fills_with_the_bytes() {
        let mut progress = Progress::hidden();
        progress.expect(2000);
        progress.start("a.weight");
        progress.advance(1000);
        assert_eq!(progress.line(), "[===============               ]  50 %  1.0 kB of 2.0 kB  a.weight");
        progress.advance(1000);
        assert_eq!(progress.line(), "[==============================] 100 %  2.0 kB of 2.0 kB  a.weight");
    }
}
