#!/usr/bin/env python3
"""Writes nvfp4.json beside itself, with numpy and ml_dtypes alone.

    pip install numpy==2.4.6 ml_dtypes==0.6.0
    python3 make_nvfp4.py

Formulas: TransformerEngine common/cast/nvfp4/core_nvfp4.cuh and dequantize_nvfp4.cuh, every step in float32. Roundings
are those of ml_dtypes; since it overflows where `cvt.satfinite` saturates, inputs are clipped to the largest value
first, and since float4_e2m1fn has no NaN, a NaN is made the +6 that `cvt` gives.

Each tensor: input, amax, encode_scale, data (the even element in the low nibble), scales, dequantized; little-endian hex.
"""

import json
import os

import ml_dtypes
import numpy as np

rng = np.random.default_rng(4)
np.seterr(all="ignore")
F = np.float32
MAX = np.finfo(F).max


def cast(x):
    """The cast of whole blocks, and back."""
    amax = np.fmax.reduce(np.abs(x), initial=F(0))
    encode = np.fmin(F(2688) / amax, MAX)
    encode = F(1) if amax == 0 or encode == 0 else encode
    blocks = x.reshape(-1, 16)
    block_amax = np.fmax.reduce(np.abs(blocks), axis=1, initial=F(0))
    wanted = np.fmin(block_amax * (encode * F(1 / 6)), MAX)
    scales = np.minimum(wanted, F(448)).astype(ml_dtypes.float8_e4m3fn)
    multiplier = np.fmin(F(1) / (scales.astype(F) * (F(1) / encode)), MAX)
    scaled = blocks * multiplier[:, None]
    clipped = np.where(np.isnan(scaled), F(6), np.clip(scaled, F(-6), F(6)))
    elements = clipped.astype(ml_dtypes.float4_e2m1fn)
    codes = (elements.view(np.uint8) & 0xF).reshape(-1, 2)
    factor = scales.astype(F) * amax * F(1 / 2688)
    values = elements.astype(F) * factor[:, None]
    assert all(a.dtype == F for a in (wanted, multiplier, scaled, factor, values))
    return {
        "amax": F(amax).tobytes(),
        "encode_scale": F(encode).tobytes(),
        "data": (codes[:, 0] | codes[:, 1] << 4).astype(np.uint8).tobytes(),
        "scales": scales.tobytes(),
        "dequantized": values.astype("<f4").tobytes(),
    }


def tensors():
    yield "normal", rng.standard_normal(192)
    yield "normal bf16", rng.standard_normal(96).astype(ml_dtypes.bfloat16)
    yield "tiny", rng.standard_normal(96) * 1e-36
    yield "subnormal", rng.integers(-(2**20), 2**20, 96) * 2.0**-149
    yield "huge", rng.choice([-1, 1], 32) * float(MAX)
    yield "exponents", rng.uniform(-2, 2, 640) * np.exp2(rng.integers(-148, 127, 640).astype(np.float64))
    yield "zeros", np.where(np.arange(32) % 2 == 0, 0.0, -0.0)
    outlier = rng.standard_normal(96)
    outlier[40] = 1e30
    yield "outlier", outlier
    infinite = rng.standard_normal(96)
    infinite[[3, 50]] = np.inf, -np.inf
    yield "infinite", infinite
    nans = rng.standard_normal(96)
    nans[5::7] = np.nan
    nans[32:48] = -np.nan
    yield "NaN", nans
    yield "ties", np.concatenate([np.arange(-64, 64) * 0.25 * 2.0**k for k in range(-4, 4)])
    yield "small blocks", rng.standard_normal((24, 16)) * np.exp2(-np.arange(24.0))[:, None]


if __name__ == "__main__":
    out = []
    for name, values in tensors():
        x = np.ravel(values).astype(F)
        entry = {"name": name} | {key: value.hex() for key, value in ({"input": x.astype("<f4").tobytes()} | cast(x)).items()}
        out.append(entry)
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "nvfp4.json"), "w") as file:
        json.dump(out, file, separators=(",", ":"))
        file.write("\n")
