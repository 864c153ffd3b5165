"""Scaled dot-product attention, softmax(Q K^T / sqrt(D)) V (Vaswani et al. 2017, section 3.2.1).

`dispatch.attention` chooses the kernel; the model does not know which one it gets. `mtrain.model.incremental`
calls `dispatch.cached_attention`. The kernel of padded sequences is

    explicit  if the weights are recorded, and for dropout on a CPU, where the fused kernel would draw from a
              generator that all threads share
    eager     on a CPU where gradients are needed, for few keys: see `suits_eager_kernel`
    fused     otherwise

Packed sequences are padded for these kernels if no kernel of `packed` can be used; with hashed dropout, the
explicit kernel then computes them.

Symbols in shapes: P tokens, B sequences of keys, N sequences of queries, H heads, T queries, S keys, D head
width, E = H * D. `keep` is a boolean mask, True where a query may attend; `keep_bias` is its additive form, 0
there and -inf elsewhere. Both broadcast.
"""
