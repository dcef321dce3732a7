//! The products of a feed-forward layer whose weights are divided among ranks, each overlapped with what it gathers or scatters.
//!
//! Tokens are rows, and each rank has some of them, as sequence parallelism has them: of `x`, of the result, and of both gradients. Between the two weights each rank has all tokens, and some columns.

use half::bf16 as Half;
use oxtile::comm::WorldSize;
use oxtile::gemm::{Activation, Epilogue};
use oxtile::num::{Pod, bf16};
use oxtile::overlap::{
    AllGatherConfig, AllGatherGemm, GatheredProduct, Gathers, GemmReduceScatter, Global, Method, OverlapConfig, OverlapMemory,
    ReduceScatterConfig, ScatterMethod, ScatteredProduct,
};
use oxtile::{Buffer, Result, Stream};
use oxtile_tile::launch::{DeviceView, DeviceViewMut};

/// Sizes over all ranks.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub tokens: u64,
    /// Of a token outside of the layer, and between its weights.
    pub width: u64,
    pub hidden: u64,
}

impl Shape {
    /// `z = x W1^T + b`, of which GELU follows: `W1` is `[hidden, width]`, and each rank has some rows.
    fn up(self) -> AllGatherConfig {
        let config = AllGatherConfig::new(Global { m: self.tokens, n: self.hidden, k: self.width });
        AllGatherConfig { transpose_b: true, activation: Activation::Gelu, ..config }
    }

    /// `y = gelu(z) W2^T`: `W2` is `[width, hidden]`, and each rank has some columns.
    fn down(self) -> ReduceScatterConfig {
        let config = ReduceScatterConfig::new(Global { m: self.tokens, n: self.width, k: self.hidden });
        ReduceScatterConfig { transpose_b: true, ..config }
    }

    /// `dz = (dy W2) gelu'(z)`.
    fn down_input(self) -> AllGatherConfig {
        let config = AllGatherConfig::new(Global { m: self.tokens, n: self.hidden, k: self.width });
        AllGatherConfig { activation: Activation::GeluGradient, ..config }
    }

    /// `dW2 = dy^T gelu(z)`, over the tokens of all ranks.
    fn down_weight(self) -> AllGatherConfig {
        let config = AllGatherConfig::new(Global { m: self.width, n: self.hidden, k: self.tokens });
        AllGatherConfig { gathers: Gathers::SumOfA, transpose_a: true, ..config }
    }

    /// `dx = dz W1`.
    fn up_input(self) -> ReduceScatterConfig {
        ReduceScatterConfig::new(Global { m: self.tokens, n: self.width, k: self.hidden })
    }

    /// `dW1 = dz^T x`, over the tokens of all ranks.
    fn up_weight(self) -> AllGatherConfig {
        let config = AllGatherConfig::new(Global { m: self.hidden, n: self.width, k: self.tokens });
        AllGatherConfig { gathers: Gathers::SumOfB, transpose_a: true, ..config }
    }

    /// The most bytes that a product gathers, or scatters.
    pub fn bytes(self, ranks: WorldSize) -> Result<u64> {
        let gathered = [self.up(), self.down_input(), self.down_weight(), self.up_weight()].map(|config| config.bytes::<bf16, bf16>());
        let scattered = [self.down(), self.up_input()].map(|config| config.bytes::<bf16, bf16>(ranks));
        gathered.into_iter().chain(scattered).try_fold(0, |most, bytes| Ok(most.max(bytes?)))
    }
}

/// How the products are done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Way {
    /// One after another, each by the method that the model finds fastest.
    #[default]
    Chosen,
    /// One after another, all by one method.
    By(Method),
    /// Begun before the products beside which they travel: gradients of weights gather their tokens beside other gradients, and that of `x` travels beside that of `W1`.
    Bulk,
}

/// The products of a rank.
pub struct Products {
    way: Way,
    up: AllGatherGemm<bf16, bf16>,
    down: GemmReduceScatter<bf16, bf16>,
    down_input: AllGatherGemm<bf16, bf16>,
    down_weight: AllGatherGemm<bf16, f32>,
    up_input: GemmReduceScatter<bf16, bf16>,
    up_weight: AllGatherGemm<bf16, f32>,
}

impl Products {
    /// Makes the products on memory of [`Shape::bytes`].
    pub fn new(memory: &OverlapMemory, compute: &Stream, shape: Shape, way: Way) -> Result<Self> {
        // What was gathered beside another product needs no kernel that waits.
        let [method, of_weights] = match way {
            Way::Chosen => [None, None],
            Way::By(method) => [Some(method), Some(method)],
            Way::Bulk => [None, Some(Method::Sequential)],
        };
        let gathering_by = |config, method| AllGatherConfig { overlap: OverlapConfig { method, ..OverlapConfig::default() }, ..config };
        let gathering = |config| gathering_by(config, method);
        let scattered = method.map(|method| if method == Method::Sequential { ScatterMethod::Sequential } else { ScatterMethod::Fused });
        let scattering = |config| GemmReduceScatter::new(memory, compute, ReduceScatterConfig { method: scattered, ..config });
        Ok(Self {
            way,
            up: AllGatherGemm::new(memory, compute, gathering(shape.up()))?,
            down: scattering(shape.down())?,
            down_input: AllGatherGemm::new(memory, compute, gathering(shape.down_input()))?,
            down_weight: AllGatherGemm::new(memory, compute, gathering_by(shape.down_weight(), of_weights))?,
            up_input: scattering(shape.up_input())?,
            up_weight: AllGatherGemm::new(memory, compute, gathering_by(shape.up_weight(), of_weights))?,
        })
    }

    /// How each is done, and why.
    pub fn choices(&self) -> [String; 6] {
        let Self { up, down, down_input, down_weight, up_input, up_weight, .. } = self;
        [
            format!("z and gelu(z): {}", up.choice()),
            format!("y: {}", down.choice()),
            format!("dz: {}", down_input.choice()),
            format!("dW2: {}", down_weight.choice()),
            format!("dx: {}", up_input.choice()),
            format!("dW1: {}", up_weight.choice()),
        ]
    }

    /// Binds them to a rank's tensors. Meets the other ranks.
    pub fn bind<'l>(&'l self, stream: &Stream, tensors: &'l Tensors) -> Result<Layer<'l>> {
        let own = [tensors.up.view(), tensors.down.view()];
        self.bind_weights(stream, tensors, Weights { forward: own, backward: own })
    }

    /// The same, of weights that lie elsewhere.
    pub fn bind_weights<'l>(&'l self, stream: &Stream, tensors: &'l Tensors, weights: Weights<'l>) -> Result<Layer<'l>> {
        let Tensors { bias, z, activated, dz, .. } = tensors;
        let Weights { forward: [up, down], backward: [up_again, down_again] } = weights;
        // SAFETY: `Layer` enqueues all products on one stream, each of which reads other buffers than it writes; the host reads them after the stream alone.
        let [of_z, of_activated, of_dz, of_y, of_dx] = unsafe { [lend(z), lend(activated), lend(dz), lend(&tensors.y), lend(&tensors.dx)] };
        // SAFETY: as above.
        let [of_bias, of_up, of_down] = unsafe { [lend(&tensors.dbias), lend(&tensors.dup), lend(&tensors.ddown)] };
        let keeping = Epilogue { bias: Some(bias.view()), kept: Some(of_z), ..Epilogue::default() };
        let deriving = Epilogue { input: Some(z.view()), bias_gradient: Some(of_bias), ..Epilogue::default() };
        Ok(Layer {
            way: self.way,
            tensors,
            up: self.up.bind_epilogue(stream, up, None, keeping, of_activated)?,
            down: self.down.bind(stream, activated.view(), down, None, of_y)?,
            down_input: self.down_input.bind_epilogue(stream, down_again, None, deriving, of_dz)?,
            down_weight: self.down_weight.bind(stream, activated.view(), None, of_down)?,
            up_input: self.up_input.bind(stream, dz.view(), up_again, None, of_dx)?,
            up_weight: self.up_weight.bind(stream, dz.view(), None, of_up)?,
        })
    }
}

/// Where a rank's parts of `W1` and of `W2` are in either pass: weights in shards lie in slots that the passes take.
#[derive(Clone, Copy)]
pub struct Weights<'l> {
    pub forward: [DeviceView<'l, bf16>; 2],
    pub backward: [DeviceView<'l, bf16>; 2],
}

/// What a rank has.
pub struct Tensors {
    /// Its tokens, and the gradient of their result.
    pub x: Buffer<bf16>,
    pub dy: Buffer<bf16>,
    /// Its part of the weights.
    pub up: Buffer<bf16>,
    pub bias: Buffer<bf16>,
    pub down: Buffer<bf16>,
    /// All tokens, between the weights.
    pub z: Buffer<bf16>,
    pub activated: Buffer<bf16>,
    pub dz: Buffer<bf16>,
    /// Results of its tokens.
    pub y: Buffer<bf16>,
    pub dx: Buffer<bf16>,
    /// Gradients of its part of the weights.
    pub dup: Buffer<f32>,
    pub dbias: Buffer<f32>,
    pub ddown: Buffer<f32>,
}

impl Tensors {
    /// Of a rank of so many, which is given `x`, `dy`, and its part of `W1`, of the bias and of `W2`. Results are not written yet.
    pub fn new(stream: &Stream, Shape { tokens, width, hidden }: Shape, ranks: u32, given: [Vec<Half>; 5]) -> Result<Self> {
        let [x, dy, up, bias, down] = given.map(|values| Buffer::from_slice(stream, &values));
        let (hidden, own) = (hidden / u64::from(ranks), tokens / u64::from(ranks) * width);
        let [z, activated, dz, y, dx] =
            [tokens * hidden, tokens * hidden, tokens * hidden, own, own].map(|len| Buffer::uninitialised(stream, len));
        let [dup, dbias, ddown] = [hidden * width, hidden, width * hidden].map(|len| Buffer::uninitialised(stream, len));
        Ok(Self {
            x: x?,
            dy: dy?,
            up: up?,
            bias: bias?,
            down: down?,
            z: z?,
            activated: activated?,
            dz: dz?,
            y: y?,
            dx: dx?,
            dup: dup?,
            dbias: dbias?,
            ddown: ddown?,
        })
    }

    /// Results of the tokens, `y` and `dx`, then gradients of the weights, `dW1`, of the bias, and `dW2`.
    pub fn results(&self, stream: &Stream) -> Result<[Vec<f32>; 5]> {
        let wide =
            |tensor: &Buffer<bf16>| -> Result<Vec<f32>> { Ok(tensor.to_vec_as::<Half>(stream)?.into_iter().map(Half::to_f32).collect()) };
        Ok([wide(&self.y)?, wide(&self.dx)?, self.dup.to_vec(stream)?, self.dbias.to_vec(stream)?, self.ddown.to_vec(stream)?])
    }
}

/// Memory of the layer, to be written by one product.
///
/// # Safety
/// What uses it and what uses other views of the buffer is enqueued on one stream, and no product takes two views of a buffer of which one is written.
pub unsafe fn lend<T: Pod>(buffer: &Buffer<T>) -> DeviceViewMut<'_, T> {
    let access = buffer.view().access("memory of the layer");
    // SAFETY: an address, a length and an owner of a live buffer, which the view borrows; the caller keeps uses apart.
    unsafe { DeviceViewMut::from_raw(access.address, buffer.len(), access.owner) }
}

/// The products of a rank with its tensors.
pub struct Layer<'l> {
    way: Way,
    tensors: &'l Tensors,
    up: GatheredProduct<'l, bf16, bf16>,
    down: ScatteredProduct<'l, bf16, bf16>,
    down_input: GatheredProduct<'l, bf16, bf16>,
    down_weight: GatheredProduct<'l, bf16, f32>,
    up_input: ScatteredProduct<'l, bf16, bf16>,
    up_weight: GatheredProduct<'l, bf16, f32>,
}

impl Layer<'_> {
    /// Enqueues the result of this rank's tokens. May be captured.
    pub fn forward(&mut self, stream: &Stream) -> Result<()> {
        self.forward_of_up(stream)?;
        self.forward_of_down(stream)
    }

    /// Enqueues what lies between the weights: it reads `W1`.
    pub fn forward_of_up(&mut self, stream: &Stream) -> Result<()> {
        self.up.copy_shard(stream, &self.tensors.x)?;
        self.up.run(stream)
    }

    /// Enqueues the result of that: it reads `W2`.
    pub fn forward_of_down(&mut self, stream: &Stream) -> Result<()> {
        self.down.run(stream)
    }

    /// Enqueues all gradients. May be captured.
    pub fn backward(&mut self, stream: &Stream) -> Result<()> {
        if self.way == Way::Bulk {
            return self.backward_in_bulk(stream);
        }
        self.backward_of_down(stream)?;
        self.backward_of_up(stream)
    }

    /// Enqueues the gradients of what lies between the weights and of `W2`, which it reads. May be captured.
    pub fn backward_of_down(&mut self, stream: &Stream) -> Result<()> {
        self.down_input.copy_shard(stream, &self.tensors.dy)?;
        let dz = self.down_input.begin(stream)?;
        if self.way != Way::Bulk {
            dz.finish()?;
            self.down_weight.copy_shard(stream, &self.tensors.dy)?;
            return self.down_weight.run(stream);
        }
        self.down_weight.copy_shard(stream, &self.tensors.dy)?;
        let ddown = self.down_weight.begin(stream)?;
        dz.finish()?;
        ddown.finish()
    }

    /// Enqueues the gradients of `x` and of `W1`, which it reads, once that of `z` is there. May be captured.
    pub fn backward_of_up(&mut self, stream: &Stream) -> Result<()> {
        self.backward_of_up_where(stream, false)
    }

    /// The same where `x` may lie in its place already, written there by what made it, or by a call before this one and none between.
    pub fn backward_of_up_where(&mut self, stream: &Stream, is_in_place: bool) -> Result<()> {
        if self.way != Way::Bulk {
            self.up_input.run(stream)?;
            self.place_x(stream, is_in_place)?;
            return self.up_weight.run(stream);
        }
        self.place_x(stream, is_in_place)?;
        let x = self.up_weight.begin(stream)?;
        let dx = self.up_input.begin(stream)?;
        x.finish()?;
        dx.finish()
    }

    fn place_x(&mut self, stream: &Stream, is_in_place: bool) -> Result<()> {
        if is_in_place { self.up_weight.shard(stream).map(drop) } else { self.up_weight.copy_shard(stream, &self.tensors.x) }
    }

    /// Each gather travels beside the product before the one that needs it, and `dx` beside the last product. Two calls at most are under way.
    fn backward_in_bulk(&mut self, stream: &Stream) -> Result<()> {
        self.down_input.copy_shard(stream, &self.tensors.dy)?;
        let dz = self.down_input.begin(stream)?;
        self.down_weight.copy_shard(stream, &self.tensors.dy)?;
        let ddown = self.down_weight.begin(stream)?;
        dz.finish()?;
        self.up_weight.copy_shard(stream, &self.tensors.x)?;
        let dup = self.up_weight.begin(stream)?;
        ddown.finish()?;
        let dx = self.up_input.begin(stream)?;
        dup.finish()?;
        dx.finish()
    }
}
