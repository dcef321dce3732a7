//! Which symmetric memory the machine allows, and why not.

use crate::{Driver, Finding, nccl::Nccl, nvshmem::Nvshmem};

const EMULATED: &str = "the virtual cluster needs no GPU: use emulated";

/// A back end that can be used with this, or not for that reason, with what to do.
type Usable = Result<String, (String, String)>;

/// The back ends by name, in the order of preference; `variable` is that of the environment.
pub fn findings(driver: &Driver, nccl: &Nccl, nvshmem: &Nvshmem, variable: &dyn Fn(&str) -> Option<String>) -> Vec<Finding> {
    let gpus = gpus(driver);
    let is = |name: &str, wanted: &str| variable(name).as_deref() == Some(wanted);
    let of_nccl = gpus.clone().and_then(|gpus| match &nccl.version {
        None => Err(("there is no NCCL".to_owned(), "see above".to_owned())),
        Some(version) if !nccl.has_windows => Err((format!("NCCL {version} has no windows"), "use 2.27 or newer, or vmm".to_owned())),
        Some(_) if !is("NCCL_NVLS_ENABLE", "0") => {
            Err(("windows would use NVLink multicast".to_owned(), "set NCCL_NVLS_ENABLE=0".to_owned()))
        }
        Some(version) => Ok(format!("{gpus}, NCCL {version}")),
    });
    let of_nvshmem = gpus.clone().and_then(|gpus| match &nvshmem.version {
        None => Err(("there is no NVSHMEM".to_owned(), "see above".to_owned())),
        Some(_) if !is("NVSHMEM_DISABLE_NVLS", "1") => {
            Err(("its teams would use NVLink multicast".to_owned(), "set NVSHMEM_DISABLE_NVLS=1".to_owned()))
        }
        Some(_) if !is("NVSHMEM_DISABLE_NCCL", "1") && !is("NCCL_NVLS_ENABLE", "0") => {
            Err(("its NCCL would use NVLink multicast".to_owned(), "set NVSHMEM_DISABLE_NCCL=1".to_owned()))
        }
        Some(version) => Ok(format!("{gpus}, NVSHMEM {version}")),
    });
    let all: [(&str, Usable); 4] = [("vmm", gpus), ("nccl", of_nccl), ("emulated", Ok("always".to_owned())), ("nvshmem", of_nvshmem)];
    let finding = |(name, usable): (&str, Usable)| match usable {
        Ok(with) => Finding::ok("symmetric", format!("{name}: {with}")),
        Err((why, mend)) => Finding::absent("symmetric", format!("{name}: {why}"), mend),
    };
    all.into_iter().map(finding).collect()
}

/// How many GPUs there are that share memory.
fn gpus(driver: &Driver) -> Usable {
    let gpus = driver.gpus();
    if gpus.is_empty() {
        return Err(("there is no GPU".to_owned(), EMULATED.to_owned()));
    }
    match gpus.iter().enumerate().find_map(|(number, gpu)| Some((number, gpu.lacks?))) {
        Some((number, what)) => Err((format!("GPU {number} has no {what}"), "use NCCL's collectives".to_owned())),
        None => Ok(format!("{} GPU(s)", gpus.len())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Gpu, Status};

    fn said(gpus: Vec<Gpu>, nccl: Option<(&str, bool)>, nvshmem: Option<&str>, variables: &[(&str, &str)]) -> Vec<String> {
        let finding = Finding::ok("", "");
        let driver = Driver::Found { cuda: (13, 0), gpus };
        let nccl = Nccl {
            finding: finding.clone(),
            version: nccl.map(|(version, _)| version.into()),
            has_windows: nccl.is_some_and(|(_, windows)| windows),
        };
        let nvshmem = Nvshmem { finding, version: nvshmem.map(Into::into) };
        let variable = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
        let findings = findings(&driver, &nccl, &nvshmem, &variable);
        assert!(findings.iter().all(|finding| finding.status != Status::Broken), "what is not usable is not broken");
        findings.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn each_back_end_says_why_not() {
        let gpu = || Gpu { name: "G".into(), capability: (9, 0), bytes: 1, lacks: None };
        let none = said(vec![], Some(("2.28.3", true)), Some("3.4.5"), &[]);
        let absent = |name: &str| format!("absent  symmetric {name}: there is no GPU; the virtual cluster needs no GPU: use emulated");
        assert_eq!(none, [absent("vmm"), absent("nccl"), "ok      symmetric emulated: always".into(), absent("nvshmem")]);

        let lacking = said(vec![gpu(), Gpu { lacks: Some("signals"), ..gpu() }], None, None, &[]);
        assert_eq!(lacking[0], "absent  symmetric vmm: GPU 1 has no signals; use NCCL's collectives");

        let without = said(vec![gpu()], None, None, &[]);
        assert_eq!(without[0], "ok      symmetric vmm: 1 GPU(s)");
        assert_eq!(without[1], "absent  symmetric nccl: there is no NCCL; see above");
        assert_eq!(without[3], "absent  symmetric nvshmem: there is no NVSHMEM; see above");

        let old = said(vec![gpu()], Some(("2.26.2", false)), None, &[("NCCL_NVLS_ENABLE", "0")]);
        assert_eq!(old[1], "absent  symmetric nccl: NCCL 2.26.2 has no windows; use 2.27 or newer, or vmm");

        let multicast = said(vec![gpu()], Some(("2.28.3", true)), Some("3.4.5"), &[("NCCL_NVLS_ENABLE", "1")]);
        assert!(multicast[1].ends_with("set NCCL_NVLS_ENABLE=0") && multicast[3].ends_with("set NVSHMEM_DISABLE_NVLS=1"), "{multicast:?}");

        let by_nccl = said(vec![gpu()], None, Some("3.4.5"), &[("NVSHMEM_DISABLE_NVLS", "1")]);
        assert!(by_nccl[3].ends_with("its NCCL would use NVLink multicast; set NVSHMEM_DISABLE_NCCL=1"), "{by_nccl:?}");

        let variables = [("NCCL_NVLS_ENABLE", "0"), ("NVSHMEM_DISABLE_NVLS", "1")];
        let all = said(vec![gpu()], Some(("2.28.3", true)), Some("3.4.5"), &variables);
        assert_eq!(all[1], "ok      symmetric nccl: 1 GPU(s), NCCL 2.28.3");
        assert!(all[3].starts_with("ok      symmetric nvshmem: 1 GPU(s), NVSHMEM 3.4.5"));
    }
}
