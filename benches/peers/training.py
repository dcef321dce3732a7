"""RMS norm, rotary embedding, cross entropy, AdamW, embedding, sums of parts: PyTorch's formulas, compiled."""

import torch

from peer import Compiled, fill

EPSILON = 1e-5


def spread(count, end):
    return torch.arange(count, device="cuda") * 7919 % end


def rms_norm(x, weight):
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(1) + EPSILON)
    return (wide * inverse[:, None] * weight.float()).to(x.dtype), inverse


def rms_norm_backward(x, gradient, weight, inverse):
    wide, g, inverse = x.float(), gradient.float(), inverse[:, None]
    product = g * weight.float()
    slope = (product * wide).mean(1, keepdim=True) * inverse * inverse
    return ((product - wide * slope) * inverse).to(x.dtype), (g * (wide * inverse)).sum(0).to(x.dtype)


def rotary_halves(x, cosines, sines):
    a, b = x.float().chunk(2, 2)
    c, s = cosines[:, None], sines[:, None]
    return torch.cat([a * c - b * s, b * c + a * s], 2).to(x.dtype)


def rotary_neighbours(x, cosines, sines):
    a, b = x.float().unflatten(2, (-1, 2)).unbind(3)
    c, s = cosines[:, None], sines[:, None]
    return torch.stack([a * c - b * s, b * c + a * s], 3).flatten(2).to(x.dtype)


def cross_entropy(logits, targets):
    wide = logits.float()
    log_sum = torch.logsumexp(wide, 1)
    losses = log_sum - wide.gather(1, targets[:, None])[:, 0]
    is_target = torch.arange(logits.shape[1], device="cuda") == targets[:, None]
    return (torch.exp(wide - log_sum[:, None]) - is_target.float()).to(logits.dtype), losses


def adamw(gradient, weights, first, second, rounded):
    rate, decay, beta1, beta2, epsilon = 1e-3, 0.01, 0.9, 0.999, 1e-8
    g = gradient.float()
    weights.mul_(1 - rate * decay)
    first.lerp_(g, 1 - beta1)
    second.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    weights.sub_(rate / (1 - beta1) * first / (second.sqrt() / (1 - beta2) ** 0.5 + epsilon))
    rounded.copy_(weights)


def embedding(table, tokens):
    return table[tokens]


def embedding_backward(gradient, tokens, sums):
    sums.index_add_(0, tokens, gradient.float())


def in_order(parts):
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total


def sum_parts(parts):
    return in_order(parts).to(parts.dtype)


def add_parts(parts, target):
    target.add_(in_order(parts) * (1 / parts.shape[0]))


class Training(Compiled):
    """Near, since sums have another order. What changes its inputs is not compared."""

    tolerance = 2e-3
    title = "torch.compile, same formula"


def peer(function, names, inputs):
    """`inputs` makes the arguments of one launch of pattern, dimensions, set and sets."""
    make = lambda self, pattern, dimensions, set, sets: inputs(pattern, dimensions, set, sets)
    return type(function.__name__, (Training,), {"function": staticmethod(function), "names": names, "inputs": make})


def of_norm(pattern, dimensions, set, sets):
    return fill(pattern, set, dimensions), fill(pattern, 2 * sets, dimensions[1:])


def of_norm_backward(pattern, dimensions, set, sets):
    x, weight = of_norm(pattern, dimensions, set, sets)
    return x, fill(pattern, sets + set, dimensions), weight, rms_norm(x, weight)[1]


def of_rotary(pattern, dimensions, set, sets):
    rows, _, size = dimensions
    return fill(pattern, set, dimensions), *(fill(pattern, sets + table, [rows, size // 2]).float() for table in range(2))


def of_logits(pattern, dimensions, set, sets):
    return fill(pattern, set, dimensions), spread(*dimensions)


def of_weights(pattern, dimensions, set, sets):
    gradient, weights = fill(pattern, set, dimensions), fill(pattern, sets + set, dimensions).float()
    return gradient, weights, torch.zeros_like(weights), torch.zeros_like(weights), torch.empty_like(gradient)


def of_table(pattern, dimensions, set, sets):
    rows, vocabulary, width = dimensions
    return fill(pattern, set, [vocabulary, width]), spread(rows, vocabulary)


def of_table_gradient(pattern, dimensions, set, sets):
    rows, vocabulary, width = dimensions
    return fill(pattern, set, [rows, width]), spread(rows, vocabulary), torch.zeros(vocabulary, width, device="cuda")


def of_parts(pattern, dimensions, set, sets):
    return (fill(pattern, set, dimensions),)


def of_added_parts(pattern, dimensions, set, sets):
    return fill(pattern, set, dimensions), torch.zeros(dimensions[1], device="cuda")


PEERS = {
    "rms_norm_compiled": peer(rms_norm, ("y", "inverse_rms"), of_norm),
    "rms_norm_backward_compiled": peer(rms_norm_backward, ("dx", "dw"), of_norm_backward),
    "rotary_halves_compiled": peer(rotary_halves, ("turned",), of_rotary),
    "rotary_neighbours_compiled": peer(rotary_neighbours, ("turned",), of_rotary),
    "cross_entropy_compiled": peer(cross_entropy, ("gradient", "losses"), of_logits),
    "adamw_compiled": peer(adamw, (), of_weights),
    "embedding_compiled": peer(embedding, ("gathered",), of_table),
    "embedding_backward_compiled": peer(embedding_backward, (), of_table_gradient),
    "sum_parts_compiled": peer(sum_parts, ("sum",), of_parts),
    "add_parts_compiled": peer(add_parts, (), of_added_parts),
}
