"""The functions that the kernels are compared with, written with torch's own operations.

Each peer is a class: it fills its buffers from the pattern, lists the launches of one graph (one a buffer set) and names
the outputs of the first. Shapes, data and results are those of the Rust side.

MXFP8: OCP Microscaling Formats 1.0; TransformerEngine common/util/ptx_arch_spec.cuh (e8m0_round_up), common/util/ptx.cuh
(exp2f_rcp, exp2f), common/cast/mxfp8/quantize_mxfp8.cuh. NVFP4: common/cast/nvfp4/core_nvfp4.cuh, dequantize_nvfp4.cuh.
FP8: common/recipe/recipe_common.cuh.
"""

import torch

BLOCK = 32
STEP = 104_729
LARGEST = 448.0  # of E4M3


def compile(function):
    """Compiled for each shape it meets, not for any: the fastest that torch.compile makes of it."""
    return torch.compile(function, dynamic=False)


def fill(pattern, buffer, shape):
    """Buffer number `buffer` of the pattern, as benches/src/pattern.rs fills it."""
    count = 1
    for length in shape:
        count *= length
    start = STEP * buffer % pattern.numel()
    turned = torch.roll(pattern, -start)
    return turned.repeat(-(-count // pattern.numel()))[:count].view(*shape).clone()


def amax(x):
    return x.abs().amax()


def mxfp8_blocks(blocks, dimension):
    """Blocks along a dimension of 32 to E4M3 codes of that shape and E8M0 codes without the dimension. No NaN in the input."""
    scaled = blocks.abs().amax(dimension) * (1.0 / LARGEST)
    bits = scaled.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    rounds_up = (mantissa > 0) & (exponent != 0xFE) & ~((exponent == 0) & (mantissa <= 0x400000))
    code = torch.where(exponent == 0xFF, 0xFE, exponent + rounds_up.to(torch.int32))
    multiplier = torch.where(code == 0xFE, 0x00400000, (254 - code) << 23).view(torch.float32)
    data = (blocks * multiplier.unsqueeze(dimension)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return data, code.to(torch.uint8)


def mxfp8_cast(x):
    """[rows, columns] to E4M3 codes of that shape and E8M0 codes [rows, columns / 32]."""
    rows, columns = x.shape
    data, scales = mxfp8_blocks(x.view(rows, columns // BLOCK, BLOCK).float(), 2)
    return data.view(rows, columns), scales


def mxfp8_cast_columns(x):
    """[rows, columns] to E4M3 codes of that shape and E8M0 codes [rows / 32, columns]."""
    rows, columns = x.shape
    data, scales = mxfp8_blocks(x.view(rows // BLOCK, BLOCK, columns).float(), 1)
    return data.view(rows, columns), scales


def mxfp8_cast_both(x):
    return *mxfp8_cast(x), *mxfp8_cast_columns(x)


def mxfp8_values(data, scales):
    """Codes times their scales, rounded to bf16. No NaN scale."""
    code = scales.to(torch.int32)
    scale = torch.where(code == 0, 0x00400000, code << 23).view(torch.float32)
    return (data.float() * scale).to(torch.bfloat16)


def mxfp8_dequantize(data, scales):
    rows, columns = data.shape
    return mxfp8_values(data.view(rows, columns // BLOCK, BLOCK), scales.unsqueeze(2)).view(rows, columns)


def mxfp8_dequantize_columns(data, scales):
    rows, columns = data.shape
    return mxfp8_values(data.view(rows // BLOCK, BLOCK, columns), scales.unsqueeze(1)).view(rows, columns)


def exact_division(a, b):
    """a / b rounded once: a compiled float32 division is an approximation, a float64 one is not."""
    return (a / b.double()).float().clamp(max=torch.finfo(torch.float32).max)


def nvfp4_cast(x, amax):
    """[rows, columns] to pairs of E2M1 codes [rows, columns / 2] and E4M3 scales [rows, columns / 16]. No NaN, Inf or amax of 0."""
    rows, columns = x.shape
    blocks = x.view(rows, columns // 16, 16).float()
    encode = exact_division(2688.0, amax)
    scales = (blocks.abs().amax(-1) * (encode * (1.0 / 6.0))).clamp(max=LARGEST).to(torch.float8_e4m3fn)
    multiplier = exact_division(1.0, scales.float() * exact_division(1.0, encode))
    scaled = blocks * multiplier.unsqueeze(-1)
    a = scaled.abs()
    # Midpoints go to the even code: down from those that are not included.
    code = (a > 0.25).to(torch.uint8) + (a >= 0.75) + (a > 1.25) + (a >= 1.75) + (a > 2.5) + (a >= 3.5) + (a > 5.0)
    pairs = (code | torch.signbit(scaled).to(torch.uint8) << 3).view(rows, columns // 2, 2)
    return pairs[..., 0] | pairs[..., 1] << 4, scales


def nvfp4_cast_columns(x, amax):
    """The cast of the transpose."""
    return nvfp4_cast(x.t().contiguous(), amax)


def nvfp4_cast_both(x, amax):
    return *nvfp4_cast(x, amax), *nvfp4_cast_columns(x, amax)


def nvfp4_hadamard(x):
    """The random Hadamard transform of the transpose, in float32, by the kernel's butterfly."""
    negative = 0xD7E8 >> torch.arange(16, device=x.device) & 1
    y = x.t().reshape(-1, 16).float() * (1 - 2 * negative)
    for distance in (1, 2, 4, 8):
        a, b = y.view(-1, 8 // distance, 2, distance).unbind(2)
        y = torch.stack([a + b, a - b], dim=2).view(-1, 16)
    return (y * 0.25).view(x.shape[1], x.shape[0])


def nvfp4_cast_hadamard(x, amax):
    return nvfp4_cast(nvfp4_hadamard(x), amax)


def nvfp4_dequantize_columns(data, scales, amax):
    return nvfp4_dequantize(data, scales, amax).t().contiguous()


def nvfp4_dequantize(data, scales, amax):
    """The inverse, rounded to bf16."""
    rows, pairs = data.shape
    codes = torch.stack([data & 0xF, data >> 4], dim=-1).view(rows, pairs // 8, 16)
    m = (codes & 7).float()
    magnitude = torch.where(m <= 4, m * 0.5, torch.where(m == 7, 6.0, m - 2.0))
    factor = scales.float() * amax * (1.0 / 2688.0)
    # Not -magnitude: compiled, that is 0 - magnitude, which has no -0.
    wide = magnitude * torch.where(codes > 7, -1.0, 1.0) * factor.unsqueeze(-1)
    return wide.to(torch.bfloat16).view(rows, 2 * pairs)


def fp8_cast(x, amax):
    """E4M3 codes and the inverse of their one scale. No NaN or Inf in the input, no amax of 0."""
    scale = exact_division(LARGEST, amax)
    data = (x.float() * scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return data, exact_division(1.0, scale)


def fp8_current_scaling(x):
    return fp8_cast(x, x.abs().amax().float())


def fp8_cast_transpose(x, amax):
    data, _ = fp8_cast(x, amax)
    return data, data.t().contiguous()


def transpose(codes):
    return codes.t().contiguous()


def fp8_dequantize(data, inverse):
    return (data.float() * inverse).to(torch.bfloat16)


def fp8_cast_blocks(x, side):
    """E4M3 codes and the inverse of the scale of each block of `side` rows by 128 columns."""
    rows, columns = x.shape
    blocks = x.view(rows // side, side, columns // 128, 128).float()
    scale = exact_division(LARGEST, blocks.abs().amax((1, 3), keepdim=True))
    data = (blocks * scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return data.view(rows, columns), exact_division(1.0, scale)


def fp8_cast_row_blocks(x):
    return fp8_cast_blocks(x, 1)


def fp8_cast_squares(x):
    return fp8_cast_blocks(x, 128)


class Copy:
    title = "torch copy_"

    def __init__(self, pattern, dimensions, sets):
        shape = [dimensions[0] // 2]
        self.pairs = [(fill(pattern, set, shape), torch.empty(shape, dtype=pattern.dtype, device="cuda")) for set in range(sets)]
        self.launches = [lambda source=source, target=target: target.copy_(source) for source, target in self.pairs]

    def outputs(self, first):
        return {"target": first}


class AmaxCompiled:
    title = "torch.compile(x.abs().amax())"

    def __init__(self, pattern, dimensions, sets):
        compiled = compile(amax)
        inputs = [fill(pattern, set, dimensions) for set in range(sets)]
        self.launches = [lambda x=x: compiled(x) for x in inputs]

    def outputs(self, first):
        return {"amax": first.float()}


class MultiAmax:
    def __init__(self, pattern, dimensions, sets):
        count, shape = dimensions[0], dimensions[1:]
        self.inputs = [[fill(pattern, set * count + tensor, shape) for tensor in range(count)] for set in range(sets)]
        self.launches = [lambda tensors=tensors: self.all(tensors) for tensors in self.inputs]

    def outputs(self, first):
        return {"amax": torch.stack([value.float() for value in first])}


class MultiAmaxCompiled(MultiAmax):
    title = "torch.compile(x.abs().amax()), one call a tensor"

    def __init__(self, pattern, dimensions, sets):
        compiled = compile(amax)
        self.all = lambda tensors: [compiled(tensor) for tensor in tensors]
        super().__init__(pattern, dimensions, sets)


class MultiAmaxForeach(MultiAmax):
    title = "torch._foreach_norm(tensors, inf)"

    def __init__(self, pattern, dimensions, sets):
        self.all = lambda tensors: torch._foreach_norm(tensors, float("inf"))
        super().__init__(pattern, dimensions, sets)


def interleave_rows(compact):
    """[outer, blocks] to tiles of 128 by 4; both are whole tiles."""
    outer, blocks = compact.shape
    return compact.view(outer // 128, 4, 32, blocks // 4, 4).permute(0, 3, 2, 1, 4).contiguous()


def interleave_columns(compact):
    """[blocks, outer] to the same tiles."""
    blocks, outer = compact.shape
    return compact.view(blocks // 4, 4, outer // 128, 4, 32).permute(2, 0, 4, 3, 1).contiguous()


def deinterleave_rows(tiles):
    return tiles.permute(0, 3, 2, 1, 4).contiguous()


def deinterleave_columns(tiles):
    return tiles.permute(1, 4, 0, 3, 2).contiguous()


def join_shards(gathered):
    """[shards, rows, width] to [rows, shards * width]."""
    return gathered.permute(1, 0, 2).contiguous()


class InterleaveCompiled:
    """One of the permutations of bytes; `shape` makes its input's shape of outer and blocks."""

    title = "torch.compile, same permutation"

    def __init__(self, permutation, shape):
        self.permutation, self.shape = permutation, shape

    def __call__(self, pattern, dimensions, sets):
        compiled = compile(self.permutation)
        outer, blocks = dimensions
        flat = [fill(pattern, set, [outer * blocks // 2]).view(torch.uint8) for set in range(sets)]
        inputs = [scales.view(*self.shape(outer, blocks)) for scales in flat]
        self.launches = [lambda x=x: compiled(x) for x in inputs]
        return self

    def outputs(self, first):
        return {"scales": first}


def tiles_of(outer, blocks):
    return outer // 128, blocks // 4, 32, 4, 4


class Mxfp8CastCompiled:
    title = "torch.compile, same formula"
    cast = staticmethod(mxfp8_cast)
    names = ("data", "scales")

    def __init__(self, pattern, dimensions, sets):
        compiled = compile(self.cast)
        inputs = [fill(pattern, set, dimensions) for set in range(sets)]
        self.launches = [lambda x=x: compiled(x) for x in inputs]

    def outputs(self, first):
        return dict(zip(self.names, first))


class Mxfp8CastColumnsCompiled(Mxfp8CastCompiled):
    cast = staticmethod(mxfp8_cast_columns)


class Mxfp8CastBothCompiled(Mxfp8CastCompiled):
    cast = staticmethod(mxfp8_cast_both)
    names = ("row_data", "row_scales", "column_data", "column_scales")


def mxfp8_interleaved(x):
    data, scales = mxfp8_cast(x)
    return data, interleave_rows(scales)


def mxfp8_gelu(x):
    return mxfp8_cast(torch.nn.functional.gelu(x.float(), approximate="tanh").to(torch.bfloat16))


def mxfp8_swiglu(x):
    half = x.shape[1] // 2
    act, gate = x[:, :half].float(), x[:, half:].float()
    return mxfp8_cast((torch.nn.functional.silu(act) * gate).to(torch.bfloat16))


def mxfp8_gelu_backward(x, gradient):
    """Both directions and the gradient of the bias."""
    x, k = x.float(), 0.79788456
    t = torch.tanh(k * x * (1 + 0.044715 * x * x))
    slope = 0.5 * x * (1 - t * t) * (k + 0.1070322243 * x * x) + 0.5 * (1 + t)
    result = (gradient.float() * slope).to(torch.bfloat16)
    return *mxfp8_cast_both(result), result.sum(0, dtype=torch.float32).to(torch.bfloat16)


class Mxfp8InterleavedCompiled(Mxfp8CastCompiled):
    cast = staticmethod(mxfp8_interleaved)
    names = ("row_data", "row_scales")


class Mxfp8GeluCompiled(Mxfp8InterleavedCompiled):
    cast = staticmethod(mxfp8_gelu)


class Mxfp8SwigluCompiled(Mxfp8InterleavedCompiled):
    cast = staticmethod(mxfp8_swiglu)

    def __init__(self, pattern, dimensions, sets):
        rows, columns = dimensions
        super().__init__(pattern, [rows, 2 * columns], sets)


class Mxfp8GeluBackwardCompiled(Mxfp8CastBothCompiled):
    """Its fifth output, the bias gradient, depends on the order of the sums and is not compared."""

    def __init__(self, pattern, dimensions, sets):
        compiled = compile(mxfp8_gelu_backward)
        operands = [(fill(pattern, set, dimensions), fill(pattern, sets + set, dimensions)) for set in range(sets)]
        self.launches = [lambda x=x, gradient=gradient: compiled(x, gradient) for x, gradient in operands]


class Mxfp8DequantizeCompiled:
    title = "torch.compile, same formula"
    cast, dequantize = staticmethod(mxfp8_cast), staticmethod(mxfp8_dequantize)

    def __init__(self, pattern, dimensions, sets):
        compiled = compile(self.dequantize)
        inputs = [self.cast(fill(pattern, set, dimensions)) for set in range(sets)]
        self.launches = [lambda cast=cast: compiled(*cast) for cast in inputs]

    def outputs(self, first):
        return {"wide": first}


class Mxfp8DequantizeColumnsCompiled(Mxfp8DequantizeCompiled):
    cast, dequantize = staticmethod(mxfp8_cast_columns), staticmethod(mxfp8_dequantize_columns)


class Nvfp4CastCompiled:
    title = "torch.compile, same formula"
    cast, transform = staticmethod(nvfp4_cast), staticmethod(lambda x: x)
    names = ("data", "scales")

    def __init__(self, pattern, dimensions, sets):
        compiled = compile(self.cast)
        inputs = [fill(pattern, set, dimensions) for set in range(sets)]
        amaxes = [amax(self.transform(x)).float() for x in inputs]
        self.launches = [lambda x=x, amax=amax: compiled(x, amax) for x, amax in zip(inputs, amaxes)]

    def outputs(self, first):
        return dict(zip(self.names, first))


class Nvfp4CastColumnsCompiled(Nvfp4CastCompiled):
    cast = staticmethod(nvfp4_cast_columns)


class Nvfp4CastHadamardCompiled(Nvfp4CastCompiled):
    cast, transform = staticmethod(nvfp4_cast_hadamard), staticmethod(nvfp4_hadamard)


class Nvfp4CastBothCompiled(Nvfp4CastCompiled):
    cast = staticmethod(nvfp4_cast_both)
    names = ("row_data", "row_scales", "column_data", "column_scales")


class Nvfp4DequantizeCompiled:
    title = "torch.compile, same formula"
    cast, dequantize = staticmethod(nvfp4_cast), staticmethod(nvfp4_dequantize)

    def __init__(self, pattern, dimensions, sets):
        compiled = compile(self.dequantize)
        inputs = [fill(pattern, set, dimensions) for set in range(sets)]
        casts = [(*self.cast(x, amax(x).float()), amax(x).float()) for x in inputs]
        self.launches = [lambda cast=cast: compiled(*cast) for cast in casts]

    def outputs(self, first):
        return {"wide": first}


class Nvfp4DequantizeColumnsCompiled(Nvfp4DequantizeCompiled):
    cast, dequantize = staticmethod(nvfp4_cast_columns), staticmethod(nvfp4_dequantize_columns)


class Fp8CurrentScalingCompiled:
    title = "torch.compile, same formula"

    def __init__(self, pattern, dimensions, sets):
        compiled = compile(fp8_current_scaling)
        inputs = [fill(pattern, set, dimensions) for set in range(sets)]
        self.launches = [lambda x=x: compiled(x) for x in inputs]

    def outputs(self, first):
        return {"data": first[0], "scale_inverse": first[1]}


class Fp8CastCompiled(Fp8CurrentScalingCompiled):
    def __init__(self, pattern, dimensions, sets):
        compiled = compile(fp8_cast)
        inputs = [fill(pattern, set, dimensions) for set in range(sets)]
        self.launches = [lambda x=x, amax=amax(x).float(): compiled(x, amax) for x in inputs]


def Fp8BlocksCompiled(function):
    """The codes; scales lie in other orders."""

    class Peer(Fp8CurrentScalingCompiled):
        def __init__(self, pattern, dimensions, sets):
            compiled = compile(function)
            inputs = [fill(pattern, set, dimensions) for set in range(sets)]
            self.launches = [lambda x=x: compiled(x) for x in inputs]

        def outputs(self, first):
            return {"data": first[0]}

    return Peer


class Fp8CastTransposeCompiled:
    title = "torch.compile, same formula"

    def __init__(self, pattern, dimensions, sets):
        compiled = compile(fp8_cast_transpose)
        inputs = [fill(pattern, set, dimensions) for set in range(sets)]
        self.launches = [lambda x=x, amax=amax(x).float(): compiled(x, amax) for x in inputs]

    def outputs(self, first):
        return {"data": first[0], "transposed": first[1]}


class Fp8TransposeContiguous:
    title = "torch codes.t().contiguous()"
    transpose = staticmethod(transpose)

    def __init__(self, pattern, dimensions, sets):
        inputs = [fp8_current_scaling(fill(pattern, set, dimensions))[0].view(torch.uint8) for set in range(sets)]
        self.launches = [lambda codes=codes: self.transpose(codes) for codes in inputs]

    def outputs(self, first):
        return {"transposed": first}


class Fp8TransposeCompiled(Fp8TransposeContiguous):
    title = "torch.compile(codes.t().contiguous())"

    def __init__(self, pattern, dimensions, sets):
        self.transpose = compile(transpose)
        super().__init__(pattern, dimensions, sets)


class Fp8DequantizeCompiled:
    title = "torch.compile, same formula"

    def __init__(self, pattern, dimensions, sets):
        compiled = compile(fp8_dequantize)
        inputs = [fp8_current_scaling(fill(pattern, set, dimensions)) for set in range(sets)]
        self.launches = [lambda cast=cast: compiled(*cast) for cast in inputs]

    def outputs(self, first):
        return {"wide": first}


class Gemm:
    """One matrix product a launch by cuBLASLt, into a buffer of its own."""

    title = "torch.mm (cuBLASLt)"
    # Sums of other orders: outputs are compared by relative Frobenius error.
    tolerance = 4e-3
    stored_as_transposed = (False, True)

    def __init__(self, pattern, dimensions, sets):
        torch.backends.cuda.preferred_blas_library("cublaslt")
        m, n, k = dimensions
        shapes = [(m, k), (k, n)]
        stored = [tuple(reversed(shape)) if turned else shape for shape, turned in zip(shapes, self.stored_as_transposed)]
        self.launches = []
        for set in range(sets):
            operands = [self.operand(fill(pattern, 2 * set + i, stored[i])) for i in range(2)]
            a, b = (x.t() if turned else x for x, turned in zip(operands, self.stored_as_transposed))
            d = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
            self.launches.append(lambda a=a, b=b, d=d: self.multiply(a, b, d))

    def operand(self, values):
        return values

    def multiply(self, a, b, d):
        return torch.mm(a, b, out=d)

    def outputs(self, first):
        return {"d": first}


class GemmNn(Gemm):
    stored_as_transposed = (False, False)


class GemmTn(Gemm):
    stored_as_transposed = (True, False)


class GemmE4m3(Gemm):
    title = "torch._scaled_mm, fast accumulation (cuBLASLt)"

    def operand(self, values):
        return values.float().to(torch.float8_e4m3fn)

    def __init__(self, pattern, dimensions, sets):
        self.one = torch.ones((), device="cuda")
        super().__init__(pattern, dimensions, sets)

    def multiply(self, a, b, d):
        return torch._scaled_mm(a, b, scale_a=self.one, scale_b=self.one, out_dtype=torch.bfloat16, use_fast_accum=True, out=d)


class Attention:
    """torch's scaled_dot_product_attention by cuDNN, on the same memory: [batches, rows, heads, head_size]."""

    title = "torch SDPA (cuDNN)"
    # Sums of other orders and other roundings of the weights.
    tolerance = 5e-3
    causal = False

    def __init__(self, pattern, dimensions, sets):
        batches, length, heads, key_heads, head_size = dimensions
        self.launches = []
        for set in range(sets):
            q, k, v = (fill(pattern, 3 * set + i, (batches, length, h, head_size)).transpose(1, 2) for i, h in enumerate((heads, key_heads, key_heads)))
            self.launches.append(lambda q=q, k=k, v=v: self.attend(q, k, v))

    def attend(self, q, k, v):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=q.shape[1] != k.shape[1])

    def outputs(self, first):
        return {"out": first.transpose(1, 2)}


class AttentionCausal(Attention):
    causal = True


class AttentionBackward:
    """The backward pass of torch's scaled_dot_product_attention by cuDNN, on the same memory."""

    title = "torch SDPA backward (cuDNN)"
    # As of the forward pass.
    tolerance = 1e-2
    causal = False

    def __init__(self, pattern, dimensions, sets):
        batches, length, heads, key_heads, head_size = dimensions
        self.launches = []
        for set in range(sets):
            tensors = (fill(pattern, 4 * set + i, (batches, length, h, head_size)) for i, h in enumerate((heads, key_heads, key_heads, heads)))
            self.launches.append(self.differentiate(*(tensor.transpose(1, 2) for tensor in tensors)))

    def differentiate(self, q, k, v, grad_out):
        """The backward pass alone, without autograd's host work. Heads of keys are repeated, and their gradients added up, as torch does."""
        group = q.shape[1] // k.shape[1]
        if group > 1:
            k, v = (tensor.repeat_interleave(group, 1) for tensor in (k, v))
        forward = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, self.causal, False)
        out, log_sum_exp, cum_q, cum_k, max_q, max_k, seed, offset = forward[:8]

        def launch():
            dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
                grad_out, q, k, v, out, log_sum_exp, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, self.causal
            )
            if group > 1:
                dk, dv = (tensor.unflatten(1, (-1, group)).sum(2) for tensor in (dk, dv))
            return dq, dk, dv

        return launch

    def outputs(self, first):
        return dict(zip(("dq", "dk", "dv"), (gradient.transpose(1, 2) for gradient in first)))


class AttentionBackwardCausal(AttentionBackward):
    causal = True


PEERS = {
    "copy": Copy,
    "amax_compiled": AmaxCompiled,
    "multi_amax_compiled": MultiAmaxCompiled,
    "multi_amax_foreach": MultiAmaxForeach,
    "fp8_current_scaling_compiled": Fp8CurrentScalingCompiled,
    "fp8_cast_compiled": Fp8CastCompiled,
    "fp8_cast_transpose_compiled": Fp8CastTransposeCompiled,
    "fp8_cast_row_blocks_compiled": Fp8BlocksCompiled(fp8_cast_row_blocks),
    "fp8_cast_squares_compiled": Fp8BlocksCompiled(fp8_cast_squares),
    "fp8_transpose_contiguous": Fp8TransposeContiguous,
    "fp8_transpose_compiled": Fp8TransposeCompiled,
    "fp8_dequantize_compiled": Fp8DequantizeCompiled,
    "interleave_rows_compiled": InterleaveCompiled(interleave_rows, lambda outer, blocks: (outer, blocks)),
    "interleave_columns_compiled": InterleaveCompiled(interleave_columns, lambda outer, blocks: (blocks, outer)),
    "deinterleave_rows_compiled": InterleaveCompiled(deinterleave_rows, tiles_of),
    "deinterleave_columns_compiled": InterleaveCompiled(deinterleave_columns, tiles_of),
    "join_shards_compiled": InterleaveCompiled(join_shards, lambda outer, blocks: (8, outer, blocks // 8)),
    "mxfp8_cast_compiled": Mxfp8CastCompiled,
    "mxfp8_cast_columns_compiled": Mxfp8CastColumnsCompiled,
    "mxfp8_cast_both_compiled": Mxfp8CastBothCompiled,
    "mxfp8_interleaved_compiled": Mxfp8InterleavedCompiled,
    "mxfp8_gelu_compiled": Mxfp8GeluCompiled,
    "mxfp8_gelu_backward_compiled": Mxfp8GeluBackwardCompiled,
    "mxfp8_swiglu_compiled": Mxfp8SwigluCompiled,
    "mxfp8_dequantize_compiled": Mxfp8DequantizeCompiled,
    "mxfp8_dequantize_columns_compiled": Mxfp8DequantizeColumnsCompiled,
    "nvfp4_cast_compiled": Nvfp4CastCompiled,
    "nvfp4_cast_columns_compiled": Nvfp4CastColumnsCompiled,
    "nvfp4_cast_hadamard_compiled": Nvfp4CastHadamardCompiled,
    "nvfp4_cast_both_compiled": Nvfp4CastBothCompiled,
    "nvfp4_dequantize_compiled": Nvfp4DequantizeCompiled,
    "nvfp4_dequantize_columns_compiled": Nvfp4DequantizeColumnsCompiled,
    "attention_full": Attention,
    "attention_causal": AttentionCausal,
    "attention_backward_full": AttentionBackward,
    "attention_backward_causal": AttentionBackwardCausal,
    "gemm_nt": Gemm,
    "gemm_nn": GemmNn,
    "gemm_tn": GemmTn,
    "gemm_e4m3": GemmE4m3,
}
