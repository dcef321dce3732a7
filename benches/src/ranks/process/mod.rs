//! A rank that is a process of its own: this program again, which reads messages from its standard input and writes others to its standard output, a line of
//! JSON each.
//!
//! `parent` starts it and asks it, `child` is what it does.

mod child;
mod parent;

use std::io::Write;
use std::net::TcpListener;
use std::time::Duration;

use anyhow::{Context, Result};
use oxtile::bootstrap::{Environment, JobId, Launcher};
use oxtile::comm::{NcclCommunicator, Rank, UniqueId, WorldSize};
use serde::{Deserialize, Serialize};

pub use self::child::serve_process;
pub use self::parent::{Kill, Process};
use super::context_parallel::{By, Made};
use super::gate::Failed;
use super::workers::Errand;
use super::{Request, Times};

/// The argument with which this program is a rank.
pub const FLAG: &str = "--rank-process";
/// Rank 0 may take one of so many ports after its own, if that is another program's by then.
const SPARE_PORTS: u16 = 3;

/// What a process is told.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToRank {
    /// The first message.
    Begin(Begin),
    Work(Request),
    /// Of the gate at which it waits.
    Opened(Opened),
    /// The last one. An end of the input without it is an end of the program that started the process.
    End,
}

/// What becomes of a gate.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Opened {
    /// All ranks have come. The side that failed before, where one did.
    Open {
        failed: Option<Failed>,
    },
    Shut {
        why: String,
    },
}

/// What a process tells.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FromRank {
    /// It is at the gate.
    Meet {
        limit: Duration,
    },
    Made(Made),
    Failed(By, String),
    Answer(Result<Times, String>),
}

/// What a process begins with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Begin {
    rank: u32,
    world: u32,
    /// Where the ranks find one another.
    port: u16,
    job: String,
    /// Of NCCL.
    id: Vec<u8>,
    errand: Errand,
}

impl Begin {
    /// That of rank 0.
    pub fn new(world: WorldSize, errand: &Errand) -> Result<Self> {
        let port = TcpListener::bind(("127.0.0.1", 0)).and_then(|listener| listener.local_addr()).context("no port for the ranks")?.port();
        let job = JobId::random().context("no name for the ranks' job")?.as_str().to_owned();
        let id = NcclCommunicator::unique_id()?.as_bytes().to_vec();
        Ok(Self { rank: 0, world: world.get(), port, job, id, errand: errand.clone() })
    }

    /// That of another rank.
    pub fn of(&self, rank: Rank) -> Self {
        Self { rank: rank.index(), ..self.clone() }
    }

    /// What `oxtile launch` tells a process by variables.
    fn environment(&self) -> Result<Environment> {
        let world = WorldSize::new(self.world).context("there are no ranks")?;
        Ok(Environment {
            launcher: Launcher::Torchrun,
            rank: Rank::new(self.rank, world).with_context(|| format!("rank {} is not of a world of {}", self.rank, self.world))?,
            world,
            local_rank: self.rank,
            master_host: "127.0.0.1".into(),
            master_port: self.port,
            spare_ports: SPARE_PORTS,
            job: Some(JobId::new(self.job.clone()).context("the name of the job is too long")?),
        })
    }

    fn id(&self) -> Result<UniqueId> {
        let bytes =
            self.id.as_slice().try_into().with_context(|| format!("an id of NCCL has {} bytes, not {}", UniqueId::BYTES, self.id.len()))?;
        Ok(UniqueId::from_bytes(bytes))
    }
}

impl FromRank {
    /// Writes it to the standard output, in one piece: libraries of the process write lines there too.
    ///
    /// # Errors
    /// The program that started this process has ended.
    pub fn send(&self) -> Result<()> {
        let mut out = std::io::stdout().lock();
        out.write_all(line(self)?.as_bytes()).and_then(|()| out.flush()).context("the program that started this rank has ended")
    }
}

/// A message as a line.
fn line(message: &impl Serialize) -> Result<String> {
    Ok(serde_json::to_string(message)? + "\n")
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::bench::Size;
    use crate::peers::Check;
    use crate::ranks::context_parallel::Direction;
    use crate::ranks::context_parallel::auto::{self, Step};
    use crate::ranks::{Work, context_parallel, plan};
    use crate::results::RanksRecord;
    use oxtile::overlap::Rates;

    /// A beginning, whose ranks do not meet.
    pub fn begin(errand: Errand) -> Begin {
        Begin { rank: 0, world: 2, port: 1, job: "job".into(), id: vec![0; UniqueId::BYTES], errand }
    }

    fn comes_back<T: Serialize + for<'a> Deserialize<'a> + PartialEq + std::fmt::Debug>(message: &T) {
        let line = line(message).unwrap();
        assert!(line.ends_with('\n') && line.matches('\n').count() == 1, "{line}");
        assert_eq!(&serde_json::from_str::<T>(&line).unwrap(), message);
    }

    #[test]
    fn every_request_of_every_family_comes_back() {
        let mut requests = 0;
        for size in [Size::Smoke, Size::Full] {
            // The many shapes have the requests of the tiny ones, and a choice for each takes its time.
            let is_taken = |name: &str| size == Size::Smoke || name != crate::ranks::shapes::SHAPES;
            let named: Vec<_> = crate::ranks::NAMES.iter().filter(|name| is_taken(name)).map(|&name| name.to_owned()).collect();
            for side in plan::comparisons(2, &Rates::H200, size, &named).unwrap().iter().flat_map(|of| of.sides.iter()) {
                comes_back(&ToRank::Work(side.request));
                requests += 1;
            }
            for row in context_parallel::rows(size, 2) {
                let left_out = vec![(By::Ring, "\"two\nlines\"".into())];
                comes_back(&ToRank::Begin(begin(Errand::Row { row, left_out })));
                let work = Work::ContextParallel { by: By::Pull, passes: context_parallel::Passes::Both, row };
                comes_back(&ToRank::Work(Request { work, bytes: u64::MAX, calls: 3 }));
            }
            comes_back(&ToRank::Begin(begin(Errand::Choices)));
            for of in auto::configurations(size, 2) {
                for step in [Step::Make, Step::Time(By::Pull, Direction::Backward)] {
                    comes_back(&ToRank::Work(Request { work: Work::Choice { of, step }, bytes: 0, calls: 3 }));
                }
            }
        }
        assert!(requests > 100, "{requests}");
    }

    #[test]
    fn what_ranks_tell_comes_back() {
        let record = RanksRecord { memory: 7, ..RanksRecord::default() };
        let check = Some(Check { equal: false, detail: "off by 1".into() });
        let ended = Some(Duration::new(1_764_000_000, 123_456_789));
        for message in [
            FromRank::Meet { limit: Duration::from_millis(1500) },
            FromRank::Made(Made { by: By::Auto, plan: Ok(Some([record.clone(), record])), check }),
            FromRank::Made(Made { by: By::Pull, plan: Err("no memory".into()), check: None }),
            FromRank::Failed(By::AllToAll, "heads".into()),
            FromRank::Answer(Ok(Times { wall: 1.25, device: 1.0 / 3.0, idle: vec![0.5], ended })),
            FromRank::Answer(Err("out of memory".into())),
        ] {
            comes_back(&message);
        }
        for message in [
            ToRank::Begin(begin(Errand::Comparisons)),
            ToRank::Opened(Opened::Open { failed: Some((By::Ring, "why".into())) }),
            ToRank::Opened(Opened::Shut { why: "rank 1 has ended".into() }),
            ToRank::End,
        ] {
            comes_back(&message);
        }
    }

    #[test]
    fn ranks_find_one_another_as_those_of_a_launcher() {
        let world = WorldSize::new(2).unwrap();
        let second = begin(Errand::Comparisons).of(Rank::new(1, world).unwrap());
        let environment = second.environment().unwrap();
        assert_eq!((environment.rank.index(), environment.local_rank, environment.world), (1, 1, world));
        assert_eq!(environment.master(), "127.0.0.1:1");
        assert!(Begin { rank: 2, ..second.clone() }.environment().unwrap_err().to_string().contains("rank 2 is not of a world of 2"));
        assert!(Begin { id: vec![1], ..second }.id().unwrap_err().to_string().contains("128 bytes, not 1"));
    }
}
