#!/usr/bin/env python3
"""Writes nvfp4_reference.json beside itself: what TransformerEngine's own reference quantizer in Python gives.

    pip install torch==2.4.1 numpy            (the CPU is enough)
    git clone https://github.com/NVIDIA/TransformerEngine; git -C TransformerEngine checkout d0067d0da6cb
    python3 make_nvfp4_reference.py TransformerEngine

It loads transformer_engine/pytorch/custom_recipes/reference_nvfp4.py and reference_utils.py alone; the modules that those import and
that quantization does not use are empty here. Inputs are float32 that bf16 holds. Left out is what the reference does not
define as the kernels do: NaN, and -0, to which it gives the code of +0. The Hadamard transform multiplies by a matrix in an order of
the library's choice, so its input is small integers, whose sums are exact in any.

Each tensor: rows, columns, input (bf16); for each cast its name, its direction, data (the even element in the low nibble), scales and
amax (one, or one for each row), little-endian hex.
"""

import importlib.util
import json
import os
import sys
import types

import numpy as np
import torch

HERE = os.path.dirname(os.path.abspath(__file__))
ROWS, COLUMNS = 32, 48


def load(checkout):
    """The reference module, without the rest of its package."""
    recipes = "transformer_engine.pytorch.custom_recipes"
    for name in ("transformer_engine", "transformer_engine.pytorch", recipes, recipes + ".gemm"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules[recipes + ".gemm"].__dict__.update(GEMMType=types.SimpleNamespace(FPROP=None), MMParams=None)
    tensor = types.ModuleType("transformer_engine.pytorch.quantized_tensor")

    class Quantizer:
        def __init__(self, *, rowwise, columnwise):
            self.rowwise_usage, self.columnwise_usage = rowwise, columnwise

    tensor.Quantizer, tensor.QuantizedTensorStorage = Quantizer, object
    sys.modules[tensor.__name__] = tensor
    modules = {}
    for name in ("reference_utils", "reference_nvfp4"):
        path = os.path.join(checkout, "transformer_engine/pytorch/custom_recipes", name + ".py")
        spec = importlib.util.spec_from_file_location(f"{recipes}.{name}", path)
        modules[name] = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = modules[name]
        setattr(sys.modules[recipes], name, modules[name])
        setattr(sys.modules[recipes], "gemm", sys.modules[recipes + ".gemm"])
        spec.loader.exec_module(modules[name])
    return modules


def where_of_bytes(where=torch.where):
    """`torch.where` that takes E4M3 on the CPU too: its bytes are selected."""

    def selected(condition, a, b):
        if a.dtype != torch.float8_e4m3fn:
            return where(condition, a, b)
        return where(condition, a.view(torch.uint8), b.view(torch.uint8)).view(a.dtype)

    return selected


def inputs():
    random = np.random.default_rng(11)
    shape = (ROWS, COLUMNS)
    yield "normal", random.standard_normal(shape)
    outlier = random.standard_normal(shape)
    outlier[7, 21] = 1e30
    yield "outlier", outlier
    yield "rows of all sizes", random.standard_normal(shape) * np.exp2(-4.0 * np.arange(ROWS))[:, None]
    yield "max finite", random.choice([-1, 1], shape) * 3.3895313892515355e38
    yield "zeros", np.zeros(shape)
    yield "ties", random.integers(1, 64, shape) * 0.25 * random.choice([-1, 1], shape)
    yield "integers", random.integers(1, 33, shape) * random.choice([-1.0, 1.0], shape)


# name -> arguments of the quantizer
CASTS = {
    "plain": {},
    "squares": {"quant_tile_shape": (16, 16)},
    "hadamard": {"with_rht": True},
    "scaled rows": {"row_scaled_nvfp4": True},
}
for squared, mode in ((False, "MAE"), (True, "MSE")):
    for largest in (448, 256):
        arguments = {"nvfp4_use_4over6": True, "nvfp4_4over6_err_mode": mode, "nvfp4_e4m3_max": largest}
        name = f"4over6 {'squared' if squared else 'absolute'} {largest}"
        CASTS[name] = arguments
        CASTS["scaled rows " + name] = arguments | {"row_scaled_nvfp4": True}


def main(checkout):
    torch.where = where_of_bytes()
    modules = load(checkout)
    quantizer, formats = modules["reference_nvfp4"].NVFP4QuantizerRef, modules["reference_utils"].Fp4Formats
    tensors = []
    for name, values in inputs():
        x = torch.tensor(values, dtype=torch.float32).to(torch.bfloat16)
        casts = []
        for cast, arguments in CASTS.items():
            if cast == "hadamard" and name != "integers":
                continue
            by_columns = "scaled" not in cast
            rule = quantizer(formats.E2M1, columnwise=by_columns, **arguments)
            data, scales, data_t, scales_t, amax, amax_t = rule._quantize(x.to(torch.float32))
            found = [("rows", data, scales, amax)] + [("columns", data_t, scales_t, amax_t)] * by_columns
            for direction, codes, codes_of_scales, largest in found:
                casts.append({
                    "name": cast,
                    "direction": direction,
                    "data": codes.contiguous().numpy().tobytes().hex(),
                    "scales": codes_of_scales.contiguous().view(torch.uint8).numpy().tobytes().hex(),
                    "amax": largest.contiguous().numpy().astype("<f4").tobytes().hex(),
                })
        bits = x.view(torch.int16).numpy().astype("<i2").tobytes().hex()
        tensors.append({"name": name, "rows": ROWS, "columns": COLUMNS, "input": bits, "casts": casts})
    with open(os.path.join(HERE, "nvfp4_reference.json"), "w") as file:
        json.dump(tensors, file, separators=(",", ":"))
        file.write("\n")


if __name__ == "__main__":
    main(sys.argv[1])
