//! What was recorded, as data: the back ends of the runtime write it, [`Timeline`](crate::timeline::Timeline) gives it out.
//!
//! | file | what it holds |
//! |---|---|
//! | `span` | one piece of work, and what sort it is |
//! | `recording` | spans on one clock |
//! | `json` | recordings as files |
//! | `error` | what can be wrong with a file |
//! | `kernel_record` | what checked launches show of a kernel, as a file |

mod error;
mod json;
mod kernel_record;
#[allow(clippy::module_inception, reason = "the noun")]
mod recording;
mod span;

use std::time::{SystemTime, UNIX_EPOCH};

pub use error::TimelineError;
pub use kernel_record::{BoxRecord, FieldRecord, KernelRecord, LineRecord, PhaseRecord};
pub(crate) use recording::MOST_SPANS;
pub use recording::{Clock, Recording};
pub use span::{Activity, Lane, Span};
pub(crate) use span::{Caller, Work};

/// Nanoseconds since 1970, by the host's clock.
pub(crate) fn now_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}
