#!/usr/bin/env python3
"""Writes formats.json, sample.bin and mxfp8.json beside itself, with numpy and ml_dtypes alone.

    pip install numpy==2.4.6 ml_dtypes==0.6.0
    python3 make_ml_dtypes.py

Where ml_dtypes and the PTX `cvt` instructions differ, this script does as `cvt` does:

* ml_dtypes overflows to NaN (e4m3fn, e2m1fn: to the largest) or Inf (e5m2); `cvt.satfinite` saturates.
  Inputs are clipped to the largest finite value first, which is the same since rounding is monotone.
* ml_dtypes keeps the sign of a NaN, or has none to give (e2m1fn); `cvt` gives one code whatever the sign:
  0x7f for e4m3 and e5m2, 7 for e2m1, 0x7fff for bf16 and f16.
* ml_dtypes rounds to nearest on the way to e8m0fnu; `cvt.rp` rounds up, saturates at 0xfe and takes 0 to 0.
  The rounding is numpy's frexp here; ml_dtypes only encodes the power of two.

formats.json
  decode.FORMAT   value of every code as f32 bits; null is NaN
  FROM.FORMAT     (FROM is f32, bf16 or f16) the codes of ALL input patterns 0 .. 2^16 or 2^32, run-length
                  coded: [[first pattern of the run, code], ...]. Rounding is monotone, so that runs are few; the
                  run boundaries of f32 are found by bisection and the runs are tried on 2^22 random patterns here.
  hash            FNV-1a 64, over little-endian u16 codes, of the conversions with too many runs: name -> hex
sample.bin        8192 records (f32 bits u32, bf16 code u16, f16 code u16), little-endian
mxfp8.json        tensors with their E4M3 and E5M2 casts, scales and dequantized values, as little-endian hex
"""

import json
import os

import ml_dtypes
import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
rng = np.random.default_rng(20261121)
np.seterr(all="ignore")

# name -> (ml_dtypes type, codes, largest finite value, code of NaN)
ELEMENTS = {
    "e4m3": (ml_dtypes.float8_e4m3fn, 256, 448.0, 0x7F),
    "e5m2": (ml_dtypes.float8_e5m2, 256, 57344.0, 0x7F),
    "e2m1": (ml_dtypes.float4_e2m1fn, 16, 6.0, 0x7),
}
HALVES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}


def encode(name, x):
    """Codes of f32 values by `cvt.rn.satfinite`."""
    dtype, codes, largest, nan = ELEMENTS[name]
    clipped = np.clip(x, np.float32(-largest), np.float32(largest))
    out = np.where(np.isnan(x), np.float32(0), clipped).astype(dtype).view(np.uint8) & (codes - 1)
    return np.where(np.isnan(x), nan, out).astype(np.uint8)


def encode_half(name, x):
    """Codes of f32 values by `cvt.rn.bf16.f32` or `cvt.rn.f16.f32`."""
    return np.where(np.isnan(x), 0x7FFF, x.astype(HALVES[name]).view(np.uint16)).astype(np.uint16)


def encode_scale(x):
    """Codes of the magnitudes of f32 values by `cvt.rp.satfinite.ue8m0x2.f32`."""
    a = np.abs(x.astype(np.float64))
    mantissa, exponent = np.frexp(np.where(np.isfinite(a), a, 1.0))
    ceil_log2 = np.where(mantissa == 0.5, exponent - 1, exponent)
    power = np.exp2(np.where(a == 0, -127, np.clip(ceil_log2, -127, 127)).astype(np.float64))
    code = power.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)
    return np.where(np.isnan(a), 0xFF, np.where(np.isinf(a), 0xFE, code)).astype(np.uint8)


ENCODE = {name: (lambda x, name=name: encode(name, x)) for name in ELEMENTS} | {"ue8m0": encode_scale}


def f32(patterns):
    return np.asarray(patterns, dtype=np.uint32).view(np.float32)


def decode_table(dtype, codes):
    values = np.arange(codes, dtype=np.uint8).view(dtype).astype(np.float32)
    return [None if np.isnan(v) else int(v.view(np.uint32)) for v in values]


def runs_of_table(codes):
    starts = np.flatnonzero(np.concatenate([[True], codes[1:] != codes[:-1]]))
    return [[int(s), int(codes[s])] for s in starts]


def runs_of_f32(code_of):
    """Runs over all 2^32 patterns, by bisection between coarse points where the code changes."""
    points = np.unique(np.concatenate([
        np.arange(0, 2**32, 2**17, dtype=np.uint64), [2**31, 0x7F800000, 0x7F800001, 0xFF800000, 0xFF800001, 2**32 - 1],
    ]).astype(np.uint64))
    codes = code_of(f32(points))
    runs = [[0, int(codes[0])]]
    changed = np.flatnonzero(codes[1:] != codes[:-1])

    def split(low, high, code_low, code_high):
        # Within a step of 2^17 patterns several codes may pass only if they are adjacent: bisect to each change.
        if code_low == code_high:
            return
        if high - low == 1:
            runs.append([int(high), int(code_high)])
            return
        middle = (low + high) // 2
        code = int(code_of(f32([middle]))[0])
        split(low, middle, code_low, code)
        split(middle, high, code, code_high)

    for i in changed:
        split(int(points[i]), int(points[i + 1]), int(codes[i]), int(codes[i + 1]))
    starts = np.array([r[0] for r in runs], dtype=np.uint64)
    values = np.array([r[1] for r in runs], dtype=np.uint8)
    patterns = rng.integers(0, 2**32, 2**22, dtype=np.uint64)
    assert (values[np.searchsorted(starts, patterns, side="right") - 1] == code_of(f32(patterns))).all()
    return runs


def fnv(codes):
    h = 0xCBF29CE484222325
    for byte in codes.astype("<u2").tobytes():
        h = ((h ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return f"{h:016x}"


def half_values(name):
    patterns = np.arange(2**16, dtype=np.uint16)
    return patterns.view(HALVES[name]).astype(np.float32)


def formats():
    out = {"decode": {name: decode_table(e[0], e[1]) for name, e in ELEMENTS.items()}}
    out["decode"]["ue8m0"] = decode_table(ml_dtypes.float8_e8m0fnu, 256)
    out["f32"] = {name: runs_of_f32(code_of) for name, code_of in ENCODE.items()}
    for half in HALVES:
        out[half] = {name: runs_of_table(code_of(half_values(half))) for name, code_of in ENCODE.items()}
    out["hash"] = {
        "bf16 to f16": fnv(encode_half("f16", half_values("bf16"))),
        "f16 to bf16": fnv(encode_half("bf16", half_values("f16"))),
        # Every 65521st pattern of f32, from 0.
        "f32 to bf16": fnv(encode_half("bf16", f32(np.arange(0, 2**32, 65521, dtype=np.uint64)))),
        "f32 to f16": fnv(encode_half("f16", f32(np.arange(0, 2**32, 65521, dtype=np.uint64)))),
        # The decoded value of every f16 code, NaN as 0x7fff, upper and lower half in turn.
        "f16 to f32": fnv(np.where(np.isnan(half_values("f16")), 0x7FFF7FFF, half_values("f16").view(np.uint32))
                          .astype("<u4").view("<u2")),
    }
    return out


def sample():
    random = rng.integers(0, 2**32, 4096, dtype=np.uint64)
    # Around the midpoints of bf16, those of f16, and the top and bottom of both.
    bf16_ties = (rng.integers(0, 2**16, 1024, dtype=np.uint64) << 16) + 0x8000
    exponents = rng.integers(127 - 26, 127 + 17, 1024, dtype=np.uint64)
    f16_ties = (exponents << 23) | (rng.integers(0, 2**10, 1024, dtype=np.uint64) << 13) | 0x1000
    near = np.concatenate([bf16_ties, f16_ties]) + rng.integers(-1, 2, 2048).astype(np.uint64)
    edges = np.array([0, 1, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FFFFFFF, 0x477FEFFF, 0x477FF000,
                      0x33000000, 0x33000001, 0x33800000, 0x387FC000, 0x387FE000, 0x38800000], dtype=np.uint64)
    subnormals = rng.integers(0, 2**24, 2048 - 2 * len(edges), dtype=np.uint64)
    patterns = np.concatenate([random, near, edges, edges | 2**31, subnormals]).astype(np.uint32)
    assert len(patterns) == 8192
    record = np.zeros(8192, dtype=[("f32", "<u4"), ("bf16", "<u2"), ("f16", "<u2")])
    record["f32"] = patterns
    record["bf16"] = encode_half("bf16", f32(patterns))
    record["f16"] = encode_half("f16", f32(patterns))
    return record.tobytes()


def mxfp8_cast(x, name):
    """Rowwise MXFP8 of f32 values [M, K]: codes [M, K], scales [M, ceil(K / 32)], dequantized [M, K]."""
    dtype, _, largest, _ = ELEMENTS[name]
    reciprocal = np.float32(1) / np.float32(largest)
    codes, scales, values = [], [], []
    for row in x:
        for start in range(0, len(row), 32):
            block = row[start:start + 32]
            amax = np.fmax.reduce(np.abs(block), initial=np.float32(0))
            scale = encode_scale(np.array([amax * reciprocal], dtype=np.float32))
            # 2^(127 - e), exact in f32 down to the subnormal 2^-127.
            multiplier = np.float32(2.0 ** (127 - int(scale[0])))
            code = encode(name, block * multiplier)
            scales.append(int(scale[0]))
            codes.append(code)
            values.append(code.view(dtype).astype(np.float32) * scale.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    return np.concatenate(codes), np.array(scales, dtype=np.uint8), np.concatenate(values)


def tensors():
    """(name, dtype, values [M, K] exactly representable in the dtype)."""
    def rounded(x, dtype):
        return x.astype(np.float32).astype(dtype).astype(np.float32)

    dtypes = {"f32": np.float32} | HALVES
    for name, dtype in dtypes.items():
        yield f"normal {name}", name, rounded(rng.standard_normal((3, 80)), dtype)
    for name in ("f32", "bf16"):
        exponents = np.exp2(rng.integers(-140, 127, (4, 64)).astype(np.float64))
        yield f"exponents {name}", name, rounded(rng.uniform(-2, 2, (4, 64)) * exponents, dtypes[name])
    special = rng.standard_normal((8, 32)).astype(np.float32)
    special[0, 5] = np.nan
    special[1] = np.nan
    special[2, 7] = np.inf
    special[3, 9] = -np.inf
    special[4] = 0.0
    special[4, ::2] = -0.0
    special[5] = rng.integers(0, 2**7, 32).astype(np.float32) * np.float32(2.0**-133)
    special[6] = np.float32(ml_dtypes.finfo(ml_dtypes.bfloat16).max) * rng.choice([-1, 1], 32).astype(np.float32)
    special[7, 3] = 1e30
    yield "special f32", "f32", special
    yield "special bf16", "bf16", rounded(special, ml_dtypes.bfloat16)
    grid = np.arange(-128, 128, dtype=np.float32).reshape(4, 64) * np.float32(0.875)
    yield "ties f16", "f16", rounded(grid, np.float16)
    yield "one column", "bf16", rounded(rng.standard_normal((5, 1)), ml_dtypes.bfloat16)


def mxfp8():
    out = []
    for title, dtype, x in tensors():
        entry = {"name": title, "dtype": dtype, "rows": x.shape[0], "columns": x.shape[1], "input": x.astype("<f4").tobytes().hex()}
        for name in ("e4m3", "e5m2"):
            codes, scales, values = mxfp8_cast(x, name)
            values = np.where(np.isnan(values), np.uint32(0x7FFFFFFF), values.view(np.uint32)).astype("<u4")
            entry[name] = {"data": codes.tobytes().hex(), "scales": scales.tobytes().hex(), "dequantized": values.tobytes().hex()}
        out.append(entry)
    return out


def dump(name, value):
    with open(os.path.join(HERE, name), "w") as file:
        json.dump(value, file, separators=(",", ":"))
        file.write("\n")


if __name__ == "__main__":
    dump("formats.json", formats())
    with open(os.path.join(HERE, "sample.bin"), "wb") as file:
        file.write(sample())
    dump("mxfp8.json", mxfp8())
