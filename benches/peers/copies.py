"""Copies, largest magnitudes, and permutations of bytes."""

import torch

from peer import amax, compile, fill


class Copy:
    title = "torch copy_"

    def __init__(self, pattern, dimensions, sets):
        shape = [dimensions[0] // 2]
        self.pairs = [(fill(pattern, set, shape), torch.empty(shape, dtype=pattern.dtype, device="cuda")) for set in range(sets)]
        self.launches = [lambda source=source, target=target: target.copy_(source) for source, target in self.pairs]

    def outputs(self, first):
        return {"target": first}


class AmaxCompiled:
    title = "torch.compile(x.abs().amax())"

    def __init__(self, pattern, dimensions, sets):
        compiled = compile(amax)
        inputs = [fill(pattern, set, dimensions) for set in range(sets)]
        self.launches = [lambda x=x: compiled(x) for x in inputs]

    def outputs(self, first):
        return {"amax": first.float()}


class MultiAmax:
    def __init__(self, pattern, dimensions, sets):
        count, shape = dimensions[0], dimensions[1:]
        self.inputs = [[fill(pattern, set * count + tensor, shape) for tensor in range(count)] for set in range(sets)]
        self.launches = [lambda tensors=tensors: self.all(tensors) for tensors in self.inputs]

    def outputs(self, first):
        return {"amax": torch.stack([value.float() for value in first])}


class MultiAmaxCompiled(MultiAmax):
    title = "torch.compile(x.abs().amax()), one call a tensor"

    def __init__(self, pattern, dimensions, sets):
        compiled = compile(amax)
        self.all = lambda tensors: [compiled(tensor) for tensor in tensors]
        super().__init__(pattern, dimensions, sets)


class MultiAmaxForeach(MultiAmax):
    title = "torch._foreach_norm(tensors, inf)"

    def __init__(self, pattern, dimensions, sets):
        self.all = lambda tensors: torch._foreach_norm(tensors, float("inf"))
        super().__init__(pattern, dimensions, sets)


def interleave_rows(compact):
    """[outer, blocks] to tiles of 128 by 4; both are whole tiles."""
    outer, blocks = compact.shape
    return compact.view(outer // 128, 4, 32, blocks // 4, 4).permute(0, 3, 2, 1, 4).contiguous()


def interleave_columns(compact):
    """[blocks, outer] to the same tiles."""
    blocks, outer = compact.shape
    return compact.view(blocks // 4, 4, outer // 128, 4, 32).permute(2, 0, 4, 3, 1).contiguous()


def deinterleave_rows(tiles):
    return tiles.permute(0, 3, 2, 1, 4).contiguous()


def deinterleave_columns(tiles):
    return tiles.permute(1, 4, 0, 3, 2).contiguous()


def join_shards(gathered):
    """[shards, rows, width] to [rows, shards * width]."""
    return gathered.permute(1, 0, 2).contiguous()


class InterleaveCompiled:
    """One of the permutations of bytes; `shape` makes its input's shape of outer and blocks."""

    title = "torch.compile, same permutation"

    def __init__(self, permutation, shape):
        self.permutation, self.shape = permutation, shape

    def __call__(self, pattern, dimensions, sets):
        compiled = compile(self.permutation)
        outer, blocks = dimensions
        flat = [fill(pattern, set, [outer * blocks // 2]).view(torch.uint8) for set in range(sets)]
        inputs = [scales.view(*self.shape(outer, blocks)) for scales in flat]
        self.launches = [lambda x=x: compiled(x) for x in inputs]
        return self

    def outputs(self, first):
        return {"scales": first}


def tiles_of(outer, blocks):
    return outer // 128, blocks // 4, 32, 4, 4


PEERS = {
    "copy": Copy,
    "amax_compiled": AmaxCompiled,
    "multi_amax_compiled": MultiAmaxCompiled,
    "multi_amax_foreach": MultiAmaxForeach,
    "interleave_rows_compiled": InterleaveCompiled(interleave_rows, lambda outer, blocks: (outer, blocks)),
    "interleave_columns_compiled": InterleaveCompiled(interleave_columns, lambda outer, blocks: (blocks, outer)),
    "deinterleave_rows_compiled": InterleaveCompiled(deinterleave_rows, tiles_of),
    "deinterleave_columns_compiled": InterleaveCompiled(deinterleave_columns, tiles_of),
    "join_shards_compiled": InterleaveCompiled(join_shards, lambda outer, blocks: (8, outer, blocks // 8)),
}
