//! Matrix multiplication by cuBLASLt, whose library is loaded when first asked for.

use std::ffi::{CStr, c_char, c_void};
use std::ptr;
use std::sync::{Arc, OnceLock};

use cudarc::cublaslt::sys::{self, cublasLtMatmulDescAttributes_t as Attribute, cublasStatus_t, cudaDataType_t};

use super::shared_library::is_present;
use crate::runtime::backend::StreamId;
use crate::runtime::error::{Error, Result};
use crate::runtime::matmul::*;

/// The oldest library with every scale mode of [`MatmulScale`]: CUDA 12.9.
const OLDEST: usize = 12_09_00;

/// `cublasOperation_t`, which cuBLASLt takes as a number.
const CUBLAS_OP_N: i32 = 0;
const CUBLAS_OP_T: i32 = 1;

/// One library handle a device.
pub(super) struct CublasLt(Vec<OnceLock<Arc<Handle>>>);

struct Handle(sys::cublasLtHandle_t);

// SAFETY: cuBLAS Library, 2.1.2, "Thread Safety": a handle may be used by several threads.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: a live handle, not used after this.
        super::platform::log(check("cublasLtDestroy", unsafe { sys::cublasLtDestroy(self.0) }));
    }
}

impl CublasLt {
    pub fn new(devices: usize) -> Self {
        Self((0..devices).map(|_| OnceLock::new()).collect())
    }

    /// The library's version, or why it cannot be used.
    pub fn version() -> Result<usize, String> {
        static VERSION: OnceLock<Result<usize, String>> = OnceLock::new();
        let find = || {
            if !is_present(&["libcublasLt.so", "libcublasLt.so.13", "libcublasLt.so.12"]) {
                return Err("libcublasLt was not found: put the folder that holds it into LD_LIBRARY_PATH".to_owned());
            }
            // SAFETY: no arguments; every version has this function.
            match unsafe { sys::cublasLtGetVersion() } {
                version if version >= OLDEST => Ok(version),
                version => Err(format!("libcublasLt {version} was found: install that of CUDA 12.9 or newer")),
            }
        };
        VERSION.get_or_init(find).clone()
    }

    fn handle(&self, device: u32) -> Result<Arc<Handle>> {
        let slot = &self.0[device as usize];
        if let Some(handle) = slot.get() {
            return Ok(Arc::clone(handle));
        }
        let mut handle = ptr::null_mut();
        // SAFETY: a valid place for the handle, in the device's context, which the caller made current.
        check("cublasLtCreate", unsafe { sys::cublasLtCreate(&raw mut handle) })?;
        Ok(Arc::clone(slot.get_or_init(|| Arc::new(Handle(handle)))))
    }

    /// The best algorithm by the library's own rule. The device's context is current.
    pub fn plan(&self, device: u32, matmul: &Matmul, memory: &MatmulMemory) -> Result<Option<Plan>> {
        let handle = self.handle(device)?;
        let description = describe(matmul, memory)?;
        let layouts = [layout(matmul.a.matrix)?, layout(matmul.b.matrix)?, layout(matmul.d)?];
        let preference = preference(memory)?;
        let [a, b, d] = [&layouts[0], &layouts[1], &layouts[2]].map(|layout| layout.object);
        // SAFETY: plain numbers, for which zero is a value.
        let mut found: sys::cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
        let mut count = 0;
        // SAFETY: live objects, and a valid place for one result.
        let status = unsafe {
            let (description, preference) = (description.object, preference.object);
            sys::cublasLtMatmulAlgoGetHeuristic(handle.0, description, a, b, d, d, preference, 1, &raw mut found, &raw mut count)
        };
        if status == cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED || (status == cublasStatus_t::CUBLAS_STATUS_SUCCESS && count == 0) {
            return Ok(None);
        }
        check("cublasLtMatmulAlgoGetHeuristic", status)?;
        Ok(Some(Plan { handle, description, layouts, algorithm: found.algo, factors: matmul.factors, memory: *memory }))
    }
}

/// A chosen algorithm and what it is for.
pub(super) struct Plan {
    handle: Arc<Handle>,
    description: Owned<sys::cublasLtMatmulDescOpaque_t>,
    layouts: [Owned<sys::cublasLtMatrixLayoutOpaque_t>; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
    factors: MatmulFactors,
    memory: MatmulMemory,
}

// SAFETY: the objects are only read after they are made.
unsafe impl Send for Plan {}
// SAFETY: as above.
unsafe impl Sync for Plan {}

impl MatmulPlan for Plan {
    /// The device's context is current.
    fn enqueue(&self, stream: StreamId) -> Result<()> {
        let (host, memory) = (if let MatmulFactors::Host { alpha, beta } = self.factors { [alpha, beta] } else { [0.0; 2] }, &self.memory);
        let [alpha, beta]: [*const c_void; 2] = match self.factors {
            MatmulFactors::Host { .. } => [ptr::from_ref(&host[0]).cast(), ptr::from_ref(&host[1]).cast()],
            MatmulFactors::Device => [memory.factors as *const c_void, (memory.factors + 4) as *const c_void],
        };
        let [a, b, d] = [&self.layouts[0], &self.layouts[1], &self.layouts[2]].map(|layout| layout.object);
        // SAFETY: live objects; matrices, scales and factors lie at these addresses in the sizes that were described, and the
        // runtime keeps their memory until the stream's work is done. Host factors are copied before the call returns.
        let status = unsafe {
            sys::cublasLtMatmul(
                self.handle.0,
                self.description.object,
                alpha,
                memory.a as *const c_void,
                a,
                memory.b as *const c_void,
                b,
                beta,
                memory.d as *const c_void,
                d,
                memory.d as *mut c_void,
                d,
                &raw const self.algorithm,
                memory.workspace as *mut c_void,
                WORKSPACE_BYTES as usize,
                stream.handle as sys::cudaStream_t,
            )
        };
        check("cublasLtMatmul", status)
    }
}

/// What is multiplied how.
fn describe(matmul: &Matmul, memory: &MatmulMemory) -> Result<Owned<sys::cublasLtMatmulDescOpaque_t>> {
    let mut object = ptr::null_mut();
    let (compute, scale) = (sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, cudaDataType_t::CUDA_R_32F);
    // SAFETY: a valid place for the object.
    check("cublasLtMatmulDescCreate", unsafe { sys::cublasLtMatmulDescCreate(&raw mut object, compute, scale) })?;
    let description = Owned { object, destroy: sys::cublasLtMatmulDescDestroy };
    let transposition = |operand: &MatmulOperand| match operand.transposed {
        true => CUBLAS_OP_T,
        false => CUBLAS_OP_N,
    };
    description.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &transposition(&matmul.a))?;
    description.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &transposition(&matmul.b))?;
    description.set(Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM, &i8::from(matmul.fast_accumulation))?;
    if matmul.factors == MatmulFactors::Device {
        let mode = sys::cublasLtPointerMode_t::CUBLASLT_POINTER_MODE_DEVICE as i32;
        description.set(Attribute::CUBLASLT_MATMUL_DESC_POINTER_MODE, &mode)?;
    }
    let scales = [
        (&matmul.a, memory.a_scale, Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER),
        (&matmul.b, memory.b_scale, Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER),
    ];
    for (operand, address, mode, pointer) in scales {
        if let Some(value) = scale_mode(operand.scale) {
            description.set(mode, &(value as i32))?;
            description.set(pointer, &address)?;
        }
    }
    Ok(description)
}

fn scale_mode(scale: MatmulScale) -> Option<sys::cublasLtMatmulMatrixScale_t> {
    use sys::cublasLtMatmulMatrixScale_t as Mode;
    match scale {
        MatmulScale::None => None,
        MatmulScale::Tensor => Some(Mode::CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F),
        MatmulScale::Row128 => Some(Mode::CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F),
        MatmulScale::Square128 => Some(Mode::CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F),
        MatmulScale::Row32 => Some(Mode::CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0),
        MatmulScale::Row16 => Some(Mode::CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3),
    }
}

fn layout(matrix: MatmulMatrix) -> Result<Owned<sys::cublasLtMatrixLayoutOpaque_t>> {
    let element = match matrix.element {
        MatmulElement::Bf16 => cudaDataType_t::CUDA_R_16BF,
        MatmulElement::F32 => cudaDataType_t::CUDA_R_32F,
        MatmulElement::E4m3 => cudaDataType_t::CUDA_R_8F_E4M3,
        MatmulElement::E2m1 => cudaDataType_t::CUDA_R_4F_E2M1,
    };
    let (mut object, MatmulMatrix { rows, columns, .. }) = (ptr::null_mut(), matrix);
    // SAFETY: a valid place for the object.
    let status = unsafe { sys::cublasLtMatrixLayoutCreate(&raw mut object, element, rows, columns, rows as i64) };
    check("cublasLtMatrixLayoutCreate", status)?;
    Ok(Owned { object, destroy: sys::cublasLtMatrixLayoutDestroy })
}

/// What an algorithm may use and count on.
fn preference(memory: &MatmulMemory) -> Result<Owned<sys::cublasLtMatmulPreferenceOpaque_t>> {
    use sys::cublasLtMatmulPreferenceAttributes_t as Preference;
    let mut object = ptr::null_mut();
    // SAFETY: a valid place for the object.
    check("cublasLtMatmulPreferenceCreate", unsafe { sys::cublasLtMatmulPreferenceCreate(&raw mut object) })?;
    let preference = Owned { object, destroy: sys::cublasLtMatmulPreferenceDestroy };
    let alignment = |address: u64| 1_u32 << address.trailing_zeros().min(8);
    preference.set(Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &WORKSPACE_BYTES)?;
    preference.set(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &alignment(memory.a))?;
    preference.set(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &alignment(memory.b))?;
    preference.set(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &alignment(memory.d))?;
    preference.set(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &alignment(memory.d))?;
    Ok(preference)
}

/// An object of the library.
struct Owned<T> {
    object: *mut T,
    destroy: unsafe fn(*mut T) -> cublasStatus_t,
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        // SAFETY: a live object, not used after this.
        super::platform::log(check("cublasLt...Destroy", unsafe { (self.destroy)(self.object) }));
    }
}

impl Owned<sys::cublasLtMatmulDescOpaque_t> {
    fn set<V>(&self, attribute: Attribute, value: &V) -> Result<()> {
        // SAFETY: a live object; the value, which has the attribute's type, is copied.
        let status = unsafe { sys::cublasLtMatmulDescSetAttribute(self.object, attribute, ptr::from_ref(value).cast(), size_of::<V>()) };
        check("cublasLtMatmulDescSetAttribute", status)
    }
}

impl Owned<sys::cublasLtMatmulPreferenceOpaque_t> {
    fn set<V>(&self, attribute: sys::cublasLtMatmulPreferenceAttributes_t, value: &V) -> Result<()> {
        // SAFETY: as above.
        let status =
            unsafe { sys::cublasLtMatmulPreferenceSetAttribute(self.object, attribute, ptr::from_ref(value).cast(), size_of::<V>()) };
        check("cublasLtMatmulPreferenceSetAttribute", status)
    }
}

fn check(call: &'static str, status: cublasStatus_t) -> Result<()> {
    if status == cublasStatus_t::CUBLAS_STATUS_SUCCESS { Ok(()) } else { Err(error(call, status)) }
}

#[cold]
fn error(call: &'static str, status: cublasStatus_t) -> Error {
    // SAFETY: the library returns strings with a terminating zero that live as long as it does, which is never unloaded.
    let text = |text: *const c_char| if text.is_null() { "unknown" } else { unsafe { CStr::from_ptr(text) }.to_str().unwrap_or("unknown") };
    // SAFETY: any status may be asked for.
    let (name, description) = unsafe { (text(sys::cublasLtGetStatusName(status)), text(sys::cublasLtGetStatusString(status))) };
    Error::Cuda { call, code: status as u32, name, description, mend: "; pin another path of the multiplication" }
}
