//! One pass of attention on a place.

use candle_core::op::BackpropOp;
use candle_core::{DType, Layout, Result, Shape, Tensor, bail};
use oxtile::Buffer;
use oxtile::attention::{Attention, AttentionBackward, BackwardElement, BackwardInputs, Gradients, Inputs, Outputs, Sequences};
use oxtile::num::{bf16, f16};

use crate::attention::Call;
use crate::element::Element;
use crate::place::{Place, Work, failed};

/// The result, and its log-sum-exp.
pub fn forward<P: Place>(place: &P, call: &Call, inputs: [(&P::Storage, &Layout); 3], dtype: DType) -> Result<(P::Storage, Tensor)> {
    match dtype {
        DType::BF16 => forward_of::<bf16, P>(place, call, inputs),
        DType::F16 => forward_of::<f16, P>(place, call, inputs),
        other => bail!("oxtile: q is {other:?}: attention takes BF16, F16"),
    }
}

fn forward_of<T: BackwardElement + Element, P: Place>(
    place: &P,
    call: &Call,
    [q, k, v]: [(&P::Storage, &Layout); 3],
) -> Result<(P::Storage, Tensor)> {
    let config = call.config;
    let attention = Attention::<T>::new(place.runtime(), config).map_err(failed)?;
    let rows = call.statistics().elem_count() as u64;
    let (mut out, mut log_sum_exp) = (place.allocate::<T>(rows * config.value_size())?, place.allocate::<f32>(rows)?);
    let ((q, of_q), (k, of_k), (v, of_v)) = (place.read::<T>(q.0, q.1)?, place.read::<T>(k.0, k.1)?, place.read::<T>(v.0, v.1)?);
    let ((mut result, of_result), (mut logs, of_logs)) = (place.write(&mut out)?, place.write(&mut log_sum_exp)?);
    call.clear(place, &mut result)?;
    call.clear(place, &mut logs)?;
    call.with_sequences(place, |sequences| {
        let inputs = Inputs { sequences, ..Inputs::new(q.view(), k.view(), v.view()) };
        attention.forward(place.stream(), inputs, Outputs::new(result.view_mut(), logs.view_mut())).map_err(failed)
    })?;
    drop(((of_q, of_k, of_v), (of_result, of_logs)));
    Ok((place.give(out, result)?, tensor::<P>(place.give(log_sum_exp, logs)?, call.statistics())))
}

/// The gradients of one call.
pub struct Backward<'a> {
    /// The call.
    pub call: &'a Call,
    /// Queries, keys, values, the result and its gradient.
    pub tensors: [&'a Tensor; 5],
    /// The log-sum-exp of the forward pass.
    pub log_sum_exp: &'a Tensor,
}

impl Work for Backward<'_> {
    type Output = [Tensor; 3];

    fn run<P: Place>(self, place: &P) -> Result<[Tensor; 3]> {
        match self.tensors[0].dtype() {
            DType::BF16 => self.run_of::<bf16, P>(place),
            DType::F16 => self.run_of::<f16, P>(place),
            other => bail!("oxtile: q is {other:?}: attention takes BF16, F16"),
        }
    }
}

impl Backward<'_> {
    fn run_of<T: BackwardElement + Element, P: Place>(self, place: &P) -> Result<[Tensor; 3]> {
        let Self { call, tensors, log_sum_exp } = self;
        let [shape_q, shape_k, shape_v] = [0, 1, 2].map(|i: usize| tensors[i].shape().clone());
        let count = |shape: &Shape| shape.elem_count() as u64;
        let mut grad_q = place.allocate::<T>(count(&shape_q))?;
        let mut grad_k = place.allocate::<T>(count(&shape_k))?;
        let mut grad_v = place.allocate::<T>(count(&shape_v))?;
        let guards = tensors.map(Tensor::storage_and_layout);
        let of_logs = log_sum_exp.storage_and_layout();
        let read = |i: usize| place.read::<T>(place.storage(&guards[i].0)?, guards[i].1);
        let inputs = (read(0)?, read(1)?, read(2)?, read(3)?, read(4)?, place.read::<f32>(place.storage(&of_logs.0)?, of_logs.1)?);
        let ((q, l0), (k, l1), (v, l2), (out, l3), (grad_out, l4), (logs, l5)) = inputs;
        let ((mut dq, l6), (mut dk, l7), (mut dv, l8)) = (place.write(&mut grad_q)?, place.write(&mut grad_k)?, place.write(&mut grad_v)?);
        [&mut dq, &mut dk, &mut dv].into_iter().try_for_each(|gradient| call.clear(place, gradient))?;
        let attention = AttentionBackward::<T>::new(place.runtime(), call.config, call.order).map_err(failed)?;
        call.with_sequences(place, |sequences| {
            let forward = Inputs { sequences, ..Inputs::new(q.view(), k.view(), v.view()) };
            let inputs = BackwardInputs { forward, out: out.view().into(), log_sum_exp: logs.view(), grad_out: grad_out.view().into() };
            let gradients = Gradients::new(dq.view_mut(), dk.view_mut(), dv.view_mut());
            attention.backward(place.stream(), inputs, gradients).map_err(failed)
        })?;
        drop((l0, l1, l2, l3, l4, l5, l6, l7, l8));
        Ok([
            tensor::<P>(place.give(grad_q, dq)?, shape_q),
            tensor::<P>(place.give(grad_k, dk)?, shape_k),
            tensor::<P>(place.give(grad_v, dv)?, shape_v),
        ])
    }
}

impl Call {
    /// The shape of the log-sum-exp.
    fn statistics(&self) -> Shape {
        let [batches, heads, queries] = [self.config.batches, self.config.heads, self.config.queries].map(|size| size as usize);
        if self.ends.is_some() { (heads, queries).into() } else { (batches, heads, queries).into() }
    }

    /// Clears what a pass over packed sequences is to write: it writes no row that belongs to none.
    fn clear<P: Place, T: Element>(&self, place: &P, target: &mut Buffer<T>) -> Result<()> {
        if self.ends.is_some() { target.fill_zero(place.stream()).map_err(failed) } else { Ok(()) }
    }

    /// Calls a function with the places of packed sequences, or none.
    fn with_sequences<P: Place>(&self, place: &P, work: impl FnOnce(Option<Sequences<'_>>) -> Result<()>) -> Result<()> {
        let Some([queries, keys]) = &self.ends else { return work(None) };
        let (of_queries, of_keys) = (queries.storage_and_layout(), keys.storage_and_layout());
        let (queries, _queries_loan): (Buffer<u32>, _) = place.read(place.storage(&of_queries.0)?, of_queries.1)?;
        let (keys, _keys_loan): (Buffer<u32>, _) = place.read(place.storage(&of_keys.0)?, of_keys.1)?;
        work(Some(Sequences::new(queries.view(), keys.view())))
    }
}

/// A tensor of a result, of which candle knows no operation.
pub fn tensor<P: Place>(storage: P::Storage, shape: Shape) -> Tensor {
    Tensor::from_storage(P::wrap(storage), shape, BackpropOp::none(), false)
}
