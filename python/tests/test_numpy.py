"""Attention and quantization on arrays of NumPy, against float64 and the golden bytes: `python test_numpy.py GOLDEN`, with the folder of golden files."""

import json
import os
import sys
import unittest
import warnings

import numpy as np
import oxtile

GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tests", "golden")


def reference(q, k, v, grad, mask, scale):
    """Result, log-sum-exp and gradients of one sequence, `[rows, heads, size]`, in float64."""
    group = q.shape[1] // k.shape[1]
    q, k, v, grad = (x.astype(np.float64).transpose(1, 0, 2) for x in (q, k, v, grad))
    keys, values = k.repeat(group, 0), v.repeat(group, 0)
    scores = np.where(mask, scale * q @ keys.transpose(0, 2, 1), -np.inf)
    top = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), -1e300)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    p = weights / np.where(total == 0, 1, total)
    out = p @ values
    dp = grad @ values.transpose(0, 2, 1)
    ds = p * (dp - (grad * out).sum(-1, keepdims=True)) * scale
    of_keys = lambda x: x.reshape(x.shape[0] // group, group, *x.shape[1:]).sum(1)
    grads = ds @ keys, of_keys(ds.transpose(0, 2, 1) @ q), of_keys(p.transpose(0, 2, 1) @ grad)
    with np.errstate(divide="ignore"):
        lse = np.log(total[..., 0]) + np.where(total[..., 0] == 0, 0, top[..., 0])
    return [x.transpose(1, 0, 2) for x in (out, *grads)], lse


def mask_of(queries, keys, causal, window):
    place = np.arange(queries)[:, None] + keys - queries
    key = np.arange(keys)[None]
    left, right = window or (None, None)
    seen = np.ones((queries, keys), bool)
    seen &= (key <= place) | (not causal)
    seen &= (left is None) | (key >= place - (left or 0))
    seen &= (right is None) | (key <= place + (right or 0))
    return seen


class Attention(unittest.TestCase):
    def check(self, batches=2, queries=70, keys=70, heads=2, key_heads=2, size=64, value_size=None, causal=False, window=None, scale=None, ends=None):
        random = np.random.default_rng(7)
        lead = (batches,) if ends is None else ()
        draw = lambda *shape: random.standard_normal((*lead, *shape)).astype(np.float16)
        q, k, v = draw(queries, heads, size), draw(keys, key_heads, size), draw(keys, key_heads, value_size or size)
        grad = draw(queries, heads, value_size or size)
        options = dict(causal=causal, window=window, scale=scale, cu_seqlens=ends)
        out, lse = oxtile.attention(q, k, v, return_lse=True, **options)
        gradients = oxtile.attention_backward(q, k, v, out, lse, grad, **options)
        pairs = ends if isinstance(ends, tuple) else (ends, ends)
        if ends is None:
            parts = [(i, slice(None), slice(None), lse[i]) for i in range(batches)]
        else:
            spans = [[slice(a, b) for a, b in zip(e, e[1:])] for e in pairs]
            parts = [(slice(None), a, b, lse[:, a]) for a, b in zip(*spans)]
        for one, a, b, found_lse in parts:
            parts_of = lambda x, rows: x[one][rows]
            mask = mask_of(parts_of(q, a).shape[0], parts_of(k, b).shape[0], causal, window)
            wanted, wanted_lse = reference(parts_of(q, a), parts_of(k, b), parts_of(v, b), parts_of(grad, a), mask, scale or size**-0.5)
            for name, found, rows, right in zip(("out", "dq", "dk", "dv"), (out, *gradients), (a, a, b, b), wanted):
                error = np.abs(parts_of(found, rows).astype(np.float64) - right).max(initial=0)
                self.assertLess(error, 0.006 * max(1e-9, np.abs(right).max(initial=0)) + 1e-3, f"{name}: {error}")
            np.testing.assert_allclose(found_lse, wanted_lse, atol=2e-3)
        self.assertEqual((out.dtype, lse.dtype), (np.float16, np.float32))
        for gradient, of in zip(gradients, (q, k, v)):
            self.assertEqual((gradient.shape, gradient.dtype), (of.shape, of.dtype))

    def test_full(self):
        self.check()

    def test_causal_with_fewer_queries(self):
        self.check(queries=40, causal=True)

    def test_heads_that_share_keys(self):
        self.check(batches=1, heads=6, key_heads=2, size=128, causal=True)

    def test_window_and_scale(self):
        self.check(batches=1, window=(9, 3), scale=0.2)

    def test_causal_window(self):
        self.check(batches=1, causal=True, window=(20, None))

    def test_sizes_of_heads(self):
        self.check(batches=1, queries=33, keys=50, size=24)
        self.check(batches=1, queries=33, keys=50, size=192, value_size=128)

    def test_packed(self):
        self.check(queries=100, keys=100, ends=np.array([0, 30, 30, 100], np.int32), causal=True)

    def test_packed_with_other_keys(self):
        self.check(queries=60, keys=90, heads=4, key_heads=2, ends=(np.array([0, 20, 60], np.int32), np.array([0, 50, 90], np.int32)))

    def test_queries_without_keys_are_zeros(self):
        q, k = np.ones((1, 4, 1, 64), np.float16), np.ones((1, 2, 1, 64), np.float16)
        out, lse = oxtile.attention(q, k, k, causal=True, return_lse=True)
        self.assertTrue((out[0, :2] == 0).all() and (out[0, 2:] == 1).all())
        self.assertTrue(np.isneginf(lse[0, 0, :2]).all())

    def test_nothing(self):
        q = np.zeros((0, 4, 1, 64), np.float16)
        self.assertEqual(oxtile.attention(q, q, q).shape, q.shape)

    def test_views_and_read_only_arrays_are_taken(self):
        both = np.random.default_rng(1).standard_normal((2, 30, 3, 2, 64)).astype(np.float16)
        q, k, v = (both[:, :, i] for i in range(3))
        v.flags.writeable = False
        np.testing.assert_array_equal(oxtile.attention(q, k, v), oxtile.attention(q.copy(), k.copy(), v.copy()))

    def test_arrays_stay_as_they_are(self):
        q = np.random.default_rng(2).standard_normal((1, 20, 1, 64)).astype(np.float16)
        before = q.copy()
        out, lse = oxtile.attention(q, q, q, return_lse=True)
        kept = out.copy(), lse.copy()
        oxtile.attention_backward(q, q, q, out, lse, q)
        for array, old in ((q, before), (out, kept[0]), (lse, kept[1])):
            np.testing.assert_array_equal(array, old)


class BadArguments(unittest.TestCase):
    def refused(self, kind, words, *arguments, of=oxtile.attention, **options):
        with self.assertRaises(kind) as caught:
            of(*arguments, **options)
        self.assertIn(words, str(caught.exception))

    def test_attention(self):
        x = lambda *shape, type=np.float16: np.zeros(shape, type)
        q, ends = x(2, 5, 4, 64), lambda *e: np.array(e, np.int32)
        packed = x(5, 4, 64)
        lists = q.tolist()
        refused = self.refused
        refused(TypeError, "q is a list: pass an array of NumPy", lists, q, q)
        refused(TypeError, "v is a NoneType: pass an array of NumPy", q, q, None)
        refused(TypeError, "q is float32: attention takes bfloat16 and float16", *[x(2, 5, 4, 64, type=np.float32)] * 3)
        refused(TypeError, "k is float32, q is float16: convert one", q, x(2, 5, 4, 64, type=np.float32), q)
        refused(TypeError, "q is int64: attention takes", *[x(2, 5, 4, 64, type=np.int64)] * 3)
        refused(TypeError, "which its library does not lend", *[x(2, 5, 4, 64).astype(object)] * 3)
        refused(ValueError, "q has shape [64]", *[x(64)] * 3)
        refused(ValueError, "q has shape [5, 4, 64]: q, k and v are [batches, rows, heads, size], or give cu_seqlens", *[packed] * 3)
        refused(ValueError, "k has shape [3, 5, 4, 64], not [2, 5, 4, 64]: [batches, keys, key heads, size], batches and size as those of q", q, x(3, 5, 4, 64), x(3, 5, 4, 64))
        refused(ValueError, "k has shape [2, 5, 4, 32], not [2, 5, 4, 64]", q, x(2, 5, 4, 32), q)
        refused(ValueError, "v has shape [2, 6, 4, 64], not [2, 5, 4, 64]", q, q, x(2, 6, 4, 64))
        refused(ValueError, "key_heads is 3: a divisor of heads, which is 4", q, x(2, 5, 3, 64), x(2, 5, 3, 64))
        refused(ValueError, "head_size is 20: a multiple of 8 up to 256", *[x(2, 5, 4, 20)] * 3)
        refused(ValueError, "head_size is 264", *[x(1, 5, 1, 264)] * 3)
        refused(ValueError, "scale is -1", q, q, q, scale=-1)
        refused(ValueError, "scale is nan", q, q, q, scale=float("nan"))
        refused(TypeError, "scale is '1'", q, q, q, scale="1")
        refused(TypeError, "causal is 1: True or False", q, q, q, causal=1)
        refused(TypeError, "window is 5: (left, right)", q, q, q, window=5)
        refused(TypeError, "each bound is an integer", q, q, q, window=(1.5, 0))
        refused(ValueError, "each bound is from 0 to 1073741823", q, q, q, window=(-1, 0))
        refused(ValueError, "each bound is from 0", q, q, q, window=(0, 1 << 40))
        refused(ValueError, "q has shape [2, 5, 4, 64]: q, k and v are [rows, heads, size] with cu_seqlens", q, q, q, cu_seqlens=ends(0, 5))
        refused(ValueError, "cu_seqlens is [0, 4]: it begins at 0, does not fall and ends at the number of rows, 5", packed, packed, packed, cu_seqlens=ends(0, 4))
        refused(ValueError, "cu_seqlens is [0, 4, 3, 5]", packed, packed, packed, cu_seqlens=ends(0, 4, 3, 5))
        refused(ValueError, "cu_seqlens_k is [0, 2]", packed, packed, packed, cu_seqlens=(ends(0, 5), ends(0, 2)))
        refused(ValueError, "cu_seqlens_k has shape [3], not [2]", packed, packed, packed, cu_seqlens=(ends(0, 5), ends(0, 2, 5)))
        refused(TypeError, "cu_seqlens is int64: give 32-bit integers", packed, packed, packed, cu_seqlens=np.array([0, 5]))
        refused(ValueError, "cu_seqlens has 3 arrays", packed, packed, packed, cu_seqlens=(ends(0, 5),) * 3)
        refused(ValueError, "cu_seqlens has shape [], not [sequences + 1]", packed, packed, packed, cu_seqlens=np.array(5, np.int32))

    def test_backward(self):
        q, lse = np.zeros((1, 5, 2, 64), np.float16), np.zeros((1, 2, 5), np.float32)
        refused = lambda kind, words, *arguments: self.refused(kind, words, *arguments, of=oxtile.attention_backward)
        refused(ValueError, "lse has shape [1, 5, 2], not [1, 2, 5]: [batches, heads, queries]", q, q, q, q, lse.reshape(1, 5, 2), q)
        refused(TypeError, "lse is float16, not float32", q, q, q, q, lse.astype(np.float16), q)
        refused(ValueError, "grad_out has shape [1, 4, 2, 64], not [1, 5, 2, 64]: that of out", q, q, q, q, lse, q[:, :4])
        refused(ValueError, "out has shape [1, 4, 2, 64]", q, q, q, q[:, :4], lse, q[:, :4])

    def test_quantization(self):
        x = np.zeros((4, 20), np.float32)
        refused = lambda kind, words, *arguments: self.refused(kind, words, *arguments, of=oxtile.quantize)
        refused(ValueError, 'format is "int4": mxfp8, nvfp4 or fp8', x, "int4")
        refused(ValueError, 'direction is "up": rows or columns', x, "fp8", "up")
        refused(ValueError, "20 columns are not a multiple of 16: pad them", x, "nvfp4")
        refused(ValueError, "4 rows are not a multiple of 16", x[:, :16], "nvfp4", "columns")
        refused(TypeError, "x is float64: quantization takes", x.astype(np.float64), "mxfp8")
        refused(ValueError, "x has no dimension", np.array(1, np.float32), "mxfp8")
        refused(TypeError, "x is a list", [1.0], "mxfp8")
        refused = lambda kind, words, *arguments: self.refused(kind, words, *arguments, of=oxtile.dequantize)
        refused(TypeError, "quantized is a ndarray", x)
        good = oxtile.quantize(x, "mxfp8")
        refused(TypeError, "dtype is float64", good, np.float64)
        short = oxtile.Quantized(good.codes[:3], good.scales, None, good.shape, "mxfp8", "rows", "float32")
        refused(ValueError, "codes has 60 bytes, not the 80 of mxfp8 codes [4, 20] of a matrix [4, 20] by rows", short)
        other = oxtile.Quantized(good.codes, good.scales, good.scales, good.shape, "mxfp8", "rows", "float32")
        refused(ValueError, "mxfp8 has not an amax", other)

    def test_large_work_is_warned_of_once(self):
        from oxtile import _libraries

        _libraries._warned = False
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                _libraries.warn_of_the_emulator(1e10, "attention")
        self.assertEqual(len(caught), 1)
        self.assertIn("runs on an emulator of the GPU, here some 1.0e+10 multiplications", str(caught[0].message))

    def test_the_warning_names_the_line_of_the_call(self):
        from oxtile import _libraries

        x = np.zeros((1, 16, 1, 64), np.float16)
        for call in (lambda: oxtile.attention(x, x, x), lambda: oxtile.quantize(x, "mxfp8")):
            _libraries._warned, largest = False, _libraries._LARGE
            _libraries._LARGE = 1
            try:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    call()
            finally:
                _libraries._LARGE = largest
            self.assertEqual([(warning.category, warning.filename) for warning in caught], [(RuntimeWarning, __file__)])

    def test_memory_that_is_not_lent(self):
        class OnGpu:
            """An array that says that it is on a GPU."""

            def __dlpack_device__(self):
                return (2, 0)

            def __dlpack__(self, **_):
                raise BufferError("no such memory")

        from oxtile import _oxtile

        with self.assertRaisesRegex(TypeError, "x is a OnGpu, which its library does not lend .no such memory."):
            _oxtile.quantize([OnGpu()] * 3, "fp8", "rows", 0)


def unhex(text, type=np.uint8):
    return np.frombuffer(bytes.fromhex(text), type)


def golden(name):
    with open(os.path.join(GOLDEN, name)) as file:
        return json.load(file)


class Quantization(unittest.TestCase):
    def test_mxfp8_has_the_golden_bytes(self):
        seen = 0
        for tensor in golden("mxfp8.json"):
            for type in ("float32", "float16"):
                shape, values = (tensor["rows"], tensor["columns"]), unhex(tensor["input"], "<f4")
                if type != "float32" and tensor["dtype"] != "f16":
                    continue
                x = values.astype(type).reshape(shape)
                q = oxtile.quantize(x, "mxfp8")
                np.testing.assert_array_equal(q.codes.ravel(), unhex(tensor["e4m3"]["data"]), tensor["name"])
                np.testing.assert_array_equal(q.scales.ravel(), unhex(tensor["e4m3"]["scales"]), tensor["name"])
                restored = oxtile.dequantize(q, "float32")
                np.testing.assert_array_equal(restored.ravel(), unhex(tensor["e4m3"]["dequantized"], "<f4"), tensor["name"])
                seen += 1
        self.assertGreater(seen, 8)

    def test_nvfp4_has_the_golden_bytes(self):
        for tensor in golden("nvfp4.json"):
            q = oxtile.quantize(unhex(tensor["input"], "<f4"), "nvfp4")
            np.testing.assert_array_equal(q.codes.ravel(), unhex(tensor["data"]), tensor["name"])
            np.testing.assert_array_equal(q.scales.ravel(), unhex(tensor["scales"]), tensor["name"])
            np.testing.assert_array_equal(q.amax, unhex(tensor["amax"], "<f4"), tensor["name"])
            np.testing.assert_array_equal(oxtile.dequantize(q), unhex(tensor["dequantized"], "<f4"), tensor["name"])

    def test_nvfp4_by_columns_has_the_golden_bytes(self):
        seen = set()
        for tensor in golden("nvfp4_reference.json"):
            x = unhex(tensor["input"], "<u2").astype(np.uint32) << 16 if len(tensor["input"]) == 4 * tensor["rows"] * tensor["columns"] else unhex(tensor["input"], "<u4")
            x = x.view(np.float32).reshape(tensor["rows"], tensor["columns"])
            for cast in tensor["casts"]:
                if cast["name"] != "plain":
                    continue
                q = oxtile.quantize(x, "nvfp4", cast["direction"])
                np.testing.assert_array_equal(q.codes.ravel(), unhex(cast["data"]), tensor["name"])
                np.testing.assert_array_equal(q.scales.ravel(), unhex(cast["scales"]), tensor["name"])
                seen.add(cast["direction"])
        self.assertEqual(seen, {"rows", "columns"})

    def test_fp8_has_the_golden_bytes(self):
        seen = 0
        for tensor in golden("fp8.json"):
            x = unhex(tensor["input"], "<f4").reshape(tensor["rows"], tensor["columns"])
            for cast in tensor["casts"]:
                if cast["format"] != "e4m3" or cast["epsilon"] or cast["power_of_two"]:
                    continue
                rows, columns = oxtile.quantize(x, "fp8"), oxtile.quantize(x, "fp8", "columns")
                np.testing.assert_array_equal(rows.codes.ravel(), unhex(cast["tensor"]["data"]), tensor["name"])
                np.testing.assert_array_equal(rows.scales.ravel(), unhex(cast["tensor"]["inverses"], "<f4"), tensor["name"])
                np.testing.assert_array_equal(columns.codes.T, rows.codes, tensor["name"])
                np.testing.assert_array_equal(oxtile.dequantize(columns), oxtile.dequantize(rows), tensor["name"])
                seen += 1
        self.assertGreater(seen, 4)

    def test_every_format_and_direction_comes_back(self):
        x = np.random.default_rng(3).standard_normal((3, 16, 64)).astype(np.float16)
        for format, error in (("mxfp8", 0.07), ("fp8", 0.07), ("nvfp4", 0.35)):
            for direction in ("rows", "columns"):
                y = oxtile.dequantize(oxtile.quantize(x, format, direction))
                self.assertEqual((y.shape, y.dtype), (x.shape, x.dtype))
                self.assertLess((np.abs(y - x) / (np.abs(x) + 0.3)).max(), error, (format, direction))

    def test_a_compiler_finds_the_shapes_of_the_kernels(self):
        from oxtile import _oxtile, _quantize

        for format in ("mxfp8", "nvfp4", "fp8"):
            for direction in ("rows", "columns"):
                for rows, columns in ((0, 0), (0, 32), (16, 0), (16, 16), (16, 48), (48, 16), (96, 160), (64, 1024), *([] if format == "nvfp4" else [(1, 1), (3, 33), (65, 7)])):
                    codes, scales, _ = _oxtile.quantized_shapes(format, direction, [rows, columns])
                    found = _quantize.result_shapes(format, direction, rows, columns)
                    self.assertEqual(found, (tuple(codes), tuple(scales)), (format, direction, rows, columns))

    def test_columns_are_the_rows_of_the_transpose(self):
        x = np.random.default_rng(4).standard_normal((64, 48)).astype(np.float32)
        for format in ("mxfp8", "nvfp4"):
            columns, rows = oxtile.quantize(x, format, "columns"), oxtile.quantize(np.ascontiguousarray(x.T), format)
            turned = columns.codes if format == "nvfp4" else columns.codes.T
            np.testing.assert_array_equal(turned, rows.codes)


if __name__ == "__main__":
    if len(sys.argv) > 1 and os.path.isdir(sys.argv[1]):
        GOLDEN = sys.argv.pop(1)
    unittest.main()
