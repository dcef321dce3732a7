//! Notes between ranks over the connections of the store.

use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use oxtile::Error;
use oxtile::comm::{Board, Meeting, Rank};
use oxtile::symmetric::SymmetricError;

use crate::threads::run;
use crate::trial;

const LONG: Duration = Duration::from_secs(10);

pub fn trials() -> Vec<Trial> {
    vec![
        trial("board::notes_reach_every_rank", notes_reach_every_rank),
        trial("board::a_rank_that_gives_up_is_not_waited_for", a_rank_that_gives_up_is_not_waited_for),
        trial("board::a_rank_that_is_gone_is_not_waited_for", a_rank_that_is_gone_is_not_waited_for),
    ]
}

fn aborted(result: oxtile::Result<Vec<u8>>) -> (u32, String) {
    match result.expect_err("no such note") {
        Error::Symmetric(SymmetricError::Aborted { rank, why }) => (rank.index(), why),
        other => panic!("{other}"),
    }
}

fn notes_reach_every_rank() {
    let ended = run(4, |board| {
        let me = board.rank();
        // Long ones, and one that is replaced.
        for value in [0, 1] {
            board.publish(me, "note", vec![me.index() as u8 + value; 100_000]).expect("it is sent");
        }
        board.publish(me, "last", Vec::new()).expect("it is sent");
        for from in board.world().ranks() {
            assert!(board.read(from, "last", LONG).expect("it comes").is_empty());
            assert_eq!(board.read(from, "note", LONG).expect("it comes"), vec![from.index() as u8 + 1; 100_000]);
        }
        let error = board.read(Rank::ZERO, "never", Duration::from_millis(30)).expect_err("no rank pins it");
        assert!(matches!(&error, Error::Symmetric(SymmetricError::Missing { ranks, .. }) if ranks == &[Rank::ZERO]), "{error}");
        board.close().expect("all come");
    });
    ended.into_iter().for_each(|rank| rank.expect("no panic"));
}

fn a_rank_that_gives_up_is_not_waited_for() {
    let ended = run(3, |board| {
        let (me, last) = (board.rank(), board.world().ranks().last().expect("three"));
        if me == last {
            board.publish(me, "arena 1: before", vec![1]).expect("it is sent");
            board.give_up(me, Some("arena 1:"), "no memory");
            board.publish(me, "arena 2: after", vec![2]).expect("it is sent");
        }
        assert_eq!(board.read(last, "arena 2: after", LONG).expect("another scope"), [2]);
        assert_eq!(aborted(board.read(last, "arena 1: never", LONG)), (2, "no memory".to_owned()));
        assert_eq!(board.read(last, "arena 1: before", LONG).expect("it was pinned before"), [1]);
        // A meeting's end is its own, whatever another is called.
        let [one, ten] = ["arena 1", "arena 10"].map(|name| Meeting::new(board.clone(), me, board.world(), name));
        if me == last {
            one.give_up("no memory");
            ten.publish("after", vec![3]).expect("it is sent");
        }
        assert_eq!(ten.read(last, "after", LONG).expect("another meeting"), [3]);
        assert!(matches!(ten.read(last, "never", Duration::ZERO), Err(Error::Symmetric(SymmetricError::Missing { .. }))));
        board.close().expect("all come");
    });
    ended.into_iter().for_each(|rank| rank.expect("no panic"));
}

fn a_rank_that_is_gone_is_not_waited_for() {
    for victim in [0, 1] {
        let ended = run(3, |board| {
            let world = board.world();
            let victim = Rank::new(victim, world).expect("of this world");
            if board.rank() == victim {
                return;
            }
            let start = Instant::now();
            let (rank, why) = aborted(board.read(victim, "note", LONG));
            assert_eq!(rank, victim.index());
            assert!(why.starts_with("its process is gone"), "{why}");
            assert!(start.elapsed() < Duration::from_secs(5), "nothing waited for the deadline");
            if victim != Rank::ZERO {
                // The others go on.
                let other = Rank::new(2 - board.rank().index(), world).expect("of this world");
                board.publish(board.rank(), "left", Vec::new()).expect("it is sent");
                board.read(other, "left", LONG).expect("it comes");
                board.publish(board.rank(), "read", Vec::new()).expect("it is sent");
                // Its own too: then the other has got it, before this rank goes.
                for rank in [other, board.rank()] {
                    board.read(rank, "read", LONG).expect("it comes");
                }
            }
        });
        ended.into_iter().for_each(|rank| rank.expect("no panic"));
    }
}
