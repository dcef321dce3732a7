#!/usr/bin/env python3
"""Writes fp8.json beside itself, with numpy and ml_dtypes alone.

    pip install numpy==2.4.6 ml_dtypes==0.6.0
    python3 make_fp8.py

Each tensor [M, K] is cast to E4M3 and E5M2 with one f32 scale for the tensor, one for each 128 neighbours of a row, and one for
each 128x128 square, under two rules: as it is, and with powers of two and an epsilon. The formulas are
TransformerEngine's `common/recipe/recipe_common.cuh`; numpy's float32 division and product round as the GPU's. Where
ml_dtypes and `cvt.rn.satfinite` differ, this script does as `cvt` does: inputs are clipped to the largest finite value,
and every NaN is 0x7f.

fp8.json    tensors as little-endian hex; of each cast the codes [M, K] and the f32 inverses of the scales
"""

import json
import os

import ml_dtypes
import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
rng = np.random.default_rng(20261122)
np.seterr(all="ignore")

# name -> (ml_dtypes type, largest finite value)
ELEMENTS = {"e4m3": (ml_dtypes.float8_e4m3fn, 448.0), "e5m2": (ml_dtypes.float8_e5m2, 57344.0)}
DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
# name -> (epsilon, powers of two)
RULES = {"plain": (np.float32(0), False), "powers": (np.float32(2.0**-20), True)}


def encode(name, x):
    dtype, largest = ELEMENTS[name]
    clipped = np.clip(x, np.float32(-largest), np.float32(largest))
    codes = np.where(np.isnan(x), np.float32(0), clipped).astype(dtype).view(np.uint8)
    return np.where(np.isnan(x), np.uint8(0x7F), codes)


def scale_of(block, name, rule, largest_scale):
    epsilon, powers = RULES[rule]
    amax = np.fmax.reduce(np.abs(block), axis=None, initial=np.float32(0))
    amax = epsilon if amax < epsilon else amax
    if amax == 0 or np.isinf(amax):
        return np.float32(1)
    scale = np.float32(ELEMENTS[name][1]) / amax
    if np.isinf(scale):
        scale = np.float32(largest_scale)
    if powers:
        mantissa, exponent = np.frexp(scale)
        scale = np.ldexp(np.float32(0.5), exponent)
    return np.float32(scale)


def cast(x, name, rule, block_rows, block_columns, largest_scale):
    """Codes of the shape of x; inverses of the scales, one a block, row by row of blocks."""
    codes, inverses = np.zeros(x.shape, np.uint8), []
    for row in range(0, x.shape[0], block_rows):
        for column in range(0, x.shape[1], block_columns):
            place = np.s_[row:row + block_rows, column:column + block_columns]
            scale = scale_of(x[place], name, rule, largest_scale)
            codes[place] = encode(name, x[place] * scale)
            inverses.append(np.float32(1) / scale)
    return {"data": codes.tobytes().hex(), "inverses": np.array(inverses, "<f4").tobytes().hex()}


def tensors():
    """(name, dtype, values [M, K] exactly representable in the dtype)."""
    for name, dtype in DTYPES.items():
        yield f"normal {name}", name, rng.standard_normal((3, 200)).astype(np.float32).astype(dtype)
    for name in ("f32", "bf16"):
        exponents = np.exp2(rng.integers(-140, 127, (4, 150)).astype(np.float64))
        yield f"exponents {name}", name, (rng.uniform(-2, 2, (4, 150)) * exponents).astype(np.float32).astype(DTYPES[name])
    special = rng.standard_normal((8, 130)).astype(np.float32)
    special[0, 5] = np.nan
    special[1] = np.nan
    special[2, 7] = np.inf
    special[3, 9] = -np.inf
    special[4] = 0.0
    special[4, ::2] = -0.0
    special[5] = rng.integers(0, 2**7, 130).astype(np.float32) * np.float32(2.0**-133)
    special[6] = np.float32(ml_dtypes.finfo(ml_dtypes.bfloat16).max) * rng.choice([-1, 1], 130).astype(np.float32)
    special[7, 3] = 1e30
    yield "special f32", "f32", special
    yield "special bf16", "bf16", special.astype(ml_dtypes.bfloat16)
    tiny = rng.integers(-128, 128, (2, 140)).astype(np.float32) * np.float32(2.0**-133)
    yield "subnormal bf16", "bf16", tiny.astype(ml_dtypes.bfloat16)
    yield "subnormal f32", "f32", rng.integers(-(2**20), 2**20, (2, 140)).astype(np.int32).astype(np.float32) * np.float32(2.0**-149)


def main():
    out = []
    for title, dtype, typed in tensors():
        x = typed.astype(np.float32)
        of_type = float(np.float32(ml_dtypes.finfo(DTYPES[dtype]).max))
        entry = {"name": title, "dtype": dtype, "rows": x.shape[0], "columns": x.shape[1], "input": x.astype("<f4").tobytes().hex()}
        entry["casts"] = [
            {"format": name, "rule": rule, "epsilon": float(RULES[rule][0]), "power_of_two": RULES[rule][1],
             "tensor": cast(x, name, rule, x.shape[0], x.shape[1], np.finfo(np.float32).max),
             "row_blocks": cast(x, name, rule, 1, 128, of_type), "squares": cast(x, name, rule, 128, 128, of_type)}
            for name in ELEMENTS for rule in RULES
        ]
        out.append(entry)
    with open(os.path.join(HERE, "fp8.json"), "w") as file:
        json.dump(out, file, separators=(",", ":"))
        file.write("\n")


main()
