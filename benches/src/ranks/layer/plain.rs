//! The layer by plain products, with NCCL's collectives around them or alone.

use anyhow::Result;
use half::bf16 as Half;
use oxtile::comm::{Communicator, NcclCommunicator, ReduceOp};
use oxtile::gemm::{Activation, Epilogue, Gemm, GemmConfig};
use oxtile::num::bf16;
use oxtile::runtime::Bound;
use oxtile::{Buffer, Runtime, Stream};

use super::products::{Shape, Tensors, lend};

/// The products of a rank on gathered operands.
pub struct Plain {
    up: Gemm<bf16, bf16>,
    down: Gemm<bf16, bf16>,
    down_input: Gemm<bf16, bf16>,
    down_weight: Gemm<bf16, f32>,
    up_input: Gemm<bf16, bf16>,
    up_weight: Gemm<bf16, f32>,
    /// The tokens of all ranks, and their gradients.
    x: Buffer<bf16>,
    dy: Buffer<bf16>,
    /// This rank's parts of the sums `y` and `dx`, of all tokens.
    y: Buffer<bf16>,
    dx: Buffer<bf16>,
}

impl Plain {
    /// Of a rank of so many; `given` are a rank's tensors.
    pub fn new(
        runtime: &Runtime,
        stream: &Stream,
        Shape { tokens, width, hidden }: Shape,
        ranks: u32,
        given: impl Fn(u32) -> [Vec<Half>; 5],
    ) -> Result<Self> {
        let part = hidden / u64::from(ranks);
        let of = |[m, n, k]: [u64; 3]| GemmConfig { m, n, k, ..GemmConfig::default() };
        let (inside, outside) = (of([tokens, part, width]), of([tokens, width, part]));
        let weight = |m, n| GemmConfig { transpose_a: true, ..of([m, n, tokens]) };
        let all: Vec<_> = (0..ranks).map(given).collect();
        let joined = |tensor: usize| Buffer::from_slice(stream, &all.iter().flat_map(|given| given[tensor].clone()).collect::<Vec<_>>());
        let sum = || Buffer::uninitialised(stream, tokens * width);
        Ok(Self {
            up: Gemm::new(runtime, GemmConfig { transpose_b: true, activation: Activation::Gelu, ..inside })?,
            down: Gemm::new(runtime, GemmConfig { transpose_b: true, ..outside })?,
            down_input: Gemm::new(runtime, GemmConfig { activation: Activation::GeluGradient, ..inside })?,
            down_weight: Gemm::new(runtime, weight(width, part))?,
            up_input: Gemm::new(runtime, outside)?,
            up_weight: Gemm::new(runtime, weight(part, width))?,
            x: joined(0)?,
            dy: joined(1)?,
            y: sum()?,
            dx: sum()?,
        })
    }

    /// Binds them to a rank's tensors. Without a communicator nothing is gathered or summed: the products are alone.
    pub fn bind<'a>(&'a self, stream: &Stream, tensors: &'a Tensors, comm: Option<&'a NcclCommunicator>) -> Result<PlainLayer<'a>> {
        let Tensors { up, bias, down, z, activated, dz, .. } = tensors;
        // SAFETY: `PlainLayer::call` enqueues all products on one stream, each of which reads other buffers than it writes; the host reads them after the stream alone.
        let [of_z, of_activated, of_dz, of_y, of_dx] = unsafe { [lend(z), lend(activated), lend(dz), lend(&self.y), lend(&self.dx)] };
        // SAFETY: as above.
        let [of_bias, of_up, of_down] = unsafe { [lend(&tensors.dbias), lend(&tensors.dup), lend(&tensors.ddown)] };
        let (x, dy) = (self.x.view(), self.dy.view());
        let keeping = Epilogue { bias: Some(bias.view()), kept: Some(of_z), ..Epilogue::default() };
        let deriving = Epilogue { input: Some(z.view()), bias_gradient: Some(of_bias), ..Epilogue::default() };
        Ok(PlainLayer {
            of: self,
            tensors,
            comm,
            up: self.up.bind_epilogue(stream, (x, up.view()), None, keeping, of_activated)?,
            down: self.down.bind(stream, activated.view(), down.view(), None, of_y)?,
            down_input: self.down_input.bind_epilogue(stream, (dy, down.view()), None, deriving, of_dz)?,
            down_weight: self.down_weight.bind(stream, dy, activated.view(), None, of_down)?,
            up_input: self.up_input.bind(stream, dz.view(), up.view(), None, of_dx)?,
            up_weight: self.up_weight.bind(stream, dz.view(), x, None, of_up)?,
        })
    }
}

/// The products with a rank's tensors.
pub struct PlainLayer<'a> {
    of: &'a Plain,
    tensors: &'a Tensors,
    comm: Option<&'a NcclCommunicator>,
    up: Bound<'a>,
    down: Bound<'a>,
    down_input: Bound<'a>,
    down_weight: Bound<'a>,
    up_input: Bound<'a>,
    up_weight: Bound<'a>,
}

impl PlainLayer<'_> {
    /// Enqueues both passes. The tokens are gathered again for the gradient of the first weight, as sequence parallelism has it; their gradients are gathered once.
    pub fn call(&mut self, stream: &Stream) -> Result<()> {
        let Plain { x, dy, y, dx, .. } = self.of;
        self.gather(stream, &self.tensors.x, x)?;
        self.up.run(stream)?;
        self.down.run(stream)?;
        self.scatter(stream, y, &self.tensors.y)?;
        self.gather(stream, &self.tensors.dy, dy)?;
        self.down_input.run(stream)?;
        self.down_weight.run(stream)?;
        self.up_input.run(stream)?;
        self.scatter(stream, dx, &self.tensors.dx)?;
        self.gather(stream, &self.tensors.x, x)?;
        self.up_weight.run(stream)?;
        Ok(())
    }

    /// Enqueues the gradients of `x` and of the first weight.
    pub fn pair(&mut self, stream: &Stream) -> Result<()> {
        self.up_input.run(stream)?;
        Ok(self.up_weight.run(stream)?)
    }

    fn gather(&self, stream: &Stream, shard: &Buffer<bf16>, whole: &Buffer<bf16>) -> Result<()> {
        // SAFETY: all uses of the buffer are enqueued on one stream, and what is gathered is another one.
        let whole = unsafe { lend(whole) };
        Ok(self.comm.map_or(Ok(()), |comm| comm.all_gather(stream, shard.view(), whole))?)
    }

    fn scatter(&self, stream: &Stream, whole: &Buffer<bf16>, rows: &Buffer<bf16>) -> Result<()> {
        // SAFETY: as in `gather`.
        let rows = unsafe { lend(rows) };
        Ok(self.comm.map_or(Ok(()), |comm| comm.reduce_scatter(stream, whole.view(), rows, ReduceOp::Sum))?)
    }
}
