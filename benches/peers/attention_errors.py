"""Errors of `oxtile attention --device cuda --backward`, and of torch's attention on the same file, against float64.

Prints for each shape the relative Frobenius error of the result, ours and torch's, and the ratio of the two; the ratios of the gradients; the
log-sum-exp's error, absolute below 1. Lines end in `<--` where a ratio is above 1.1 or the log-sum-exp is off by more than 1e-5.

    python3 benches/peers/attention_errors.py target/release/oxtile
"""

import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I32": torch.int32}
NAMES = {dtype: name for name, dtype in TYPES.items()}
BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


def save(path, tensors):
    header, data = {}, b""
    for name, tensor in tensors.items():
        begin = len(data)
        data += tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes()
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, len(data)]}
    header = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def load(path):
    file = path.read_bytes()
    data = 8 + struct.unpack("<Q", file[:8])[0]
    tensors = {}
    for name, entry in json.loads(file[8:data]).items():
        if name != "__metadata__":
            begin, end = (data + offset for offset in entry["data_offsets"])
            tensors[name] = torch.frombuffer(bytearray(file[begin:end]), dtype=TYPES[entry["dtype"]]).reshape(entry["shape"]).cuda()
    return tensors


def visible(queries, keys, causal, window):
    i, j = torch.arange(queries, device="cuda")[:, None], torch.arange(keys, device="cuda")
    diagonal = i + keys - queries
    seen = torch.ones(queries, keys, dtype=torch.bool, device="cuda")
    if causal:
        seen &= j <= (i if causal == "top-left" else diagonal)
    if window:
        seen &= (j >= diagonal - window[0]) & (j <= diagonal + window[1])
    return seen


def reference(q, k, v, grad, seen):
    """Result, log-sum-exp and gradients in float64, of tensors of [heads, rows, size]."""
    heads, group, scale = q.shape[0], q.shape[0] // k.shape[0], q.shape[-1] ** -0.5
    q, k, v, grad = (x.double() for x in (q, k, v, grad))
    grad_k, grad_v, rest = torch.zeros_like(k), torch.zeros_like(v), []
    for head in range(heads):
        of = head // group
        scores = (q[head] @ k[of].T * scale).masked_fill(~seen, float("-inf"))
        log_sum_exp = scores.logsumexp(-1)
        weights = (scores - log_sum_exp[:, None]).exp().nan_to_num(0.0)
        out = weights @ v[of]
        grad_scores = weights * (grad[head] @ v[of].T - (grad[head] * out).sum(-1, keepdim=True)) * scale
        rest.append((out, log_sum_exp, grad_scores @ k[of]))
        grad_k[of] += grad_scores.T @ q[head]
        grad_v[of] += weights.T @ grad[head]
    out, log_sum_exp, grad_q = (torch.stack(parts) for parts in zip(*rest))
    return (out, grad_q, grad_k, grad_v), log_sum_exp


def torch_side(q, k, v, grad, causal, seen):
    """The same by the first of torch's kernels that takes it. Heads that share keys are given each their own."""
    group = q.shape[0] // k.shape[0]
    for backend in BACKENDS:
        q, k, v = (x[None].detach().clone().requires_grad_() for x in (q, k, v)) if q.dim() == 3 else (q, k, v)
        mask = {"is_causal": True} if causal == "top-left" else {} if seen.all() else {"attn_mask": seen}
        try:
            with sdpa_kernel(backend):
                each = (x.repeat_interleave(group, 1) for x in (k, v))
                out = torch.nn.functional.scaled_dot_product_attention(q, *each, **mask)
            out.backward(grad[None])
            return out[0].detach(), q.grad[0], k.grad[0], v.grad[0]
        except RuntimeError:
            continue
    raise RuntimeError("none of torch's kernels takes this shape")


def compare(program, name, queries, keys, heads, key_heads, size, value_size, dtype=torch.bfloat16, causal=None, window=None, cuts=None):
    torch.manual_seed(1)
    shapes = (queries, heads, size), (keys, key_heads, size), (keys, key_heads, value_size), (queries, heads, value_size)
    q, k, v, grad = inputs = [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]
    file = dict(zip(("q", "k", "v", "dout"), inputs))
    if cuts:
        for side, array in enumerate(("cu_seqlens_q", "cu_seqlens_kv")):
            file[array] = torch.tensor([cut[side] for cut in cuts], dtype=torch.int32)
    else:
        file = {name: tensor[None] for name, tensor in file.items()}
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "in.safetensors"), Path(folder, "out.safetensors")
        save(source, file)
        options = [*(["--causal", causal] if causal else []), *(["--window", "%d,%d" % window] if window else [])]
        words = [program, "attention", "--input", source, "--output", target, "--device", "cuda", "--backward", *options]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        found = load(target)
    ours = [found[name].reshape(like.shape) for name, like in (("out", grad), ("dq", q), ("dk", k), ("dv", v))]
    log_sum_exp, worst = found["lse"].reshape(heads, queries).double(), 0.0
    squares = torch.zeros(3, 4, dtype=torch.float64)
    cuts = cuts or [(0, 0), (queries, keys)]
    for begin, end in zip(cuts, cuts[1:]):
        of_queries, of_keys = slice(begin[0], end[0]), slice(begin[1], end[1])
        rows = (of_queries, of_queries, of_keys, of_keys)
        parts = [x[part].transpose(0, 1) for x, part in zip(inputs, (of_queries, of_keys, of_keys, of_queries))]
        seen = visible(end[0] - begin[0], end[1] - begin[1], causal, window)
        expected, expected_log = reference(*parts, seen)
        theirs = torch_side(*parts, causal, seen)
        worst = max(worst, ((log_sum_exp[:, of_queries] - expected_log) / expected_log.abs().clamp(min=1)).abs().max().item())
        for i, value in enumerate(expected):
            sides = value, ours[i][rows[i]].transpose(0, 1).double() - value, theirs[i].double() - value
            squares[:, i] += torch.tensor([side.square().sum().item() for side in sides])
    norms, errors, peers = squares.sqrt()
    ratios = (errors / peers).tolist()
    beyond = "" if max(ratios) <= 1.1 and worst <= 1e-5 else " <--"
    out = f"out {errors[0] / norms[0]:.2e}/{peers[0] / norms[0]:.2e}={ratios[0]:.3f}"
    print(f"{name:34} {out} dq {ratios[1]:.3f} dk {ratios[2]:.3f} dv {ratios[3]:.3f} lse {worst:.1e}{beyond}", flush=True)


def main(program):
    sizes = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
    for name, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        for size in sizes:
            for causal in (None, "top-left"):
                compare(program, f"{name} d%d/%d {causal or 'full'}" % size, 2048, 2048, 4, 4, *size, dtype=dtype, causal=causal)
    cuts = [(0, 0), (777, 900), (1000, 1123), (3000, 3500)]
    for size in sizes[:1] + sizes[2:]:
        compare(program, "d%d/%d window 300,0" % size, 2048, 2048, 4, 4, *size, window=(300, 0))
        compare(program, "d%d/%d bottom-right 1000x2000" % size, 1000, 2000, 4, 4, *size, causal="bottom-right")
        compare(program, "d%d/%d packed" % size, 3000, 3500, 4, 4, *size, causal="bottom-right", cuts=cuts)
    compare(program, "d128 full, 4 on 1", 2048, 2048, 4, 1, 128, 128)
    compare(program, "d128 causal, 4 on 1", 2048, 2048, 4, 1, 128, 128, causal="top-left")
    compare(program, "d128 odd 1999x2531", 1999, 2531, 4, 4, 128, 128)
    compare(program, "d64 odd 1537x77", 1537, 77, 4, 4, 64, 64)


if __name__ == "__main__":
    main(*sys.argv[1:])
