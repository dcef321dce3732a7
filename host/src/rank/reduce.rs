//! What a reduction does with the elements of many ranks.

/// How elements of the ranks become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReduceOp {
    /// Their sum. In which order is up to the communicator; each run of one communicator takes the same.
    Sum,
    /// The largest. What a NaN among floats gives is up to the communicator.
    Max,
}

/// A number type that is reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
pub enum DType {
    U8,
    U32,
    U64,
    I8,
    I32,
    I64,
    F32,
    F64,
    Bf16,
    F16,
    E4m3,
    E5m2,
}
