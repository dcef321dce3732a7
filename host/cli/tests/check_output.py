"""Checks a quantized checkpoint: check_output.py INPUT OUTPUT REPORT.json

Reads both files with safetensors, decodes OUTPUT with ml_dtypes and holds the result against INPUT and the report.
"""

import json
import math
import sys

import ml_dtypes
import numpy
import safetensors

DTYPES = {
    "F32": numpy.float32,
    "F16": numpy.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": numpy.int64,
    "U8": numpy.uint8,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}


def load(path):
    """Tensors by name. `deserialize` checks the whole header and knows every dtype; `safe_open` gives the metadata."""
    with open(path, "rb") as file:
        entries = safetensors.deserialize(file.read())
    arrays = {
        name: numpy.frombuffer(entry["data"], DTYPES[entry["dtype"]]).reshape(entry["shape"]) for name, entry in entries
    }
    with safetensors.safe_open(path, framework="numpy") as file:
        assert sorted(file.keys()) == sorted(arrays), "both ways of opening see the same tensors"
        return arrays, file.metadata()


def check_mxfp8(before, codes, scales, amax, report):
    """Decodes one tensor and compares it with its original."""
    assert codes.dtype == ml_dtypes.float8_e4m3fn and codes.shape == before.shape
    rows, columns = math.prod(before.shape[:-1]), before.shape[-1]
    assert scales.dtype == ml_dtypes.float8_e8m0fnu and scales.shape == (rows, columns // 32)
    assert amax.dtype == numpy.float32 and amax.shape == (1,)
    exact = before.astype(numpy.float64).reshape(rows, columns)
    assert amax[0] == abs(exact).max(), "amax is the largest magnitude"
    blocks = codes.astype(numpy.float64).reshape(rows, columns // 32, 32)
    decoded = (blocks * scales.astype(numpy.float64)[:, :, None]).reshape(rows, columns)
    # Half a step of three mantissa bits, or of the smallest subnormal.
    step = numpy.maximum(abs(exact) * 2**-4, numpy.repeat(scales.astype(numpy.float64), 32, axis=1) * 2**-10)
    assert (abs(decoded - exact) <= step).all(), "every element is within half a step"
    noise = ((decoded - exact) ** 2).sum()
    assert math.isclose(report["snr_db"], 10 * math.log10((exact**2).sum() / noise), rel_tol=1e-9)
    assert report["zeros"] == (decoded == 0).sum() and report["saturated"] == 0
    assert math.isclose(report["amax"], float(amax[0]), rel_tol=1e-6)


def check_nvfp4(before, packed, scales, global_scale, amax, report):
    """Decodes one tensor and compares it with its original."""
    rows, columns = math.prod(before.shape[:-1]), before.shape[-1]
    assert packed.dtype == numpy.uint8 and packed.shape == (rows, columns // 2)
    assert scales.dtype == ml_dtypes.float8_e4m3fn and scales.shape == (rows, columns // 16)
    exact = before.astype(numpy.float64).reshape(rows, columns)
    assert amax.dtype == numpy.float32 and amax.shape == (1,) and amax[0] == abs(exact).max()
    assert global_scale.dtype == numpy.float32 and global_scale == numpy.float32(2688) / amax
    nibbles = numpy.stack([packed & 0xF, packed >> 4], axis=-1).reshape(rows, columns // 16, 16)
    elements = nibbles.astype(numpy.uint8).view(ml_dtypes.float4_e2m1fn).astype(numpy.float64)
    # As compressed-tensors and vLLM decode: the scales over the global scale.
    factors = scales.astype(numpy.float64) / float(global_scale[0])
    decoded = (elements * factors[:, :, None]).reshape(rows, columns)
    # Half a step of one mantissa bit, or of the subnormal; the scale's own rounding moves the largest by up to 1/16.
    step = numpy.maximum(abs(exact) * 2**-2, numpy.repeat(factors, 16, axis=1) * 2**-2) * (1 + 1e-6)
    assert (abs(decoded - exact) <= step).all(), "every element is within half a step"
    noise = ((decoded - exact) ** 2).sum()
    assert math.isclose(report["snr_db"], 10 * math.log10((exact**2).sum() / noise), rel_tol=1e-5)
    assert report["zeros"] == (decoded == 0).sum() and report["saturated"] == 0
    assert math.isclose(report["amax"], float(amax[0]), rel_tol=1e-6)


PARTS = {
    "mxfp8": (check_mxfp8, ["", "_scale", "_amax"]),
    "nvfp4": (check_nvfp4, ["_packed", "_scale", "_global_scale", "_amax"]),
}


def main(input_path, output_path, report_path):
    (before, metadata_before), (after, metadata) = load(input_path), load(output_path)
    check, parts = PARTS[metadata["oxtile.format"]]
    assert metadata["format"] == metadata_before["format"]
    with open(report_path, encoding="utf-8") as file:
        report = {tensor["name"]: tensor for tensor in json.load(file)["tensors"]}
    assert report.keys() == before.keys()
    quantized = 0
    for name, array in before.items():
        if report[name]["action"] == "quantized":
            (side,) = report[name]["sides"]
            check(array, *(after.pop(name + part) for part in parts), side)
            quantized += 1
        else:
            copy = after.pop(name)
            assert copy.dtype == array.dtype and copy.shape == array.shape and copy.tobytes() == array.tobytes()
    assert not after, f"nothing else is in the output: {list(after)}"
    print(f"{quantized} tensors quantized, {len(before) - quantized} passed through")


if __name__ == "__main__":
    main(*sys.argv[1:])
