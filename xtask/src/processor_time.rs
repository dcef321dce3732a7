//! The processor time of programs that were run: the cost of a suite that does not depend on the number of cores, or on their other work.

use std::{fs, time::Duration};

/// The processor time of every child that has ended, its own children included. `None` where the system does not tell.
///
/// proc_pid_stat(5): the fields 16 and 17 of `/proc/self/stat`, `cutime` and `cstime`, in hundredths of a second.
pub fn of_children() -> Option<Duration> {
    parse(&fs::read_to_string("/proc/self/stat").ok()?)
}

fn parse(stat: &str) -> Option<Duration> {
    // The second field, the program's name in parentheses, may hold anything.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks: Vec<u64> = fields.get(13..15)?.iter().map(|field| field.parse().ok()).collect::<Option<_>>()?;
    Some(Duration::from_millis(10 * ticks.iter().sum::<u64>()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fields_behind_the_name_are_read() {
        let stat = "7 (a (b) c) S 1 7 7 0 -1 4194560 900 0 3 0 11 12 150 25 20 0 1 0";
        assert_eq!(parse(stat), Some(Duration::from_millis(1750)));
        assert_eq!(parse("7 (short) S 1"), None);
    }

    #[test]
    fn a_child_counts_once_it_has_ended() {
        let Some(before) = of_children() else { return };
        let work = "i=0; while [ $i -lt 200000 ]; do i=$((i + 1)); done";
        assert!(std::process::Command::new("sh").args(["-c", work]).status().unwrap().success());
        assert!(of_children().unwrap() > before);
    }
}
