//! `cuTensorMapEncodeTiled`.

use cudarc::driver::sys::{
    self, CUtensorMap, CUtensorMapDataType as DataType, CUtensorMapFloatOOBfill as Fill, CUtensorMapInterleave as Interleave,
    CUtensorMapL2promotion as Promotion, CUtensorMapSwizzle as Swizzle,
};

use oxtile_tile::layout::SwizzleMode;

use super::driver::check;
use crate::runtime::backend::BoxMap;
use crate::runtime::error::Result;

/// Dimensions, strides and box, innermost first, as the driver wants them. Elements travel as unsigned integers.
pub(super) fn encode(map: &BoxMap) -> Result<[u64; 16]> {
    let data_type = match map.element_bytes {
        1 => DataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
        2 => DataType::CU_TENSOR_MAP_DATA_TYPE_UINT16,
        4 => DataType::CU_TENSOR_MAP_DATA_TYPE_UINT32,
        _ => DataType::CU_TENSOR_MAP_DATA_TYPE_UINT64,
    };
    let swizzle = match map.swizzle {
        SwizzleMode::None => Swizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
        SwizzleMode::Bytes32 => Swizzle::CU_TENSOR_MAP_SWIZZLE_32B,
        SwizzleMode::Bytes64 => Swizzle::CU_TENSOR_MAP_SWIZZLE_64B,
        SwizzleMode::Bytes128 => Swizzle::CU_TENSOR_MAP_SWIZZLE_128B,
    };
    let element_strides = vec![1; map.dimensions.len()];
    let mut encoded = CUtensorMap { opaque: [0; 16] };
    // SAFETY: every pointer is to an array of the rank's length (one less for the strides) that outlives the call;
    // `encoded` has the alignment of its type. The driver checks the values.
    check("cuTensorMapEncodeTiled", unsafe {
        sys::cuTensorMapEncodeTiled(
            &raw mut encoded,
            data_type,
            map.dimensions.len() as u32,
            map.address as *mut std::ffi::c_void,
            map.dimensions.as_ptr(),
            map.strides.as_ptr(),
            map.box_dimensions.as_ptr(),
            element_strides.as_ptr(),
            Interleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            Promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            Fill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    })?;
    Ok(encoded.opaque)
}
