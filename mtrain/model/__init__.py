"""The Transformer (Vaswani et al., "Attention Is All You Need", 2017). Read `layers`, `attention`, `encoder`,
`transformer`, `loss`, and `cache` for decoding.

Symbols in shapes:
    B   sentences
    K   beams, or samples, per sentence
    N   rows, B*K
    S   source length, in tokens
    T   target length, in tokens
    H   attention heads
    D   head width
    E   model width, H*D
    V   vocabulary size

Masks are boolean and True where a query may attend: `keep`, and `source_keep` (B, S), which is True at tokens
and False at padding. The additive form of a mask, 0 and -inf, is called `keep_bias`.
"""
