//! The operands of device operations: memory orders, scopes, atomic and warp operators.

/// The threads among which a memory operation or fence takes effect (PTX ISA, "Scope").
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// `.cta`: the threads of one block.
    Block,
    /// `.cluster`: the threads of one cluster.
    Cluster,
    /// `.gpu`: the threads of one device.
    Device,
    /// `.sys`: all threads, other devices and the host included.
    System,
}

impl Scope {
    /// All scopes; each takes in those before it.
    pub(crate) const ALL: [Self; 4] = [Self::Block, Self::Cluster, Self::Device, Self::System];
}

/// The state space an address belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Space {
    /// Global memory; the address is a device address.
    Global,
    /// The shared memory of the thread's block; the address is a byte offset into it.
    Shared,
}

/// How a global load is ordered (`ld`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReadOrder {
    /// `ld.global.nc`: no thread writes the memory while the kernel runs.
    ReadOnly,
    /// `ld.weak`, the plain load.
    Weak,
    /// `ld.relaxed.scope`.
    Relaxed(Scope),
    /// `ld.acquire.scope`.
    Acquire(Scope),
}

/// How a global store is ordered (`st`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WriteOrder {
    /// `st.weak`, the plain store.
    Weak,
    /// `st.relaxed.scope`.
    Relaxed(Scope),
    /// `st.release.scope`.
    Release(Scope),
}

/// How an atomic read-modify-write is ordered (`atom`, `red`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AtomicOrder {
    /// `.relaxed`, what `atom` without a qualifier means.
    Relaxed,
    /// `.acquire`.
    Acquire,
    /// `.release`.
    Release,
    /// `.acq_rel`.
    AcquireRelease,
}

/// What an atomic read-modify-write computes. Operands are the low `width` bytes of a `u64`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AtomicOp {
    /// Wrapping integer sum (width 4 or 8).
    Add,
    /// `f32` sum (width 4), the operand given by its bits.
    AddF32,
    /// Unsigned minimum (width 4 or 8).
    Min,
    /// Unsigned maximum (width 4 or 8).
    Max,
    /// Signed minimum (width 4 or 8).
    MinSigned,
    /// Signed maximum (width 4 or 8).
    MaxSigned,
    /// Bitwise and.
    And,
    /// Bitwise or.
    Or,
    /// Bitwise exclusive or.
    Xor,
    /// Exchange.
    Exchange,
    /// Compare and swap: stores the operand if memory equals `compare`.
    CompareAndSwap,
}

/// How `shfl.sync` picks the source lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ShuffleMode {
    /// `.idx`: the lane given.
    Index,
    /// `.up`: this lane less the argument.
    Up,
    /// `.down`: this lane plus the argument.
    Down,
    /// `.bfly`: this lane xor the argument.
    Butterfly,
}

/// What `vote.sync` computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum VoteMode {
    /// 1 if any lane's predicate holds.
    Any,
    /// 1 if every lane's predicate holds.
    All,
    /// One bit a lane.
    Ballot,
    /// 1 if the predicate is the same in every lane.
    Uniform,
}

/// What `redux.sync` computes over 32-bit values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// Wrapping sum.
    Add,
    /// Unsigned minimum.
    Min,
    /// Unsigned maximum.
    Max,
    /// Signed minimum.
    MinSigned,
    /// Signed maximum.
    MaxSigned,
    /// Bitwise and.
    And,
    /// Bitwise or.
    Or,
    /// Bitwise exclusive or.
    Xor,
}

/// The threads that take part in a [`collective`](crate::device::collective).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Group {
    /// The lanes of this thread's warp named in the mask.
    Warp(u32),
    /// The 128 threads of this thread's warpgroup (four warps, the first a multiple of four).
    Warpgroup,
}
