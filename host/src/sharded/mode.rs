//! Whether the passes of a chain are enqueued, or captured in graphs.

/// Whether the passes of a [`Chain`](super::Chain) are enqueued, or captured in graphs: [`Eager`] or [`Captured`].
pub trait Mode: sealed::Sealed + 'static {
    /// Whether they are in graphs.
    #[doc(hidden)]
    const IS_CAPTURED: bool;
}

/// Passes are enqueued, and never in a graph: the stream of such a chain has no name that could be given to [`Graph::capture`](crate::Graph::capture).
///
/// ```compile_fail,E0599
/// use oxtile::sharded::{Bf16, Chain, Published};
/// use oxtile::{Graph, Result, Stream};
///
/// fn capture(published: &Published<'_, Bf16>, chain: &mut Chain<Bf16>, stream: &Stream) -> Result<Graph> {
///     let pulls = chain.pulls().clone();
///     Graph::capture(&[stream, &pulls], || published.forward(chain)?.finish())
/// }
/// ```
#[derive(Debug)]
pub enum Eager {}

/// Passes are in graphs alone. Code that is captured names the type, and then takes no weight from the slots of an eager chain, which a replay would not pull:
///
/// ```compile_fail,E0308
/// use oxtile::sharded::{Bf16, Captured, Chain, Pass, Published};
/// # use oxtile::{Result, Stream};
///
/// fn captured_layers(pass: Pass<'_, Bf16, Captured>) -> Result<()> {
///     pass.finish()
/// }
///
/// fn mixed(published: &Published<'_, Bf16>, eager: &mut Chain<Bf16>) -> Result<()> {
///     captured_layers(published.forward(eager)?)
/// }
/// ```
#[derive(Debug)]
pub enum Captured {}

impl Mode for Eager {
    const IS_CAPTURED: bool = false;
}

impl Mode for Captured {
    const IS_CAPTURED: bool = true;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Eager {}
    impl Sealed for super::Captured {}
}
