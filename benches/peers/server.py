#!/usr/bin/env python3
"""The torch side of the benchmarks: one JSON request a line on stdin, one JSON answer a line on stdout.

    {"do": "hello"}                                            -> {"torch", "cuda", "device", "python", "libraries"}
    {"do": "prepare", "peer", "dimensions", "sets", "pattern"} -> {"title"}
    {"do": "round", "peer", "replays"}                         -> {"milliseconds"}
    {"do": "check", "peer", "files": {NAME: PATH}}             -> {"equal", "detail"}
    {"do": "release"}                                          -> {}

An answer is {"ok": true, ...} or {"ok": false, "error": TEXT}; the server goes on after an error. It ends with stdin.
"""

import json
import os
import sys
import traceback

from versions import versions

WARM_UP = 3


class Prepared:
    """A peer captured in a CUDA graph, one launch a buffer set."""

    def __init__(self, torch, peer):
        self.torch, self.peer = torch, peer
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # Compiles, and fills the allocator, before the capture.
            for _ in range(WARM_UP):
                for launch in peer.launches:
                    launch()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.results = [launch() for launch in peer.launches]

    def round(self, replays):
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.graph.replay()  # Keeps the device busy while the host enqueues what is timed.
        start.record()
        for _ in range(replays):
            self.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def check(self, files):
        """Compares the first launch's outputs with those in files: byte for byte, or within the peer's tolerance."""
        self.graph.replay()
        self.torch.cuda.synchronize()
        outputs = self.peer.outputs(self.results[0])
        if sorted(outputs) != sorted(files):
            return False, f"outputs {sorted(outputs)}, files {sorted(files)}"
        details = []
        for name, output in outputs.items():
            mine = output.contiguous().view(-1).view(self.torch.uint8)
            size = os.path.getsize(files[name])
            if size != mine.numel():
                details.append(f"{name}: {mine.numel()} bytes, the kernel wrote {size}")
                continue
            theirs = self.torch.from_file(files[name], size=size, dtype=self.torch.uint8).to(mine.device)
            tolerance = getattr(self.peer, "tolerance", None)
            if tolerance is not None:
                ours, others = (x.view(output.dtype).double() for x in (theirs, mine))
                error = float((ours - others).norm() / others.norm())
                if not error <= tolerance:
                    details.append(f"{name}: relative Frobenius error {error:.2e}, beyond {tolerance:.0e}")
                continue
            different = int((mine != theirs).sum())
            if different:
                details.append(f"{name}: {different} of {size} bytes differ")
        return not details, "; ".join(details)


class Server:
    def __init__(self):
        self.prepared = {}
        self.patterns = {}

    def hello(self, request):
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("torch sees no CUDA device")
        name = torch.cuda.get_device_name(0)
        return versions(name)

    def pattern(self, path):
        import torch

        if path not in self.patterns:
            values = torch.from_file(path, size=os.path.getsize(path) // 2, dtype=torch.bfloat16)
            self.patterns[path] = values.cuda()
        return self.patterns[path]

    def prepare(self, request):
        import torch
        from formulas import PEERS

        peer = PEERS[request["peer"]](self.pattern(request["pattern"]), request["dimensions"], request["sets"])
        self.prepared[request["peer"]] = Prepared(torch, peer)
        return {"title": peer.title}

    def round(self, request):
        return {"milliseconds": self.prepared[request["peer"]].round(request["replays"])}

    def check(self, request):
        equal, detail = self.prepared[request["peer"]].check(request["files"])
        return {"equal": equal, "detail": detail}

    def release(self, request):
        import gc

        import torch

        self.prepared.clear()
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
        return {}

    def answer(self, line):
        try:
            request = json.loads(line)
            if request.get("do") not in ("hello", "prepare", "round", "check", "release"):
                raise ValueError(f"unknown request {request.get('do')!r}")
            return {"ok": True, **getattr(self, request["do"])(request)}
        except Exception as error:
            traceback.print_exc()
            return {"ok": False, "error": f"{type(error).__name__}: {error}"}


def main():
    # Whatever torch and its compilers print goes to stderr: stdout carries answers alone.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    server = Server()
    for line in sys.stdin:
        if line.strip():
            answers.write(json.dumps(server.answer(line)) + "\n")


if __name__ == "__main__":
    main()
