//! How ranks join, and meet before and after whatever takes memory, loads kernels or waits on the host, since work that waits for other ranks may delay those.

use std::time::Duration;

use anyhow::{Result, bail};
use oxtile::comm::{ArenaRank, Communicator, NcclCommunicator, NcclOptions};
use oxtile::symmetric::BackendName;

use super::super::gate::Gate;
use super::super::member::DEADLINE;
use super::super::workers::Seat;
use super::By;

/// How long ranks may take to fill tensors, and one GPU to attend to the longest sequence.
const PREPARATION: Duration = Duration::from_secs(120);

/// What a rank does that has joined the others.
pub trait Joined {
    /// Does it, with messages, and with the rank whose arenas are of the back end.
    fn run<C: Communicator + Send + Sync>(&self, comm: &C, rank: &impl ArenaRank, backend: BackendName) -> Result<()>;
}

/// Joins the others, by NCCL or on the virtual cluster.
pub fn join(seat: &Seat, of: &impl Joined) -> Result<()> {
    let (rank, world) = (seat.rank.rank(), seat.rank.world());
    match (&seat.id, &seat.emulated) {
        (Some(id), _) => {
            let options = NcclOptions { deadline: DEADLINE, ..NcclOptions::default() };
            let comm = NcclCommunicator::join(seat.rank.device(), *id, rank, world, &options)?;
            of.run(&comm, &seat.rank, BackendName::Vmm)
        }
        (None, Some(comm)) => of.run(comm, comm, BackendName::Emulated),
        (None, None) => bail!("{rank} has neither NCCL nor a virtual cluster"),
    }
}

/// Does a rank's part of something, and waits for all ranks. Where one fails, its error is told, and all end.
pub fn together<R>(gate: &Gate, by: By, part: impl FnOnce() -> Result<R>) -> Result<R> {
    let result = gate.after(PREPARATION, || part().inspect_err(|error| gate.fail(by, format!("{error:#}"))))?;
    match gate.failed() {
        Some((by, why)) => bail!("{} failed: {why}", by.label()),
        None => Ok(result),
    }
}
