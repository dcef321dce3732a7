"""Collectives of torch.distributed over NCCL, one process a GPU, for `oxtile-benches --ranks N`.

Reads a JSON request a line, `{"collective", "bytes", "calls"}`, and answers with the wall time of the calls and the device's time
for them in milliseconds, each of the slowest rank; `{"do": "hello"}` says what runs.
"""

import json
import os
import sys
import time


def serve(rank, world, port, pipe):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    buffers = {}

    def calls(collective, size):
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

    while True:
        request = pipe.recv()
        if request is None:
            break
        call = calls(request["collective"], request["bytes"])
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        call()
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        before = time.perf_counter()
        start.record()
        for _ in range(request["calls"]):
            call()
        end.record()
        torch.cuda.synchronize()
        wall = (time.perf_counter() - before) * 1e3
        pipe.send({"wall": wall, "device": start.elapsed_time(end)})
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
                answer = {"torch": torch.__version__, "cuda": torch.version.cuda, "device": f"NCCL {nccl}", "python": sys.version.split()[0]}
            else:
                for pipe in pipes:
                    pipe.send(request)
                answers = [pipe.recv() for pipe in pipes]
                answer = {key: max(answer[key] for answer in answers) for key in ("wall", "device")}
            print(json.dumps({"ok": True, **answer}), flush=True)
        except (EOFError, OSError, RuntimeError) as error:
            print(json.dumps({"ok": False, "error": f"a rank of torch has ended: {error!r}"}), flush=True)
    for pipe in pipes:
        pipe.send(None)
    for worker in workers:
        worker.join(20)


if __name__ == "__main__":
    main()
