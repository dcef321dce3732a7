"""Times of forward + backward beside PyTorch's SDPA and FlashAttention-3, in rounds that alternate: `python time_torch.py OUT.json`.

Each peer that cannot run is left out and says why. Times are of device events around a forward and a backward pass; a round has one of each.
"""

import argparse
import json
import platform
import statistics
import time

import oxtile
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


def peers(q, k, v, causal):
    """Functions of no arguments that return the result, by name."""

    def sdpa(backend):
        def run():
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal).transpose(1, 2)

        return run

    found = {
        "oxtile": lambda: oxtile.attention(q, k, v, causal=causal),
        "oxtile deterministic": lambda: oxtile.attention(q, k, v, causal=causal, deterministic=True),
        "sdpa cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
        "sdpa flash": sdpa(SDPBackend.FLASH_ATTENTION),
    }
    try:
        from flash_attn_interface import flash_attn_func

        def flash():
            out = flash_attn_func(q, k, v, causal=causal)
            return out[0] if isinstance(out, tuple) else out

        found["flash attention 3"] = flash
    except ImportError as error:
        print(f"flash attention 3 is left out: {error}")
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--shape", default="4x8192x16x128", help="batches x rows x heads x size")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--full", action="store_true", help="without the causal mask")
    arguments = parser.parse_args()
    batches, rows, heads, size = shape = [int(n) for n in arguments.shape.split("x")]
    causal = not arguments.full
    torch.manual_seed(0)
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    grad = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    runs, left_out = peers(*inputs, causal), {}
    results = {}
    for name, run in list(runs.items()):
        try:
            out = run()
            results[name] = [out, *torch.autograd.grad(out, inputs, grad)]
            torch.cuda.synchronize()
        except Exception as error:
            left_out[name] = str(error).splitlines()[0]
            print(f"{name} is left out: {left_out[name]}")
            del runs[name]
    differences = {
        name: [((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(results["oxtile"], other)] for name, other in results.items()
    }
    del results
    event = lambda: torch.cuda.Event(enable_timing=True)
    times = {name: {"forward": [], "backward": [], "both": [], "host": []} for name in runs}
    for round in range(arguments.rounds + 5):
        # Each round begins with another peer.
        names = list(runs)
        for name in names[round % len(names) :] + names[: round % len(names)]:
            marks = [event() for _ in range(3)]
            # The device is behind the host: what is timed is work, not launches.
            torch.cuda._sleep(1_000_000)
            marks[0].record()
            start = time.perf_counter()
            out = runs[name]()
            marks[1].record()
            torch.autograd.grad(out, inputs, grad)
            host = time.perf_counter() - start
            marks[2].record()
            torch.cuda.synchronize()
            if round >= 5:
                kept = times[name]
                kept["forward"].append(marks[0].elapsed_time(marks[1]))
                kept["backward"].append(marks[1].elapsed_time(marks[2]))
                kept["both"].append(marks[0].elapsed_time(marks[2]))
                kept["host"].append(host * 1e3)
    pairs = rows * rows / (2 if causal else 1)
    flops = {"forward": 4, "backward": 10, "both": 14}
    flops = {part: count * batches * heads * size * pairs for part, count in flops.items()}
    medians = {name: {part: statistics.median(found) for part, found in parts.items()} for name, parts in times.items()}
    tflops = {name: {part: flops[part] / medians[name][part] / 1e9 for part in flops} for name in medians}
    report = {
        "shape": shape,
        "causal": causal,
        "rounds": arguments.rounds,
        "milliseconds": times,
        "medians": medians,
        "tflops": tflops,
        "relative differences from oxtile (out, dq, dk, dv)": differences,
        "left out": left_out,
        "versions": {
            "oxtile": oxtile.__version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "python": platform.python_version(),
            "gpu": torch.cuda.get_device_name(),
        },
    }
    with open(arguments.out, "w") as file:
        json.dump(report, file, indent=1)
    for name, parts in medians.items():
        found = tflops[name]
        print(f"{name:22} forward {parts['forward']:.3f} ms {found['forward']:.0f} TFLOP/s, backward {parts['backward']:.3f} ms {found['backward']:.0f} TFLOP/s", end="")
        print(f", both {parts['both']:.3f} ms {found['both']:.0f} TFLOP/s, host {parts['host']:.3f} ms")


if __name__ == "__main__":
    main()
