//! The configuration of attention that a file asks for.

use oxtile::attention::{AttentionConfig, Layout, Mask, Window};

use crate::{
    arguments::{self, Causal},
    safetensors::{Checkpoint, Dtype, Tensor, TensorSpec},
};

/// What is wrong with a file.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// A tensor is missing.
    #[error("there is no tensor `{name}`: {why}")]
    Missing {
        /// Its name.
        name: &'static str,
        /// Why it is wanted.
        why: &'static str,
    },
    /// A tensor is given that has no use.
    #[error("there is a tensor `{name}`, but q, k and v are [batch, sequence, heads, size]: leave it out, or give [tokens, heads, size]")]
    Unused {
        /// Its name.
        name: &'static str,
    },
    /// A tensor that another library would add to the scores, or drop some of them by.
    #[error(
        "there is a tensor `{name}`: attention has no additive bias, no mask of elements and no dropout: leave it out, or give --causal or --window"
    )]
    NotTaken {
        /// Its name.
        name: &'static str,
    },
    /// A tensor has the wrong type.
    #[error("tensor `{name}` is {found}: it must be {allowed}")]
    Dtype {
        /// Its name.
        name: &'static str,
        /// Its type.
        found: Dtype,
        /// What it may be.
        allowed: &'static str,
    },
    /// A tensor has the wrong shape.
    #[error("tensor `{name}` has the shape {found:?}: {allowed}")]
    Shape {
        /// Its name.
        name: &'static str,
        /// Its shape.
        found: Vec<u64>,
        /// What it may be.
        allowed: String,
    },
    /// Sizes or options that attention does not take.
    #[error("{at}: {why}")]
    Config {
        /// The tensor or the option.
        at: &'static str,
        /// The field of the configuration, and what it may be.
        why: String,
    },
    /// Lengths or offsets that make no sequences.
    #[error("tensor `{name}`, element {index}, is {value}: it must be {allowed}")]
    Sequence {
        /// The tensor's name.
        name: &'static str,
        /// Where.
        index: usize,
        /// What is there.
        value: i32,
        /// What may be there.
        allowed: String,
    },
    /// A causal mask over sequences whose ranks would not have the keys of their queries.
    #[error(
        "sequence {index} has {queries} queries and {keys} keys: a causal mask with --context-parallel takes as many keys as queries; \
         leave out --context-parallel, or give a window: --window -1,0"
    )]
    Causal {
        /// Which sequence.
        index: usize,
        /// Its queries.
        queries: u64,
        /// Its keys.
        keys: u64,
    },
}

/// A job.
#[derive(Debug)]
pub struct Plan {
    /// Queries.
    pub q: Tensor,
    /// Keys.
    pub k: Tensor,
    /// Values.
    pub v: Tensor,
    /// The gradient of the result, if gradients are asked for.
    pub grad_out: Option<Tensor>,
    /// Of packed tensors: `cu_seqlens_q`, `cu_seqlens_kv`, and where queries and keys begin, if given.
    pub arrays: Vec<Tensor>,
    /// What is computed.
    pub config: AttentionConfig,
}

const ARRAYS: [&str; 4] = ["cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"];

impl Plan {
    /// The job that a file and a request make.
    ///
    /// # Errors
    /// [`PlanError`] that names the tensor.
    pub fn new(input: &Checkpoint, request: &arguments::Attention) -> Result<Self, PlanError> {
        let find = |name: &str| input.tensors().iter().find(|tensor| tensor.name == name).cloned();
        let need = |name: &'static str| find(name).ok_or(PlanError::Missing { name, why: "the file holds q, k and v" });
        let (q, k, v) = (need("q")?, need("k")?, need("v")?);
        if let Some(name) = ["bias", "attn_bias", "mask", "attn_mask", "dropout"].into_iter().find(|name| find(name).is_some()) {
            return Err(PlanError::NotTaken { name });
        }
        if !matches!(q.dtype, Dtype::Bf16 | Dtype::F16) {
            return Err(PlanError::Dtype { name: "q", found: q.dtype, allowed: "BF16 or F16" });
        }
        if request.fp8 && q.dtype != Dtype::Bf16 {
            return Err(PlanError::Dtype { name: "q", found: q.dtype, allowed: "BF16 with --fp8" });
        }
        for (name, tensor) in [("k", &k), ("v", &v)] {
            if tensor.dtype != q.dtype {
                return Err(PlanError::Dtype { name, found: tensor.dtype, allowed: "of q's type" });
            }
        }
        let config = AttentionConfig {
            mask: match request.causal {
                None => Mask::Full,
                Some(Causal::TopLeft) => Mask::CausalTopLeft,
                Some(Causal::BottomRight) => Mask::CausalBottomRight,
            },
            window: Window { left: request.window[0], right: request.window[1] },
            scale: request.scale,
            ..config(&q, &k, &v)?
        };
        check(&config)?;
        let mut plan = Self { q, k, v, grad_out: None, arrays: Vec::new(), config };
        if request.backward {
            plan.grad_out = Some(plan.find_grad_out(find("dout"))?);
        }
        match config.layout {
            Layout::Packed => plan.find_arrays(find)?,
            _ => {
                if let Some(name) = ARRAYS.into_iter().find(|name| find(name).is_some()) {
                    return Err(PlanError::Unused { name });
                }
            }
        }
        Ok(plan)
    }

    fn find_grad_out(&self, given: Option<Tensor>) -> Result<Tensor, PlanError> {
        let why = "--backward asks for gradients, and `dout` is that of the result";
        let tensor = given.ok_or(PlanError::Missing { name: "dout", why })?;
        if tensor.dtype != self.q.dtype {
            return Err(PlanError::Dtype { name: "dout", found: tensor.dtype, allowed: "of q's type" });
        }
        if tensor.shape != self.out_shape() {
            let allowed = format!("with q of {:?} and v of {:?} it is {:?}", self.q.shape, self.v.shape, self.out_shape());
            return Err(PlanError::Shape { name: "dout", found: tensor.shape, allowed });
        }
        Ok(tensor)
    }

    fn find_arrays(&mut self, find: impl Fn(&str) -> Option<Tensor>) -> Result<(), PlanError> {
        let padded = ARRAYS[2..].iter().any(|name| find(name).is_some());
        for name in ARRAYS.into_iter().take(if padded { 4 } else { 2 }) {
            // Where one side has padding and the other none, the other's offsets are its sums.
            let given = find(name).or_else(|| name.strip_suffix("_padded").and_then(&find));
            let why = "q, k and v of [tokens, heads, size] are sequences one after the other, whose ends it says";
            let tensor = given.ok_or(PlanError::Missing { name, why })?;
            if tensor.dtype != Dtype::I32 {
                return Err(PlanError::Dtype { name, found: tensor.dtype, allowed: "I32" });
            }
            let length = self.arrays.first().map_or(&tensor, |first| first).elements();
            if tensor.shape.len() != 1 || tensor.elements() == 0 || tensor.elements() != length {
                let allowed = "one element more than there are sequences, the same of all".to_owned();
                return Err(PlanError::Shape { name, found: tensor.shape, allowed });
            }
            self.arrays.push(tensor);
        }
        self.config.batches = self.arrays[0].elements() - 1;
        check(&self.config)
    }

    /// Checks that sequences lie inside the tensors, and that none lies where another is written.
    ///
    /// # Errors
    /// [`PlanError::Sequence`].
    pub fn check_arrays(&self, arrays: &[Vec<u32>]) -> Result<(), PlanError> {
        for side in 0..arrays.len().min(2) {
            let of_offsets = if arrays.len() > 2 { side + 2 } else { side };
            let (sums, offsets) = (&arrays[side], &arrays[of_offsets]);
            let rows = [self.config.queries, self.config.keys][side];
            check_rising(self.array_name(side), sums, if of_offsets == side { rows } else { i32::MAX as u64 })?;
            let lengths = || sums.windows(2).map(|pair| u64::from(pair[1] - pair[0]));
            check_inside(self.array_name(of_offsets), offsets, lengths().chain([0]), rows)?;
            // Keys may be those of several sequences, unless they get gradients.
            if side == 0 || self.grad_out.is_some() {
                check_apart(self.array_name(of_offsets), offsets, lengths())?;
            }
        }
        Ok(())
    }

    /// The name in the file: where offsets are those of the sums, the sums'.
    fn array_name(&self, index: usize) -> &'static str {
        ARRAYS.into_iter().find(|name| *name == self.arrays[index].name).unwrap_or(ARRAYS[index])
    }

    /// What is written, in this order.
    pub fn outputs(&self) -> Vec<TensorSpec> {
        let spec = |name: &str, dtype, shape| TensorSpec { name: name.to_owned(), dtype, shape };
        let mut specs = vec![spec("out", self.q.dtype, self.out_shape()), spec("lse", Dtype::F32, self.statistics_shape())];
        if self.grad_out.is_some() {
            specs.extend([("dq", &self.q), ("dk", &self.k), ("dv", &self.v)].map(|(name, of)| spec(name, of.dtype, of.shape.clone())));
        }
        specs
    }

    /// What is read, in bytes, but for the arrays.
    pub fn input_bytes(&self) -> u64 {
        [&self.q, &self.k, &self.v].into_iter().chain(&self.grad_out).map(Tensor::bytes).sum()
    }

    /// What is written, in bytes.
    pub fn output_bytes(&self) -> u64 {
        self.outputs().iter().map(|spec| spec.shape.iter().product::<u64>() * spec.dtype.bits() / 8).sum()
    }

    /// Shape of the result.
    pub fn out_shape(&self) -> Vec<u64> {
        let (rows, _) = self.q.shape.split_at(self.q.shape.len() - 1);
        [rows, &[self.config.value_size()]].concat()
    }

    /// Shape of the log-sum-exp.
    pub fn statistics_shape(&self) -> Vec<u64> {
        let AttentionConfig { layout, batches, heads, queries, .. } = self.config;
        if layout == Layout::Packed { vec![heads, queries] } else { vec![batches, heads, queries] }
    }
}

/// An error of an array's element.
fn misplaced<T>(name: &'static str, index: usize, value: u32, allowed: String) -> Result<T, PlanError> {
    Err(PlanError::Sequence { name, index, value: value.cast_signed(), allowed })
}

/// Checks sums of lengths, up to `limit`.
fn check_rising(name: &'static str, sums: &[u32], limit: u64) -> Result<(), PlanError> {
    let mut before = 0;
    for (index, &sum) in sums.iter().enumerate() {
        if sum < before || i32::try_from(sum).is_err() {
            let allowed = if index == 0 { "0 or more".to_owned() } else { format!("at least the element before, {before}") };
            return misplaced(name, index, sum, allowed);
        }
        if u64::from(sum) > limit {
            return misplaced(name, index, sum, format!("at most {limit}, the tensor's rows"));
        }
        before = sum;
    }
    Ok(())
}

/// Checks where sequences of these lengths begin.
fn check_inside(name: &'static str, offsets: &[u32], lengths: impl Iterator<Item = u64>, rows: u64) -> Result<(), PlanError> {
    for ((index, &offset), length) in offsets.iter().enumerate().zip(lengths) {
        if i32::try_from(offset).is_err() || u64::from(offset) + length > rows {
            let allowed = format!("0 or more, and with its sequence's {length} rows at most {rows}, the tensor's rows");
            return misplaced(name, index, offset, allowed);
        }
    }
    Ok(())
}

/// Checks that no two sequences share a row.
fn check_apart(name: &'static str, offsets: &[u32], lengths: impl Iterator<Item = u64>) -> Result<(), PlanError> {
    let mut spans: Vec<_> = offsets.iter().enumerate().zip(lengths).filter(|(_, length)| *length > 0).collect();
    spans.sort_by_key(|((_, offset), _)| **offset);
    for pair in spans.windows(2) {
        let [((_, &first), length), ((index, &offset), _)] = *pair else { continue };
        let end = u64::from(first) + length;
        if u64::from(offset) < end {
            return misplaced(name, index, offset, format!("a row outside {first} to {}, which another sequence has", end - 1));
        }
    }
    Ok(())
}

/// Checks sizes and options before anything is allocated that they are the sizes of: an empty tensor may have any dimensions.
fn check(config: &AttentionConfig) -> Result<(), PlanError> {
    let oxtile::Error::Invalid { why, .. } = (match config.validate() {
        Ok(()) => return Ok(()),
        Err(error) => error,
    }) else {
        unreachable!("a configuration is valid or not")
    };
    // The error begins with the field.
    let at = match why.split_once(' ').map_or("", |(field, _)| field) {
        "batches" if config.layout == Layout::Packed => "tensor `cu_seqlens_q`",
        "batches" | "queries" | "heads" | "head_size" => "tensor `q`",
        "keys" | "key_heads" => "tensor `k`",
        "value_size" => "tensor `v`",
        "scale" => "--scale",
        "window.left" | "window.right" => "--window",
        _ => "q, k and v",
    };
    Err(PlanError::Config { at, why })
}

/// Layout and sizes.
fn config(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<AttentionConfig, PlanError> {
    let shape = |name, found: &Tensor, allowed: String| Err(PlanError::Shape { name, found: found.shape.clone(), allowed });
    let base = AttentionConfig::default();
    let config = match (&*q.shape, &*k.shape, &*v.shape) {
        (&[batches, queries, heads, head_size], &[_, keys, key_heads, _], &[.., value_size]) => AttentionConfig {
            layout: Layout::Bshd,
            batches,
            queries,
            keys,
            heads,
            key_heads,
            head_size,
            value_size: Some(value_size),
            ..base
        },
        (&[queries, heads, head_size], &[keys, key_heads, _], &[.., value_size]) => AttentionConfig {
            layout: Layout::Packed,
            batches: 1,
            queries,
            keys,
            heads,
            key_heads,
            head_size,
            value_size: Some(value_size),
            ..base
        },
        ([_, _, _] | [_, _, _, _], ..) => return shape("k", k, format!("as many dimensions as q, which is {:?}", q.shape)),
        _ => return shape("q", q, "[batch, sequence, heads, size], or [tokens, heads, size]".to_owned()),
    };
    let AttentionConfig { batches, keys, key_heads, head_size, .. } = config;
    let with = |size: u64| if q.shape.len() == 4 { vec![batches, keys, key_heads, size] } else { vec![keys, key_heads, size] };
    if k.shape != with(head_size) {
        return shape("k", k, format!("with q of {:?} it is {:?}", q.shape, with(head_size)));
    }
    if v.shape != with(config.value_size()) {
        return shape("v", v, format!("with k of {:?} it is {:?}", k.shape, with(config.value_size())));
    }
    Ok(config)
}
