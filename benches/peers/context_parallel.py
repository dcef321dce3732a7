"""Causal attention by torch's experimental context parallelism: a ring whose keys are gathered at once or go to the next rank, by cuDNN or by FlashAttention-2."""

import contextlib

import torch
import torch.nn.functional as functional

# Where releases of torch have `context_parallel` and `set_rotate_method`, the newest place first.
MODULES = (
    "torch.distributed.tensor.experimental._context_parallel._attention",
    "torch.distributed.tensor.experimental._attention",
    "torch.distributed.tensor.experimental",
)


def find():
    """The context, and what sets its rotation."""
    import importlib

    for name in MODULES:
        try:
            module = importlib.import_module(name)
            return module.context_parallel, module.set_rotate_method
        except (ImportError, AttributeError):
            continue
    raise RuntimeError(f"not available: torch {torch.__version__} has no context_parallel with set_rotate_method in {', '.join(MODULES)}")


class ContextParallel:
    """The tensors of a row, random, of which the context gives each rank its part: `[1, heads, tokens, size]`."""

    def __init__(self, row, world):
        from torch.distributed.device_mesh import init_device_mesh

        if row["sequences"] is not None or not row["is_causal"]:
            raise RuntimeError("not available: torch's context_parallel shares one causal sequence")
        context, self.set_rotation = find()
        self.row = row
        torch.manual_seed(1)  # The whole tensors are the same on all ranks.
        shapes = [[1, row[heads], row["tokens"], row["head_size"]] for heads in ("heads", "key_heads", "key_heads", "heads")]
        whole = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]
        self.exit = contextlib.ExitStack()
        mesh = init_device_mesh("cuda", (world,))
        self.exit.enter_context(context(mesh, buffers=whole, buffer_seq_dims=[2] * 4, no_restore_buffers=set(whole)))
        # The context has cut the whole tensors, and kept their memory.
        self.tensors = [part.clone() for part in whole]
        del whole
        if any(part.shape[2] != row["tokens"] // world for part in self.tensors):
            raise RuntimeError(f"not available: parts of {[list(part.shape) for part in self.tensors]}, not of {row['tokens']} // {world} tokens")
        self.has_groups = row["heads"] != row["key_heads"]

    def attend(self, q, k, v, backend):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backend = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}[backend]
        with sdpa_kernel([backend]):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.has_groups)

    def call(self, rotation, backend, passes):
        self.set_rotation(rotation)
        *inputs, grad = self.tensors
        # Tensors that want gradients forward too: else cuDNN leaves out the log-sum-exp, by which torch merges steps.
        inputs = [tensor.detach().requires_grad_() for tensor in inputs]
        if passes == "forward":
            return lambda: self.attend(*inputs, backend)
        return lambda: torch.autograd.grad(self.attend(*inputs, backend), inputs, grad)

    def close(self):
        self.exit.close()
