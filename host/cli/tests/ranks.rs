//! `oxtile launch` and `oxtile::comm::bootstrap` together: this program is what is launched.

mod common;

use std::{
    process::{ExitCode, Output},
    time::Duration,
};

use common::{oxtile, stderr};
use libtest_mimic::{Arguments, Trial};
use oxtile::comm::bootstrap::{Environment, Store};

/// What makes this program a rank instead of the tests: `well`, or how rank 1 ends.
const FAULT: &str = "OXTILE_TEST_RANK";

fn main() -> ExitCode {
    if let Ok(fault) = std::env::var(FAULT) {
        return rank(&fault);
    }
    let trial = |name: &str, test: fn()| {
        Trial::test(name, move || {
            test();
            Ok(())
        })
    };
    let trials = vec![
        trial("launched_ranks_find_one_another", launched_ranks_find_one_another),
        trial("a_rank_that_dies_is_named_by_all", a_rank_that_dies_is_named_by_all),
        trial("two_launches_at_a_time_do_not_mix", two_launches_at_a_time_do_not_mix),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn rank(fault: &str) -> ExitCode {
    let exchange = || {
        let environment = Environment::read()?;
        let mut store = Store::connect(&environment, Duration::from_secs(30))?;
        let said = store.all_gather(format!("{}{fault}", environment.local_rank).as_bytes())?;
        if fault == "die" && environment.rank.index() == 1 {
            std::process::exit(9);
        }
        println!("{}", said.iter().map(|said| String::from_utf8_lossy(said)).collect::<Vec<_>>().join(" "));
        store.close()
    };
    match exchange() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(3)
        }
    }
}

fn launch(fault: &str, ranks: &str) -> Output {
    let program = std::env::current_exe().expect("a path");
    oxtile().args(["launch", "-n", ranks]).arg(program).env(FAULT, fault).output().expect("the binary runs")
}

fn launched_ranks_find_one_another() {
    for ranks in 1..=4_u32 {
        let done = launch("w", &ranks.to_string());
        assert!(done.status.success(), "{}", stderr(&done));
        let mut lines: Vec<_> = String::from_utf8_lossy(&done.stdout).lines().map(str::to_owned).collect();
        lines.sort();
        let all = (0..ranks).map(|rank| format!("{rank}w")).collect::<Vec<_>>().join(" ");
        assert_eq!(lines, (0..ranks).map(|rank| format!("[rank {rank}] {all}")).collect::<Vec<_>>());
    }
}

fn a_rank_that_dies_is_named_by_all() {
    let done = launch("die", "3");
    let said = stderr(&done);
    // The end of a rank that lost it may be seen first.
    assert!(matches!(done.status.code(), Some(9 | 3)), "{:?}: {said}", done.status);
    let last = said.lines().last().unwrap_or_default();
    assert!(last.starts_with("oxtile: rank ") && last.contains("rank 1 (process ") && last.contains(") exited with status 9"), "{said}");
    // A rank that was not ended before it could report it reports the same.
    assert!(
        said.lines()
            .all(|line| line.starts_with("oxtile: ")
                || line.ends_with("rank 1 is gone, during the closing of the store: see what it said last")),
        "{said}"
    );
}

fn two_launches_at_a_time_do_not_mix() {
    let launches: Vec<_> = ["a", "b", "c"].map(|name| std::thread::spawn(move || launch(name, "3"))).into();
    for (name, launched) in ["a", "b", "c"].into_iter().zip(launches) {
        let done = launched.join().expect("no panic");
        assert!(done.status.success(), "{}", stderr(&done));
        let said = String::from_utf8_lossy(&done.stdout).into_owned();
        assert!(said.lines().count() == 3 && said.lines().all(|line| line.ends_with(&format!("] 0{name} 1{name} 2{name}"))), "{said}");
    }
}
