"""NVFP4: TransformerEngine common/cast/nvfp4/core_nvfp4.cuh, dequantize_nvfp4.cuh, quantize_4over6_nvfp4.cuh. No NaN or Inf in the
input, no amax of 0.
"""

import torch

from copies import interleave_rows
from peer import Compiled, amax, compiled, exact_division, fill

BLOCK = 16
LARGEST = 448.0  # of E4M3
RANGE = 6.0 * LARGEST


def blocks_of(x):
    rows, columns = x.shape
    return x.view(rows, columns // BLOCK, BLOCK).float()


def e2m1(scaled):
    """The nearest codes, those of an even code where two are as near."""
    a = scaled.abs()
    # Midpoints go to the even code: down from those that are not included.
    code = (a > 0.25).to(torch.uint8) + (a >= 0.75) + (a > 1.25) + (a >= 1.75) + (a > 2.5) + (a >= 3.5) + (a > 5.0)
    return code | torch.signbit(scaled).to(torch.uint8) << 3


def value_of(code):
    m = (code & 7).float()
    magnitude = torch.where(m <= 4, m * 0.5, torch.where(m == 7, 6.0, m - 2.0))
    # Not -magnitude: compiled, that is 0 - magnitude, which has no -0.
    return magnitude * torch.where(code > 7, -1.0, 1.0)


def pack(codes):
    """[rows, blocks, 16] to pairs [rows, blocks * 8]."""
    pairs = codes.view(codes.shape[0], -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4


def e4m3(x):
    return x.clamp(max=LARGEST).to(torch.float8_e4m3fn)


def multiplier(scales, encode):
    return exact_division(1.0, scales.float() * exact_division(1.0, encode)).unsqueeze(-1)


def cast_blocks(blocks, block_amax, amax):
    """[rows, blocks, 16] to pairs of codes and scales [rows, blocks]; the amax is the tensor's or, [rows, 1], each row's."""
    encode = exact_division(RANGE, amax)
    scales = e4m3(block_amax * (encode * (1.0 / 6.0)))
    return pack(e2m1(blocks * multiplier(scales, encode))), scales


def cast_rows(x, amax):
    """[rows, columns] to pairs of E2M1 codes [rows, columns / 2] and E4M3 scales [rows, columns / 16]."""
    blocks = blocks_of(x)
    return cast_blocks(blocks, blocks.abs().amax(-1), amax)


def cast_columns(x, amax):
    """The cast of the transpose."""
    return cast_rows(x.t().contiguous(), amax)


def cast_both(x, amax):
    return *cast_rows(x, amax), *cast_columns(x, amax)


def cast_squares(x, amax):
    """Both directions, 16 by 16 elements with one scale."""
    rows, columns = x.shape
    squares = x.abs().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK).amax((1, 3)).float()
    by_rows = cast_blocks(blocks_of(x), squares.repeat_interleave(BLOCK, 0), amax)
    return *by_rows, *cast_blocks(blocks_of(x.t().contiguous()), squares.t().repeat_interleave(BLOCK, 0), amax)


def cast_rows_interleaved(x, amax):
    data, scales = cast_rows(x, amax)
    return data, interleave_rows(scales.view(torch.uint8))


def cast_scaled_rows(x):
    """With an amax for each row."""
    return cast_rows(x, x.abs().amax(1, keepdim=True).float())


def cast_rows_4over6(x, amax):
    """Each block with the largest element at 6 and at 4: that of the smaller sum of absolute errors, at 6 if they are the same."""
    blocks, encode = blocks_of(x), exact_division(RANGE, amax)
    base = (blocks.abs().amax(-1).double() / 6.0).float() * encode

    def candidate(scale):
        scales = e4m3(scale)
        codes = e2m1(blocks * multiplier(scales, encode))
        found = ((value_of(codes) * scales.float().unsqueeze(-1) * amax).double() / RANGE).float()
        error = 0.0
        for lost in (found - blocks).abs().unbind(-1):  # In order.
            error = error + lost
        return codes, scales.view(torch.uint8), error

    (six, six_scales, six_error), (four, four_scales, four_error) = candidate(base), candidate(base * 1.5)
    is_four = four_error < six_error
    return pack(torch.where(is_four.unsqueeze(-1), four, six)), torch.where(is_four, four_scales, six_scales)


def cast_columns_4over6(x, amax):
    return cast_rows_4over6(x.t().contiguous(), amax)


def hadamard(x):
    """The random Hadamard transform of the transpose, in float32, by the kernel's butterfly."""
    negative = 0xD7E8 >> torch.arange(16, device=x.device) & 1
    y = x.t().reshape(-1, 16).float() * (1 - 2 * negative)
    for distance in (1, 2, 4, 8):
        a, b = y.view(-1, 8 // distance, 2, distance).unbind(2)
        y = torch.stack([a + b, a - b], dim=2).view(-1, 16)
    return (y * 0.25).view(x.shape[1], x.shape[0])


def cast_hadamard(x, amax):
    return cast_rows(hadamard(x), amax)


def hadamard_amax(x):
    """After the transform, and before, which is not compared."""
    return amax(hadamard(x)), amax(x).float()


def dequantize_rows(data, scales, amax):
    """The inverse, rounded to bf16; the amax is the tensor's or, [rows, 1], each row's."""
    rows, pairs = data.shape
    codes = torch.stack([data & 0xF, data >> 4], dim=-1).view(rows, pairs // 8, BLOCK)
    factor = scales.float() * amax * (1.0 / RANGE)
    return (value_of(codes) * factor.unsqueeze(-1)).to(torch.bfloat16).view(rows, 2 * pairs)


def dequantize_columns(data, scales, amax):
    return dequantize_rows(data, scales, amax).t().contiguous()


class Cast(Compiled):
    """A tensor and the amax of what `transform` makes of it."""

    transform = staticmethod(lambda x: x)

    def inputs(self, pattern, dimensions, set, sets):
        x = fill(pattern, set, dimensions)
        return x, amax(self.transform(x)).float()


class CastHadamard(Cast):
    transform = staticmethod(hadamard)


class Dequantize(Compiled):
    """What `cast` makes, and the amax."""

    cast = staticmethod(cast_rows)

    def inputs(self, pattern, dimensions, set, sets):
        x = fill(pattern, set, dimensions)
        of_all = self.amax(x).float()
        return *self.cast(x, of_all), of_all

    def amax(self, x):
        return amax(x)


class DequantizeColumns(Dequantize):
    cast = staticmethod(cast_columns)


class DequantizeScaledRows(Dequantize):
    def amax(self, x):
        return x.abs().amax(1, keepdim=True)


PAIR = ("data", "scales")
BOTH = ("row_data", "row_scales", "column_data", "column_scales")

PEERS = {
    "nvfp4_cast_compiled": compiled(cast_rows, PAIR, Cast),
    "nvfp4_cast_columns_compiled": compiled(cast_columns, PAIR, Cast),
    "nvfp4_cast_hadamard_compiled": compiled(cast_hadamard, PAIR, CastHadamard),
    "nvfp4_hadamard_amax_compiled": compiled(hadamard_amax, ("amax",)),
    "nvfp4_cast_both_compiled": compiled(cast_both, BOTH, Cast),
    "nvfp4_squares_compiled": compiled(cast_squares, BOTH, Cast),
    "nvfp4_interleaved_compiled": compiled(cast_rows_interleaved, PAIR, Cast),
    "nvfp4_scaled_rows_compiled": compiled(cast_scaled_rows),
    "nvfp4_4over6_compiled": compiled(cast_rows_4over6, PAIR, Cast),
    "nvfp4_columns_4over6_compiled": compiled(cast_columns_4over6, PAIR, Cast),
    "nvfp4_dequantize_compiled": compiled(dequantize_rows, ("wide",), Dequantize),
    "nvfp4_dequantize_columns_compiled": compiled(dequantize_columns, ("wide",), DequantizeColumns),
    "nvfp4_dequantize_scaled_rows_compiled": compiled(dequantize_rows, ("wide",), DequantizeScaledRows),
}
