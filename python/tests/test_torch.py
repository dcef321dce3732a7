"""Attention and quantization on tensors of PyTorch: `python test_torch.py`, on the CPU by the emulator, and on a GPU where there is one.

`OXTILE_REQUIRE=cuda` makes a missing GPU a failure.
"""

import os
import unittest

import oxtile
import torch
import torch.nn.functional as F

HAS_GPU = torch.cuda.is_available()
if os.environ.get("OXTILE_REQUIRE") == "cuda" and not HAS_GPU:
    raise SystemExit("OXTILE_REQUIRE=cuda asks for a GPU, and torch finds none")
DEVICES = ["cpu"] + ["cuda"] * HAS_GPU
on_gpu = unittest.skipUnless(HAS_GPU, "there is no GPU")


def reference(q, k, v, mask, scale=None):
    """Attention of `[batches, rows, heads, size]` by torch's SDPA in float32, differentiable."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.float().transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2)


def mask_of(queries, keys, causal, window, device):
    place = torch.arange(queries, device=device)[:, None] + keys - queries
    key = torch.arange(keys, device=device)[None]
    left, right = window or (None, None)
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if causal:
        seen &= key <= place
    if left is not None:
        seen &= key >= place - left
    if right is not None:
        seen &= key <= place + right
    return seen


def tensors(device, dtype, shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]


def grads_of(out, inputs, grad):
    return torch.autograd.grad(out, inputs, grad)


def compiled(function, device, **options):
    """The function as one graph: what breaks it is an error."""
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager", **options)


class Case(unittest.TestCase):
    def close(self, found, wanted, what, bound):
        error = (found.detach().float() - wanted.detach().float()).abs().max().item() if wanted.numel() else 0.0
        largest = wanted.abs().max().item() if wanted.numel() else 0.0
        self.assertLessEqual(error, bound * largest + 1e-4, f"{what}: {error} of {largest}")


class Attention(Case):
    BOUND = {torch.bfloat16: 0.012, torch.float16: 0.003}

    def check(self, device, dtype, batches=2, queries=70, keys=70, heads=2, key_heads=2, size=64, causal=False, window=None, scale=None):
        shapes = [(batches, queries, heads, size), (batches, keys, key_heads, size), (batches, keys, key_heads, size)]
        q, k, v = inputs = tensors(device, dtype, shapes)
        out = oxtile.attention(q, k, v, causal=causal, window=window, scale=scale)
        wanted = reference(q, k, v, mask_of(queries, keys, causal, window, device), scale)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(device, dtype)
        self.close(out, wanted, "out", self.BOUND[dtype])
        for name, found, right in zip("qkv", grads_of(out, inputs, grad), grads_of(wanted, inputs, grad.float())):
            self.assertEqual(found.dtype, dtype)
            self.close(found, right, f"gradient of {name}", self.BOUND[dtype])

    def test_gradients(self):
        for device in DEVICES:
            for dtype in self.BOUND:
                with self.subTest(device=device, dtype=dtype):
                    self.check(device, dtype)
                    self.check(device, dtype, causal=True, heads=4, key_heads=2)
                    self.check(device, dtype, batches=1, queries=40, causal=True, window=(20, None), scale=0.2)

    @on_gpu
    def test_gradients_of_larger_tensors(self):
        for dtype in self.BOUND:
            for size in (64, 128):
                for causal in (False, True):
                    with self.subTest(dtype=dtype, size=size, causal=causal):
                        self.check("cuda", dtype, queries=1000, keys=1000, heads=8, key_heads=2, size=size, causal=causal)
        self.check("cuda", torch.bfloat16, queries=300, keys=300, size=256, causal=True)
        self.check("cuda", torch.bfloat16, queries=700, keys=700, size=128, causal=True, window=(100, None))

    def test_packed(self):
        for device in DEVICES:
            q, k, v = inputs = tensors(device, torch.bfloat16, [(100, 4, 64), (100, 2, 64), (100, 2, 64)])
            ends = torch.tensor([0, 30, 30, 100], dtype=torch.int32, device=device)
            out = oxtile.attention(q, k, v, causal=True, cu_seqlens=ends)
            parts = [reference(q[None, a:b], k[None, a:b], v[None, a:b], mask_of(b - a, b - a, True, None, device))[0] for a, b in ((0, 30), (30, 100))]
            wanted = torch.cat(parts)
            grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out)
            self.close(out, wanted, "out", 0.012)
            for name, found, right in zip("qkv", grads_of(out, inputs, grad), grads_of(wanted, inputs, grad.float())):
                self.close(found, right, f"gradient of {name}", 0.012)

    def test_a_packed_qkv_and_an_expanded_gradient(self):
        for device in DEVICES:
            (qkv,) = tensors(device, torch.bfloat16, [(1, 30, 3, 2, 64)])
            out = oxtile.attention(*qkv.unbind(2), causal=True)
            (found,) = torch.autograd.grad(out.sum(), qkv)
            wanted = reference(*qkv.unbind(2), mask_of(30, 30, True, None, device))
            (right,) = torch.autograd.grad(wanted.sum(), qkv)
            self.close(found, right, "gradient", 0.02)

    def test_log_sum_exp(self):
        q, k, v = tensors("cpu", torch.float16, [(1, 20, 2, 64)] * 3)
        _, lse = oxtile.attention(q, k, v, return_lse=True)
        wanted = (q.float().transpose(1, 2) @ k.float().transpose(1, 2).mT / 8).logsumexp(-1)
        self.close(lse, wanted, "lse", 1e-3)
        self.assertFalse(lse.requires_grad)

    def test_the_operator_passes_opcheck(self):
        for device in DEVICES:
            q, k, v = tensors(device, torch.bfloat16, [(1, 20, 2, 64)] * 3)
            torch.library.opcheck(torch.ops.oxtile.attention.default, (q, k, v, None, None, True, None, None, None, True))

    def test_compile(self):
        for device in DEVICES:
            q, k, v = inputs = tensors(device, torch.bfloat16, [(1, 40, 4, 64), (1, 40, 2, 64), (1, 40, 2, 64)])

            def block(q, k, v):
                return oxtile.attention(q * 2, k, v, causal=True, deterministic=True).float().square().sum()

            found, wanted = compiled(block, device)(q, k, v), block(q, k, v)
            self.close(found, wanted, "result", 1e-3)
            for a, b in zip(torch.autograd.grad(found, inputs), torch.autograd.grad(wanted, inputs)):
                self.close(a, b, "gradient", 1e-2)

    def test_compile_of_packed_sequences(self):
        for device in DEVICES:
            q, k, v = inputs = tensors(device, torch.bfloat16, [(100, 4, 64), (100, 2, 64), (100, 2, 64)])
            ends = torch.tensor([0, 30, 30, 100], dtype=torch.int32, device=device)

            def block(q, k, v, ends):
                return oxtile.attention(q * 2, k, v, causal=True, window=(20, None), scale=0.2, cu_seqlens=ends, deterministic=True).float().square().sum()

            found, wanted = compiled(block, device)(q, k, v, ends), block(q, k, v, ends)
            self.close(found, wanted, "result", 1e-3)
            for a, b in zip(torch.autograd.grad(found, inputs), torch.autograd.grad(wanted, inputs)):
                self.close(a, b, "gradient", 1e-2)

    def test_compile_of_the_gradients_alone(self):
        for device in DEVICES:
            q, k, v, grad = tensors(device, torch.float16, [(1, 40, 2, 64)] * 4)

            def step(q, k, v, grad):
                out, lse = oxtile.attention(q + 1, k, v, return_lse=True)
                return oxtile.attention_backward(q + 1, k, v, out, lse, grad, deterministic=True)

            found, wanted = compiled(step, device)(q, k, v, grad), step(q, k, v, grad)
            right = grads_of(oxtile.attention(q + 1, k, v, deterministic=True), (q, k, v), grad)
            for a, b, c in zip(found, wanted, right):
                self.assertFalse(a.requires_grad or b.requires_grad)
                self.close(a, b, "gradient, compiled", 1e-2)
                self.close(b, c, "gradient, by autograd", 1e-2)

    def test_the_gradients_pass_opcheck(self):
        for device in DEVICES:
            q, k, v = (x.detach() for x in tensors(device, torch.bfloat16, [(1, 20, 2, 64)] * 3))
            out, lse = oxtile.attention(q, k, v, causal=True, return_lse=True)
            operands = (q, k, v, out, lse, out, None, None, True, None, None, None, True)
            torch.library.opcheck(torch.ops.oxtile.attention_backward.default, operands)

    def test_a_second_derivative_is_refused_by_name(self):
        q, k, v = tensors("cpu", torch.bfloat16, [(1, 16, 1, 64)] * 3)
        (first,) = torch.autograd.grad(oxtile.attention(q, k, v).float().sum(), q, create_graph=True)
        with self.assertRaisesRegex(oxtile.Error, "oxtile.attention has no second derivative"):
            first.float().sum().backward()

    def test_bad_arguments(self):
        q = torch.zeros(1, 4, 2, 64, dtype=torch.bfloat16)
        for kind, words, call in (
            (TypeError, "q is float32: attention takes bfloat16 and float16", lambda: oxtile.attention(*[q.float()] * 3)),
            (TypeError, "k is float16, q is bfloat16: convert one", lambda: oxtile.attention(q, q.half(), q)),
            (TypeError, "q is of Torch, k of NumPy: convert one", lambda: oxtile.attention(q, q.half().numpy(), q)),
            (ValueError, "cu_seqlens is [0, 3]", lambda: oxtile.attention(q[0], q[0], q[0], cu_seqlens=torch.tensor([0, 3], dtype=torch.int32))),
            (ValueError, "key_heads is 2: a divisor of heads, which is 3", lambda: oxtile.attention(torch.zeros(1, 4, 3, 64).bfloat16(), q, q)),
        ):
            with self.assertRaises(kind) as caught:
                call()
            self.assertIn(words, str(caught.exception))

    @unittest.skipUnless(torch.cuda.device_count() > 1, "there are no two GPUs")
    def test_the_current_device_stays(self):
        q, k, v = inputs = tensors("cuda:1", torch.bfloat16, [(1, 200, 2, 64)] * 3)
        out = oxtile.attention(q, k, v)
        torch.autograd.grad(out.float().sum(), inputs)
        oxtile.dequantize(oxtile.quantize(q, "mxfp8"))
        self.assertEqual(torch.cuda.current_device(), 0)
        self.close(out, reference(q, k, v, None), "out", 0.012)

    @on_gpu
    def test_tensors_on_two_devices(self):
        q = torch.zeros(1, 4, 2, 64, dtype=torch.bfloat16)
        with self.assertRaisesRegex(Exception, "k is on the CPU, q on GPU 0: move one|Expected all tensors"):
            oxtile.attention(q.cuda(), q, q)


class Streams(Case):
    """What only a GPU shows."""

    def step(self, inputs, grad, **options):
        out = oxtile.attention(*inputs, causal=True, deterministic=True, **options)
        return out, *torch.autograd.grad(out, inputs, grad)

    def setUp(self):
        if not HAS_GPU:
            self.skipTest("there is no GPU")
        self.inputs = tensors("cuda", torch.bfloat16, [(2, 1000, 4, 128)] * 3)
        self.grad = torch.randn(2, 1000, 4, 128, device="cuda").bfloat16()
        self.wanted = self.step(self.inputs, self.grad)
        torch.cuda.synchronize()

    def test_a_side_stream(self):
        side = torch.cuda.Stream()
        for _ in range(20):
            scale = torch.randn((), device="cuda").bfloat16()
            inputs = [(x.detach() * scale).requires_grad_() for x in self.inputs]
            wanted = self.step(inputs, self.grad)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                # Work before, which a call on another stream would not wait for.
                torch.cuda._sleep(2_000_000)
                own = [(x.detach() * scale).requires_grad_() for x in self.inputs]
                found = self.step(own, self.grad)
            torch.cuda.current_stream().wait_stream(side)
            for a, b in zip(found, wanted):
                self.assertTrue(torch.equal(a, b))

    def test_a_capture_is_refused_by_name(self):
        self.step([x.detach().clone().requires_grad_() for x in self.inputs], self.grad)
        torch.cuda.synchronize()
        q, k, v = (x.detach() for x in self.inputs)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            try:
                oxtile.attention(q, k, v)
                text = "it was captured"
            except oxtile.Error as error:
                text = str(error)
        self.assertIn("capture the bound run alone", text)

    def test_nothing_waits(self):
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        with profile(activities=activities):
            # The first profile of a process takes long to begin.
            torch.zeros(1, device="cuda")
        with profile(activities=activities) as profiler:
            torch.cuda._sleep(400_000_000)
            for _ in range(10):
                self.step(self.inputs, self.grad)
            done = torch.cuda.Event()
            done.record()
            waited = done.query()
        names = [event.name for event in profiler.events()]
        self.assertTrue(any("oxtile" in name for name in names))
        # The profiler itself synchronises the device when it ends.
        waits = [name for name in names if "StreamSynchronize" in name or "EventSynchronize" in name]
        self.assertEqual(waits, [])
        self.assertFalse(waited, "the stream was done when the calls returned: something waited")


class Quantization(Case):
    def test_formats(self):
        for device in DEVICES:
            x = torch.randn(3, 16, 64, generator=torch.Generator().manual_seed(1)).to(device)
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                for format, bound in (("mxfp8", 0.04), ("fp8", 0.04), ("nvfp4", 0.2)):
                    for direction in ("rows", "columns"):
                        quantized = oxtile.quantize(x.to(dtype), format, direction)
                        restored = oxtile.dequantize(quantized)
                        self.assertEqual((restored.dtype, restored.shape, restored.device), (dtype, x.shape, x.device))
                        self.close(restored, x.to(dtype), f"{format} {direction} {dtype}", bound)

    @on_gpu
    def test_the_emulator_and_a_gpu_give_the_same_bytes(self):
        x = torch.randn(96, 160, generator=torch.Generator().manual_seed(2)).bfloat16()
        for format in ("mxfp8", "fp8", "nvfp4"):
            for direction in ("rows", "columns"):
                here, there = oxtile.quantize(x, format, direction), oxtile.quantize(x.cuda(), format, direction)
                for a, b in ((here.codes, there.codes), (here.scales, there.scales)):
                    self.assertTrue(torch.equal(a.view(torch.uint8), b.cpu().view(torch.uint8)), (format, direction))

    def test_types_of_torch(self):
        x = oxtile.quantize(torch.randn(4, 32), "mxfp8")
        self.assertEqual(x.codes.dtype, torch.float8_e4m3fn)
        wide = x.codes.float() * 2.0 ** (x.scales.view(torch.uint8).float() - 127)
        self.assertTrue(torch.equal(wide, oxtile.dequantize(x)))

    def test_compile(self):
        for device in DEVICES:
            x = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(1)).to(device)
            for format in ("mxfp8", "nvfp4", "fp8"):
                for direction in ("rows", "columns"):

                    def there_and_back(x):
                        quantized = oxtile.quantize(x * 2, format, direction)
                        return quantized.codes, quantized.scales, quantized.amax, oxtile.dequantize(quantized, torch.bfloat16) + 1

                    for found, wanted in zip(compiled(there_and_back, device)(x), there_and_back(x)):
                        if wanted is None:
                            self.assertIsNone(found)
                            continue
                        self.assertEqual((found.dtype, found.shape), (wanted.dtype, wanted.shape), (format, direction))
                        same = torch.equal(found.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))
                        self.assertTrue(same, (format, direction))

    def test_compile_returns_what_quantize_returns(self):
        for device in DEVICES:
            x = torch.randn(4, 64, device=device)
            found, wanted = compiled(lambda x: oxtile.quantize(x, "nvfp4"), device)(x), oxtile.quantize(x, "nvfp4")
            self.assertIsInstance(found, oxtile.Quantized)
            self.assertEqual((found.shape, found.format, found.direction, found.element), ((4, 64), "nvfp4", "rows", "float32"))
            self.assertTrue(torch.equal(found.codes, wanted.codes) and torch.equal(found.amax, wanted.amax))

    def test_compile_of_sizes_that_change(self):
        for device in DEVICES:
            function = compiled(lambda x: oxtile.dequantize(oxtile.quantize(x, "mxfp8")), device, dynamic=True)
            for rows, columns in ((3, 64), (7, 96), (40, 33)):
                x = torch.randn(rows, columns, device=device)
                self.assertTrue(torch.equal(function(x), oxtile.dequantize(oxtile.quantize(x, "mxfp8"))))
            # What the format cannot hold is an error of the call, in the library's words.
            with self.assertRaisesRegex(Exception, "20 columns are not a multiple of 16: pad them"):
                compiled(lambda x: oxtile.quantize(x, "nvfp4").codes, device)(torch.zeros(4, 20, device=device))
            with self.assertRaisesRegex(Exception, 'format is "int4": mxfp8, nvfp4 or fp8'):
                compiled(lambda x: oxtile.quantize(x, "int4").codes, device)(torch.zeros(4, 32, device=device))

    def test_the_operators_pass_opcheck(self):
        x = torch.randn(32, 64)
        for format in ("mxfp8", "nvfp4", "fp8"):
            for direction in ("rows", "columns"):
                torch.library.opcheck(torch.ops.oxtile.quantize.default, (x, format, direction))
        codes, scales, _ = torch.ops.oxtile.quantize(x, "fp8", "columns")
        torch.library.opcheck(torch.ops.oxtile.dequantize.default, (codes, scales, None, 32, 64, "fp8", "columns", "bfloat16"))


if __name__ == "__main__":
    unittest.main()
