"""Attention with gradients, and low-precision formats, by GPU kernels written in Rust.

Tensors are those of NumPy, PyTorch, CuPy or JAX. On a GPU the kernels run on the library's current stream, and the call returns before they are
done. On the CPU the same kernels run on an emulator: right to the bit, and slow.

    out = oxtile.attention(q, k, v, causal=True)
    x8 = oxtile.quantize(x, "mxfp8")
    y = oxtile.dequantize(x8)
"""

import os as _os

from . import _oxtile
from ._attention import attention, attention_backward
from ._oxtile import Error, kernels
from ._quantize import Quantized, dequantize, quantize

_oxtile.kernels_are_in(_os.path.join(_os.path.dirname(__file__), "kernels"))

__all__ = ["Error", "Quantized", "attention", "attention_backward", "dequantize", "kernels", "quantize"]
__version__ = "0.1.0"
