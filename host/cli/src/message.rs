//! One line on standard error, which a reader that takes nothing does not delay for ever.

use std::{
    io::{Write, stderr},
    sync::mpsc,
    thread,
    time::Duration,
};

use crate::text::{printable, printable_lines};

/// How long a reader may take to make room.
const LIMIT: Duration = Duration::from_secs(2);

/// The most bytes of a line.
const LONGEST: usize = 4096;

/// Prints it in the program's name. If it is not read in time it is lost: the status tells the rest.
pub fn tell(text: &str) {
    print(line(text));
}

/// Prints what a tool has written, as many lines as it has.
pub fn tell_output(text: &str) {
    print(format!("{}\n", printable_lines(text.trim_end())));
}

/// One line, whatever stands in the text: names and words of files and of other programs are in it.
fn line(text: &str) -> String {
    let mut line = format!(
        "oxtile: {}",
        text.lines()
            .map(|line| printable(line.trim_matches([' ', '\t', '\r'])))
            .filter(|line| !line.is_empty())
            .collect::<Vec<_>>()
            .join("; ")
    );
    if line.len() >= LONGEST {
        let end = line.floor_char_boundary(LONGEST - "…\n".len());
        line.truncate(end);
        line.push('…');
    }
    line.push('\n');
    line
}

fn print(text: String) {
    let (said, is_said) = mpsc::channel();
    // Another thread may hold the stream for as long as it is not read.
    let thread = thread::Builder::new().name("message".into()).spawn(move || {
        let _ = stderr().lock().write_all(text.as_bytes());
        let _ = said.send(());
    });
    if thread.is_ok() {
        let _ = is_said.recv_timeout(LIMIT);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_short_line_whatever_the_text() {
        assert_eq!(line("a: wrong"), "oxtile: a: wrong\n");
        assert_eq!(line("no crate\n  mend: name one\n\n"), "oxtile: no crate; mend: name one\n");
        assert_eq!(line("\u{1b}[2J\u{2028}"), "oxtile: \\u{1b}[2J\\u{2028}\n");
        for text in ["é".repeat(3_000_000), "\u{1b}".repeat(100_000), "a\nb".repeat(100_000)] {
            let line = line(&text);
            assert!(line.len() <= LONGEST && line.ends_with("…\n") && line.lines().count() == 1, "{} bytes", line.len());
        }
    }
}
