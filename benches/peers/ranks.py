"""Collectives of torch.distributed over NCCL, products of gathered operands and context parallelism, one process a GPU, for `oxtile-benches --ranks N`.

Reads a JSON request a line, `{"collective", "bytes", "calls"}`, a `put`, a `get`, `{"gathered_product": [HOW, [M, N, K]]}`, `{"scattered_product": ...}`, `{"reduced_product": ...}`, `{"layer": [HOW, [TOKENS, WIDTH, HIDDEN]]}` and
`{"context_parallel": {"by": {"torch": [ROTATION, BACKEND]}, "passes", "row"}}` among the collectives, and answers with the wall time of the calls and the device's
time for them in milliseconds, each of the slowest rank, and with the time from each rank's end to the last one's; `{"do": "hello"}` says what runs.
"""

import json
import os
import sys
import time

from versions import versions


def serve(rank, world, port, pipe):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    import torch
    import torch.distributed as dist
    from peer import compile

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    buffers = {}
    attention = None

    def copy(collective, size):
        """A copy to, or from, the next rank's symmetric memory: the same engine, another library's way to it."""
        import torch.distributed._symmetric_memory as symmetric

        if ("copy", size) not in buffers:
            buffers.clear()
            shared = symmetric.empty(size // 2, dtype=torch.bfloat16, device=f"cuda:{rank}")
            handle = symmetric.rendezvous(shared, dist.group.WORLD)
            theirs = handle.get_buffer((rank + 1) % world, (size // 2,), torch.bfloat16)
            own = torch.zeros(size // 2, dtype=torch.bfloat16, device="cuda")
            buffers["copy", size] = [own, theirs, shared, handle]
        own, theirs, *_ = buffers["copy", size]
        return {"put": lambda: theirs.copy_(own), "get": lambda: own.copy_(theirs)}[collective]

    def gathered_product(how, m, n, k):
        """Rows of A of each rank, columns of B, which is stored as its transpose; random, since a product of zeros draws less power."""
        import torch.distributed._symmetric_memory as symmetric

        if ("product", m, n, k) not in buffers:
            buffers.clear()
            torch.manual_seed(1 + rank)
            shard, weight = (torch.randn(size, dtype=torch.bfloat16, device="cuda") for size in ([m // world, k], [n // world, k]))
            whole = torch.empty([m, k], dtype=torch.bfloat16, device="cuda")
            buffers["product", m, n, k] = [shard, weight.t(), whole, torch.empty([m, n // world], dtype=torch.bfloat16, device="cuda")]
        shard, weight, whole, d = buffers["product", m, n, k]
        if how == "torch_fused":
            group = dist.group.WORLD.group_name
            symmetric.enable_symm_mem_for_group(group)
            return lambda: torch.ops.symm_mem.fused_all_gather_matmul(shard, [weight], gather_dim=0, group_name=group, return_A=False)

        def unfused():
            dist.all_gather_into_tensor(whole, shard)
            torch.matmul(whole, weight, out=d)

        return {"torch_unfused": unfused}[how]

    def scattered_product(how, m, n, k):
        """All rows of A of each rank's part of the sum, and of B, which is stored as its transpose."""
        import torch.distributed._symmetric_memory as symmetric

        if ("scattered", m, n, k) not in buffers:
            buffers.clear()
            torch.manual_seed(1 + rank)
            a, weight = (torch.randn(size, dtype=torch.bfloat16, device="cuda") for size in ([m, k // world], [n, k // world]))
            whole = torch.empty([m, n], dtype=torch.bfloat16, device="cuda")
            buffers["scattered", m, n, k] = [a, weight.t(), whole, torch.empty([m // world, n], dtype=torch.bfloat16, device="cuda")]
        a, weight, whole, d = buffers["scattered", m, n, k]
        if how == "torch_fused":
            group = dist.group.WORLD.group_name
            symmetric.enable_symm_mem_for_group(group)
            return lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(a, weight, "sum", scatter_dim=0, group_name=group)

        def unfused():
            torch.matmul(a, weight, out=whole)
            dist.reduce_scatter_tensor(d, whole)

        return {"torch_unfused": unfused}[how]

    def reduced_product(how, m, n, k):
        """All rows of A of each rank's part of the sum, and of B, which is stored as its transpose."""
        if ("reduced", m, n, k) not in buffers:
            buffers.clear()
            torch.manual_seed(1 + rank)
            a, weight = (torch.randn(size, dtype=torch.bfloat16, device="cuda") for size in ([m, k // world], [n, k // world]))
            buffers["reduced", m, n, k] = [a, weight.t(), torch.empty([m, n], dtype=torch.bfloat16, device="cuda")]
        a, weight, whole = buffers["reduced", m, n, k]

        def unfused():
            torch.matmul(a, weight, out=whole)
            dist.all_reduce(whole)

        return {"torch_unfused": unfused}[how]

    @compile
    def gelu(z, bias):
        return torch.nn.functional.gelu(z + bias, approximate="tanh")

    @compile
    def gelu_backward(dz, z, bias):
        dz = torch.ops.aten.gelu_backward(dz, z + bias, approximate="tanh")
        return dz, dz.sum(0, dtype=torch.float32)

    def layer(how, tokens, width, hidden):
        """A feed-forward layer with sequence parallelism, forward and backward: the six products of ours, with the bias, its gradient and the gradients of weights in f32. What is between products is compiled. The gathered
        gradients are kept from one product to the next; the gathered tokens for the backward pass, or they are gathered again."""
        import torch.distributed._symmetric_memory as symmetric

        own, part = tokens // world, hidden // world
        if ("layer", tokens, width, hidden) not in buffers:
            buffers.clear()
            torch.manual_seed(1 + rank)
            x, dy, up, down, bias = (torch.randn(size, dtype=torch.bfloat16, device="cuda") for size in ([own, width], [own, width], [part, width], [width, part], [part]))
            buffers["layer", tokens, width, hidden] = [x, dy, up.mul_(width**-0.5), down.mul_(hidden**-0.5), bias.mul_(0.5)]
        x, dy, up, down, bias = buffers["layer", tokens, width, hidden]
        group = dist.group.WORLD.group_name
        is_fused, is_kept = how.startswith("torch_fused"), how.endswith("kept")
        if is_fused:
            symmetric.enable_symm_mem_for_group(group)

        def gather(shard):
            whole = torch.empty([tokens, width], dtype=torch.bfloat16, device="cuda")
            dist.all_gather_into_tensor(whole, shard)
            return whole

        def gathered(shard, b):
            """The gathered rows, and their product with b."""
            if is_fused:
                whole, products = torch.ops.symm_mem.fused_all_gather_matmul(shard, [b], gather_dim=0, group_name=group, return_A=True)
                return whole, products[0]
            whole = gather(shard)
            return whole, torch.matmul(whole, b)

        def scattered(a, b):
            if is_fused:
                return torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b, "sum", scatter_dim=0, group_name=group)
            rows = torch.empty([own, width], dtype=torch.bfloat16, device="cuda")
            dist.reduce_scatter_tensor(rows, torch.matmul(a, b))
            return rows

        def step():
            whole_x, z = gathered(x, up.t())
            activated = gelu(z, bias)
            y = scattered(activated, down.t())
            whole_dy, dz = gathered(dy, down)
            dz, dbias = gelu_backward(dz, z, bias)
            ddown = torch.mm(whole_dy.t(), activated, out_dtype=torch.float32)
            dx = scattered(dz, up)
            dup = torch.mm(dz.t(), whole_x if is_kept else gather(x), out_dtype=torch.float32)
            return y, dx, ddown, dup, dbias

        return step

    def context_parallel(request):
        """A call of `scaled_dot_product_attention` inside of torch's context, of which one is open at a time."""
        nonlocal attention
        from context_parallel import ContextParallel

        row, how = request["row"], request["by"]["torch"]
        if attention is None or attention.row != row:
            buffers.clear()
            if attention is not None:
                attention.close()
                attention = None
            torch.cuda.empty_cache()
            attention = ContextParallel(row, world)
        return attention.call(*how, request["passes"])

    def calls(collective, size):
        if isinstance(collective, dict) and "context_parallel" in collective:
            return context_parallel(collective["context_parallel"])
        if isinstance(collective, dict) and "scattered_product" in collective:
            how, sizes = collective["scattered_product"]
            return scattered_product(how, *sizes)
        if isinstance(collective, dict) and "reduced_product" in collective:
            how, sizes = collective["reduced_product"]
            return reduced_product(how, *sizes)
        if isinstance(collective, dict) and "layer" in collective:
            how, sizes = collective["layer"]
            return layer(how, *sizes)
        if isinstance(collective, dict):
            how, sizes = collective["gathered_product"]
            return gathered_product(how, *sizes)
        if collective in ("put", "get"):
            return copy(collective, size)
        whole, part = size // 2, size // 2 // world
        if size not in buffers:
            buffers.clear()
            buffers[size] = [torch.zeros(whole, dtype=torch.bfloat16, device="cuda"), torch.zeros(part, dtype=torch.bfloat16, device="cuda")]
        whole, part = buffers[size]
        return {
            "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
            "all_reduce": lambda: dist.all_reduce(whole),
        }[collective]

    def answer(call, count, lead):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        call()
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        if lead:
            call()  # The ranks begin together, where it ends.
        before = time.perf_counter()
        start.record()
        for _ in range(count):
            call()
        end.record()
        torch.cuda.synchronize()
        ended = time.perf_counter()  # A clock of the host, the same in all processes.
        return {"wall": (ended - before) * 1e3, "device": start.elapsed_time(end), "ended": ended}

    while True:
        request = pipe.recv()
        if request is None:
            break
        try:
            collective = request["collective"]
            pipe.send(answer(calls(collective, request["bytes"]), request["calls"], isinstance(collective, dict)))
        except Exception as error:  # torch's own, of whatever kind: the next request may do
            pipe.send({"error": f"rank {rank}: {error!r}"})
    dist.destroy_process_group()


def main():
    import socket

    world = int(sys.argv[1])
    import torch
    import torch.multiprocessing as processes

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = processes.get_context("spawn")
    pipes, workers = [], []
    for rank in range(world):
        ours, theirs = context.Pipe()
        worker = context.Process(target=serve, args=(rank, world, port, theirs), daemon=True)
        worker.start()
        theirs.close()
        pipes.append(ours)
        workers.append(worker)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request.get("do") == "hello":
                nccl = ".".join(map(str, torch.cuda.nccl.version()))
                answer = versions(f"NCCL {nccl}")
            else:
                for pipe in pipes:
                    pipe.send(request)
                answers = [pipe.recv() for pipe in pipes]
                failed = [answer["error"] for answer in answers if "error" in answer]
                if failed:
                    raise RuntimeError(failed[0])
                answer = {key: max(answer[key] for answer in answers) for key in ("wall", "device")}
                last = max(answer["ended"] for answer in answers)
                answer["idle"] = [(last - answer["ended"]) * 1e3 for answer in answers]
            print(json.dumps({"ok": True, **answer}), flush=True)
        except (EOFError, OSError, RuntimeError) as error:
            print(json.dumps({"ok": False, "error": f"a rank of torch failed or has ended: {error!r}"}), flush=True)
    for pipe in pipes:
        pipe.send(None)
    for worker in workers:
        worker.join(20)


if __name__ == "__main__":
    main()
