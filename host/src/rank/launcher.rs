//! The launcher that started this process, and the rank that it gave it.

/// What started the processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// `oxtile launch`, torchrun, or another launcher that sets the same variables.
    Torchrun,
    /// mpirun of Open MPI.
    OpenMpi,
    /// mpiexec of MPICH, Intel MPI and their kin.
    Hydra,
    /// srun.
    Slurm,
}

/// The variables of one launcher.
pub(crate) struct Names {
    pub launcher: Launcher,
    pub rank: &'static str,
    pub world: &'static str,
    pub local_rank: &'static str,
    /// The number of ranks of its host, if the launcher gives it as a number.
    pub local_world: Option<&'static str>,
    /// All of them together name the job; the first set that is there.
    pub job: &'static [&'static [&'static str]],
}

const LAUNCHERS: [Names; 4] = [
    Names {
        launcher: Launcher::Torchrun,
        rank: "RANK",
        world: "WORLD_SIZE",
        local_rank: "LOCAL_RANK",
        local_world: Some("LOCAL_WORLD_SIZE"),
        job: &[&["TORCHELASTIC_RUN_ID"]],
    },
    Names {
        launcher: Launcher::OpenMpi,
        rank: "OMPI_COMM_WORLD_RANK",
        world: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_world: Some("OMPI_COMM_WORLD_LOCAL_SIZE"),
        job: &[&["OMPI_MCA_ess_base_jobid"], &["PMIX_NAMESPACE"]],
    },
    Names {
        launcher: Launcher::Hydra,
        rank: "PMI_RANK",
        world: "PMI_SIZE",
        local_rank: "MPI_LOCALRANKID",
        local_world: Some("MPI_LOCALNRANKS"),
        job: &[&["PMI_JOBID"]],
    },
    Names {
        launcher: Launcher::Slurm,
        rank: "SLURM_PROCID",
        world: "SLURM_NTASKS",
        local_rank: "SLURM_LOCALID",
        local_world: None,
        job: &[&["SLURM_JOB_ID", "SLURM_STEP_ID"]],
    },
];

impl Names {
    /// The variables of the launcher that counts. `get` gives nothing for a variable that is empty.
    pub fn of(get: &dyn Fn(&str) -> Option<String>) -> Option<&'static Self> {
        let is_srun = |names: &Self| get(names.local_rank).is_none() && get("SLURM_PROCID") == get(names.rank);
        let is_it = |names: &&Self| get(names.rank).is_some() && !(names.launcher == Launcher::Hydra && is_srun(names));
        LAUNCHERS.iter().find(is_it)
    }
}

/// The rank that a launcher gave this process, whatever else is set.
pub(crate) fn process_rank() -> Option<u32> {
    rank_of(|name| std::env::var(name).ok())
}

fn rank_of(get: impl Fn(&str) -> Option<String>) -> Option<u32> {
    let get = |name: &str| get(name).filter(|value| !value.is_empty());
    get(Names::of(&get)?.rank)?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_is_known_without_the_rest() {
        let rank = |variables: &str| {
            rank_of(|name| {
                let mut pairs = variables.split_whitespace().filter_map(|pair| pair.split_once('='));
                pairs.find(|(key, _)| *key == name).map(|(_, value)| value.to_owned())
            })
        };
        assert_eq!(["RANK=3", "OMPI_COMM_WORLD_RANK=3", "PMI_RANK=3", "SLURM_PROCID=3"].map(rank), [Some(3); 4]);
        assert_eq!(rank("SLURM_PROCID=0 OMPI_COMM_WORLD_RANK=2 RANK="), Some(2));
        assert_eq!([rank(""), rank("RANK=x")], [None; 2]);
    }
}
