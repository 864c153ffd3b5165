"""The Transformer (Vaswani et al., "Attention Is All You Need", 2017).

    Question                                                            File
    What do the model and its layers compute?                           transformer.py
    Which kernel computes attention? Where is padding masked?           ../kernels/attention/dispatch.py
    Which sequence does a token belong to?                              ../kernels/sequences.py
    What is minimized: cross-entropy, label smoothing, R-Drop?          ../kernels/cross_entropy.py
    How is one position decoded at a time, and with which weights?      incremental.py
    How is one position decoded in buffers of fixed shapes, on a GPU?   static_decoder.py
    How does a step of beam search keep keys and values, and masks?     cache.py
    How are good sentence pairs told from bad ones?                     classifier.py
    Which model is built for a config?                                  build.py

Symbols in shapes:
    B   sentences
    K   beams, or samples, per sentence
    N   rows, B*K
    P   tokens of all sequences, one after another; with padding, B*S or N*T
    S   source length, in tokens
    T   target length, in tokens
    H   attention heads
    D   head width
    E   model width, H*D
    V   vocabulary size
The paper writes d_model for E, h for H, d_k and d_v for D, and d_ff for `ffn_dim`.

Masks are boolean and True where a query may attend: `keep`, and `source_keep` (B, S), which is True at real
tokens and False at padding. The additive form of a mask, 0 and -inf, is called `keep_bias`.
"""
