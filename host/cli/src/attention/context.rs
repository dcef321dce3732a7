//! Attention by ranks that share the sequences: each has its rows of the file, and rank 0 gets all results.

use oxtile::{
    Bound, Buffer, HostElement, Stream,
    attention::{BackwardInputs, Gradients, Inputs, Layout, Outputs},
    comm::Rank,
    context_parallel::{self, ContextElement, ContextParallel, ContextParallelFp8, Schedule},
    num::{Pod, bf16},
    thd::Packed,
};
use oxtile_tile::launch::DeviceView;

use super::{
    JobError, Number, Plan, bytes_of, numbers_of,
    parts::{Parts, Side},
    report::Passes,
    seat::{Link, Seat},
};
use crate::{
    progress::Progress,
    safetensors::{Checkpoint, Tensor},
};

/// What rank 0 gets: how it was computed, and the bytes of [`Plan::outputs`].
pub type Joined = (Passes, Vec<Vec<u8>>);

/// A rank's tensors.
struct Tensors<T> {
    /// Queries, keys and values.
    inputs: [Buffer<T>; 3],
    out: Buffer<T>,
    log_sum_exp: Buffer<f32>,
    /// The gradient of the result, and those of the inputs.
    gradients: Option<(Buffer<T>, [Buffer<T>; 3])>,
    /// Sums of lengths and offsets, of queries and of keys.
    sums: [[Buffer<u32>; 2]; 2],
}

/// Attention over ranks, of whichever width.
pub trait Operation<T: ContextElement> {
    /// What its passes do.
    fn plan(&self) -> &context_parallel::Plan;
    /// Where packed sequences lie, of queries and of keys.
    fn set_sequences(&self, stream: &Stream, queries: Packed<DeviceView<'_, u32>>, keys: Packed<DeviceView<'_, u32>>)
    -> oxtile::Result<()>;
    /// Binds a forward pass.
    fn forward<'a>(&'a self, stream: &Stream, inputs: Inputs<'a, T>, outputs: Outputs<'a, T>) -> oxtile::Result<Bound<'a>>;
    /// Binds a backward pass.
    fn backward<'a>(&'a self, stream: &Stream, inputs: BackwardInputs<'a, T>, gradients: Gradients<'a, T>) -> oxtile::Result<Bound<'a>>;
}

impl<T: ContextElement> Operation<T> for ContextParallel<'_, T> {
    fn plan(&self) -> &context_parallel::Plan {
        ContextParallel::plan(self)
    }

    fn set_sequences(
        &self,
        stream: &Stream,
        queries: Packed<DeviceView<'_, u32>>,
        keys: Packed<DeviceView<'_, u32>>,
    ) -> oxtile::Result<()> {
        ContextParallel::set_sequences(self, stream, queries, keys)
    }

    fn forward<'a>(&'a self, stream: &Stream, inputs: Inputs<'a, T>, outputs: Outputs<'a, T>) -> oxtile::Result<Bound<'a>> {
        self.bind_forward(stream, inputs, outputs)
    }

    fn backward<'a>(&'a self, stream: &Stream, inputs: BackwardInputs<'a, T>, gradients: Gradients<'a, T>) -> oxtile::Result<Bound<'a>> {
        self.bind_backward(stream, inputs, gradients)
    }
}

/// It refuses packed sequences when it is made.
impl Operation<bf16> for ContextParallelFp8<'_> {
    fn plan(&self) -> &context_parallel::Plan {
        ContextParallelFp8::plan(self)
    }

    fn set_sequences(&self, _: &Stream, _: Packed<DeviceView<'_, u32>>, _: Packed<DeviceView<'_, u32>>) -> oxtile::Result<()> {
        Ok(())
    }

    fn forward<'a>(&'a self, stream: &Stream, inputs: Inputs<'a, bf16>, outputs: Outputs<'a, bf16>) -> oxtile::Result<Bound<'a>> {
        self.bind_forward(stream, inputs, outputs)
    }

    fn backward<'a>(
        &'a self,
        stream: &Stream,
        inputs: BackwardInputs<'a, bf16>,
        gradients: Gradients<'a, bf16>,
    ) -> oxtile::Result<Bound<'a>> {
        self.bind_backward(stream, inputs, gradients)
    }
}

/// Attends by the ranks of `seats`, which are all of the world or one of it. `None` where rank 0 is another process's.
///
/// # Errors
/// What the schedule refuses; of the device, and of other ranks.
pub fn attend<H, C>(
    seats: &[Seat<C>],
    input: &Checkpoint,
    plan: &Plan,
    parts: &Parts,
    schedule: Schedule,
    progress: &mut Progress,
) -> Result<Option<Joined>, JobError>
where
    H: Number + HostElement<Device: ContextElement>,
    C: Link,
{
    let config = parts.context(schedule);
    // Those of all ranks, before any is bound.
    let operations = seats.iter().map(|seat| ContextParallel::<H::Device>::new(&seat.stream, seat.transport(), config));
    attend_by::<H, C>(seats, &operations.collect::<oxtile::Result<Vec<_>>>()?, (input, plan, parts), schedule, progress)
}

/// The same of 8 bits.
///
/// # Errors
/// As [`attend`].
pub fn attend_fp8<C: Link>(
    seats: &[Seat<C>],
    input: &Checkpoint,
    plan: &Plan,
    parts: &Parts,
    schedule: Schedule,
    progress: &mut Progress,
) -> Result<Option<Joined>, JobError> {
    let config = parts.context(schedule);
    let operations = seats.iter().map(|seat| ContextParallelFp8::new(&seat.stream, seat.transport(), config));
    attend_by::<half::bf16, C>(seats, &operations.collect::<oxtile::Result<Vec<_>>>()?, (input, plan, parts), schedule, progress)
}

fn attend_by<H, C>(
    seats: &[Seat<C>],
    operations: &[impl Operation<H::Device>],
    (input, plan, parts): (&Checkpoint, &Plan, &Parts),
    schedule: Schedule,
    progress: &mut Progress,
) -> Result<Option<Joined>, JobError>
where
    H: Number + HostElement<Device: ContextElement>,
    C: Link,
{
    let mut tensors = seats.iter().map(|seat| upload::<H, C>(seat, input, plan, parts, progress)).collect::<Result<Vec<_>, _>>()?;
    progress.wait_for("attention");
    for ((seat, operation), of_rank) in seats.iter().zip(operations).zip(&mut tensors) {
        let Tensors { inputs: [q, k, v], out, log_sum_exp, sums, .. } = of_rank;
        if parts.config.layout == Layout::Packed {
            let [queries, keys] =
                sums.each_ref().map(|[ends, offsets]| Packed { cu_seqlens: ends.view(), cu_seqlens_padded: offsets.view() });
            operation.set_sequences(&seat.stream, queries, keys)?;
        }
        let inputs = Inputs::new(q.view(), k.view(), v.view());
        operation.forward(&seat.stream, inputs, Outputs::new(out.view_mut(), log_sum_exp.view_mut()))?.run(&seat.stream)?;
    }
    for ((seat, operation), of_rank) in seats.iter().zip(operations).zip(&mut tensors) {
        let Tensors { inputs: [q, k, v], out, log_sum_exp, gradients, .. } = of_rank;
        let Some((grad_out, [dq, dk, dv])) = gradients else { continue };
        let forward = Inputs::new(q.view(), k.view(), v.view());
        let inputs = BackwardInputs { forward, out: out.view().into(), log_sum_exp: log_sum_exp.view(), grad_out: grad_out.view().into() };
        operation.backward(&seat.stream, inputs, Gradients::new(dq.view_mut(), dk.view_mut(), dv.view_mut()))?.run(&seat.stream)?;
    }
    let joined = join::<H, C>(seats, &tensors, plan, parts, progress)?;
    let passes = operations.first().map(|operation| Passes::new(operation.plan(), schedule, seats[0].world(), plan.grad_out.is_some()));
    Ok(passes.zip(joined))
}

/// Bytes of a row of a tensor of `[.., heads, size]`.
fn row_bytes<N: Number>(tensor: &Tensor) -> u64 {
    tensor.shape.iter().rev().take(2).product::<u64>() * N::BYTES as u64
}

/// A rank's rows of the file, and room for its results.
fn upload<H, C>(
    seat: &Seat<C>,
    input: &Checkpoint,
    plan: &Plan,
    parts: &Parts,
    progress: &mut Progress,
) -> Result<Tensors<H::Device>, JobError>
where
    H: Number + HostElement<Device: ContextElement>,
    C: Link,
{
    let stream = &seat.stream;
    let mut tensor = |side, tensor: &Tensor| -> Result<Buffer<H::Device>, JobError> {
        progress.start(&format!("{} of {}", tensor.name, seat.rank()));
        let part = parts.take(side, seat.rank(), input, tensor, row_bytes::<H>(tensor))?;
        progress.advance(tensor.bytes() / u64::from(seat.world().get()));
        Ok(Buffer::from_slice(stream, &numbers_of::<H>(&part))?)
    };
    let inputs = [tensor(Side::Queries, &plan.q)?, tensor(Side::Keys, &plan.k)?, tensor(Side::Keys, &plan.v)?];
    let zeros = |len| Buffer::<H::Device>::zeros(stream, len);
    let gradients = |grad_out| -> Result<_, JobError> {
        let [q, k, v] = inputs.each_ref().map(Buffer::len);
        Ok((tensor(Side::Queries, grad_out)?, [zeros(q)?, zeros(k)?, zeros(v)?]))
    };
    let sums = |side| -> oxtile::Result<[Buffer<u32>; 2]> {
        let [ends, offsets] = parts.sums(side).map(|sums| Buffer::from_slice(stream, &sums));
        Ok([ends?, offsets?])
    };
    let rows = parts.statistics();
    Ok(Tensors {
        out: zeros(rows * parts.config.value_size())?,
        log_sum_exp: Buffer::from_slice(stream, &vec![f32::NEG_INFINITY; rows as usize])?,
        gradients: plan.grad_out.as_ref().map(gradients).transpose()?,
        sums: [sums(Side::Queries)?, sums(Side::Keys)?],
        inputs,
    })
}

/// The results of all ranks in the order of the file, where rank 0 is.
fn join<H, C>(
    seats: &[Seat<C>],
    tensors: &[Tensors<H::Device>],
    plan: &Plan,
    parts: &Parts,
    progress: &mut Progress,
) -> Result<Option<Vec<Vec<u8>>>, JobError>
where
    H: Number + HostElement<Device: ContextElement>,
    C: Link,
{
    for seat in seats {
        progress.wait_for(&format!("attention of {}", seat.rank()));
        seat.wait()?;
    }
    let has_first = seats.iter().any(|seat| seat.rank() == Rank::ZERO);
    let mut joined = Vec::new();
    let mut tensor = |side, shape: &[u64], of: Vec<&Buffer<H::Device>>| -> Result<Vec<u8>, JobError> {
        let mut whole = vec![0; shape.iter().product::<u64>() as usize * H::BYTES];
        let row = shape.iter().rev().take(2).product::<u64>() * H::BYTES as u64;
        for (rank, part) in collect::<H, C>(seats, &of)? {
            parts.put(side, rank, &bytes_of(&part), &mut whole, row);
        }
        if has_first {
            progress.advance(whole.len() as u64);
        }
        Ok(whole)
    };
    joined.push(tensor(Side::Queries, &plan.out_shape(), tensors.iter().map(|of_rank| &of_rank.out).collect())?);
    let mut statistics = vec![f32::NEG_INFINITY; plan.statistics_shape().iter().product::<u64>() as usize];
    let of: Vec<_> = tensors.iter().map(|of_rank| &of_rank.log_sum_exp).collect();
    for (rank, part) in collect::<f32, C>(seats, &of)? {
        parts.put_statistics(rank, &part, &mut statistics, plan.config.queries);
    }
    joined.push(bytes_of(&statistics));
    if plan.grad_out.is_some() {
        for (number, (side, given)) in [(Side::Queries, &plan.q), (Side::Keys, &plan.k), (Side::Keys, &plan.v)].into_iter().enumerate() {
            let of = tensors.iter().filter_map(|of_rank| Some(&of_rank.gradients.as_ref()?.1[number])).collect();
            joined.push(tensor(side, &given.shape, of)?);
        }
    }
    progress.advance(if has_first { joined[1].len() as u64 } else { 0 });
    Ok(has_first.then_some(joined))
}

/// A tensor's part of each rank, where rank 0 is; `of` are those of `seats`.
fn collect<H, C>(seats: &[Seat<C>], of: &[&Buffer<H::Device>]) -> oxtile::Result<Vec<(Rank, Vec<H>)>>
where
    H: HostElement<Device: Pod>,
    C: Link,
{
    let mine = |rank| seats.iter().zip(of).find(|(seat, _)| seat.rank() == rank);
    let Some((root, own)) = mine(Rank::ZERO) else {
        let send = |(seat, part): (&Seat<C>, &&Buffer<H::Device>)| {
            seat.communicator().send(&seat.stream, *part, Rank::ZERO)?;
            seat.wait()
        };
        seats.iter().zip(of).try_for_each(send)?;
        return Ok(Vec::new());
    };
    let mut parts = Vec::new();
    for rank in root.world().ranks() {
        let part = match mine(rank) {
            Some((seat, part)) => part.to_vec_as(&seat.stream)?,
            None => {
                let mut part = Buffer::uninitialised(&root.stream, own.len())?;
                root.communicator().recv(&root.stream, &mut part, rank)?;
                root.wait()?;
                part.to_vec_as(&root.stream)?
            }
        };
        parts.push((rank, part));
    }
    Ok(parts)
}
