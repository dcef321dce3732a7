"""MXFP8: OCP Microscaling Formats 1.0; TransformerEngine common/util/ptx_arch_spec.cuh (e8m0_round_up), common/util/ptx.cuh
(exp2f_rcp, exp2f), common/cast/mxfp8/quantize_mxfp8.cuh, gated_mxfp8.cuh.
"""

import torch

from copies import interleave_columns, interleave_rows
from peer import Compiled, compiled, fill

BLOCK = 32
LARGEST = 448.0  # of E4M3


def encode(blocks, dimensions):
    """Blocks along some dimensions to E4M3 codes of that shape and E8M0 codes, those dimensions 1. No NaN in the input."""
    scaled = blocks.abs().amax(dimensions, keepdim=True) * (1.0 / LARGEST)
    bits = scaled.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    rounds_up = (mantissa > 0) & (exponent != 0xFE) & ~((exponent == 0) & (mantissa <= 0x400000))
    code = torch.where(exponent == 0xFF, 0xFE, exponent + rounds_up.to(torch.int32))
    multiplier = torch.where(code == 0xFE, 0x00400000, (254 - code) << 23).view(torch.float32)
    data = (blocks * multiplier).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return data, code.to(torch.uint8)


def cast_rows(x):
    """[rows, columns] to E4M3 codes of that shape and E8M0 codes [rows, columns / 32]."""
    rows, columns = x.shape
    data, scales = encode(x.view(rows, columns // BLOCK, BLOCK).float(), 2)
    return data.view(rows, columns), scales.squeeze(2)


def cast_columns(x):
    """[rows, columns] to E4M3 codes of that shape and E8M0 codes [rows / 32, columns]."""
    rows, columns = x.shape
    data, scales = encode(x.view(rows // BLOCK, BLOCK, columns).float(), 1)
    return data.view(rows, columns), scales.squeeze(1)


def cast_both(x):
    return *cast_rows(x), *cast_columns(x)


def cast_squares(x):
    """Both directions, 32 by 32 elements with one scale."""
    rows, columns = x.shape
    data, scales = encode(x.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK).float(), (1, 3))
    data, scales = data.view(rows, columns), scales.view(rows // BLOCK, columns // BLOCK)
    # Either direction has a tensor of its own.
    return data, scales.repeat_interleave(BLOCK, 0), data.clone(), scales.repeat_interleave(BLOCK, 1)


def cast_rows_interleaved(x):
    data, scales = cast_rows(x)
    return data, interleave_rows(scales)


def cast_both_interleaved(x):
    by_columns, column_scales = cast_columns(x)
    return *cast_rows_interleaved(x), by_columns, interleave_columns(column_scales)


def gelu(x):
    return cast_rows(torch.nn.functional.gelu(x.float(), approximate="tanh").to(torch.bfloat16))


def swiglu(x):
    act, gate = x.float().chunk(2, 1)
    return cast_rows((torch.nn.functional.silu(act) * gate).to(torch.bfloat16))


def gelu_backward(x, gradient):
    """Both directions of the gradient, and that itself."""
    x, k = x.float(), 0.79788456
    t = torch.tanh(k * x * (1 + 0.044715 * x * x))
    slope = 0.5 * x * (1 - t * t) * (k + 0.1070322243 * x * x) + 0.5 * (1 + t)
    return (gradient.float() * slope).to(torch.bfloat16)


def gelu_backward_both(x, gradient):
    return cast_both(gelu_backward(x, gradient))


def gelu_backward_bias(x, gradient):
    """With the gradient of the bias, which depends on the order of the sums and is not compared."""
    result = gelu_backward(x, gradient)
    return *cast_both(result), result.sum(0, dtype=torch.float32).to(torch.bfloat16)


def gelu_backward_columns(x, gradient):
    return cast_columns(gelu_backward(x, gradient))


def gelu_backward_bias_columns(x, gradient):
    """As `gelu_backward_bias`."""
    result = gelu_backward(x, gradient)
    return *cast_columns(result), result.sum(0, dtype=torch.float32).to(torch.bfloat16)


def swiglu_backward(x, gradient):
    """Both directions of the gradients of both halves of the input, side by side."""
    (act, gate), gradient = x.float().chunk(2, 1), gradient.float()
    sigmoid = torch.sigmoid(act)
    of_act = gradient * gate * (sigmoid * (1 + act * (1 - sigmoid)))
    return cast_both(torch.cat([of_act, gradient * (act * sigmoid)], 1).to(torch.bfloat16))


def values(data, scales):
    """Codes times their scales, rounded to bf16. No NaN scale."""
    code = scales.to(torch.int32)
    scale = torch.where(code == 0, 0x00400000, code << 23).view(torch.float32)
    return (data.float() * scale).to(torch.bfloat16)


def dequantize_rows(data, scales):
    rows, columns = data.shape
    return values(data.view(rows, columns // BLOCK, BLOCK), scales.unsqueeze(2)).view(rows, columns)


def dequantize_columns(data, scales):
    rows, columns = data.shape
    return values(data.view(rows // BLOCK, BLOCK, columns), scales.unsqueeze(1)).view(rows, columns)


class Gated(Compiled):
    """The input has both halves."""

    def inputs(self, pattern, dimensions, set, sets):
        return (fill(pattern, set, [dimensions[0], 2 * dimensions[1]]),)


class Backward(Compiled):
    """The input and the gradient."""

    def inputs(self, pattern, dimensions, set, sets):
        return fill(pattern, set, dimensions), fill(pattern, sets + set, dimensions)


class GatedBackward(Compiled):
    """The same of a gate, whose result has half as many columns."""

    def inputs(self, pattern, dimensions, set, sets):
        return fill(pattern, set, dimensions), fill(pattern, sets + set, [dimensions[0], dimensions[1] // 2])


class Dequantize(Compiled):
    """What `cast` makes."""

    cast = staticmethod(cast_rows)

    def inputs(self, pattern, dimensions, set, sets):
        return self.cast(fill(pattern, set, dimensions))


class DequantizeColumns(Dequantize):
    cast = staticmethod(cast_columns)


ROWS = ("row_data", "row_scales")
COLUMNS = ("column_data", "column_scales")
BOTH = (*ROWS, *COLUMNS)

PEERS = {
    "mxfp8_cast_compiled": compiled(cast_rows),
    "mxfp8_cast_columns_compiled": compiled(cast_columns),
    "mxfp8_cast_both_compiled": compiled(cast_both, BOTH),
    "mxfp8_interleaved_compiled": compiled(cast_rows_interleaved),
    "mxfp8_both_interleaved_compiled": compiled(cast_both_interleaved, BOTH),
    "mxfp8_squares_compiled": compiled(cast_squares, BOTH),
    "mxfp8_gelu_compiled": compiled(gelu, ROWS),
    "mxfp8_swiglu_compiled": compiled(swiglu, ROWS, Gated),
    "mxfp8_gelu_backward_compiled": compiled(gelu_backward_both, BOTH, Backward),
    "mxfp8_gelu_backward_bias_compiled": compiled(gelu_backward_bias, BOTH, Backward),
    "mxfp8_gelu_backward_columns_compiled": compiled(gelu_backward_columns, COLUMNS, Backward),
    "mxfp8_gelu_backward_bias_columns_compiled": compiled(gelu_backward_bias_columns, COLUMNS, Backward),
    "mxfp8_swiglu_backward_compiled": compiled(swiglu_backward, BOTH, GatedBackward),
    "mxfp8_dequantize_compiled": compiled(dequantize_rows, ("wide",), Dequantize),
    "mxfp8_dequantize_columns_compiled": compiled(dequantize_columns, ("wide",), DequantizeColumns),
}
