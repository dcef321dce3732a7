//! A problem of context parallelism: the tensors of each rank, and what they are to find. For ranks of any kind.

use std::time::Duration;

use half::bf16 as Half;
use oxtile::attention::{AttentionConfig, BackwardInputs, Gradients, Inputs, Layout, Outputs, Sink};
use oxtile::comm::{Rank, WorldSize};
use oxtile::context_parallel::{ContextElement, ContextParallel, ContextParallelConfig, ContextParallelFp8, Schedule};
use oxtile::num::{bf16, f16};
use oxtile::runtime::Mode;
use oxtile::symmetric::ArenaOptions;
use oxtile::thd::Packed;
use oxtile::{Bound, Buffer, HostElement, Result, Stream};

use crate::values::values as operand;
use crate::whole_attention::{Results, Sequence, Whole, place};

/// What tokens of a sequence are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Of {
    Queries,
    Keys,
}

/// Sums of lengths: of valid rows, and of all.
fn ends(lengths: &[[u64; 2]]) -> [Vec<u32>; 2] {
    [0, 1].map(|of| {
        let sum = |sum: &mut u32, length: &[u64; 2]| {
            *sum += length[of] as u32;
            Some(*sum)
        };
        std::iter::once(0).chain(lengths.iter().scan(0, sum)).collect()
    })
}

/// A program of every rank.
#[derive(Clone, Debug)]
pub struct Case {
    pub ranks: u32,
    pub config: ContextParallelConfig,
    /// Lengths and padded lengths of packed sequences.
    pub lengths: Vec<[u64; 2]>,
    /// Those of their keys, where they are other ones than those of queries.
    pub key_lengths: Option<Vec<[u64; 2]>>,
    pub mode: Mode,
    pub seed: u64,
    /// Of arenas.
    pub deadline: Duration,
    /// Whether traded heads are put into the memory of other ranks.
    pub has_puts: bool,
}

impl Case {
    pub fn new(ranks: u32, attention: AttentionConfig) -> Self {
        let config = ContextParallelConfig::new(attention).by(Schedule::Ring);
        let (mode, deadline) = (Mode::Fast, Duration::from_secs(60));
        Self { ranks, config, lengths: Vec::new(), key_lengths: None, mode, seed: 1, deadline, has_puts: false }
    }

    pub fn by(self, schedule: Schedule) -> Self {
        Self { config: self.config.by(schedule), ..self }
    }

    /// By traded heads, which are put into the memory of other ranks.
    pub fn by_puts(self) -> Self {
        Self { has_puts: true, ..self.by(Schedule::AllToAll) }
    }

    /// Whether ranks put into memory that others may still fill with NaN.
    pub fn puts_heads(&self) -> bool {
        let by = |schedule| self.schedules().contains(&schedule);
        by(Schedule::AllToAll) && (self.has_puts || by(Schedule::Pull))
    }

    pub fn schedules(&self) -> [Schedule; 2] {
        [self.config.forward, self.config.backward]
    }

    pub fn options(&self) -> ArenaOptions {
        // Operations of 8 bits may take more.
        let bytes = self.config.arena_bytes(self.world(), 2).max(ContextParallelFp8::arena_bytes(&self.config, self.world()));
        ArenaOptions { bytes, deadline: self.deadline, ..ArenaOptions::default() }
    }

    pub fn world(&self) -> WorldSize {
        WorldSize::new(self.ranks).unwrap()
    }

    /// Lengths and padded lengths of packed sequences.
    fn lengths(&self, of: Of) -> &[[u64; 2]] {
        self.key_lengths.as_ref().filter(|_| of == Of::Keys).unwrap_or(&self.lengths)
    }

    /// The whole problem: values that are exact in bf16. Rows in no sequence are NaN.
    pub fn whole(&self) -> Whole {
        let AttentionConfig { layout, batches, queries, keys, heads, key_heads, head_size, .. } = self.config.attention;
        let batches = if layout == Layout::Packed { 1 } else { batches };
        let rows = |of: Of| -> Vec<[usize; 2]> {
            let ([_, offsets], lengths) = (ends(self.lengths(of)), self.lengths(of));
            lengths.iter().zip(offsets).map(|([length, _], first)| [*length as usize, first as usize]).collect()
        };
        let sequences = rows(Of::Queries).into_iter().zip(rows(Of::Keys)).map(|(queries, keys)| Sequence { queries, keys }).collect();
        let values = |seed, of: Of, heads: u64, size: u64| -> Vec<f64> {
            let (valid, rows) = (rows(of), if of == Of::Queries { queries } else { keys });
            let all = operand(seed, batches * rows * heads * size);
            let mut all: Vec<f64> = all.into_iter().map(|x| f64::from(x.to_f32() / 2.0)).map(|x| Half::from_f64(x).to_f64()).collect();
            if layout == Layout::Packed {
                let row = (heads * size) as usize;
                for (at, values) in all.chunks_mut(row).enumerate() {
                    if !valid.iter().any(|[length, first]| (*first..first + length).contains(&at)) {
                        values.fill(f64::NAN);
                    }
                }
            }
            all
        };
        let value = self.config.attention.value_size();
        Whole {
            config: self.config.attention,
            q: values(self.seed * 10 + 1, Of::Queries, heads, head_size),
            k: values(self.seed * 10 + 2, Of::Keys, key_heads, head_size),
            v: values(self.seed * 10 + 3, Of::Keys, key_heads, value),
            grad_out: values(self.seed * 10 + 4, Of::Queries, heads, value),
            sink: (0..heads).map(|head| head as f64 / 2.0 - 0.5).collect(),
            sequences,
        }
    }

    /// Tokens of all ranks.
    fn tokens(&self, of: Of) -> u64 {
        if of == Of::Queries { self.config.attention.queries } else { self.config.attention.keys }
    }

    /// The token of the whole that a row of a rank's tensors is.
    pub fn token(&self, rank: Rank, of: Of, row: usize) -> usize {
        let (partition, world) = (self.config.partition, self.world());
        let tokens = self.tokens(of);
        if self.config.attention.layout != Layout::Packed {
            return partition.token(rank, world, tokens, row as u64) as usize;
        }
        let [_, offsets] = ends(self.lengths(of));
        let ranks = self.ranks as usize;
        let bounds = |at: usize| [offsets[at] as usize, offsets[at + 1] as usize];
        let sequence = (0..offsets.len() - 1).find(|at| row < bounds(*at)[1] / ranks);
        let Some([first, end]) = sequence.map(bounds) else {
            // After the last sequence.
            let last = *offsets.last().unwrap() as usize;
            let own = tokens as usize / ranks - last / ranks;
            return last + rank.index() as usize * own + row - last / ranks;
        };
        first + partition.token(rank, world, (end - first) as u64, (row - first / ranks) as u64) as usize
    }

    /// A rank's part of a tensor of `[batches, tokens, heads, size]`.
    pub fn part(&self, rank: Rank, whole: &[f64], of: Of, shape: [u64; 2]) -> Vec<f64> {
        let AttentionConfig { layout, batches, .. } = self.config.attention;
        let batches = if layout == Layout::Packed { 1 } else { batches as usize };
        let ([heads, size], tokens) = (shape.map(|n| n as usize), self.tokens(of) as usize);
        let rows = tokens / self.ranks as usize;
        let mut part = vec![0.0; batches * rows * heads * size];
        for (batch, row, head) in (0..batches).flat_map(|b| (0..rows).flat_map(move |r| (0..heads).map(move |h| (b, r, h)))) {
            let from = place(layout, [batches, tokens, heads, size], [batch, self.token(rank, of, row), head]);
            let to = place(layout, [batches, rows, heads, size], [batch, row, head]);
            part[to..to + size].copy_from_slice(&whole[from..from + size]);
        }
        part
    }

    /// A rank's part of a number for each head and row.
    fn statistics(&self, rank: Rank, whole: &[f64]) -> Vec<f64> {
        let AttentionConfig { layout, batches, queries, heads, .. } = self.config.attention;
        let batches = if layout == Layout::Packed { 1 } else { batches };
        let rows = (queries / u64::from(self.ranks)) as usize;
        let token = |row| self.token(rank, Of::Queries, row);
        (0..(batches * heads) as usize).flat_map(|head| (0..rows).map(move |row| whole[head * queries as usize + token(row)])).collect()
    }

    /// A rank's part of the results of the whole.
    pub fn of_rank(&self, rank: Rank, whole: &Results) -> Results {
        let AttentionConfig { heads, key_heads, head_size, .. } = self.config.attention;
        let value = self.config.attention.value_size();
        Results {
            out: self.part(rank, &whole.out, Of::Queries, [heads, value]),
            log_sum_exp: self.statistics(rank, &whole.log_sum_exp),
            max_logit: whole.max_logit.clone(),
            grad_q: self.part(rank, &whole.grad_q, Of::Queries, [heads, head_size]),
            grad_k: self.part(rank, &whole.grad_k, Of::Keys, [key_heads, head_size]),
            grad_v: self.part(rank, &whole.grad_v, Of::Keys, [key_heads, value]),
            grad_sink: whole.grad_sink.clone(),
        }
    }

    /// Makes the keys of rank `i` 2^i times as large, and its values 4^i times: what one rank leaves out, or takes for another's, is not lost beside the others.
    pub fn tell_ranks_apart(&self, whole: &mut Whole) {
        let AttentionConfig { layout, batches, keys, key_heads, head_size, .. } = self.config.attention;
        let batches = if layout == Layout::Packed { 1 } else { batches };
        for (tensor, size, factor) in [(&mut whole.k, head_size, 2.0_f64), (&mut whole.v, self.config.attention.value_size(), 4.0)] {
            let shape = [batches, keys, key_heads, size].map(|n| n as usize);
            for rank in self.world().ranks() {
                let rows = (0..shape[1] / self.ranks as usize).map(|row| self.token(rank, Of::Keys, row));
                for (token, batch, head) in
                    rows.flat_map(|token| (0..shape[0]).flat_map(move |b| (0..shape[2]).map(move |h| (token, b, h))))
                {
                    let at = place(layout, shape, [batch, token, head]);
                    tensor[at..at + shape[3]].iter_mut().for_each(|x| *x *= factor.powi(rank.index() as i32));
                }
            }
        }
    }

    /// Fills what no pass may read before it has written it with NaN. In check mode the emulator reports reads of memory that was never written, which it is not then.
    pub fn spoil<T: Element>(&self, operation: &ContextParallel<'_, T>, stream: &Stream) -> Result<()> {
        if self.mode == Mode::Fast { operation.spoil_memory(stream) } else { Ok(()) }
    }

    /// Holds a rank's part in `bf16` against the whole.
    pub fn compare(&self, rank: Rank, found: &Results, expected: &Results) {
        self.compare_within(rank, found, expected, 1e-2);
    }

    /// Holds a rank's part against the whole: its relative L2 error, and its largest error, which is at most twice as much of the largest value.
    pub fn compare_within(&self, rank: Rank, found: &Results, expected: &Results, most: f64) {
        let AttentionConfig { sink, max_logit, .. } = self.config.attention;
        let expected = self.of_rank(rank, expected);
        let tensors = [
            ("out", &found.out, &expected.out),
            ("gradient of q", &found.grad_q, &expected.grad_q),
            ("gradient of k", &found.grad_k, &expected.grad_k),
            ("gradient of v", &found.grad_v, &expected.grad_v),
        ];
        for (name, found, expected) in tensors {
            assert_eq!(found.len(), expected.len(), "{name}");
            let error: f64 = found.iter().zip(expected).map(|(a, b)| (a - b) * (a - b)).sum();
            let norm: f64 = expected.iter().map(|b| b * b).sum();
            let largest = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            let top = expected.iter().fold(0.0_f64, |top, b| top.max(b.abs()));
            // Of gradients that are zero, as of a query that sees one key, what is left of rounding counts as nothing.
            let error = error.sqrt() / norm.sqrt().max(1e-3);
            assert!(
                error <= most && largest <= 2.0 * most * top.max(1e-3),
                "{self:?}, {rank}: {name} is off by {error:.2e}, at most {largest:.2e} of {top:.2e}"
            );
        }
        let mut numbers = vec![("log-sum-exp", &found.log_sum_exp, &expected.log_sum_exp, 2e-3)];
        if max_logit {
            numbers.push(("largest score", &found.max_logit, &expected.max_logit, 2e-3));
        }
        if sink == Sink::Learnable {
            numbers.push(("gradient of the sink", &found.grad_sink, &expected.grad_sink, 2e-2));
        }
        for (name, found, expected, most) in numbers {
            assert_eq!(found.len(), expected.len(), "{name}");
            for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
                // Rows in no sequence see nothing but the sink, and by steps that is what they have.
                if sink != Sink::None && *expected == f64::NEG_INFINITY && name == "log-sum-exp" {
                    continue;
                }
                let same = found == expected || (expected.is_finite() && (found - expected).abs() <= most * expected.abs().max(1.0));
                assert!(same, "{self:?}, {rank}: {name} {at} is {found}, not {expected}");
            }
        }
    }
}

/// An element of tensors.
pub trait Element: ContextElement {
    type Host: HostElement<Device = Self> + Copy;

    fn host(value: f64) -> Self::Host;
    fn number(value: Self::Host) -> f64;
}

macro_rules! elements {
    ($($device:ty: $host:ty),*) => { $(
        impl Element for $device {
            type Host = $host;

            fn host(value: f64) -> $host {
                <$host>::from_f64(value)
            }

            fn number(value: $host) -> f64 {
                value.to_f64()
            }
        }
    )* };
}
elements! { bf16: half::bf16, f16: half::f16 }

/// The tensors of a rank.
pub struct Tensors<T = bf16> {
    /// Queries, keys, values, and the gradient of the result.
    pub inputs: [Buffer<T>; 4],
    /// The result, and the gradients of queries, keys and values: NaN at first.
    pub outputs: [Buffer<T>; 4],
    pub log_sum_exp: Buffer<f32>,
    max_logit: Buffer<f32>,
    grad_sink: Buffer<f32>,
    sink: Buffer<f32>,
    /// Sums of lengths of all sequences, valid and padded: of queries, and of keys.
    ends: [[Buffer<u32>; 2]; 2],
}

impl<T: Element> Tensors<T> {
    pub fn new(case: &Case, whole: &Whole, rank: Rank, stream: &Stream) -> Result<Self> {
        let AttentionConfig { queries, heads, key_heads, head_size, .. } = whole.config;
        let value = whole.config.value_size();
        let upload = |whole: &[f64], of: Of, shape| {
            let part: Vec<_> = case.part(rank, whole, of, shape).into_iter().map(T::host).collect();
            Buffer::<T>::from_slice(stream, &part)
        };
        let inputs = [
            upload(&whole.q, Of::Queries, [heads, head_size])?,
            upload(&whole.k, Of::Keys, [key_heads, head_size])?,
            upload(&whole.v, Of::Keys, [key_heads, value])?,
            upload(&whole.grad_out, Of::Queries, [heads, value])?,
        ];
        let nan = |like: usize| Buffer::<T>::from_slice(stream, &vec![T::host(f64::NAN); inputs[like].len() as usize]);
        let outputs = [nan(3)?, nan(0)?, nan(1)?, nan(2)?];
        let batches = if whole.config.layout == Layout::Packed { 1 } else { whole.config.batches };
        let numbers = |len: u64| Buffer::from_slice(stream, &vec![f32::NAN; len as usize]);
        let sink: Vec<f32> = whole.sink.iter().map(|sink| *sink as f32).collect();
        let array = |ends: Vec<u32>| Buffer::from_slice(stream, &ends);
        let both = |of: Of| -> Result<[Buffer<u32>; 2]> {
            let [ends, offsets] = ends(case.lengths(of));
            Ok([array(ends)?, array(offsets)?])
        };
        Ok(Self {
            inputs,
            outputs,
            log_sum_exp: numbers(batches * heads * queries / u64::from(case.ranks))?,
            max_logit: numbers(heads)?,
            grad_sink: numbers(heads)?,
            sink: Buffer::from_slice(stream, &sink)?,
            ends: [both(Of::Queries)?, both(Of::Keys)?],
        })
    }

    /// Other inputs, and sequences, into the same tensors.
    pub fn renew(&mut self, case: &Case, whole: &Whole, rank: Rank, stream: &Stream) -> Result<()> {
        let new = Self::new(case, whole, rank, stream)?;
        for (to, from) in self.inputs.iter_mut().chain(&mut self.outputs).zip(new.inputs.iter().chain(&new.outputs)) {
            to.copy_from(stream, from)?;
        }
        for (to, from) in self.ends.iter_mut().flatten().zip(new.ends.iter().flatten()) {
            to.copy_from(stream, from)?;
        }
        self.log_sum_exp.copy_from(stream, &new.log_sum_exp)
    }

    pub fn set_sequences(&self, case: &Case, operation: &ContextParallel<'_, T>, stream: &Stream) -> Result<()> {
        if case.config.attention.layout != Layout::Packed {
            return Ok(());
        }
        let [queries, keys] =
            self.ends.each_ref().map(|[ends, offsets]| Packed { cu_seqlens: ends.view(), cu_seqlens_padded: offsets.view() });
        operation.set_sequences(stream, queries, keys)
    }

    pub fn forward<'a>(&'a mut self, case: &Case, operation: &'a ContextParallel<'_, T>, stream: &Stream) -> Result<Bound<'a>> {
        let AttentionConfig { sink, max_logit, .. } = case.config.attention;
        let [q, k, v, _] = &self.inputs;
        let inputs = Inputs { sink: (sink == Sink::Learnable).then(|| self.sink.view()), ..Inputs::new(q.view(), k.view(), v.view()) };
        let max_logit = max_logit.then(|| self.max_logit.view_mut());
        let outputs = Outputs { max_logit, ..Outputs::new(self.outputs[0].view_mut(), self.log_sum_exp.view_mut()) };
        operation.bind_forward(stream, inputs, outputs)
    }

    pub fn backward<'a>(&'a mut self, case: &Case, operation: &'a ContextParallel<'_, T>, stream: &Stream) -> Result<Bound<'a>> {
        let is_learnable = case.config.attention.sink == Sink::Learnable;
        let ([q, k, v, grad], [out, grad_q, grad_k, grad_v]) = (&self.inputs, &mut self.outputs);
        let forward = Inputs { sink: is_learnable.then(|| self.sink.view()), ..Inputs::new(q.view(), k.view(), v.view()) };
        let inputs = BackwardInputs { forward, out: out.view().into(), log_sum_exp: self.log_sum_exp.view(), grad_out: grad.view().into() };
        let gradients = Gradients::new(grad_q.view_mut(), grad_k.view_mut(), grad_v.view_mut());
        operation.bind_backward(stream, inputs, Gradients { sink: is_learnable.then(|| self.grad_sink.view_mut()), ..gradients })
    }

    pub fn results(&self, stream: &Stream) -> Result<Results> {
        let tensor =
            |buffer: &Buffer<T>| -> Result<Vec<f64>> { Ok(buffer.to_vec_as::<T::Host>(stream)?.into_iter().map(T::number).collect()) };
        let numbers = |buffer: &Buffer<f32>| -> Result<Vec<f64>> { Ok(buffer.to_vec(stream)?.into_iter().map(f64::from).collect()) };
        let [out, grad_q, grad_k, grad_v] = &self.outputs;
        Ok(Results {
            out: tensor(out)?,
            grad_q: tensor(grad_q)?,
            grad_k: tensor(grad_k)?,
            grad_v: tensor(grad_v)?,
            log_sum_exp: numbers(&self.log_sum_exp)?,
            max_logit: numbers(&self.max_logit)?,
            grad_sink: numbers(&self.grad_sink)?,
        })
    }
}
