"""Quantization: arguments checked and results made, for any library."""

from dataclasses import dataclass
from typing import Any, Optional, Tuple

from . import _oxtile
from ._libraries import Torch, common_library, library_of, warn_of_the_emulator

_ELEMENTS = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Quantized:
    """A quantized matrix.

    Attributes:
        codes: the codes. ``mxfp8`` and ``fp8``: one e4m3 for each element; ``nvfp4``: bytes of two e2m1, the even element in the low four bits. Of the
            transpose where `direction` is columns, but for ``mxfp8``. PyTorch's ``float8_e4m3fn`` where it is that, else bytes.
        scales: what codes are multiplied by. ``mxfp8``: e8m0, one for 32 neighbours; ``nvfp4``: e4m3, one for 16 neighbours; ``fp8``: one ``float32``.
        amax: ``nvfp4``: the largest magnitude of the matrix, one ``float32``: an element is ``code * scale * amax / (6 * 448)``. Else None.
        shape: of the array that was quantized.
        format: ``mxfp8``, ``nvfp4`` or ``fp8``.
        direction: along which dimension neighbours share a scale: ``rows`` or ``columns``.
        element: the type of the array that was quantized.
    """

    codes: Any
    scales: Any
    amax: Optional[Any]
    shape: Tuple[int, ...]
    format: str
    direction: str
    element: str


def matrix(shape):
    """The rows and columns of an array: all dimensions but the last are rows."""
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows, shape[-1]


# Neighbours that share a scale (none: all do), elements in a byte of codes, and whether codes and scales by columns are those of the transpose.
_SHAPES = {"mxfp8": (32, 1, False), "nvfp4": (16, 2, True), "fp8": (None, 1, True)}


def result_shapes(format, direction, rows, columns):
    """The shapes of codes and scales of a matrix that the format can hold, of sizes that may be unknown yet: as `_oxtile.quantized_shapes`."""
    block, elements, turns = _SHAPES[format]
    by_columns = direction == "columns"
    lines, length = (columns, rows) if turns and by_columns else (rows, columns)
    outer, inner = (columns, rows) if by_columns else (rows, columns)
    scales = (1, 1) if block is None else (outer, (inner + block - 1) // block)
    return (lines, (length + elements - 1) // elements), scales if turns or not by_columns else scales[::-1]


def cast(library, x, format, direction):
    """Codes, scales and the amax of an array. Name, direction and shape are checked before anything is moved."""
    shape = matrix(x.shape)
    of_codes, of_scales, has_amax = _oxtile.quantized_shapes(format, direction, list(shape))
    if library.is_on_cpu(x):
        warn_of_the_emulator(10 * shape[0] * shape[1], "quantization")
    x = library.contiguous("x", x.reshape(shape))
    codes = library.empty(tuple(of_codes), "uint8", x)
    scales = library.empty(tuple(of_scales), "float32" if format == "fp8" else "uint8", x)
    amax = [library.empty((1,), "float32", x)] if has_amax else []
    with library.device(x):
        _oxtile.quantize([x, codes, scales, *amax], format, direction, library.stream(x))
    return codes, scales, amax[0] if has_amax else None


def restore(library, codes, scales, amax, shape, format, direction, element):
    """The matrix; FP8 by columns gives the transpose."""
    codes, scales = library.contiguous("codes", codes), library.contiguous("scales", scales)
    is_turned = format == "fp8" and direction == "columns"
    output = library.empty(tuple(reversed(shape)) if is_turned else tuple(shape), element, codes)
    # The codes of the transpose by rows are those of the matrix by columns.
    tensors = [output, codes, scales, *([] if amax is None else [library.contiguous("amax", amax)])]
    with library.device(codes):
        _oxtile.dequantize(tensors, format, "rows" if is_turned else direction, element, library.stream(codes))
    return library.given(output, element)


def quantize(x, format, direction="rows"):
    """Quantizes an array.

    Arguments:
        x: ``bfloat16``, ``float16`` or ``float32``, of at least one dimension. All dimensions but the last are rows of one matrix.
        format: ``"mxfp8"`` (OCP MX, e4m3, a power of two for 32 neighbours), ``"nvfp4"`` (e2m1, an e4m3 for 16 neighbours, and one float32) or ``"fp8"`` (e4m3, one
            scale). Rounding is to nearest, ties to even, as TransformerEngine does it.
        direction: along which dimension neighbours share a scale: ``"rows"``, or ``"columns"`` of a matrix, for products from the other side.

    Returns:
        A `Quantized`, whose arrays are of `x`'s library and device.

    ``nvfp4`` wants columns that are a multiple of 16, and rows too by columns; ``mxfp8`` takes any. The gradient is none: what is quantized is detached.

    Raises:
        TypeError: `x` is of no known library, or of another type.
        ValueError: the format cannot hold the shape, or has another name.
        oxtile.Error: there is no driver or no kernel for the GPU, or a device failed.
    """
    library = library_of("x", x)
    element = library.element(x)
    if element not in _ELEMENTS:
        raise TypeError(f"x is {element}: quantization takes bfloat16, float16 and float32")
    if x.ndim == 0:
        raise ValueError("x has no dimension: pass at least one row")
    if library is Torch:
        from . import _torch

        codes, scales, amax = _torch.quantize(x.detach(), format, direction)
    else:
        codes, scales, amax = (None if array is None else library.given(array, "") for array in cast(library, x, format, direction))
    return Quantized(codes, scales, amax, tuple(x.shape), format, direction, element)


def dequantize(quantized, dtype=None):
    """Restores an array that `quantize` quantized.

    Arguments:
        quantized: a `Quantized`.
        dtype: the type of the result, by name or as the library's own: ``"bfloat16"``, ``"float16"`` or ``"float32"``; by default that of the array that
            was quantized. NumPy has no ``bfloat16``.

    Returns:
        An array of the shape that was quantized.

    Raises:
        TypeError: `quantized` is no `Quantized`, or `dtype` another type.
        ValueError: its arrays do not have the sizes of its format and shape.
        oxtile.Error: as `quantize`.
    """
    if not isinstance(quantized, Quantized):
        raise TypeError(f"quantized is a {type(quantized).__name__}: pass what oxtile.quantize returned")
    arrays = {"codes": quantized.codes, "scales": quantized.scales, "amax": quantized.amax}
    library = common_library(**{name: array for name, array in arrays.items() if array is not None})
    element = quantized.element if dtype is None else str(getattr(dtype, "__name__", dtype)).removeprefix("torch.")
    if element not in _ELEMENTS:
        raise TypeError(f"dtype is {element}: bfloat16, float16 or float32")
    shape, format, direction = matrix(quantized.shape), quantized.format, quantized.direction
    if library is Torch:
        from . import _torch

        output = _torch.dequantize(quantized.codes, quantized.scales, quantized.amax, shape, format, direction, element)
    else:
        output = restore(library, quantized.codes, quantized.scales, quantized.amax, shape, format, direction, element)
    return (output.T if format == "fp8" and direction == "columns" else output).reshape(quantized.shape)
