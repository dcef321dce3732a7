//! Attention and its gradients.

use oxtile::attention::{
    Attention, AttentionBackward, AttentionConfig, BackwardElement, BackwardInputs, Gradients, Inputs, Layout, Mask, Order, Outputs,
    Sequences, Window,
};
use oxtile::num::{bf16, f16};
use oxtile::{Buffer, HostElement};
use pyo3::prelude::*;

use crate::array::{Array, Type};
use crate::error::{raise, wrong_type, wrong_value};
use crate::session::Session;

/// What a call computes, beside its tensors.
#[derive(FromPyObject)]
pub struct Options {
    causal: bool,
    /// Keys to the left and right of the diagonal.
    window: (Option<u64>, Option<u64>),
    scale: Option<f64>,
    /// Whether the gradients of queries are added in the same order every time.
    deterministic: bool,
    stream: u64,
}

/// The ends of packed sequences: of queries and of keys.
type Ends<'py> = Option<[Bound<'py, PyAny>; 2]>;

/// Attends: `tensors` are q, k, v, and where the result and its log-sum-exp go.
#[pyfunction]
pub fn attention_forward(py: Python<'_>, tensors: [Bound<'_, PyAny>; 5], ends: Ends<'_>, options: Options) -> PyResult<()> {
    let [q, k, v, out, log_sum_exp] = &tensors;
    let [q, k, v] = [Array::read("q", q)?, Array::read("k", k)?, Array::read("v", v)?];
    let [out, log_sum_exp] = [Array::written("out", out)?, Array::written("lse", log_sum_exp)?];
    let call = Call::new([&q, &k, &v], [&out, &log_sum_exp], ends, &options)?;
    match q.element {
        Type::Bf16 => call.forward::<bf16>(py, [&q, &k, &v], [&out, &log_sum_exp]),
        Type::F16 => call.forward::<f16>(py, [&q, &k, &v], [&out, &log_sum_exp]),
        other => Err(wrong_element(other)),
    }
}

/// The gradients: `tensors` are q, k, v, the result, its log-sum-exp, its gradient, and where the gradients of q, k and v go.
#[pyfunction]
pub fn attention_backward(py: Python<'_>, tensors: [Bound<'_, PyAny>; 9], ends: Ends<'_>, options: Options) -> PyResult<()> {
    let [q, k, v, out, log_sum_exp, grad_out, dq, dk, dv] = &tensors;
    let [q, k, v] = [Array::read("q", q)?, Array::read("k", k)?, Array::read("v", v)?];
    let [out, log_sum_exp, grad_out] = [Array::read("out", out)?, Array::read("lse", log_sum_exp)?, Array::read("grad_out", grad_out)?];
    let gradients = [Array::written("grad_q", dq)?, Array::written("grad_k", dk)?, Array::written("grad_v", dv)?];
    let call = Call::new([&q, &k, &v], [&out, &log_sum_exp], ends, &options)?;
    for (gradient, of) in gradients.iter().zip([&q, &k, &v]).chain([(&grad_out, &out)]) {
        gradient.check_type(of)?;
        gradient.check_place(of)?;
        gradient.check_shape(&of.shape, format_args!("that of {}", of.name))?;
    }
    match q.element {
        Type::Bf16 => call.backward::<bf16>(py, [&q, &k, &v, &out, &grad_out], &log_sum_exp, gradients.each_ref()),
        Type::F16 => call.backward::<f16>(py, [&q, &k, &v, &out, &grad_out], &log_sum_exp, gradients.each_ref()),
        other => Err(wrong_element(other)),
    }
}

fn wrong_element(found: Type) -> PyErr {
    wrong_type(format!("q is {found}: attention takes bfloat16 and float16"))
}

/// A call whose arguments were checked.
struct Call {
    session: Session,
    config: AttentionConfig,
    order: Order,
    ends: Option<[Array; 2]>,
}

impl Call {
    fn new([q, k, v]: [&Array; 3], [out, log_sum_exp]: [&Array; 2], ends: Ends<'_>, options: &Options) -> PyResult<Self> {
        if !matches!(q.element, Type::Bf16 | Type::F16) {
            return Err(wrong_element(q.element));
        }
        for other in [k, v, out] {
            other.check_type(q)?;
        }
        let ends = ends
            .map(|[queries, keys]| Ok::<_, PyErr>([Array::read("cu_seqlens", &queries)?, Array::read("cu_seqlens_k", &keys)?]))
            .transpose()?;
        for other in [k, v, out, log_sum_exp].into_iter().chain(ends.iter().flatten()) {
            other.check_place(q)?;
        }
        if log_sum_exp.element != Type::F32 {
            return Err(wrong_type(format!("lse is {}, not float32", log_sum_exp.element)));
        }
        let config = config([q, k, v], ends.as_ref(), options)?;
        let value_size = config.value_size();
        match config.layout {
            Layout::Packed => {
                out.check_shape(&[config.queries, config.heads, value_size], "[rows, heads, value size]")?;
                log_sum_exp.check_shape(&[config.heads, config.queries], "[heads, rows]")?;
            }
            _ => {
                out.check_shape(&[config.batches, config.queries, config.heads, value_size], "[batches, queries, heads, value size]")?;
                log_sum_exp.check_shape(&[config.batches, config.heads, config.queries], "[batches, heads, queries]")?;
            }
        }
        let order = if options.deterministic { Order::Deterministic } else { Order::Fast };
        Ok(Self { session: Session::open(q.place, options.stream)?, config, order, ends })
    }

    fn ends(&self) -> PyResult<Option<[Buffer<u32>; 2]>> {
        self.ends.as_ref().map(|[queries, keys]| Ok([self.session.read(queries)?, self.session.read(keys)?])).transpose()
    }

    fn forward<T>(self, py: Python<'_>, inputs: [&Array; 3], [out, log_sum_exp]: [&Array; 2]) -> PyResult<()>
    where
        T: BackwardElement + HostElement<Device = T>,
    {
        let (session, ends) = (&self.session, self.ends()?);
        let [q, k, v] = [session.read::<T>(inputs[0])?, session.read(inputs[1])?, session.read(inputs[2])?];
        let (mut result, mut logs) = (session.target::<T>(out)?, session.target::<f32>(log_sum_exp)?);
        let attend = || {
            let inputs = Inputs { sequences: sequences(&ends), ..Inputs::new(q.view(), k.view(), v.view()) };
            let outputs = Outputs::new(result.view_mut(), logs.view_mut());
            Attention::<T>::new(&session.runtime, self.config)?.forward(&session.stream, inputs, outputs)?;
            session.finish()
        };
        py.detach(attend).map_err(raise)?;
        session.give(out, &result)?;
        session.give(log_sum_exp, &logs)
    }

    fn backward<T>(self, py: Python<'_>, inputs: [&Array; 5], log_sum_exp: &Array, gradients: [&Array; 3]) -> PyResult<()>
    where
        T: BackwardElement + HostElement<Device = T>,
    {
        let (session, ends) = (&self.session, self.ends()?);
        let inputs = inputs.map(|input| session.read::<T>(input));
        let [q, k, v, out, grad_out] = inputs;
        let (q, k, v, out, grad_out, logs) = (q?, k?, v?, out?, grad_out?, session.read::<f32>(log_sum_exp)?);
        let [dq, dk, dv] = gradients.map(|gradient| session.target::<T>(gradient));
        let (mut dq, mut dk, mut dv) = (dq?, dk?, dv?);
        let step = || {
            let forward = Inputs { sequences: sequences(&ends), ..Inputs::new(q.view(), k.view(), v.view()) };
            let inputs = BackwardInputs { forward, out: out.view().into(), log_sum_exp: logs.view(), grad_out: grad_out.view().into() };
            let outputs = Gradients::new(dq.view_mut(), dk.view_mut(), dv.view_mut());
            AttentionBackward::<T>::new(&session.runtime, self.config, self.order)?.backward(&session.stream, inputs, outputs)?;
            session.finish()
        };
        py.detach(step).map_err(raise)?;
        for (array, result) in gradients.into_iter().zip([&dq, &dk, &dv]) {
            session.give(array, result)?;
        }
        Ok(())
    }
}

fn sequences(ends: &Option<[Buffer<u32>; 2]>) -> Option<Sequences<'_>> {
    ends.as_ref().map(|[queries, keys]| Sequences::new(queries.view(), keys.view()))
}

/// What tensors of these shapes mean.
fn config([q, k, v]: [&Array; 3], ends: Option<&[Array; 2]>, options: &Options) -> PyResult<AttentionConfig> {
    let mask = if options.causal { Mask::CausalBottomRight } else { Mask::Full };
    let (left, right) = options.window;
    let common = AttentionConfig {
        mask,
        window: Window { left, right },
        scale: options.scale.map(|scale| scale as f32),
        ..AttentionConfig::default()
    };
    let Some(ends) = ends else {
        let (&[batches, queries, heads, head_size], &[_, keys, key_heads, _], &[.., value_size]) =
            (&q.shape[..], &k.shape[..], &v.shape[..])
        else {
            return Err(wrong_dimensions(
                [q, k, v],
                "[batches, rows, heads, size]",
                4,
                "or give cu_seqlens for packed sequences, [rows, heads, size]",
            ));
        };
        k.check_shape(&[batches, keys, key_heads, head_size], "[batches, keys, key heads, size], batches and size as those of q")?;
        v.check_shape(&[batches, keys, key_heads, value_size], "[batches, keys, key heads, value size], as k")?;
        return Ok(AttentionConfig { batches, queries, keys, heads, key_heads, head_size, value_size: Some(value_size), ..common });
    };
    let (&[queries, heads, head_size], &[keys, key_heads, _], &[.., value_size]) = (&q.shape[..], &k.shape[..], &v.shape[..]) else {
        return Err(wrong_dimensions(
            [q, k, v],
            "[rows, heads, size] with cu_seqlens",
            3,
            "or leave cu_seqlens out for [batches, rows, heads, size]",
        ));
    };
    k.check_shape(&[keys, key_heads, head_size], "[rows, key heads, size], size as that of q")?;
    v.check_shape(&[keys, key_heads, value_size], "[rows, key heads, value size], as k")?;
    for array in ends {
        if array.element != Type::Int {
            return Err(wrong_type(format!("{} is {}: give 32-bit integers", array.name, array.element)));
        }
        if array.shape.len() != 1 || array.shape[0] == 0 {
            return Err(wrong_value(format!("{} has shape {:?}, not [sequences + 1]", array.name, array.shape)));
        }
        array.check_shape(&ends[0].shape, "that of cu_seqlens")?;
    }
    let (layout, batches) = (Layout::Packed, ends[0].shape[0] - 1);
    Ok(AttentionConfig { layout, batches, queries, keys, heads, key_heads, head_size, value_size: Some(value_size), ..common })
}

fn wrong_dimensions(arrays: [&Array; 3], expected: &str, dimensions: usize, mend: &str) -> PyErr {
    let wrong = arrays.into_iter().find(|array| array.shape.len() != dimensions).unwrap_or(arrays[0]);
    wrong_value(format!("{} has shape {:?}: q, k and v are {expected}, {mend}", wrong.name, wrong.shape))
}
