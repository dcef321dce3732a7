//! What a launcher tells a process by variables.
//!
//! | launcher | rank, world, local rank | address of rank 0 | job |
//! |---|---|---|---|
//! | `oxtile launch`, torchrun | `RANK`, `WORLD_SIZE`, `LOCAL_RANK` | `MASTER_ADDR`, `MASTER_PORT` | `OXTILE_JOB_ID`, `TORCHELASTIC_RUN_ID` |
//! | Open MPI | `OMPI_COMM_WORLD_RANK`, `_SIZE`, `_LOCAL_RANK` | the same; on one host `MASTER_ADDR` may be missing | `OMPI_MCA_ess_base_jobid`, `PMIX_NAMESPACE` |
//! | MPICH, Intel MPI | `PMI_RANK`, `PMI_SIZE`, `MPI_LOCALRANKID` | the same | `PMI_JOBID` |
//! | srun | `SLURM_PROCID`, `SLURM_NTASKS`, `SLURM_LOCALID` | the same, or the first host of `SLURM_STEP_NODELIST` and a port made of `SLURM_JOB_ID` | `SLURM_JOB_ID` and `SLURM_STEP_ID` |
//!
//! The first launcher of this order whose rank is set counts: srun starts mpirun, and mpirun torchrun, not the other way round. srun itself sets
//! `PMI_RANK` too (`--mpi=pmi2`): where that equals `SLURM_PROCID`, and `MPI_LOCALRANKID` is not set, the launcher is srun.
//!
//! A port that is named is the only one: `OXTILE_MASTER_PORT`, else `MASTER_PORT`. A port that Oxtile derives may be another
//! program's: rank 0 then takes the first free one of four, and the others ask at all four for their job. Oxtile derives it under srun without
//! `MASTER_PORT`, and under torchrun, whose agent listens at `MASTER_PORT` itself where it sets `TORCHELASTIC_USE_AGENT_STORE`: then the four are
//! the next ones.
//!
//! Sources: torchrun's documentation, "Environment Variables", and pytorch #192113 on its agent; Open MPI's, "Environment variables that Open MPI sets"; srun(1),
//! "OUTPUT ENVIRONMENT VARIABLES"; MPICH `src/pm/hydra`; Slurm's `src/plugins/mpi/pmi2`.

use std::fmt;

use super::{BootstrapError, JobId};
use crate::rank::launcher::{Launcher, Names};
use crate::rank::{Rank, WorldSize};

/// The largest world: rank 0 has a connection and a thread for each of its ranks, and one answer holds what all of them bring.
pub const MOST_RANKS: u32 = 4096;

/// What a process knows of its job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Environment {
    /// The launcher.
    pub launcher: Launcher,
    /// This process's rank.
    pub rank: Rank,
    /// How many ranks there are.
    pub world: WorldSize,
    /// Its number among those of its host, from 0: which GPU it takes.
    pub local_rank: u32,
    /// Name or address of rank 0's host.
    pub master_host: String,
    /// The port that rank 0 listens at if it is free. It also tells jobs of one name apart.
    pub master_port: u16,
    /// How many of the next ports rank 0 may take instead.
    pub spare_ports: u16,
    /// The job, where the launcher names it.
    pub job: Option<JobId>,
}

/// The variable that counts before every launcher's own.
const JOB: &str = "OXTILE_JOB_ID";
const MASTER_ADDR: &str = "MASTER_ADDR";
const MASTER_PORT: &str = "MASTER_PORT";
/// How many spare ports there are if no port is named.
const SPARE_PORTS: u16 = 3;
/// The variable of rank 0's port, which counts before the launcher's own.
const OWN_PORT: &str = "OXTILE_MASTER_PORT";
/// `True` where torchrun's agent listens at `MASTER_PORT`.
const AGENT_STORE: &str = "TORCHELASTIC_USE_AGENT_STORE";
/// Variables by which rank 0 listens elsewhere than at `MASTER_PORT`: a launcher that has set that for its ranks removes them.
pub const OVERRIDES_OF_MASTER_PORT: [&str; 2] = [OWN_PORT, AGENT_STORE];

impl Environment {
    /// Reads the variables of this process.
    ///
    /// # Errors
    /// [`NoLauncher`](BootstrapError::NoLauncher), [`Missing`](BootstrapError::Missing), [`Value`](BootstrapError::Value).
    pub fn read() -> Result<Self, BootstrapError> {
        Self::from_variables(|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    /// Reads variables by `get`; an empty one counts as not set.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn from_variables(get: impl Fn(&str) -> Option<String>) -> Result<Self, BootstrapError> {
        let variables = Variables { get: &get };
        let names = Names::of(&|name| variables.get(name)).ok_or(BootstrapError::NoLauncher)?;
        let world = variables.number(names, names.world, "the launcher sets both: start every rank by it")?;
        let no_world = || value_error(names.world, world, format!("a number from 1 to {MOST_RANKS}"));
        let world = WorldSize::new(world).filter(|world| world.get() <= MOST_RANKS).ok_or_else(no_world)?;
        let rank = variables.number(names, names.rank, "")?;
        let rank =
            Rank::new(rank, world).ok_or_else(|| value_error(names.rank, rank, format!("below {} = {}", names.world, world.get())))?;
        let local_rank = variables.local_rank(names, world)?;
        let host = variables.master_host(names, world)?;
        let (master_port, spare_ports) = variables.master_port(names)?;
        Ok(Self {
            launcher: names.launcher,
            rank,
            world,
            local_rank,
            master_host: host,
            master_port,
            spare_ports,
            job: variables.job(names)?,
        })
    }

    /// The ports at which rank 0 may listen, in the order in which it tries: the same on every rank.
    pub fn master_ports(&self) -> impl Iterator<Item = u16> {
        (0..=self.spare_ports).map(|distance| spare_port(self.master_port, distance))
    }

    /// Where rank 0 listens if its first port is free.
    pub fn master(&self) -> String {
        self.address(self.master_port)
    }

    pub(super) fn address(&self, port: u16) -> String {
        if self.master_host.contains(':') {
            return format!("[{}]:{port}", self.master_host);
        }
        format!("{}:{port}", self.master_host)
    }
}

/// The port that is `distance` higher, or lower where there is none.
fn spare_port(port: u16, distance: u16) -> u16 {
    port.checked_add(distance).unwrap_or(port - distance)
}

struct Variables<'a> {
    get: &'a dyn Fn(&str) -> Option<String>,
}

impl Variables<'_> {
    fn get(&self, name: &str) -> Option<String> {
        (self.get)(name).filter(|value| !value.is_empty())
    }

    fn number(&self, names: &Names, name: &'static str, mend: &'static str) -> Result<u32, BootstrapError> {
        let value = self.get(name).ok_or(BootstrapError::Missing { variable: name, because: names.rank, mend })?;
        value.trim().parse().map_err(|_| value_error(name, value, "a number from 0 to 4294967295".into()))
    }

    fn local_rank(&self, names: &Names, world: WorldSize) -> Result<u32, BootstrapError> {
        let local_rank = self.number(names, names.local_rank, "set it to the number of the rank on its host, from 0")?;
        let of_host = names.local_world.filter(|name| self.get(name).is_some());
        let of_host = of_host.map(|name| Ok((name, self.number(names, name, "")?))).transpose()?;
        let (variable, count) = of_host.filter(|(_, count)| *count < world.get()).unwrap_or((names.world, world.get()));
        if local_rank < count {
            return Ok(local_rank);
        }
        Err(value_error(names.local_rank, local_rank, format!("below {variable} = {count}: it is the number of the rank on its host")))
    }

    fn master_host(&self, names: &Names, world: WorldSize) -> Result<String, BootstrapError> {
        const MEND: &str = "set it to the host of rank 0 on every rank";
        let missing = BootstrapError::Missing { variable: MASTER_ADDR, because: names.rank, mend: MEND };
        if let Some(host) = self.get(MASTER_ADDR) {
            return Ok(host);
        }
        match names.launcher {
            Launcher::Slurm => {
                let nodes = ["SLURM_STEP_NODELIST", "SLURM_NODELIST"].into_iter().find_map(|name| self.get(name));
                nodes.and_then(|nodes| first_host(&nodes)).ok_or(missing)
            }
            Launcher::OpenMpi if self.get("OMPI_COMM_WORLD_LOCAL_SIZE").is_some_and(|size| size == world.get().to_string()) => {
                Ok("127.0.0.1".into())
            }
            _ => Err(missing),
        }
    }

    /// The first port, and how many spare ones there are.
    fn master_port(&self, names: &Names) -> Result<(u16, u16), BootstrapError> {
        const MEND: &str = "set it to a free port of rank 0's host on every rank";
        if let Some(port) = self.port(OWN_PORT)? {
            return Ok((port, 0));
        }
        let Some(port) = self.port(MASTER_PORT)? else {
            let job = self.get("SLURM_JOB_ID").filter(|_| names.launcher == Launcher::Slurm);
            // Above what systems give out by themselves (32768 on), and apart from that of the job after.
            let of_job = job.and_then(|job| job.parse::<u64>().ok()).map(|job| 16_384 + (job % 16_384) as u16);
            let missing = BootstrapError::Missing { variable: MASTER_PORT, because: names.rank, mend: MEND };
            return of_job.map(|port| (port, SPARE_PORTS)).ok_or(missing);
        };
        let is_taken =
            names.launcher == Launcher::Torchrun && self.get(AGENT_STORE).is_some_and(|value| value.eq_ignore_ascii_case("true"));
        Ok(if is_taken { (spare_port(port, 1), SPARE_PORTS) } else { (port, 0) })
    }

    fn port(&self, name: &'static str) -> Result<Option<u16>, BootstrapError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let port = value.trim().parse().ok().filter(|&port| port != 0);
        port.map(Some).ok_or_else(|| value_error(name, value, "a port from 1 to 65535".into()))
    }

    fn job(&self, names: &Names) -> Result<Option<JobId>, BootstrapError> {
        let of = |variables: &[&str]| variables.iter().map(|name| self.get(name)).collect::<Option<Vec<_>>>().map(|parts| parts.join("."));
        let named = [&[JOB] as &[&str]].into_iter().chain(names.job.iter().copied()).find_map(|set| Some((set[0], of(set)?)));
        let Some((variable, name)) = named else { return Ok(None) };
        let too_long =
            || BootstrapError::Refused { rank: Rank::ZERO, reason: format!("{variable} is longer than {} bytes", JobId::MAX_BYTES) };
        JobId::new(name).map(Some).ok_or_else(too_long)
    }
}

fn value_error(variable: &'static str, value: impl fmt::Display, expected: String) -> BootstrapError {
    BootstrapError::Value { variable, value: value.to_string(), expected }
}

/// The first host of a list such as `node[03-05,7],gpu1` or `row[1-2]node[3-4]` (Slurm's hostlist).
fn first_host(list: &str) -> Option<String> {
    let (mut host, mut rest) = (String::new(), list);
    while let Some(at) = rest.find(['[', ',']) {
        host.push_str(&rest[..at]);
        let Some(ranges) = rest[at..].strip_prefix('[') else {
            rest = "";
            break;
        };
        let (ranges, after) = ranges.split_once(']')?;
        host.push_str(ranges.split(['-', ',']).next()?);
        rest = after;
    }
    host.push_str(rest);
    Some(host).filter(|host| !host.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variable(variables: &str, name: &str) -> Option<String> {
        let mut pairs = variables.split_whitespace().filter_map(|pair| pair.split_once('='));
        pairs.find(|(key, _)| *key == name).map(|(_, value)| value.to_owned())
    }

    fn read(variables: &str) -> Result<Environment, BootstrapError> {
        Environment::from_variables(|name| variable(variables, name))
    }

    fn refusal(variables: &str) -> String {
        read(variables).expect_err("a refusal").to_string()
    }

    fn numbers(environment: &Environment) -> [u32; 3] {
        [environment.rank.index(), environment.world.get(), environment.local_rank]
    }

    #[test]
    fn each_launcher_is_understood() {
        let torchrun =
            read("RANK=3 WORLD_SIZE=8 LOCAL_RANK=1 MASTER_ADDR=h MASTER_PORT=29500 TORCHELASTIC_RUN_ID=r SLURM_PROCID=0").unwrap();
        assert_eq!((torchrun.launcher, numbers(&torchrun), torchrun.master().as_str()), (Launcher::Torchrun, [3, 8, 1], "h:29500"));
        assert_eq!(torchrun.job, JobId::new("r"));
        let ours = read("RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=::1 MASTER_PORT=1 TORCHELASTIC_RUN_ID=r OXTILE_JOB_ID=o").unwrap();
        assert_eq!((ours.job, ours.master_host.as_str()), (JobId::new("o"), "::1"));

        // torchrun's agent has the port that it names.
        const AGENT: &str = "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=h TORCHELASTIC_USE_AGENT_STORE=True MASTER_PORT=";
        let ports = |variables: &str| read(&format!("{AGENT}{variables}")).unwrap().master_ports().collect::<Vec<_>>();
        assert_eq!(ports("29500"), [29501, 29502, 29503, 29504]);
        assert_eq!([ports("65535"), ports("65532")], [[65534, 65535, 65532, 65531], [65533, 65534, 65535, 65530]]);
        // A port that was named is the only one.
        assert_eq!(ports("29500 OXTILE_MASTER_PORT=7"), [7]);
        assert_eq!(torchrun.master_ports().collect::<Vec<_>>(), [29500]);

        const OMPI: &str = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0 MASTER_PORT=7 PMIX_NAMESPACE=n";
        let mpi = read(&format!("{OMPI} OMPI_COMM_WORLD_LOCAL_SIZE=2 SLURM_PROCID=0 PMI_RANK=5")).unwrap();
        assert_eq!((mpi.launcher, numbers(&mpi), mpi.master().as_str()), (Launcher::OpenMpi, [1, 2, 0], "127.0.0.1:7"));
        assert_eq!(mpi.job, JobId::new("n"));
        assert!(
            refusal(&format!("{OMPI} OMPI_COMM_WORLD_LOCAL_SIZE=1")).starts_with("MASTER_ADDR is not set, though OMPI_COMM_WORLD_RANK is")
        );

        let hydra = read("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MASTER_ADDR=a MASTER_PORT=7").unwrap();
        assert_eq!((hydra.launcher, numbers(&hydra), hydra.job), (Launcher::Hydra, [1, 2, 1], None));

        assert!(
            refusal("PMI_RANK=1 PMI_SIZE=2 SLURM_PROCID=0 SLURM_NTASKS=1").starts_with("MPI_LOCALRANKID is not set, though PMI_RANK is")
        );

        const SLURM: &str = "SLURM_PROCID=5 SLURM_NTASKS=8 SLURM_LOCALID=1 SLURM_JOB_ID=16385 SLURM_STEP_ID=2";
        let slurm = read(&format!("{SLURM} SLURM_STEP_NODELIST=gpu[003-004,9]-ib,x")).unwrap();
        assert_eq!((slurm.launcher, numbers(&slurm), slurm.master().as_str()), (Launcher::Slurm, [5, 8, 1], "gpu003-ib:16385"));
        assert_eq!(slurm.job, JobId::new("16385.2"));
        let pmi2 = read(&format!("{SLURM} SLURM_STEP_NODELIST=gpu[003-004,9]-ib,x PMI_RANK=5 PMI_SIZE=8 PMI_JOBID=16385.2")).unwrap();
        assert_eq!(pmi2, slurm, "srun --mpi=pmi2");
        assert_eq!(slurm.master_ports().collect::<Vec<_>>(), [16385, 16386, 16387, 16388]);
        assert!(refusal(SLURM).starts_with("MASTER_ADDR is not set, though SLURM_PROCID is"));
    }

    #[test]
    fn errors_name_the_variable() {
        assert!(refusal("").contains("oxtile launch -n N") && refusal("").contains("MASTER_PORT"));
        assert!(refusal("RANK=1").starts_with("WORLD_SIZE is not set, though RANK is"));
        assert!(refusal("RANK=1 WORLD_SIZE= LOCAL_RANK=0").starts_with("WORLD_SIZE is not set"));
        assert_eq!(refusal("RANK=2 WORLD_SIZE=2"), "RANK = \"2\" is not below WORLD_SIZE = 2");
        assert_eq!(refusal("RANK=0 WORLD_SIZE=0"), "WORLD_SIZE = \"0\" is not a number from 1 to 4096");
        assert_eq!(refusal("RANK=0 WORLD_SIZE=400000000"), "WORLD_SIZE = \"400000000\" is not a number from 1 to 4096");
        assert_eq!(
            refusal("RANK=0 WORLD_SIZE=1 LOCAL_RANK=5"),
            "LOCAL_RANK = \"5\" is not below WORLD_SIZE = 1: it is the number of the rank on its host"
        );
        let local = refusal("RANK=5 WORLD_SIZE=8 LOCAL_RANK=5 LOCAL_WORLD_SIZE=4");
        assert!(local.starts_with("LOCAL_RANK = \"5\" is not below LOCAL_WORLD_SIZE = 4"), "{local}");
        assert!(refusal("RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=x").starts_with("LOCAL_WORLD_SIZE = \"x\""));
        assert!(refusal("RANK=-1 WORLD_SIZE=2").starts_with("RANK = \"-1\" is not a number from 0"));
        assert!(refusal("RANK=1 WORLD_SIZE=2").starts_with("LOCAL_RANK is not set"));
        const BASE: &str = "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1";
        assert!(refusal(BASE).starts_with("MASTER_ADDR is not set"));
        assert!(refusal(&format!("{BASE} MASTER_ADDR=a")).starts_with("MASTER_PORT is not set"));
        for port in ["0", "65536", "x"] {
            assert_eq!(
                refusal(&format!("{BASE} MASTER_ADDR=a MASTER_PORT={port}")),
                format!("MASTER_PORT = {port:?} is not a port from 1 to 65535")
            );
        }
        let own = refusal(&format!("{BASE} MASTER_ADDR=a MASTER_PORT=7 OXTILE_MASTER_PORT=x"));
        assert_eq!(own, "OXTILE_MASTER_PORT = \"x\" is not a port from 1 to 65535");
        assert!(refusal("SLURM_PROCID=1 SLURM_NTASKS=x").starts_with("SLURM_NTASKS = \"x\""));
    }

    #[test]
    fn the_first_host_of_a_list() {
        for (list, host) in
            [("a", "a"), ("a,b", "a"), ("n[3-5]", "n3"), ("n[03,5]", "n03"), ("n[1-2]-x,m", "n1-x"), ("n[1-2]m[3-4],x[5]", "n1m3")]
        {
            assert_eq!(first_host(list).as_deref(), Some(host), "{list}");
        }
        assert_eq!(first_host(""), None);
        assert_eq!([first_host("n[1"), first_host("n[1-2]m[3")], [None, None]);
    }
}
