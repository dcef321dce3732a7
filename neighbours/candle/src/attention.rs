//! Attention as an operation that candle's autograd knows.

use std::sync::OnceLock;

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, CustomOp3, DType, Layout, Result, Shape, Tensor, bail};
use oxtile::attention::{AttentionConfig, Layout as Rows, Mask, Order, Window};

use crate::check;
use crate::cpu::Cpu;
use crate::launch::{Backward, forward};
use crate::place::{self, Place};

/// What attention computes beside its tensors. `..AttentionOptions::default()` completes it: every query sees all keys.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AttentionOptions {
    /// Which keys a query sees.
    pub mask: Mask,
    /// Which of those are near enough.
    pub window: Window,
    /// The factor of the scores; `head_size` to the power -1/2 if none.
    pub scale: Option<f32>,
    /// Whether the gradients of queries are added in the same order every time, so that they have the same bits. The other order is faster.
    pub order: Order,
}

/// `softmax(scale Q K^T + mask) V` of `q` `[batches, queries, heads, size]`, `k` `[batches, keys, key heads, size]` and `v` `[batches, keys, key heads, value size]`, with gradients.
///
/// The tensors are BF16 or F16, all three alike, and contiguous. Query head `h` sees key head `h / (heads / key heads)`. The result is `[batches, queries, heads, value size]`. A query that
/// sees no key gets zeros.
///
/// # Errors
/// Types, shapes and devices that do not fit, with what to change; Oxtile's errors in their own words.
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, options: &AttentionOptions) -> Result<Tensor> {
    inputs([q, k, v])?;
    let ([batches, queries, heads, head_size], [_, keys, key_heads, _], [.., value_size]) = (q.dims(), k.dims(), v.dims()) else {
        return dimensions([q, k, v], 4, "[batches, rows, heads, size]; packed sequences, [rows, heads, size], go to attention_packed");
    };
    check::shape(("k", k), &[*batches, *keys, *key_heads, *head_size], "[batches, keys, key heads, size], batches and size as those of q")?;
    check::shape(("v", v), &[*batches, *keys, *key_heads, *value_size], "[batches, keys, key heads, value size], as k")?;
    let [batches, queries, keys, heads, key_heads, head_size, value_size] =
        [batches, queries, keys, heads, key_heads, head_size, value_size].map(|size| *size as u64);
    let sizes = AttentionConfig { batches, queries, keys, heads, key_heads, head_size, value_size: Some(value_size), ..config(options) };
    apply([q, k, v], Call { config: sizes, order: options.order, ends: None })
}

/// As [`attention`], of packed sequences: `q` `[rows, heads, size]`, `k` `[rows, key heads, size]` and `v` `[rows, key heads, value size]`, one sequence after the other.
///
/// `ends` are the sums of the rows of the sequences before, of queries and of keys: U32, `[sequences + 1]` each, from 0 to all rows, such as `[0, 30, 30, 100]` for sequences of 30, 0 and
/// 70 rows. On a GPU the host does not read them; places beyond the tensors are left out by the kernels. Rows that no sequence has are zeros in the result and in the gradients.
///
/// # Errors
/// As [`attention`].
pub fn attention_packed(q: &Tensor, k: &Tensor, v: &Tensor, ends: [&Tensor; 2], options: &AttentionOptions) -> Result<Tensor> {
    inputs([q, k, v])?;
    let ([queries, heads, head_size], [keys, key_heads, _], [.., value_size]) = (q.dims(), k.dims(), v.dims()) else {
        return dimensions([q, k, v], 3, "[rows, heads, size]; dense tensors, [batches, rows, heads, size], go to attention");
    };
    check::shape(("k", k), &[*keys, *key_heads, *head_size], "[rows, key heads, size], size as that of q")?;
    check::shape(("v", v), &[*keys, *key_heads, *value_size], "[rows, key heads, value size], as k")?;
    let named = [("the ends of queries", ends[0]), ("the ends of keys", ends[1])];
    for (name, end) in named {
        check::element((name, end), &[DType::U32], "sums of rows are")?;
        if end.rank() != 1 || end.elem_count() == 0 {
            bail!("oxtile: {name} have shape {:?}, not [sequences + 1]", end.dims())
        }
        check::shape((name, end), ends[0].dims(), "that of queries")?;
    }
    check::places(&[("q", q), named[0], named[1]])?;
    let [queries, keys, heads, key_heads, head_size, value_size] =
        [queries, keys, heads, key_heads, head_size, value_size].map(|size| *size as u64);
    let (layout, batches) = (Rows::Packed, ends[0].elem_count() as u64 - 1);
    let sizes =
        AttentionConfig { layout, batches, queries, keys, heads, key_heads, head_size, value_size: Some(value_size), ..config(options) };
    apply([q, k, v], Call { config: sizes, order: options.order, ends: Some(ends.map(Tensor::detach)) })
}

fn config(&AttentionOptions { mask, window, scale, order: _ }: &AttentionOptions) -> AttentionConfig {
    AttentionConfig { mask, window, scale, ..AttentionConfig::default() }
}

fn inputs([q, k, v]: [&Tensor; 3]) -> Result<()> {
    check::element(("q", q), &[DType::BF16, DType::F16], "attention takes")?;
    let named = [("q", q), ("k", k), ("v", v)];
    check::same_type(&named)?;
    check::places(&named)
}

fn dimensions(tensors: [&Tensor; 3], rank: usize, expected: &str) -> Result<Tensor> {
    let names = ["q", "k", "v"];
    let wrong = tensors.iter().position(|tensor| tensor.rank() != rank).unwrap_or(0);
    bail!("oxtile: {} has shape {:?}: q, k and v are {expected}", names[wrong], tensors[wrong].dims())
}

/// A call whose arguments were checked.
#[derive(Clone)]
pub struct Call {
    /// Sizes and masks.
    pub config: AttentionConfig,
    /// How the gradients of queries are added.
    pub order: Order,
    /// The ends of packed sequences: of queries and of keys.
    pub ends: Option<[Tensor; 2]>,
}

fn apply([q, k, v]: [&Tensor; 3], call: Call) -> Result<Tensor> {
    q.apply_op3(k, v, Attend { call, log_sum_exp: OnceLock::new() })
}

/// One call: made for one result, whose gradient it knows.
struct Attend {
    call: Call,
    /// What the backward pass needs of the forward pass beside its result.
    log_sum_exp: OnceLock<Tensor>,
}

impl Attend {
    fn forward<P: Place>(&self, place: &P, inputs: [(&P::Storage, &Layout); 3], dtype: DType) -> Result<(P::Storage, Shape)> {
        let (out, log_sum_exp) = forward(place, &self.call, inputs, dtype)?;
        if self.log_sum_exp.set(log_sum_exp).is_err() {
            bail!("oxtile::attention: an operation is applied once")
        }
        let mut shape = inputs[0].1.dims().to_vec();
        if let Some(size) = shape.last_mut() {
            *size = self.call.config.value_size() as usize;
        }
        Ok((out, shape.into()))
    }
}

impl CustomOp3 for Attend {
    fn name(&self) -> &'static str {
        "oxtile::attention"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        of_q: &Layout,
        k: &CpuStorage,
        of_k: &Layout,
        v: &CpuStorage,
        of_v: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        use candle_core::backend::BackendStorage;
        self.forward(&Cpu::open()?, [(q, of_q), (k, of_k), (v, of_v)], q.dtype())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        q: &CudaStorage,
        of_q: &Layout,
        k: &CudaStorage,
        of_k: &Layout,
        v: &CudaStorage,
        of_v: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        use candle_core::backend::BackendStorage;
        crate::cuda::on(q.device(), |place| self.forward(place, [(q, of_q), (k, of_k), (v, of_v)], q.dtype()))
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        out: &Tensor,
        grad_out: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let Some(log_sum_exp) = self.log_sum_exp.get() else { bail!("oxtile::attention: the forward pass did not run") };
        // Gradients of sums come with strides of 0.
        let grad_out = &grad_out.contiguous()?;
        let [q, k, v] = place::run(q.device(), Backward { call: &self.call, tensors: [q, k, v, out, grad_out], log_sum_exp })?;
        Ok((Some(q), Some(k), Some(v)))
    }
}
