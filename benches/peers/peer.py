"""What the peers share: their data, how they are compiled, and the shape of a peer.

A peer is a class: it fills its buffers from the pattern, lists the launches of one graph (one a buffer set) and names the
outputs of the first. Shapes, data and results are those of the Rust side.
"""

import torch

STEP = 104_729


def compile(function):
    """Compiled for each shape it meets, not for any: the fastest that torch.compile makes of it."""
    return torch.compile(function, dynamic=False)


def fill(pattern, buffer, shape):
    """Buffer number `buffer` of the pattern, as benches/src/pattern.rs fills it."""
    count = 1
    for length in shape:
        count *= length
    start = STEP * buffer % pattern.numel()
    turned = torch.roll(pattern, -start)
    return turned.repeat(-(-count // pattern.numel()))[:count].view(*shape).clone()


def amax(x):
    return x.abs().amax()


def exact_division(a, b):
    """a / b rounded once: a compiled float32 division is an approximation, a float64 one is not."""
    return (a / b.double()).float().clamp(max=torch.finfo(torch.float32).max)


class Compiled:
    """A compiled `function`. `names` are those of its outputs, in order; what has none is not compared."""

    title = "torch.compile, same formula"
    names = ("data", "scales")

    def __init__(self, pattern, dimensions, sets):
        compiled = compile(self.function)
        inputs = [self.inputs(pattern, dimensions, set, sets) for set in range(sets)]
        self.launches = [lambda x=x: compiled(*x) for x in inputs]

    def inputs(self, pattern, dimensions, set, sets):
        """The arguments of one launch."""
        return (fill(pattern, set, dimensions),)

    def outputs(self, first):
        return dict(zip(self.names, first if isinstance(first, tuple) else (first,)))


def compiled(function, names=Compiled.names, of=Compiled):
    """The peer of a function, its inputs made as `of` makes them."""
    return type(function.__name__, (of,), {"function": staticmethod(function), "names": names})
