"""Arrays of JAX on the CPU, and of CuPy on a GPU: `python test_others.py`. What is not installed is left out."""

import importlib.util
import unittest

import numpy as np
import oxtile


def inputs():
    random = np.random.default_rng(0)
    return [random.standard_normal((1, 70, 2, 64)).astype(np.float16) for _ in range(4)]


def attended(arrays):
    q, k, v, grad = arrays
    out, lse = oxtile.attention(q, k, v, causal=True, return_lse=True)
    return [out, lse, *oxtile.attention_backward(q, k, v, out, lse, grad, causal=True)]


@unittest.skipUnless(importlib.util.find_spec("jax"), "JAX is not installed")
class Jax(unittest.TestCase):
    def setUp(self):
        import jax

        self.enterContext(jax.default_device(jax.devices("cpu")[0]))

    def test_attention_gives_what_numpy_is_given(self):
        import jax.numpy as jnp

        for found, wanted in zip(attended([jnp.asarray(x) for x in inputs()]), attended(inputs())):
            self.assertTrue(hasattr(found, "devices"))
            np.testing.assert_array_equal(np.asarray(found), wanted)

    def test_bfloat16(self):
        import jax
        import jax.numpy as jnp

        x = jnp.asarray(inputs()[0]).astype(jnp.bfloat16)
        out = oxtile.attention(x, x, x)
        wide = x.astype(jnp.float32)
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", wide, wide) / 8)
        self.assertEqual(out.dtype, jnp.bfloat16)
        self.assertLess(jnp.abs(out.astype(jnp.float32) - jnp.einsum("bhqk,bkhd->bqhd", weights, wide)).max(), 0.02)
        for format, bound in (("mxfp8", 0.2), ("fp8", 0.2), ("nvfp4", 0.6)):
            restored = oxtile.dequantize(oxtile.quantize(x, format))
            self.assertEqual((restored.dtype, restored.shape), (x.dtype, x.shape))
            self.assertLess(jnp.abs(restored.astype(jnp.float32) - wide).max(), bound)

    def test_traced_arrays_are_refused(self):
        import jax

        with self.assertRaisesRegex(TypeError, "q is traced: oxtile cannot be called inside jax.jit"):
            jax.jit(lambda x: oxtile.attention(x, x, x))(inputs()[0])


@unittest.skipUnless(importlib.util.find_spec("cupy"), "CuPy is not installed")
class CuPy(unittest.TestCase):
    def test_attention_is_near_that_of_the_emulator(self):
        import cupy

        with cupy.cuda.Stream(non_blocking=True) as stream:
            found = attended([cupy.asarray(x) for x in inputs()])
            stream.synchronize()
        for array, wanted in zip(found, attended(inputs())):
            np.testing.assert_allclose(cupy.asnumpy(array).astype(np.float32), wanted.astype(np.float32), atol=0.01, rtol=0.01)

    def test_codes_are_those_of_the_emulator(self):
        import cupy

        x = inputs()[0]
        for format in ("mxfp8", "fp8"):
            here, there = oxtile.quantize(x, format), oxtile.quantize(cupy.asarray(x), format)
            np.testing.assert_array_equal(here.codes, cupy.asnumpy(there.codes))


if __name__ == "__main__":
    unittest.main()
