"""Which versions the peers are of."""

import importlib.metadata
import sys

# The package of each library that torch calls, as PyPI names it for CUDA 13 and CUDA 12; FlashAttention-3 has a package of its own.
PACKAGES = {
    "cuBLAS": ["nvidia-cublas", "nvidia-cublas-cu12"],
    "cuDNN": ["nvidia-cudnn-cu13", "nvidia-cudnn-cu12"],
    "NCCL": ["nvidia-nccl-cu13", "nvidia-nccl-cu12"],
    "Triton": ["triton"],
    "FlashAttention-3": ["flash_attn_3", "flash-attn-3"],
}


def versions(device):
    """The answer to `hello`."""
    import torch

    libraries = {}
    for name, packages in PACKAGES.items():
        for package in packages:
            try:
                libraries.setdefault(name, importlib.metadata.version(package))
            except importlib.metadata.PackageNotFoundError:
                pass
    # What is linked into torch, or lies beside it without a package, tells its version itself.
    number = torch.backends.cudnn.version() or 0
    if number:
        libraries.setdefault("cuDNN", f"{number // 10000}.{number // 100 % 100}.{number % 100}")
    if torch.distributed.is_nccl_available():
        libraries.setdefault("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    try:
        import flash_attn_interface

        libraries.setdefault("FlashAttention-3", getattr(flash_attn_interface, "__version__", "of an unknown version"))
    except ImportError:
        pass
    return {"torch": torch.__version__, "cuda": torch.version.cuda, "device": device, "python": sys.version.split()[0], "libraries": libraries}
