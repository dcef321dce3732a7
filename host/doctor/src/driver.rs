//! NVIDIA's driver and the GPUs that it sees.

use std::ffi::{CStr, c_char, c_int};

use libloading::Library;

use crate::{
    Finding,
    library::{function, open},
};

const NAME: &str = "libcuda.so.1";
/// What `oxtile` needs: CUDA 13.0, release 580.
const OLDEST: c_int = 13_000;
/// `CUDA_ERROR_NO_DEVICE`.
const NO_DEVICE: c_int = 100;
/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR` and `..._MINOR` of `cuda.h`.
const CAPABILITY: [c_int; 2] = [75, 76];
/// `CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED`, `..._HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED` and
/// `..._CAN_USE_64_BIT_STREAM_MEM_OPS` of `cuda.h`: what `vmm` asks a device for.
const SHARING: [(c_int, &str); 3] =
    [(102, "virtual memory management"), (103, "memory that is shared by file descriptors"), (122, "signals of 64 bits on streams")];
const MEND: &str = "install NVIDIA's driver, release 580 or newer (the emulator needs none)";

/// The driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Driver {
    /// None.
    Absent {
        /// The loader's reason.
        why: String,
    },
    /// One that does not start, or is too old.
    Broken {
        /// What it says.
        why: String,
        /// What to do.
        mend: &'static str,
    },
    /// One that works, for so many GPUs.
    Found {
        /// The newest CUDA that it is for: major and minor.
        cuda: (u32, u32),
        /// The GPUs that this process sees.
        gpus: Vec<Gpu>,
    },
}

/// A GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// As NVIDIA calls it.
    pub name: String,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// Bytes of its memory.
    pub bytes: u64,
    /// What it lacks that memory shared between processes needs.
    pub lacks: Option<&'static str>,
}

impl Driver {
    /// Asks the driver.
    pub fn find() -> Self {
        match open(NAME) {
            Ok(library) => Self::ask(NAME, &library).unwrap_or_else(|why| Self::Broken { why, mend: MEND }),
            Err(why) => Self::Absent { why },
        }
    }

    fn ask(name: &str, library: &Library) -> Result<Self, String> {
        type Number = unsafe extern "C" fn(*mut c_int) -> c_int;
        // SAFETY: the signatures are those of `cuda.h`.
        let (driver_version, init, count) = unsafe {
            (
                function::<Number>(library, name, "cuDriverGetVersion")?,
                function::<unsafe extern "C" fn(u32) -> c_int>(library, name, "cuInit")?,
                function::<Number>(library, name, "cuDeviceGetCount")?,
            )
        };
        let (mut version, mut gpus) = (0, 0);
        // SAFETY: a valid place for the number; may be called before cuInit.
        unsafe { driver_version(&raw mut version) };
        let cuda = (version.unsigned_abs() / 1000, version.unsigned_abs() % 1000 / 10);
        if version < OLDEST {
            return Ok(Self::Broken { why: format!("the driver is for CUDA {}.{}, older than 13.0", cuda.0, cuda.1), mend: MEND });
        }
        // SAFETY: no pointers.
        match unsafe { init(0) } {
            0 => {}
            NO_DEVICE => return Ok(Self::Found { cuda, gpus: Vec::new() }),
            code => {
                let mend = "see dmesg and nvidia-smi, and restart the machine after an update of the driver";
                return Ok(Self::Broken { why: format!("cuInit fails with code {code}"), mend });
            }
        }
        // SAFETY: a valid place for the count.
        match unsafe { count(&raw mut gpus) } {
            0 => Ok(Self::Found { cuda, gpus: (0..gpus).map(|number| Gpu::ask(name, library, number)).collect::<Result<_, _>>()? }),
            code => Err(format!("cuDeviceGetCount fails with code {code}")),
        }
    }

    /// The GPUs, none where there is no driver that works.
    pub fn gpus(&self) -> &[Gpu] {
        match self {
            Self::Found { gpus, .. } => gpus,
            Self::Absent { .. } | Self::Broken { .. } => &[],
        }
    }

    pub(crate) fn finding(&self) -> Finding {
        match self {
            Self::Absent { why } => Finding::absent("driver", why, MEND),
            Self::Broken { why, mend } => Finding::broken("driver", why, *mend),
            Self::Found { cuda: (major, minor), .. } => Finding::ok("driver", format!("CUDA {major}.{minor} ({NAME})")),
        }
    }

    pub(crate) fn gpu_findings(&self) -> Vec<Finding> {
        const MEND: &str = "see nvidia-smi and CUDA_VISIBLE_DEVICES; kernels run on the emulator";
        match self.gpus() {
            [] => vec![Finding::absent("gpu", "none seen by the driver", MEND)],
            gpus => gpus.iter().enumerate().map(|(number, gpu)| gpu.finding(number)).collect(),
        }
    }
}

impl Gpu {
    fn ask(name: &str, library: &Library, number: c_int) -> Result<Self, String> {
        // SAFETY: the signatures are those of `cuda.h`.
        let (attribute, get_name, memory) = unsafe {
            (
                function::<unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int>(library, name, "cuDeviceGetAttribute")?,
                function::<unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int>(library, name, "cuDeviceGetName")?,
                function::<unsafe extern "C" fn(*mut usize, c_int) -> c_int>(library, name, "cuDeviceTotalMem_v2")?,
            )
        };
        let value = |which: c_int| {
            let mut value = 0;
            // SAFETY: a valid place for the answer, and a device below the count.
            match unsafe { attribute(&raw mut value, which, number) } {
                0 => value.unsigned_abs(),
                _ => 0,
            }
        };
        let (mut text, mut bytes) = ([0; 256], 0);
        // SAFETY: as above; a place of the length that is said, whose last byte the driver leaves zero.
        unsafe { (get_name(text.as_mut_ptr(), 255, number), memory(&raw mut bytes, number)) };
        // SAFETY: the text ends with a zero: it was all zeros before.
        let text = unsafe { CStr::from_ptr(text.as_ptr()) };
        let lacks = SHARING.iter().find(|(which, _)| value(*which) == 0).map(|(_, what)| *what);
        let [major, minor] = CAPABILITY.map(value);
        Ok(Self { name: text.to_string_lossy().into_owned(), capability: (major, minor), bytes: bytes as u64, lacks })
    }

    fn finding(&self, number: usize) -> Finding {
        let (major, minor) = self.capability;
        let gib = self.bytes as f64 / f64::from(1 << 30);
        Finding::ok("gpu", format!("{number}: {}, compute capability {major}.{minor}, {gib:.0} GiB", self.name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Status;

    #[test]
    fn what_is_no_driver_is_broken_and_named() {
        let libc = open("libc.so.6").expect("the C library");
        assert_eq!(Driver::ask("libc.so.6", &libc).unwrap_err(), "libc.so.6 has no cuDriverGetVersion");
    }

    #[test]
    fn findings_say_what_there_is() {
        let gpu = Gpu { name: "NVIDIA H200".into(), capability: (9, 0), bytes: 141 << 30, lacks: None };
        let driver = Driver::Found { cuda: (13, 0), gpus: vec![gpu.clone(), gpu] };
        assert_eq!(driver.finding().to_string(), "ok      driver    CUDA 13.0 (libcuda.so.1)");
        assert_eq!(driver.gpu_findings()[1].to_string(), "ok      gpu       1: NVIDIA H200, compute capability 9.0, 141 GiB");
        let none = Driver::Found { cuda: (13, 0), gpus: vec![] };
        assert_eq!((none.finding().status, none.gpu_findings()[0].status), (Status::Ok, Status::Absent));
        let old = Driver::Broken { why: "the driver is for CUDA 12.4, older than 13.0".into(), mend: MEND };
        assert_eq!(old.finding().status, Status::Broken);
        assert!(old.finding().to_string().starts_with("BROKEN  driver    the driver is for CUDA 12.4, older than 13.0; install NVIDIA's"));
    }
}
