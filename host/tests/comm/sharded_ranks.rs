//! A rank's shards of weights, and what passes are to lend: the cast of the whole by what quantization offers, which knows of no shards.

use oxtile::comm::{Member, Rank};
use oxtile::num::bf16;
use oxtile::quantize::nvfp4_columns::Nearest;
use oxtile::quantize::{
    self, CurrentScaling, Direction, Mxfp8, Nvfp4, Nvfp4Columns, Nvfp4Squares, QuantizedTensor, RandomState, ScaleOptions,
};
use oxtile::sharded::{self, Bf16, Chain, Fp8, Published, ShardSet, Weight, WeightFormat, WideTensor};
use oxtile::sum_parts::SumParts;
use oxtile::symmetric::Arena;
use oxtile::{Buffer, Result, Stream};

/// Codes, scales, and the amax or the one scale.
type Bytes = (Vec<u8>, Vec<u8>, Vec<f32>);

/// What a format's tensors hold, and the cast of a whole weight by what quantization offers, which knows of no shards.
pub trait Oracle: WeightFormat {
    fn bytes(tensor: &Self::Tensor, stream: &Stream) -> Bytes;
    fn whole(stream: &Stream, values: &Buffer<bf16>, shape: [u64; 2], direction: Direction) -> Bytes;
}

macro_rules! raw {
    ($buffer:expr, $stream:expr) => {
        $buffer.to_vec($stream).unwrap().iter().map(|code| code.to_bits()).collect::<Vec<u8>>()
    };
}

impl Oracle for Bf16 {
    fn bytes(tensor: &WideTensor, stream: &Stream) -> Bytes {
        (tensor.data.to_vec(stream).unwrap().iter().flat_map(|value| value.to_bits().to_le_bytes()).collect(), Vec::new(), Vec::new())
    }

    fn whole(stream: &Stream, values: &Buffer<bf16>, _: [u64; 2], _: Direction) -> Bytes {
        (values.to_vec(stream).unwrap().iter().flat_map(|value| value.to_bits().to_le_bytes()).collect(), Vec::new(), Vec::new())
    }
}

impl Oracle for sharded::Mxfp8 {
    fn bytes(tensor: &Self::Tensor, stream: &Stream) -> Bytes {
        (raw!(tensor.data, stream), raw!(tensor.scales, stream), Vec::new())
    }

    fn whole(stream: &Stream, values: &Buffer<bf16>, shape: [u64; 2], direction: Direction) -> Bytes {
        let casts = Mxfp8::<bf16>::new(&stream.device().runtime()).unwrap();
        Self::bytes(&casts.quantize(stream, values.view(), shape, direction).unwrap(), stream)
    }
}

fn nvfp4_bytes(tensor: &QuantizedTensor<quantize::Nvfp4Format>, stream: &Stream) -> Bytes {
    (raw!(tensor.data, stream), raw!(tensor.scales, stream), tensor.amax.to_vec(stream).unwrap())
}

/// The values and rows of zeros up to a multiple of 16.
fn padded(stream: &Stream, values: &Buffer<bf16>, [rows, columns]: [u64; 2]) -> (Buffer<bf16>, [u64; 2]) {
    let mut all = values.to_vec_as::<half::bf16>(stream).unwrap();
    let shape = [rows.next_multiple_of(16), columns];
    all.resize((shape[0] * columns) as usize, half::bf16::ZERO);
    (Buffer::from_slice(stream, &all).unwrap(), shape)
}

impl Oracle for sharded::Nvfp4 {
    fn bytes(tensor: &Self::Tensor, stream: &Stream) -> Bytes {
        nvfp4_bytes(tensor, stream)
    }

    fn whole(stream: &Stream, values: &Buffer<bf16>, shape: [u64; 2], direction: Direction) -> Bytes {
        let runtime = stream.device().runtime();
        let (values, shape) = padded(stream, values, shape);
        let rows = Nvfp4::<bf16>::new(&runtime).unwrap().quantize(stream, values.view(), shape).unwrap();
        if direction == Direction::Rows {
            return nvfp4_bytes(&rows, stream);
        }
        let mut tensor = quantize::Nvfp4Tensor::uninitialised(stream, shape, Direction::Columns).unwrap();
        tensor.amax.copy_from(stream, &rows.amax).unwrap();
        let casts = Nvfp4Columns::<bf16, Nearest, false>::new(&runtime).unwrap();
        casts.cast_columns(stream, values.view(), &RandomState::none(stream).unwrap(), &mut tensor).unwrap();
        nvfp4_bytes(&tensor, stream)
    }
}

impl Oracle for sharded::Nvfp4Squares {
    fn bytes(tensor: &Self::Tensor, stream: &Stream) -> Bytes {
        nvfp4_bytes(tensor, stream)
    }

    fn whole(stream: &Stream, values: &Buffer<bf16>, shape: [u64; 2], direction: Direction) -> Bytes {
        let (values, shape) = padded(stream, values, shape);
        let casts = Nvfp4Squares::<bf16>::new(&stream.device().runtime()).unwrap();
        let pair = casts.quantize(stream, values.view(), shape).unwrap();
        nvfp4_bytes(if direction == Direction::Rows { &pair.rows } else { &pair.columns }, stream)
    }
}

impl Oracle for Fp8 {
    fn bytes(tensor: &Self::Tensor, stream: &Stream) -> Bytes {
        (raw!(tensor.data, stream), Vec::new(), tensor.scales.to_vec(stream).unwrap())
    }

    fn whole(stream: &Stream, values: &Buffer<bf16>, shape: [u64; 2], direction: Direction) -> Bytes {
        let casts = CurrentScaling::<bf16>::new(&stream.device().runtime(), ScaleOptions::default()).unwrap();
        let pair = casts.quantize_both(stream, values.view(), shape).unwrap();
        let codes = if direction == Direction::Rows { raw!(pair.tensor.data, stream) } else { raw!(pair.transposed, stream) };
        (codes, Vec::new(), pair.tensor.scales.to_vec(stream).unwrap())
    }
}

/// The value of an element in a step: no two weights, experts, rows or steps are alike.
pub fn value(step: u32, weight: usize, expert: u64, at: u64) -> f32 {
    let bits = (u64::from(step) * 7919 + weight as u64 * 104_729 + expert * 1_299_709 + at).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40;
    (bits as f32 / (1 << 23) as f32 - 1.0) * (1.0 + (weight as u64 + 3 * expert) as f32)
}

/// All values of a matrix in a step.
pub fn values(step: u32, weight: usize, expert: u64, [rows, columns]: [u64; 2]) -> Vec<f32> {
    (0..rows * columns).map(|at| value(step, weight, expert, at)).collect()
}

/// A rank's set, its arena, and what writes its values.
pub struct Holder<F: WeightFormat> {
    pub arena: Arena,
    pub set: ShardSet<F>,
    round: SumParts<f32, bf16>,
}

impl<F: WeightFormat> Holder<F> {
    /// Takes a set of the weights.
    pub fn new(stream: &Stream, arena: &Arena, member: &Member, weights: &[Weight]) -> Result<Self> {
        let set = ShardSet::new(stream, arena, member, weights.to_vec())?;
        Ok(Self { arena: arena.clone(), set, round: SumParts::new(&stream.device().runtime())? })
    }

    /// A step's first half: this rank's rows of all values.
    pub fn publish(&mut self, stream: &Stream, step: u32) -> Result<()> {
        let me: Rank = self.arena.rank();
        let mut parts = Vec::new();
        for (id, weight) in self.set.weights() {
            let rows = weight.shards::<F>(self.arena.world()).range(me);
            for expert in 0..weight.experts {
                let all = values(step, id.index(), expert, [weight.rows, weight.columns]);
                let own = &all[(rows.start * weight.columns) as usize..(rows.end * weight.columns) as usize];
                parts.push((id, expert, Buffer::from_slice(stream, own)?));
            }
        }
        // Before the update: from here on the stream waits for the other ranks, and so would the host.
        let mut updating = self.set.update(stream)?;
        for (id, expert, own) in &parts {
            self.round.round(stream, own.view(), updating.master(*id, *expert)?)?;
        }
        updating.publish()?;
        Ok(())
    }

    /// What a pass lends, position by position: the bytes of each matrix.
    pub fn pass(&self, chain: &mut Chain<F>, stream: &Stream, is_backward: bool) -> Result<Vec<Vec<Bytes>>>
    where
        F: Oracle,
    {
        let published = Published::of(&self.set)?;
        let mut pass = if is_backward { published.backward(chain)? } else { published.forward(chain)? };
        let mut all = Vec::new();
        while let Some(weight) = pass.next_weight() {
            let gathered = pass.take(weight, stream)?;
            all.push(gathered.tensors().iter().map(|tensor| F::bytes(tensor, stream)).collect());
        }
        pass.finish()?;
        Ok(all)
    }
}

/// The weights of the tests: rows that are divided evenly, raggedly, so that ranks have none, and one row; experts; a weight of forward passes.
pub fn weights<F: WeightFormat>() -> Vec<Weight> {
    let aligned = F::COLUMNS.max(8);
    let odd = [Weight::new("odd", [5, 3]), Weight::new("odd rows", [77, 33]), Weight::new("odd experts", [20, 5]).experts(2)];
    let mut all = vec![
        Weight::new("even", [4 * 32, 2 * aligned]),
        Weight::new("ragged", [77, 3 * aligned]),
        Weight::new("few", [33, aligned]),
        Weight::new("row", [1, aligned]),
        Weight::new("experts", [48, 2 * aligned]).experts(3),
        Weight::new("ragged experts", [20, aligned]).experts(2),
    ];
    all.extend(odd.into_iter().filter(|weight| weight.columns.is_multiple_of(F::COLUMNS)));
    all.push(Weight::new("embedding", [50, aligned]).forward_only());
    all
}

/// The whole weight number `at` in a step, cast matrix by matrix.
pub fn expected<F: Oracle>(stream: &Stream, weights: &[Weight], (step, at): (u32, usize), direction: Direction) -> Vec<Bytes> {
    let Weight { rows, columns, experts, .. } = weights[at];
    let round = SumParts::<f32, bf16>::new(&stream.device().runtime()).unwrap();
    let matrix = |expert| {
        let values = Buffer::from_slice(stream, &values(step, at, expert, [rows, columns])).unwrap();
        let mut wide = Buffer::uninitialised(stream, rows * columns).unwrap();
        round.round(stream, values.view(), wide.view_mut()).unwrap();
        F::whole(stream, &wide, [rows, columns], direction)
    };
    (0..experts).map(matrix).collect()
}
