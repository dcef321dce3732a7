from dataclasses import dataclass
from typing import Any, Literal, Optional, Tuple, TypeVar, Union, overload

_Array = TypeVar("_Array")
_Window = Optional[Tuple[Optional[int], Optional[int]]]
_Ends = Optional[Union[_Array, Tuple[_Array, _Array]]]
_Format = Literal["mxfp8", "nvfp4", "fp8"]
_Direction = Literal["rows", "columns"]

__version__: str

class Error(Exception): ...

@overload
def attention(
    q: _Array,
    k: _Array,
    v: _Array,
    *,
    causal: bool = False,
    window: _Window = None,
    scale: Optional[float] = None,
    cu_seqlens: _Ends[_Array] = None,
    deterministic: bool = False,
    return_lse: Literal[False] = False,
) -> _Array: ...
@overload
def attention(
    q: _Array,
    k: _Array,
    v: _Array,
    *,
    causal: bool = False,
    window: _Window = None,
    scale: Optional[float] = None,
    cu_seqlens: _Ends[_Array] = None,
    deterministic: bool = False,
    return_lse: Literal[True],
) -> Tuple[_Array, _Array]: ...
def attention_backward(
    q: _Array,
    k: _Array,
    v: _Array,
    out: _Array,
    lse: _Array,
    grad_out: _Array,
    *,
    causal: bool = False,
    window: _Window = None,
    scale: Optional[float] = None,
    cu_seqlens: _Ends[_Array] = None,
    deterministic: bool = False,
) -> Tuple[_Array, _Array, _Array]: ...
@dataclass(frozen=True)
class Quantized:
    codes: Any
    scales: Any
    amax: Optional[Any]
    shape: Tuple[int, ...]
    format: str
    direction: str
    element: str

def quantize(x: Any, format: _Format, direction: _Direction = "rows") -> Quantized: ...
def dequantize(quantized: Quantized, dtype: Any = None) -> Any: ...
def kernels(capability: Tuple[int, int]) -> int: ...
