//! The board of ranks that are processes, after rank 0 has left it: it goes on as long as the others need it, and no longer.

use std::process::{Child, ExitCode};
use std::thread;
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use oxtile::Error;
use oxtile::comm::bootstrap::{Environment, Store, StoreBoard};
use oxtile::comm::{Board, Rank};
use oxtile::symmetric::SymmetricError;

use crate::{faults, trial};

const LONG: Duration = Duration::from_secs(10);

pub fn trials() -> Vec<Trial> {
    let case = |name: &'static str| {
        trial(format!("board::{name}"), move || {
            for (rank, mut child) in faults::ranks(&format!("board:{name}")).into_iter().enumerate() {
                assert!(ends(&mut child), "rank {rank} failed, or hangs");
            }
        })
    };
    vec![case("outlives_rank_0"), case("ends_when_nobody_pins")]
}

/// Whether a rank ends well, in time.
fn ends(child: &mut Child) -> bool {
    let start = Instant::now();
    while start.elapsed() < 2 * LONG {
        if let Some(status) = child.try_wait().expect("it was started") {
            return status.success();
        }
        thread::sleep(Duration::from_millis(5));
    }
    let _ = child.kill();
    let _ = child.wait();
    false
}

/// One rank. Rank 0 leaves at once, and so does its process as far as it is asked.
pub fn child(case: &str) -> ExitCode {
    let limit = if case == "outlives_rank_0" { LONG } else { Duration::from_millis(300) };
    let environment = Environment::read().expect("the variables are set");
    let board = Store::connect(&environment, LONG).and_then(Store::into_board).expect("all come").outliving_rank_0(limit);
    if board.rank() == Rank::ZERO {
        return ExitCode::SUCCESS;
    }
    let error = gone(&board, Rank::ZERO);
    assert!(error.starts_with("its process is gone"), "{error}");
    let other = Rank::new(3 - board.rank().index(), board.world()).expect("of three");
    if case == "outlives_rank_0" {
        for call in 0..20 {
            let key = format!("call {call}");
            board.publish_to(&[board.rank(), other], board.rank(), &key, vec![call]).expect("a process serves");
            assert_eq!(board.read(other, &key, LONG).expect("it is passed on"), [call]);
            thread::sleep(Duration::from_millis(10));
        }
        board.publish(board.rank(), "last", Vec::new()).expect("a process serves");
        [board.rank(), other].into_iter().for_each(|rank| _ = board.read(rank, "last", LONG).expect("it is passed on"));
    } else {
        // The other rank is there, and silent.
        assert!(gone(&board, other).ends_with("and with it the board"));
    }
    ExitCode::SUCCESS
}

/// Why a rank pins nothing more.
fn gone(board: &StoreBoard, rank: Rank) -> String {
    match board.read(rank, "never", LONG).expect_err("no rank pins it") {
        Error::Symmetric(SymmetricError::Aborted { why, .. }) => why,
        other => panic!("{other}"),
    }
}
