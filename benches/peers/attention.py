"""Attention by cuDNN, and by FlashAttention-3 where Python finds it."""

import torch

from peer import fill


def shapes(dimensions):
    """The shapes of queries, keys, values and result."""
    batches, queries, keys, heads, key_heads, head_size, value_size = dimensions
    of_queries, of_keys = (batches, queries, heads), (batches, keys, key_heads)
    return (*of_queries, head_size), (*of_keys, head_size), (*of_keys, value_size), (*of_queries, value_size)


class Attention:
    """torch's scaled_dot_product_attention by cuDNN, on the same memory: [batches, rows, heads, size]. A causal mask is aligned top-left."""

    title = "torch SDPA (cuDNN)"
    # Sums of other orders and other roundings of the weights.
    tolerance = 5e-3
    causal = False

    def __init__(self, pattern, dimensions, sets):
        self.launches = []
        for set in range(sets):
            q, k, v = (fill(pattern, 3 * set + i, shape).transpose(1, 2) for i, shape in enumerate(shapes(dimensions)[:3]))
            self.launches.append(lambda q=q, k=k, v=v: self.attend(q, k, v))

    def attend(self, q, k, v):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=q.shape[1] != k.shape[1])

    def outputs(self, first):
        return {"out": first.transpose(1, 2)}


class AttentionCausal(Attention):
    causal = True


class AttentionBackward:
    """The backward pass of torch's scaled_dot_product_attention by cuDNN, on the same memory."""

    title = "torch SDPA backward (cuDNN)"
    # As of the forward pass.
    tolerance = 1e-2
    causal = False

    def __init__(self, pattern, dimensions, sets):
        self.launches = []
        for set in range(sets):
            tensors = (fill(pattern, 4 * set + i, shape) for i, shape in enumerate(shapes(dimensions)))
            self.launches.append(self.differentiate(*(tensor.transpose(1, 2) for tensor in tensors)))

    def differentiate(self, q, k, v, grad_out):
        """The backward pass alone, without autograd's host work. Key heads are repeated, and their gradients added up, as torch does."""
        group = q.shape[1] // k.shape[1]
        if group > 1:
            k, v = (tensor.repeat_interleave(group, 1) for tensor in (k, v))
        forward = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, self.causal, False)
        out, log_sum_exp, cum_q, cum_k, max_q, max_k, seed, offset = forward[:8]

        def launch():
            dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
                grad_out, q, k, v, out, log_sum_exp, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, self.causal
            )
            if group > 1:
                dk, dv = (tensor.unflatten(1, (-1, group)).sum(2) for tensor in (dk, dv))
            return dq, dk, dv

        return launch

    def outputs(self, first):
        return dict(zip(("dq", "dk", "dv"), (gradient.transpose(1, 2) for gradient in first)))


class AttentionBackwardCausal(AttentionBackward):
    causal = True


class FlashAttention3:
    """FlashAttention-3's forward pass (the package flash_attn_interface), on the same memory. A causal mask is aligned bottom-right."""

    title = "FlashAttention-3"
    tolerance = Attention.tolerance
    causal = False

    def __init__(self, pattern, dimensions, sets):
        # Where it is missing, the error goes to the row.
        import flash_attn_interface

        self.functions = flash_attn_interface
        self.launches = []
        for set in range(sets):
            tensors = [fill(pattern, self.buffers * set + i, shape) for i, shape in enumerate(shapes(dimensions)[: self.buffers])]
            self.launches.append(self.launch(*tensors))

    buffers = 3

    def forward(self, q, k, v):
        """The result, and its log-sum-exp."""
        return self.functions._flash_attn_forward(q, k, v, softmax_scale=q.shape[-1] ** -0.5, causal=self.causal)[:2]

    def launch(self, q, k, v):
        return lambda: self.forward(q, k, v)[0]

    def outputs(self, first):
        return {"out": first}


class FlashAttention3Causal(FlashAttention3):
    causal = True


class FlashAttention3Backward(FlashAttention3):
    """Its backward pass, which adds in any order: its fast form."""

    title = "FlashAttention-3 backward, fast"
    tolerance = AttentionBackward.tolerance
    buffers = 4

    def launch(self, q, k, v, grad_out):
        out, log_sum_exp = self.forward(q, k, v)
        scale = q.shape[-1] ** -0.5

        def launch():
            gradients = [q.new_empty(tensor.shape) for tensor in (q, k, v)]
            self.functions._flash_attn_backward(
                grad_out,
                q,
                k,
                v,
                out,
                log_sum_exp,
                dq=gradients[0],
                dk=gradients[1],
                dv=gradients[2],
                softmax_scale=scale,
                is_causal=self.causal,
            )
            return gradients

        return launch

    def outputs(self, first):
        return dict(zip(("dq", "dk", "dv"), first))


class FlashAttention3BackwardCausal(FlashAttention3Backward):
    causal = True


PEERS = {
    "attention_full": Attention,
    "attention_causal": AttentionCausal,
    "attention_backward_full": AttentionBackward,
    "attention_backward_causal": AttentionBackwardCausal,
    "flash_attention_3_full": FlashAttention3,
    "flash_attention_3_causal": FlashAttention3Causal,
    "flash_attention_3_backward_full": FlashAttention3Backward,
    "flash_attention_3_backward_causal": FlashAttention3BackwardCausal,
}
