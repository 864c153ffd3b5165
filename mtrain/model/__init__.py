"""The Transformer (Vaswani et al., "Attention Is All You Need", 2017).

    Question                                                                  File
    what do the model and its layers compute?                                 transformer.py
    which kernel computes attention? where is padding masked?                 ../kernels/attention.py
    which sequence does a token belong to?                                    ../kernels/sequences.py
    what is minimized: cross-entropy, label smoothing, R-Drop?                loss.py
    how is one position decoded at a time, with which weights?                incremental.py
    how are keys and values kept, and beams reordered?                        cache.py
    how are good sentence pairs told from bad ones?                           classifier.py
    which of the models does a config mean?                                   build.py

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

Masks are boolean and True where a query may attend: `keep`, and `source_keep` (B, S), which is True at tokens
and False at padding. The additive form of a mask, 0 and -inf, is called `keep_bias`.
"""
