//! One line on standard error, which a reader that takes nothing does not delay for ever.

use std::{
    io::{Write, stderr},
    sync::mpsc,
    thread,
    time::Duration,
};

/// How long a reader may take to make room.
const LIMIT: Duration = Duration::from_secs(2);

/// Prints it in the program's name. If it is not read in time it is lost: the status tells the rest.
pub fn tell(text: &str) {
    let line = format!("oxtile: {text}\n");
    let (said, is_said) = mpsc::channel();
    // Another thread may hold the stream for as long as it is not read.
    let thread = thread::Builder::new().name("message".into()).spawn(move || {
        let _ = stderr().lock().write_all(line.as_bytes());
        let _ = said.send(());
    });
    if thread.is_ok() {
        let _ = is_said.recv_timeout(LIMIT);
    }
}
