"""FP8: TransformerEngine common/recipe/recipe_common.cuh. No NaN or Inf in the input, no amax of 0."""

import torch

from peer import Compiled, amax, compile, compiled, exact_division, fill

LARGEST = 448.0  # of E4M3


def encode(x, scale):
    return (x.float() * scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def cast(x, amax):
    """E4M3 codes and the inverse of their one scale."""
    scale = exact_division(LARGEST, amax)
    return encode(x, scale), exact_division(1.0, scale)


def current_scaling(x):
    return cast(x, amax(x).float())


def cast_transpose(x, amax):
    data, _ = cast(x, amax)
    return data, data.t().contiguous()


def transpose(codes):
    return codes.t().contiguous()


def dequantize(data, inverse):
    return (data.float() * inverse).to(torch.bfloat16)


def cast_blocks(x, side):
    """E4M3 codes and the inverse of the scale of each block of `side` rows by 128 columns."""
    rows, columns = x.shape
    blocks = x.view(rows // side, side, columns // 128, 128).float()
    scale = exact_division(LARGEST, blocks.abs().amax((1, 3), keepdim=True))
    return encode(blocks, scale).view(rows, columns), exact_division(1.0, scale)


def cast_row_blocks(x):
    return cast_blocks(x, 1)


def cast_squares(x):
    return cast_blocks(x, 128)


class Cast(Compiled):
    """A tensor and its amax."""

    def inputs(self, pattern, dimensions, set, sets):
        x = fill(pattern, set, dimensions)
        return x, amax(x).float()


class Dequantize(Compiled):
    """Codes and the inverse of their scale."""

    def inputs(self, pattern, dimensions, set, sets):
        return current_scaling(fill(pattern, set, dimensions))


class TransposeContiguous:
    title = "torch codes.t().contiguous()"
    transpose = staticmethod(transpose)

    def __init__(self, pattern, dimensions, sets):
        inputs = [current_scaling(fill(pattern, set, dimensions))[0].view(torch.uint8) for set in range(sets)]
        self.launches = [lambda codes=codes: self.transpose(codes) for codes in inputs]

    def outputs(self, first):
        return {"transposed": first}


class TransposeCompiled(TransposeContiguous):
    title = "torch.compile(codes.t().contiguous())"

    def __init__(self, pattern, dimensions, sets):
        self.transpose = compile(transpose)
        super().__init__(pattern, dimensions, sets)


SCALED = ("data", "scale_inverse")
# Of blocks the codes alone: scales lie in other orders.
CODES = ("data",)

PEERS = {
    "fp8_current_scaling_compiled": compiled(current_scaling, SCALED),
    "fp8_cast_compiled": compiled(cast, SCALED, Cast),
    "fp8_cast_transpose_compiled": compiled(cast_transpose, ("data", "transposed"), Cast),
    "fp8_cast_row_blocks_compiled": compiled(cast_row_blocks, CODES),
    "fp8_cast_squares_compiled": compiled(cast_squares, CODES),
    "fp8_transpose_contiguous": TransposeContiguous,
    "fp8_transpose_compiled": TransposeCompiled,
    "fp8_dequantize_compiled": compiled(dequantize, ("wide",), Dequantize),
}
