"""Matrix products by cuBLASLt."""

import torch

from peer import fill


class Gemm:
    """One matrix product a launch by cuBLASLt, into a buffer of its own."""

    title = "torch.mm (cuBLASLt)"
    # Sums of other orders: outputs are compared by relative Frobenius error.
    tolerance = 4e-3
    stored_as_transposed = (False, True)
    # Numbers of buffers are multiples of this.
    spacing = 1
    # Larger results are not compared.
    compared = None

    def __init__(self, pattern, dimensions, sets):
        torch.backends.cuda.preferred_blas_library("cublaslt")
        m, n, k = dimensions
        shapes = [(m, k), (k, n)]
        stored = [tuple(reversed(shape)) if turned else shape for shape, turned in zip(shapes, self.stored_as_transposed)]
        self.launches = []
        for set in range(sets):
            operands = [fill(pattern, self.spacing * (2 * set + i), stored[i]) for i in range(2)]
            a, b = self.ready(*(x.t() if turned else x for x, turned in zip(operands, self.stored_as_transposed)))
            d = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
            self.launches.append(lambda a=a, b=b, d=d: self.multiply(a, b, d))

    def ready(self, a, b):
        """The operands as the launches take them."""
        return a, b

    def multiply(self, a, b, d):
        return torch.mm(a, b, out=d)

    def outputs(self, first):
        return {"d": first} if self.compared is None or first.numel() <= self.compared else {}


class GemmNn(Gemm):
    stored_as_transposed = (False, False)


class GemmTn(Gemm):
    stored_as_transposed = (True, False)


class GemmE4m3(Gemm):
    title = "torch._scaled_mm, fast accumulation (cuBLASLt)"
    elements = (torch.float8_e4m3fn, torch.float8_e4m3fn)

    def ready(self, a, b):
        """Along k, since the library takes no others."""
        left, right = self.elements
        return a.contiguous().float().to(left), b.t().contiguous().float().to(right).t()

    def __init__(self, pattern, dimensions, sets):
        self.one = torch.ones((), device="cuda")
        super().__init__(pattern, dimensions, sets)

    def multiply(self, a, b, d):
        return torch._scaled_mm(a, b, scale_a=self.one, scale_b=self.one, out_dtype=torch.bfloat16, use_fast_accum=True, out=d)


class GemmTt(Gemm):
    stored_as_transposed = (True, True)


class GemmGrouped:
    """Products of groups of rows by torch's kernel of CUTLASS; the sizes are those of benches/src/family/gemm_grouped.rs."""

    title = "torch._grouped_mm (CUTLASS)"
    tolerance = 4e-3
    # Larger results are not compared.
    compared = 1 << 27

    def __init__(self, pattern, dimensions, sets):
        groups, mean, n, k = dimensions
        sizes = [mean // 2 + 97 * group % groups * mean // groups for group in range(groups)]
        sizes[-1] += groups * mean - sum(sizes)
        ends = torch.tensor(sizes, device="cuda").cumsum(0).to(torch.int32)
        a = fill(pattern, 0, (groups * mean, k))
        b = fill(pattern, 1, (groups, n, k)).transpose(1, 2)
        self.launches = [lambda: torch._grouped_mm(a, b, offs=ends)] * sets

    def outputs(self, first):
        return {"d": first} if first.numel() <= self.compared else {}


def of_shapes(layout):
    """A layout for the many shapes of benches/src/family/gemm_shapes.rs."""
    return type("Shape" + layout.__name__, (layout,), {"spacing": 64, "compared": 1 << 22})


def of_bytes(stored_as_transposed, elements=GemmE4m3.elements):
    """8-bit operands of any layout, which lie along k before the launches are timed."""
    title = "torch._scaled_mm of operands along k, fast accumulation (cuBLASLt)"
    return type("Bytes", (GemmE4m3,), {"title": title, "stored_as_transposed": stored_as_transposed, "elements": elements})


E4M3_E5M2 = (torch.float8_e4m3fn, torch.float8_e5m2)
E5M2_E4M3 = (torch.float8_e5m2, torch.float8_e4m3fn)

PEERS = {
    "gemm_shape_nt": of_shapes(Gemm),
    "gemm_shape_nn": of_shapes(GemmNn),
    "gemm_shape_tn": of_shapes(GemmTn),
    "gemm_shape_tt": of_shapes(GemmTt),
    "gemm_shape_e4m3": of_shapes(GemmE4m3),
    "gemm_grouped_nt": GemmGrouped,
    "gemm_nt": Gemm,
    "gemm_nn": GemmNn,
    "gemm_tn": GemmTn,
    "gemm_e4m3": GemmE4m3,
    "gemm_e4m3_nn": of_bytes((False, False)),
    "gemm_e4m3_tn": of_bytes((True, False)),
    "gemm_e4m3_tt": of_bytes((True, True)),
    "gemm_e4m3_e5m2_nt": of_bytes((False, True), E4M3_E5M2),
    "gemm_e4m3_e5m2_nn": of_bytes((False, False), E4M3_E5M2),
    "gemm_e5m2_e4m3_nn": of_bytes((False, False), E5M2_E4M3),
    "gemm_e5m2_e4m3_tn": of_bytes((True, False), E5M2_E4M3),
}
