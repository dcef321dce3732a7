//! Where a device operation stands in a kernel's source.

use std::panic::Location;

/// Source line of a device operation.
pub(crate) type Site = &'static Location<'static>;
