"""Operators of PyTorch: with shapes for torch.compile, and gradients for autograd."""

from typing import Optional, Tuple

import torch

from . import _attention, _oxtile, _quantize
from ._libraries import Torch


def _options(causal, left, right, scale, deterministic):
    return _attention.Options(causal, (left, right), scale, deterministic)


def _ends(ends_q, ends_k):
    return None if ends_q is None else (ends_q, ends_k)


@torch.library.custom_op("oxtile::attention", mutates_args=())
def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ends_q: Optional[torch.Tensor],
    ends_k: Optional[torch.Tensor],
    causal: bool,
    left: Optional[int],
    right: Optional[int],
    scale: Optional[float],
    deterministic: bool,
) -> Tuple[torch.Tensor, torch.Tensor]:
    return _attention.forward(Torch, q, k, v, _ends(ends_q, ends_k), _options(causal, left, right, scale, deterministic))


@_forward.register_fake
def _(q, k, v, ends_q, ends_k, causal, left, right, scale, deterministic):
    of_out, of_lse = _attention.result_shapes(q, v, ends_q is not None)
    return q.new_empty(of_out), q.new_empty(of_lse, dtype=torch.float32)


@torch.library.custom_op("oxtile::attention_backward", mutates_args=())
def _backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad_out: torch.Tensor,
    ends_q: Optional[torch.Tensor],
    ends_k: Optional[torch.Tensor],
    causal: bool,
    left: Optional[int],
    right: Optional[int],
    scale: Optional[float],
    deterministic: bool,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    options = _options(causal, left, right, scale, deterministic)
    return _attention.backward(Torch, q, k, v, out, lse, grad_out, _ends(ends_q, ends_k), options)


@_backward.register_fake
def _(q, k, v, out, lse, grad_out, ends_q, ends_k, causal, left, right, scale, deterministic):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx, inputs, output):
    q, k, v, ends_q, ends_k, *ctx.options = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, ends_q, ends_k)


def _gradients(ctx, grad_out, _):
    q, k, v, out, lse, ends_q, ends_k = ctx.saved_tensors
    gradients = torch.ops.oxtile.attention_backward(q, k, v, out, lse, grad_out, ends_q, ends_k, *ctx.options)
    return *gradients, *[None] * (2 + len(ctx.options))


_forward.register_autograd(_gradients, setup_context=_save)


def _no_second_derivative(ctx, *gradients):
    raise _oxtile.Error("oxtile.attention has no second derivative: differentiate once, or attend with torch's own operations where two are needed")


_backward.register_autograd(_no_second_derivative)


def attention(q, k, v, ends, options):
    """The result and its log-sum-exp, with a gradient."""
    ends = ends or (None, None)
    return torch.ops.oxtile.attention(q, k, v, *ends, options.causal, *options.window, options.scale, options.deterministic)


def attention_backward(q, k, v, out, lse, grad_out, ends, options):
    """The gradients of q, k and v, which have none themselves."""
    tensors = [tensor.detach() for tensor in (q, k, v, out, lse, grad_out)]
    ends = ends or (None, None)
    return torch.ops.oxtile.attention_backward(*tensors, *ends, options.causal, *options.window, options.scale, options.deterministic)


@torch.library.custom_op("oxtile::quantize", mutates_args=())
def _cast(x: torch.Tensor, format: str, direction: str) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    codes, scales, amax = _quantize.cast(Torch, x, format, direction)
    return codes, scales, x.new_empty(0, dtype=torch.float32) if amax is None else amax


@_cast.register_fake
def _(x, format, direction):
    # Fails for names that are none; sizes may be unknown yet, and are checked when the operator runs.
    _oxtile.quantized_shapes(format, direction, [0, 0])
    codes, scales = _quantize.result_shapes(format, direction, *_quantize.matrix(x.shape))
    of_scales = torch.float32 if format == "fp8" else torch.uint8
    amax = x.new_empty(int(format == "nvfp4"), dtype=torch.float32)
    return x.new_empty(codes, dtype=torch.uint8), x.new_empty(scales, dtype=of_scales), amax


@torch.library.custom_op("oxtile::dequantize", mutates_args=())
def _restore(
    codes: torch.Tensor, scales: torch.Tensor, amax: Optional[torch.Tensor], rows: int, columns: int, format: str, direction: str, element: str
) -> torch.Tensor:
    return _quantize.restore(Torch, codes, scales, amax, (rows, columns), format, direction, element)


@_restore.register_fake
def _(codes, scales, amax, rows, columns, format, direction, element):
    shape = (columns, rows) if format == "fp8" and direction == "columns" else (rows, columns)
    return codes.new_empty(shape, dtype=getattr(torch, element))


def quantize(x, format, direction):
    """Codes, scales and the amax, of torch's types for them."""
    codes, scales, amax = torch.ops.oxtile.quantize(x, format, direction)
    if format != "nvfp4":
        codes = codes.view(torch.float8_e4m3fn)
    if format == "nvfp4":
        scales = scales.view(torch.float8_e4m3fn)
    elif format == "mxfp8" and hasattr(torch, "float8_e8m0fnu"):
        scales = scales.view(torch.float8_e8m0fnu)
    return codes, scales, amax if format == "nvfp4" else None


def dequantize(codes, scales, amax, shape, format, direction, element):
    """The matrix; FP8 by columns gives the transpose."""
    codes = codes.view(torch.uint8)
    scales = scales if format == "fp8" else scales.view(torch.uint8)
    return torch.ops.oxtile.dequantize(codes, scales, amax, *shape, format, direction, element)
