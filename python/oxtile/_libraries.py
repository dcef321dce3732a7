"""What differs between the libraries whose tensors are taken: how one is made, and which stream is current."""

import sys
import warnings
from contextlib import nullcontext


class NumPy:
    """Arrays of NumPy, on the CPU."""

    @staticmethod
    def contiguous(name, array):
        import numpy

        # A view of bytes may begin anywhere, also between elements.
        return numpy.require(array, requirements="CA") if array.ndim else array

    @staticmethod
    def element(array):
        return str(array.dtype)

    @staticmethod
    def empty(shape, element, like):
        import numpy

        return numpy.empty(shape, element)

    @staticmethod
    def is_on_cpu(array):
        return True

    @staticmethod
    def device(array):
        """Makes the array's device the current one meanwhile: the module leaves the one that it worked on."""
        return nullcontext()

    @staticmethod
    def stream(array):
        return 0

    @staticmethod
    def given(array, element):
        return array


class CuPy(NumPy):
    """Arrays of CuPy, on a GPU, on CuPy's current stream."""

    @staticmethod
    def contiguous(name, array):
        import cupy

        with array.device:
            array = cupy.ascontiguousarray(array) if array.ndim else array
            # A part of an array may begin anywhere; the kernels copy by 16 bytes.
            return array if array.data.ptr % 16 == 0 else array.copy()

    @staticmethod
    def empty(shape, element, like):
        import cupy

        with like.device:
            return cupy.empty(shape, element)

    @staticmethod
    def is_on_cpu(array):
        return False

    @staticmethod
    def device(array):
        return array.device

    @staticmethod
    def stream(array):
        import cupy

        return cupy.cuda.get_current_stream(array.device.id).ptr


class Jax(NumPy):
    """Arrays of JAX on the CPU: results are made as NumPy's, since JAX lets nothing write into its own."""

    @staticmethod
    def contiguous(name, array):
        import jax

        if isinstance(array, jax.core.Tracer):
            raise TypeError(f"{name} is traced: oxtile cannot be called inside jax.jit, jax.grad or jax.vmap; call it outside, with arrays")
        if any(device.platform != "cpu" for device in array.devices()):
            raise TypeError(f"{name} is a JAX array on a GPU, which oxtile cannot write results for: pass CuPy's or PyTorch's view of it (by DLPack)")
        return array

    @staticmethod
    def empty(shape, element, like):
        import numpy

        # NumPy lends no bfloat16: the bits travel as integers.
        return numpy.empty(shape, "uint16" if element == "bfloat16" else element)

    @staticmethod
    def given(array, element):
        import jax.numpy
        import numpy

        return jax.numpy.asarray(array.view(jax.numpy.bfloat16) if element == "bfloat16" and array.dtype == numpy.uint16 else array)


class Torch:
    """Tensors of PyTorch, on PyTorch's current stream."""

    @staticmethod
    def contiguous(name, tensor):
        tensor = tensor.detach().contiguous()
        # A part of a tensor may begin anywhere; the kernels copy by 16 bytes.
        return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()

    @staticmethod
    def element(tensor):
        return str(tensor.dtype).removeprefix("torch.")

    @staticmethod
    def empty(shape, element, like):
        import torch

        return torch.empty(shape, dtype=getattr(torch, element), device=like.device)

    @staticmethod
    def is_on_cpu(tensor):
        return tensor.device.type == "cpu"

    @staticmethod
    def device(tensor):
        import torch

        return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()

    @staticmethod
    def stream(tensor):
        import torch

        return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0

    @staticmethod
    def given(tensor, element):
        return tensor


def library_of(name, array):
    """The library of an array; a TypeError that names the argument for anything else."""
    modules = sys.modules
    if "torch" in modules and isinstance(array, modules["torch"].Tensor):
        return Torch
    if "numpy" in modules and isinstance(array, modules["numpy"].ndarray):
        return NumPy
    if "cupy" in modules and isinstance(array, modules["cupy"].ndarray):
        return CuPy
    if "jax" in modules and isinstance(array, modules["jax"].Array):
        return Jax
    raise TypeError(f"{name} is a {type(array).__name__}: pass an array of NumPy, PyTorch, CuPy or JAX")


def common_library(**arrays):
    """The library that all of these arrays are of."""
    found = {name: library_of(name, array) for name, array in arrays.items()}
    (first, library), *others = found.items()
    for name, other in others:
        if other is not library:
            raise TypeError(f"{first} is of {library.__name__}, {name} of {other.__name__}: convert one")
    return library


_LARGE = 1e8
_warned = False


def _outside():
    """The `stacklevel` of the first frame outside of this package: other libraries may lie between its own frames."""
    frame, level, found = sys._getframe(1), 1, 1
    while frame is not None:
        if frame.f_globals.get("__package__") == __package__:
            found = level + 1
        frame, level = frame.f_back, level + 1
    return found


def warn_of_the_emulator(multiply_adds, what):
    """Warns, once a process, of work that takes the emulator more than about a second."""
    global _warned
    if multiply_adds > _LARGE and not _warned:
        _warned = True
        words = f"{what} of tensors on the CPU runs on an emulator of the GPU, here some {multiply_adds:.1e} multiplications: it may take minutes"
        warnings.warn(words + "; move the tensors to a GPU, or try smaller ones", RuntimeWarning, stacklevel=_outside())
