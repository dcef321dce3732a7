//! GPUs, through the CUDA driver. (stub until the driver side lands)
use super::backend::Backend;
use super::error::{Error, Result};
use std::sync::Arc;
pub(crate) fn platform() -> Result<Arc<dyn Backend>> {
    Err(Error::NoCuda { reason: "not built".to_owned() })
}
