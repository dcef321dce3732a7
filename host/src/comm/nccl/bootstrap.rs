//! How the ranks of a job get an NCCL communicator: over Oxtile's own store, which has deadlines, a job id and a check of the user.

use serde::{Deserialize, Serialize};

use super::library::{NcclVersion, UniqueId};
use crate::bootstrap::Store;
use crate::rank::Rank;
use crate::runtime::{Error, Result};

/// A rank's contribution.
#[derive(Serialize, Deserialize)]
enum Brought {
    /// Its NCCL, whether it compares calls, and, of rank 0, the id.
    Library { version: (u32, u32, u32), compare_calls: bool, id: Vec<u8> },
    /// Why it cannot go on, and whether it has a library.
    Nothing { why: String, has_library: bool },
}

/// Gives rank 0's id to every rank, if all have the same NCCL and the same setting of `compare_calls`. Every rank calls it, also with the reason why it
/// cannot go on; it waits at most as long as the store does.
///
/// # Errors
/// [`Error::NoLibrary`] and [`Error::Invalid`], on every rank, with the rank that cannot go on, has no library, no id, another version or another
/// option; [`Error::Bootstrap`].
pub(super) fn exchange_id(
    store: &mut Store,
    version: Result<NcclVersion>,
    compare_calls: bool,
    make: impl FnOnce() -> Result<UniqueId>,
) -> Result<UniqueId> {
    let id = |version: NcclVersion| {
        let id = if store.rank() == Rank::ZERO { make()?.as_bytes().to_vec() } else { Vec::new() };
        Ok::<_, Error>(Brought::Library { version: version.number, compare_calls, id })
    };
    let (mine, own_error) = match version.and_then(id) {
        Ok(mine) => (mine, None),
        Err(error) => {
            let has_library = !matches!(error, Error::NoLibrary { .. });
            (Brought::Nothing { why: error.to_string(), has_library }, Some(error))
        }
    };
    // A structure of numbers and strings: its conversion to text cannot fail.
    let all = store.all_gather(&serde_json::to_vec(&mine).unwrap_or_default())?;
    if let Some(error) = own_error {
        return Err(error);
    }
    let unknown =
        || Brought::Nothing { why: "it brings something that this version of Oxtile does not know".to_owned(), has_library: true };
    let (mut agreed, mut found) = (None, Vec::new());
    for (rank, bytes) in store.world().ranks().zip(&all) {
        match serde_json::from_slice(bytes).unwrap_or_else(|_| unknown()) {
            Brought::Nothing { why, has_library: false } => {
                return Err(Error::NoLibrary { library: "NCCL", why: format!("{rank}: {why}") });
            }
            Brought::Nothing { why, .. } => return Err(invalid(format!("{rank}: {why}"))),
            Brought::Library { version, compare_calls, id } => {
                agreed = agreed.or_else(|| <[u8; UniqueId::BYTES]>::try_from(id).ok());
                found.push((rank, version, compare_calls));
            }
        }
    }
    let (_, first, compares) = found[0];
    if let Some((rank, (major, minor, patch), _)) = found.iter().find(|(_, version, _)| *version != first) {
        let (a, b, c) = first;
        return Err(invalid(format!(
            "{rank} has NCCL {major}.{minor}.{patch}, rank 0 {a}.{b}.{c}: give all ranks one library (OXTILE_NCCL)"
        )));
    }
    if let Some((rank, ..)) = found.iter().find(|(_, _, other)| *other != compares) {
        let [theirs, own] = [!compares, compares].map(|compares| if compares { "compares calls" } else { "does not compare calls" });
        let mend = "set NcclOptions::compare_calls the same on all ranks (it is on in debug builds unless told otherwise)";
        return Err(invalid(format!("{rank} {theirs}, rank 0 {own}: {mend}")));
    }
    agreed.map(UniqueId::from_bytes).ok_or_else(|| invalid("rank 0 brings no id".to_owned()))
}

fn invalid(why: String) -> Error {
    Error::Invalid { what: "NcclCommunicator::from_store", why }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::bootstrap::{BootstrapError, threads};
    use crate::rank::WorldSize;

    fn version(minor: u32) -> NcclVersion {
        NcclVersion { number: (2, minor, 9), library: "libnccl.so.2".into() }
    }

    /// What three ranks, a thread each, get; a rank without a version does not come.
    fn exchange(patience: Duration, versions: [Option<Result<NcclVersion>>; 3]) -> Vec<Option<Result<UniqueId>>> {
        exchange_with(patience, versions, |_| true)
    }

    fn exchange_with(
        patience: Duration,
        versions: [Option<Result<NcclVersion>>; 3],
        compares: fn(Rank) -> bool,
    ) -> Vec<Option<Result<UniqueId>>> {
        let stores = threads(WorldSize::new(3).unwrap(), patience).unwrap();
        let rank = |(mut store, version): (Store, Option<Result<NcclVersion>>)| {
            let Some(version) = version else {
                // It has connected, and stays silent.
                std::thread::sleep(2 * patience);
                return None;
            };
            let id = UniqueId::from_bytes([store.rank().index() as u8 + 1; UniqueId::BYTES]);
            let compares = compares(store.rank());
            Some(exchange_id(&mut store, version, compares, || Ok(id)))
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = stores.into_iter().zip(versions).map(|pair| scope.spawn(move || rank(pair))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    const PATIENT: Duration = Duration::from_secs(10);

    #[test]
    fn all_get_the_id_of_rank_0() {
        let ids = exchange(PATIENT, [(); 3].map(|()| Some(Ok(version(28)))));
        assert!(ids.into_iter().all(|id| id.unwrap().unwrap().as_bytes() == &[1; UniqueId::BYTES]));
    }

    #[test]
    fn a_rank_without_a_library_is_named_on_all() {
        let missing = Err(Error::NoLibrary { library: "NCCL", why: "no libnccl.so.2".into() });
        let results = exchange(PATIENT, [Some(Ok(version(28))), Some(missing), Some(Ok(version(28)))]);
        for (rank, result) in results.into_iter().enumerate() {
            let error = result.unwrap().unwrap_err();
            let text = error.to_string();
            assert!(matches!(error, Error::NoLibrary { .. }) && text.contains("no libnccl.so.2"), "{text}");
            assert_eq!(text.contains("rank 1: "), rank != 1, "{text}");
        }
    }

    #[test]
    fn a_rank_with_another_reason_is_named_on_all() {
        let virtual_gpu = Err(invalid("the device is a virtual one".into()));
        for result in exchange(PATIENT, [Some(Ok(version(28))), Some(virtual_gpu), Some(Ok(version(28)))]) {
            let error = result.unwrap().unwrap_err();
            assert!(matches!(error, Error::Invalid { .. }) && error.to_string().contains("the device is a virtual one"), "{error}");
        }
    }

    #[test]
    fn options_that_differ_are_named_on_all() {
        let versions = [(); 3].map(|()| Some(Ok(version(28))));
        for result in exchange_with(PATIENT, versions, |rank| rank.index() != 2) {
            let text = result.unwrap().unwrap_err().to_string();
            assert!(text.contains("rank 2 does not compare calls, rank 0 compares calls: set NcclOptions::compare_calls"), "{text}");
        }
    }

    #[test]
    fn libraries_that_differ_are_named_on_all() {
        for result in exchange(PATIENT, [28, 28, 27].map(|minor| Some(Ok(version(minor))))) {
            let text = result.unwrap().unwrap_err().to_string();
            assert!(text.contains("rank 2 has NCCL 2.27.9, rank 0 2.28.9"), "{text}");
        }
    }

    #[test]
    fn a_rank_that_is_silent_is_named_in_time() {
        let (start, patience) = (Instant::now(), Duration::from_millis(300));
        let results = exchange(patience, [Some(Ok(version(28))), Some(Ok(version(28))), None]);
        for result in results.into_iter().flatten() {
            let error = result.unwrap_err();
            assert!(matches!(&error, Error::Bootstrap(BootstrapError::Deadline { missing, .. }) if missing[0].index() == 2), "{error}");
        }
        assert!(start.elapsed() < Duration::from_secs(3));
    }
}
