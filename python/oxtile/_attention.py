"""Attention: arguments checked and results made, for any library."""

import math
import numbers
from typing import NamedTuple, Optional

from . import _oxtile
from ._libraries import Torch, common_library, warn_of_the_emulator


class Options(NamedTuple):
    """What the compiled module takes beside tensors."""

    causal: bool
    window: tuple
    scale: Optional[float]
    deterministic: bool
    stream: int = 0


def options_of(causal, window, scale, deterministic):
    """The options as the compiled module takes them; an error that names the one that it does not take."""
    if not isinstance(causal, bool):
        raise TypeError(f"causal is {causal!r}: True or False")
    if not isinstance(deterministic, bool):
        raise TypeError(f"deterministic is {deterministic!r}: True or False")
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, numbers.Real)):
        raise TypeError(f"scale is {scale!r}: a number, or None for 1 / sqrt(head size)")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale is {scale!r}: from 1e-20 to 1e8, or None for 1 / sqrt(head size)")
    if window is None:
        window = (None, None)
    if not isinstance(window, tuple) or len(window) != 2:
        raise TypeError(f"window is {window!r}: (left, right), the keys that a query sees on either side of the diagonal, each None for no bound")
    for bound in window:
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int)):
            raise TypeError(f"window is {window!r}: each bound is an integer, or None for no bound")
        if bound is not None and not 0 <= bound < 1 << 30:
            raise ValueError(f"window is {window!r}: each bound is from 0 to {(1 << 30) - 1}, or None for no bound")
    return Options(causal, window, None if scale is None else float(scale), deterministic)


def ends_of(cu_seqlens):
    """The ends of queries and of keys; None for tensors that are not packed."""
    if cu_seqlens is None:
        return None
    ends = cu_seqlens if isinstance(cu_seqlens, (tuple, list)) else (cu_seqlens, cu_seqlens)
    if len(ends) != 2:
        raise ValueError(f"cu_seqlens has {len(ends)} arrays: give one, or a pair for queries and keys")
    return tuple(ends)


def check_ends(name, ends, rows):
    """Fails unless ends, on the host, begin at 0, do not fall and end at the number of rows."""
    ends = ends.tolist()
    wrong = ends and (ends[0] != 0 or any(b < a for a, b in zip(ends, ends[1:])) or ends[-1] != rows)
    if wrong:
        shown = ", ".join(map(str, ends[:6])) + (", ..." if len(ends) > 6 else "")
        raise ValueError(f"{name} is [{shown}]: it begins at 0, does not fall and ends at the number of rows, {rows}")


def checked(q, k, v, cu_seqlens):
    """The ends of sequences; fails for tensors with too few dimensions, and for ends of another library. No number is read: a compiler has none yet."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim < 3:
            raise ValueError(f"{name} has shape {list(tensor.shape)}: q, k and v are [batches, rows, heads, size], or [rows, heads, size] with cu_seqlens")
    ends = ends_of(cu_seqlens)
    if ends is not None:
        common_library(q=q, cu_seqlens=ends[0], cu_seqlens_k=ends[1])
    return ends


def prepare(library, q, k, ends):
    """Fails for ends on the host that are none, and warns of work that takes the emulator long."""
    if ends is not None:
        for name, array, rows in (("cu_seqlens", ends[0], q.shape[0]), ("cu_seqlens_k", ends[1], k.shape[0])):
            if q.ndim == 3 and array.ndim == 1 and library.is_on_cpu(array) and library.element(array) in ("int32", "uint32"):
                check_ends(name, array, rows)
    if library.is_on_cpu(q):
        rows = q.shape[0] * q.shape[1] if ends is None else q.shape[0]
        keys = k.shape[1] if ends is None else k.shape[0]
        warn_of_the_emulator(2 * rows * keys * q.shape[-2] * q.shape[-1], "attention")


def result_shapes(q, v, packed):
    """The shapes of the result and of its log-sum-exp."""
    *rows, heads, _ = q.shape
    return (*rows, heads, v.shape[-1]), ((heads, *rows) if packed else (rows[0], heads, *rows[1:]))


def forward(library, q, k, v, ends, options):
    """The result and its log-sum-exp."""
    prepare(library, q, k, ends)
    q, k, v = (library.contiguous(name, tensor) for name, tensor in (("q", q), ("k", k), ("v", v)))
    of_out, of_lse = result_shapes(q, v, ends is not None)
    out = library.empty(of_out, library.element(q), q)
    lse = library.empty(of_lse, "float32", q)
    if ends is not None:
        # Rows of no sequence, after the last, are left alone by the kernels.
        with library.device(q):
            out[...], lse[...] = 0, -math.inf
        ends = [library.contiguous("cu_seqlens", array) for array in ends]
    with library.device(q):
        _oxtile.attention_forward([q, k, v, out, lse], ends, options._replace(stream=library.stream(q)))
    return library.given(out, library.element(q)), library.given(lse, "float32")


def backward(library, q, k, v, out, lse, grad_out, ends, options):
    """The gradients of q, k and v."""
    prepare(library, q, k, ends)
    names = ("q", "k", "v", "out", "lse", "grad_out")
    q, k, v, out, lse, grad_out = (library.contiguous(name, tensor) for name, tensor in zip(names, (q, k, v, out, lse, grad_out)))
    gradients = [library.empty(tensor.shape, library.element(q), q) for tensor in (q, k, v)]
    if ends is not None:
        with library.device(q):
            for gradient in gradients:
                gradient[...] = 0
        ends = [library.contiguous("cu_seqlens", array) for array in ends]
    tensors = [q, k, v, out, lse, grad_out, *gradients]
    with library.device(q):
        _oxtile.attention_backward(tensors, ends, options._replace(stream=library.stream(q)))
    return tuple(library.given(gradient, library.element(q)) for gradient in gradients)


def attention(q, k, v, *, causal=False, window=None, scale=None, cu_seqlens=None, deterministic=False, return_lse=False):
    """``softmax(scale q k^T + mask) v``, with gradients for PyTorch's autograd.

    Arguments:
        q: queries, ``[batches, rows, heads, size]``; with `cu_seqlens` ``[rows, heads, size]``. ``bfloat16`` or ``float16``; ``size`` is a multiple of 8
            up to 256.
        k: keys, ``[batches, keys, key heads, size]``; packed ``[rows, key heads, size]``. ``heads`` is a multiple of ``key heads``: query head ``h`` sees
            key head ``h // (heads // key heads)``.
        v: values, as `k`; the size may be another one.
        causal: a query sees keys up to its own place. The last query is aligned with the last key: with fewer queries than keys this is not what
            PyTorch's ``is_causal`` means.
        window: ``(left, right)``: keys that a query sees before and after its own place; ``None`` is no bound.
        scale: factor of the scores; by default ``1 / sqrt(size)``.
        cu_seqlens: for packed sequences the sums of their lengths, ``[sequences + 1]``, 32-bit integers that begin at 0, on the tensors' device; or a
            pair of them, for queries and for keys. On a GPU they are not read by the host: what they place beyond the tensors is left out. Rows after the last
            sequence get zeros, and -inf.
        deterministic: whether gradients of queries are summed in the same order every time, which is slower.
        return_lse: whether the log-sum-exp is returned too.

    Returns:
        The result, ``[..., rows, heads, value size]``, of the tensors' library, type and device. With `return_lse` also the natural logarithm of each row's
        sum of exponentials, ``float32``, ``[batches, heads, rows]``, packed ``[heads, rows]``; it has no gradient.

    A query that sees no key gets zeros, and -inf. Nothing waits on the host. For PyTorch it is a custom operator, which ``torch.compile`` takes; a call while a CUDA
    graph is captured is an error. So is a second derivative.

    Raises:
        TypeError: a tensor is of no known library, of another type, or traced by JAX.
        ValueError: shapes, sizes, devices or options do not fit; the text says which, and what they may be.
        oxtile.Error: there is no driver or no kernel for the GPU, or a device failed.
    """
    library = common_library(q=q, k=k, v=v)
    options = options_of(causal, window, scale, deterministic)
    ends = checked(q, k, v, cu_seqlens)
    if library is Torch:
        from . import _torch

        out, lse = _torch.attention(q, k, v, ends, options)
    else:
        out, lse = forward(library, q, k, v, ends, options)
    return (out, lse) if return_lse else out


def attention_backward(q, k, v, out, lse, grad_out, *, causal=False, window=None, scale=None, cu_seqlens=None, deterministic=False):
    """The gradients of `attention` for a library without autograd.

    Arguments:
        q, k, v, causal, window, scale, cu_seqlens, deterministic: as given to `attention`.
        out, lse: what `attention` returned with ``return_lse=True``.
        grad_out: the gradient of `out`, of its shape and type.

    Returns:
        The gradients of `q`, `k` and `v`, of their shapes and type.

    Raises:
        As `attention`.
    """
    library = common_library(q=q, k=k, v=v, out=out, lse=lse, grad_out=grad_out)
    options = options_of(causal, window, scale, deterministic)
    ends = checked(q, k, v, cu_seqlens)
    if library is Torch:
        from . import _torch

        return _torch.attention_backward(q, k, v, out, lse, grad_out, ends, options)
    return backward(library, q, k, v, out, lse, grad_out, ends, options)
